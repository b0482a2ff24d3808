"""Any sequence of submit, abort, load, step, failure: nothing leaks or has two owners, everything ends once, rightly.

Memory is so short that requests are preempted, idle adapters and prefixes evicted, and prefixes reused all the time;
the fake runner checks what every chunk holds.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fake_runner import expected_comparison, expected_tokens
from tests.unit.worker.engine.driver import Driver, on_device
from worker.engine.arena import Use
from worker.mailbox import AdapterFile, Load, Pin, Unload, Urgency

SIZES = {"a": 10, "b": 20, "c": 30, "d": 10, "e": 40, "f": 50}
BESIDE = {"b": 5, "d": 4, "e": 10}
"""Bytes that an adapter takes beside the arena."""
adapters = st.none() | st.sampled_from(sorted(SIZES))


def check_ownership(driver: Driver) -> None:
    """Every chunk has the owners that hold it, and no other; every count is right."""
    scheduler, config = driver.scheduler, driver.config
    memory, running = scheduler._memory, scheduler._running.values()
    arena, residency = memory.arena, memory.residency
    leaving = [request for step in scheduler._plans._in_flight for request in step.leaving]
    kv = Counter(block for request in [*running, *leaving] for block in request.block_ids)
    comparing = scheduler._comparisons._in_step
    slots_compared = Counter(() if comparing is None else (comparing.exact_slot, comparing.measured_slot))
    if comparing is not None:
        kv.update((*comparing.exact_block_ids, *comparing.measured_block_ids))
    of_adapters = [chunk for slot in residency._by_index.values() for chunk in slot.chunk_ids]
    idle = [chunk for chunk in memory._prefixes._blocks if memory._prefixes.is_idle(chunk)]
    held = [*kv, *of_adapters, *idle]
    assert len(set(held)) == len(held)
    assert len(held) + arena.free == config.total_blocks
    assert (len(kv), len(of_adapters), len(idle)) == tuple(
        arena.count(use) for use in (Use.KV, Use.ADAPTER, Use.IDLE_PREFIX)
    )
    assert all(arena._references[block] == count for block, count in kv.items())
    assert len(running) <= config.max_running_requests
    assert residency.free_slots + len(on_device(residency)) == config.max_resident_adapters
    assert residency.used_bytes == sum(a.device_bytes for a in on_device(residency).values())
    assert residency.idle_chunks == sum(len(slot.chunk_ids) for slot in residency._by_index.values() if slot.idle)
    assert driver.told() == on_device(residency)
    assert set(residency.unused()) == {s for s in residency._by_index.values() if not (s.loading or s.uses)}
    assert all(slot.pinned == (digest in residency.pinned) for digest, slot in residency._by_digest.items())
    idle_slots = {slot.index for slot in residency._by_index.values() if slot.idle}
    assert set(memory._idle_adapters.in_order()) == idle_slots  # what may leave: nothing pinned, used or on its way
    assert not any(slot.unload_ids for slot in residency._by_index.values() if slot.idle or slot.pinned)
    for adapter in on_device(residency).values():
        slot = residency.find(adapter.artifact_digest)
        assert slot is not None
        users = [r for r in [*running, *leaving] if r.adapter_slot == slot.index]
        assert adapter.in_flight == len(users) + slots_compared[slot.index]
        assert all(r.adapter is not None and r.adapter.artifact_digest == adapter.artifact_digest for r in users)
    waiting = [*scheduler._waiting.in_order(), *scheduler._waiting.parked]
    assert {r.request_id for r in scheduler._waiting.parked} == {i for i in driver.wanted if driver.is_live(i)}
    assert not any(r.block_ids or r.computed_tokens for r in waiting)
    assert {r.request_id for r in [*running, *waiting]} == set(driver.live)
    assert scheduler.status().queued_prefill_tokens == sum(r.uncomputed_tokens for r in [*running, *waiting])


def check_answers(driver: Driver) -> None:
    """Every request ended once, and what finished has the tokens it would have had alone."""
    ends = [set(driver.finished), set(driver.failed), driver.aborted, set(driver.compared), set(driver.steered)]
    asked = len(driver.prompts) + len(driver.comparisons) + len(driver.orders)
    assert sum(len(end) for end in ends) == asked == len(set.union(*ends))
    for request_id in driver.finished:
        file = driver.adapters[request_id]
        adapter = b"" if file is None else (driver.folder / file.artifact_digest).read_bytes()
        got = driver.tokens[request_id]
        assert got == expected_tokens(driver.prompts[request_id], len(got), adapter=adapter)
    for request_id, compared in driver.compared.items():
        compare = driver.comparisons[request_id]
        exact, measured = (Path(file.path).read_bytes() for file in (compare.exact, compare.measured))
        expected = expected_comparison(compare.token_ids, compare.first_position, exact, measured)
        assert (compared.same_top, compared.kl) == (expected.same_top, expected.kl)


class Engine(RuleBasedStateMachine):
    max_in_flight = 1

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[str] = set()
        self.folder = tempfile.TemporaryDirectory()
        # Little of everything, so that all limits bind: 3 running, 3 slots, 60 bytes, 16 blocks of 4 tokens.
        self.driver = Driver(
            Path(self.folder.name),
            max_in_flight=self.max_in_flight,
            max_running_requests=3,
            max_resident_adapters=3,
            max_adapter_bytes=60,
            max_vocabulary_bytes=14,
            total_blocks=16,
            chunk_bytes=16,
            adapter_chunk_bytes=15,
            max_context_tokens=48,
            max_prefill_tokens=7,
            adapter_floor=0.2,
        )
        for name, size in SIZES.items():
            (Path(self.folder.name) / name).write_bytes(name.encode() * size)

    def file(self, name: str) -> AdapterFile:
        return self.driver.file(name, SIZES[name], vocabulary=BESIDE.get(name, 0))

    @rule(
        prompt=st.integers(0, 50),
        max_tokens=st.integers(0, 60),
        adapter=adapters,
        same=st.booleans(),
        tenant=st.sampled_from(["t", "u"]),
        weight=st.sampled_from([1.0, 3.0]),
        absent=st.booleans(),
    )
    def submit(
        self,
        prompt: int,
        max_tokens: int,
        adapter: str | None,
        same: bool,
        tenant: str,
        weight: float,
        absent: bool,
    ) -> None:
        file = None if adapter is None else self.file(adapter)
        text: Any = tuple(range(1, prompt + 1)) if same else prompt  # equal beginnings, or not
        self.driver.submit(text, max_tokens, file, tenant, weight, absent=absent)

    @precondition(lambda self: self.driver.wanted)
    @rule(data=st.data())
    def provide(self, data: st.DataObject) -> None:
        self.driver.provide(data.draw(st.sampled_from(self.driver.wanted)))

    @rule(count=st.integers(1, 16), exact=st.sampled_from(sorted(SIZES)), measured=st.sampled_from(sorted(SIZES)))
    def compare(self, count: int, exact: str, measured: str) -> None:
        files = [self.file(name) for name in (exact, measured)]
        self.driver.compare(tuple(range(1, count + 1)), files[0], files[1], first=count // 2)

    @rule(name=st.sampled_from(sorted(SIZES)), urgency=st.sampled_from(Urgency))
    def load(self, name: str, urgency: Urgency) -> None:
        self.driver.load(self.file(name), urgency)

    @rule(name=st.sampled_from(sorted(SIZES)))
    def unload(self, name: str) -> None:
        residency = self.driver.scheduler._memory.residency
        order = self.driver.unload(name)
        if order in self.driver.steered:
            assert residency.find(name) is None
            assert name not in residency.pinned

    @rule(name=st.sampled_from(["a", "b", "c", "d"]), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if pinned:
            self.driver.pin(name, SIZES[name], vocabulary=BESIDE.get(name, 0))
        else:
            self.driver.unpin(name)

    @precondition(lambda self: self.driver.loading)
    @rule()
    def begin_loads(self) -> None:
        self.driver.begun.update(self.driver.loading)

    @precondition(lambda self: self.driver.prompts or self.driver.comparisons or self.driver.orders)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        loads = [order_id for order_id, order in self.driver.orders.items() if isinstance(order, Load)]
        known = sorted([*self.driver.prompts, *self.driver.comparisons, *loads])
        if not known:
            return
        self.driver.abort(*data.draw(st.lists(st.sampled_from(known), max_size=3)))

    @precondition(lambda self: self.driver.loading)
    @rule(data=st.data(), works=st.booleans())
    def end_load(self, data: st.DataObject, works: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.driver.loading)))
        if works:
            self.driver.finish_load(slot)
        else:
            self.driver.fail_load(slot)

    @rule(count=st.integers(1, 5), seconds=st.sampled_from([0.0, 0.01, 0.7, 3.0]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.driver.step(seconds)

    @rule()
    def fail_a_step(self) -> None:
        self.driver.fail_next_step = True
        self.driver.step()
        self.driver.fail_next_step = False

    @invariant()
    def what_is_held_is_what_running_requests_and_adapters_hold(self) -> None:
        check_ownership(self.driver)
        residency = self.driver.scheduler._memory.residency
        assert residency.used_bytes <= 60
        assert residency.vocabulary_bytes <= 14
        self.pinned_stay()
        for adapter in on_device(residency).values():
            slot = residency.find(adapter.artifact_digest)
            assert slot is not None
            assert adapter.loading == (slot.index in self.driver.loading)

    def pinned_stay(self) -> None:
        """A pinned adapter that was on the device and is pinned still is there still."""
        residency = self.driver.scheduler._memory.residency
        there = {digest for digest, slot in residency._by_digest.items() if slot.pinned and not slot.loading}
        assert self.kept & set(residency.pinned) <= there
        self.kept = there

    @invariant()
    def the_first_in_order_never_waits_for_nothing(self) -> None:
        """With nothing running and nothing loading a step must start something: no deadlock."""
        driver = self.driver
        if driver.scheduler._waiting and not (driver.scheduler._running or driver.loading or driver.in_flight):
            driver.step()
            assert driver.scheduler._running or driver.loading or not driver.scheduler._waiting

    def teardown(self) -> None:
        driver = self.driver
        try:
            # Each turn ends all loads, and each running request gains a token or a chunk: a generous bound.
            left = len(driver.live) + len(driver.comparing) + len(driver.ordering)
            driver.run_until_idle(max_steps=100 + 120 * left)
            driver.finish_loads()  # those that nobody waits for any more
            status = driver.scheduler.status()
            assert (status.running_requests, status.waiting_requests, status.queued_prefill_tokens) == (0, 0, 0)
            assert status.free_blocks == driver.config.total_blocks - status.pinned_chunks
            assert not any(adapter.in_flight or adapter.loading for adapter in driver.told().values())
            check_answers(driver)
            driver.submit()
            driver.run_until_idle()  # also tells the runner of the last ends
            driver.submit()
            driver.step()
            assert len(driver.runner.sequences) == 1
        finally:
            self.folder.cleanup()


class EngineAhead(Engine):
    max_in_flight = 2


TestEngine, TestEngineAhead = Engine.TestCase, EngineAhead.TestCase
TestEngine.settings = TestEngineAhead.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_10_000_random_operations_leak_nothing_and_end_everything(
    tmp_path: Path, seed: int, max_in_flight: int
) -> None:
    """One long life on a small device: nothing fails while chunks are free or can be reclaimed."""
    rng = random.Random(seed)
    driver = Driver(
        tmp_path,
        max_in_flight=max_in_flight,
        max_running_requests=6,
        max_resident_adapters=5,
        total_blocks=40,
        chunk_bytes=16,
        adapter_chunk_bytes=15,
        max_context_tokens=64,
        max_prefill_tokens=13,
        mixed_batch_ratio=0.5,
        adapter_floor=0.2,
        kv_watermark=0.0,
    )
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(name.encode() * size)
    num_provided = 0
    for number in range(10_000):
        kinds = ("submit", "compare", "abort", "load", "fail load", "step", "fail step", "order", "pin", "begin")
        match rng.choices((*kinds, "file"), (15, 6, 2, 12, 1, 70, 0.6, 6, 2, 3, 5))[0]:
            case "submit" if len(driver.live) < 40:
                wanted = rng.choice([None, None, *SIZES])
                file = None if wanted is None else driver.file(wanted, SIZES[wanted])
                prompt: Any = tuple(range(1, rng.randint(2, 40))) if rng.random() < 0.7 else rng.randint(1, 40)
                tenant, weight = rng.choice("tuv"), rng.choice([1.0, 8.0])
                driver.submit(prompt, rng.randint(1, 24), file, tenant, weight, absent=rng.random() < 0.3)
            case "file" if driver.wanted:
                driver.provide(rng.choice(driver.wanted))
                num_provided += 1
            case "compare" if len(driver.comparing) < 4:
                exact, measured = (driver.file(name, SIZES[name]) for name in rng.choices(sorted(SIZES), k=2))
                driver.compare(tuple(range(1, rng.randint(2, 20))), exact, measured)
            case "abort" if driver.live or driver.comparing:
                driver.abort(rng.choice([*driver.live, *driver.comparing]))
            case "load" if driver.loading:
                driver.finish_load(rng.choice(list(driver.loading)), seconds=rng.random())
            case "fail load" if driver.loading:
                driver.fail_load(rng.choice(list(driver.loading)))
            case "order":
                name = rng.choice(sorted(SIZES))
                if rng.random() < 0.5:
                    driver.unload(name)
                elif len(driver.ordering) < 5:
                    driver.load(driver.file(name, SIZES[name]), rng.choice(list(Urgency)))
            case "pin":
                name = rng.choice("abd")
                if rng.random() < 0.5:
                    driver.pin(name, SIZES[name])
                else:
                    driver.unpin(name)
            case "begin":
                driver.begun.update(driver.loading)
            case "step":
                driver.step(rng.choice([0.01, 0.01, 0.5]))
            case "fail step":
                driver.fail_next_step = True
                driver.step()
                driver.fail_next_step = False
        if number % 10 == 0:
            check_ownership(driver)
    driver.run_until_idle(max_steps=10_000)
    driver.finish_loads()
    check_ownership(driver)
    check_answers(driver)
    status = driver.scheduler.status()
    assert (status.kv_blocks, status.free_blocks) == (0, 40 - status.pinned_chunks)
    reasons = {failure.reason for request_id, failure in driver.failed.items() if request_id in driver.prompts}
    assert reasons <= {"CORRUPT_ARTIFACT", "INTERNAL"}
    # What the test is about did happen.
    assert status.num_preempted > 10
    assert status.num_cached_tokens > 1000
    assert len(driver.started_loads) > 100
    assert num_provided > 10
    assert len(driver.finished) > 500
    assert len(driver.compared) > 2
    orders = [type(driver.orders[order_id]) for order_id in driver.steered]
    assert min(orders.count(Load), orders.count(Unload), orders.count(Pin)) > 10
    assert (driver.num_ahead > 1000) == (max_in_flight > 1)
