"""Any sequence of submit, abort, load and step: nothing leaks or is owned twice, everything ends once, rightly."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fake_runner import expected_tokens
from tests.unit.worker.engine.driver import Driver

SIZES = {"a": 10, "b": 20, "c": 30, "d": 10, "e": 40, "f": 50}
adapters = st.none() | st.sampled_from(sorted(SIZES))


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        # Little of everything, so that all limits bind: 3 running, 2 slots, 60 bytes, 12 blocks of 4 tokens.
        self.driver = Driver(
            Path(self.folder.name),
            max_running_requests=3,
            max_resident_adapters=2,
            max_adapter_bytes=60,
            total_blocks=12,
            chunk_bytes=16,
            adapter_chunk_bytes=15,
            max_context_tokens=48,
            max_prefill_tokens=7,
        )
        for name, size in SIZES.items():
            (Path(self.folder.name) / name).write_bytes(name.encode() * size)

    @rule(prompt=st.integers(0, 50), max_tokens=st.integers(0, 60), adapter=adapters)
    def submit(self, prompt: int, max_tokens: int, adapter: str | None) -> None:
        file = None if adapter is None else self.driver.file(adapter, SIZES[adapter])
        self.driver.submit(prompt=prompt, max_tokens=max_tokens, adapter=file)

    @precondition(lambda self: self.driver.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(*data.draw(st.lists(st.sampled_from(sorted(self.driver.prompts)), max_size=3)))

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
    def what_is_held_is_what_running_requests_hold(self) -> None:
        scheduler = self.driver.scheduler
        running = scheduler._running.values()
        memory, config = scheduler._memory, self.driver.config
        held = [block for request in running for block in request.block_ids]
        held += [chunk for slot in memory.residency._by_index.values() for chunk in slot.chunk_ids]
        assert len(set(held)) == len(held)
        assert len(held) + memory.arena.free == config.total_blocks
        assert len(running) <= self.driver.config.max_running_requests
        residency = memory.residency
        assert residency.free_slots + len(residency.view()) == self.driver.config.max_resident_adapters
        assert residency.used_bytes == sum(a.device_bytes for a in residency.view()) <= 60
        for adapter in residency.view():
            slot = residency.find(adapter.artifact_digest)
            assert slot is not None
            users = [r for r in running if r.adapter_slot == slot.index]
            assert adapter.in_flight == len(users)
            assert all(r.adapter is not None and r.adapter.artifact_digest == adapter.artifact_digest for r in users)
            assert adapter.loading == (slot.index in self.driver.loading)
        live = {r.request_id for r in running} | {r.request_id for r in scheduler._waiting.in_order()}
        assert live == set(self.driver.live)
        assert scheduler.status().queued_prefill_tokens == scheduler._waiting_prompt_tokens + sum(
            r.uncomputed_prompt_tokens for r in running
        )

    @invariant()
    def the_first_in_order_never_waits_for_nothing(self) -> None:
        """With nothing running and nothing loading a step must start something: no deadlock."""
        driver = self.driver
        if driver.live and not driver.scheduler._running and not driver.loading:
            driver.step()
            assert driver.scheduler._running or driver.loading or not driver.live

    def teardown(self) -> None:
        driver = self.driver
        try:
            # Each turn ends all loads, and each running request gains a token or a chunk: a generous bound.
            driver.run_until_idle(max_steps=100 + 120 * len(driver.live))
            driver.finish_loads()  # those that nobody waits for any more
            status = driver.scheduler.status()
            assert (status.running_requests, status.waiting_requests, status.queued_prefill_tokens) == (0, 0, 0)
            assert status.free_blocks == driver.config.total_blocks
            assert not any(adapter.in_flight or adapter.loading for adapter in status.adapters)
            ends = [set(driver.finished), set(driver.failed), driver.aborted]
            assert sum(len(end) for end in ends) == len(driver.prompts) == len(set.union(*ends))
            for request_id in driver.finished:
                file = driver.adapters[request_id]
                adapter = b"" if file is None else (driver.folder / file.artifact_digest).read_bytes()
                got = driver.tokens[request_id]
                assert got == expected_tokens(driver.prompts[request_id], len(got), adapter=adapter)
            driver.submit()
            driver.run_until_idle()  # also tells the runner of the last ends
            driver.submit()
            driver.step()
            assert len(driver.runner.sequences) == 1
        finally:
            self.folder.cleanup()


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
