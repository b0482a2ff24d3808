"""The loop over a real socket pair, with real loader threads and a fake runner."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_runner import FakeRunner, Trigger, expected_tokens
from tests.unit.worker.engine.client import Client
from worker.engine.config import EngineConfig
from worker.engine.inbox import Inbox, MailboxBroken
from worker.engine.loader import Loader
from worker.engine.loop import MAX_FAILED_STEPS, EngineBroken, EngineLoop
from worker.engine.rates import StepRates
from worker.engine.scheduler import Scheduler
from worker.engine_process import describe
from worker.mailbox import MAX_FRAME_BYTES, AdapterFile, Load, Pin, Sampling, Shutdown, Submit


class Running:
    """An engine loop on a thread of this process."""

    def __init__(
        self,
        runner: FakeRunner,
        async_scheduling: bool,
        clock: Callable[[], float] = time.monotonic,
        **limits: Any,
    ) -> None:
        front, back = socket.socketpair()
        self.client = Client(front)
        self.runner = runner
        self.turns = 0
        self.error: Exception | None = None
        config = EngineConfig(
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            max_context_tokens=runner.max_context_tokens,
            block_tokens=runner.block_tokens,
            total_blocks=runner.total_blocks,
            chunk_bytes=runner.chunk_bytes,
            adapter_chunk_bytes=runner.adapter_chunk_bytes,
            **{"max_running_requests": 8, "max_prefill_tokens": 64, "max_resident_adapters": 2, **limits},
        )
        self._inbox = Inbox(back)
        self._loader = Loader(runner.prepare_adapter, self._inbox.wake)
        self._loop = EngineLoop(
            runner,
            Scheduler(config, StepRates(1e3, 1e2)),
            self._inbox,
            self._loader,
            describe=describe,
            async_scheduling=async_scheduling,
            clock=clock,
        )
        turn = self._loop._turn

        def counted() -> bool:
            self.turns += 1
            return turn()

        self._loop._turn = counted  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - tests look at it
            self.error = error
        finally:
            self._loader.close(timeout_s=5)
            self._inbox.close(flush_s=1)

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()

    def until_asleep(self, for_s: float = 0.3) -> None:
        """Wait until the loop makes no turn for a while; it may be about to make its last."""
        deadline = time.monotonic() + 60
        while True:
            turns = self.turns
            time.sleep(for_s)
            if self.turns == turns:
                return
            assert time.monotonic() < deadline, "the loop goes on turning"


@pytest.fixture(params=[False, True], ids=["one step after the other", "the next planned while one runs"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(runner: FakeRunner | None = None, **limits: Any) -> Running:
        started.append(Running(runner or FakeRunner(), request.param, **limits))
        return started[-1]

    yield begin
    for running in started:
        if running.runner.load_gate is not None:
            running.runner.load_gate.set()
        running.client.socket.close()
        running.join()


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[str], Path]:
    def make(content: str) -> Path:
        path = tmp_path / content
        path.write_text(content)
        return path

    return make


Start = Callable[..., Running]
Make = Callable[[str], Path]


def test_mixed_requests_stream_their_tokens_one_frame_per_step(start: Start, adapter: Make) -> None:
    client = start().client
    client.submit(1)
    client.submit(2, adapter=adapter("a"), logprobs=1)
    client.submit(3, (9,) * 100, adapter=adapter("b"), max_tokens=6)
    client.read_until_ended(1, 2, 3)
    assert client.tokens(1) == expected_tokens((5, 6, 7), 4)
    assert client.tokens(2) == expected_tokens((5, 6, 7), 4, adapter=b"a")
    assert client.tokens(3) == expected_tokens((9,) * 100, 6, adapter=b"b")
    assert [output.logprobs[0].top for output in client.outputs[2]] == [((t, -0.5),) for t in client.tokens(2)]
    stepped = [step.step for step in client.steps if step.outputs]
    assert stepped == sorted(set(stepped))
    last = client.steps[-1].status
    assert (last.running_requests, last.waiting_requests, last.free_blocks) == (0, 0, 64)
    assert [a.in_flight for a in client.adapters.values()] == [0, 0]


def test_of_several_that_can_never_start_none_waits_for_a_message_that_may_not_come(
    start: Start, adapter: Make
) -> None:
    client = start(max_adapter_bytes=40).client
    kept = AdapterFile("kept", str(adapter("k" * 30)), 10)  # it takes more on the device than its file says
    client.send(Pin(1, kept.artifact_digest, kept.artifact_bytes))
    client.send(Load(2, kept))
    while not any(steered.request_id == 2 for steered in client.read_step().steered):
        pass
    other = AdapterFile("other", str(adapter("o" * 20)), 20)
    for request_id in (3, 4):
        client.send(Submit(request_id, (5, 6, 7), Sampling(), other, "default", time.monotonic()))
    client.read_until_ended(3, 4)
    assert {client.failures[request_id].reason for request_id in (3, 4)} == {"DEVICE_FULL"}


def test_a_refused_request_gets_its_failure_without_a_step(start: Start) -> None:
    client = start().client
    client.submit(1, ())
    client.read_until_ended(1)
    assert client.failures[1].reason == "EMPTY_PROMPT"
    assert client.steps[-1].step == 0


def test_a_frame_tells_what_its_step_took_and_nothing_where_there_was_none(start: Start) -> None:
    client = start(FakeRunner(step_s=0.02)).client
    client.submit(1, ())
    client.submit(2, max_tokens=3)
    client.read_until_ended(1, 2)
    assert all((step.seconds >= 0.02) == bool(step.outputs) for step in client.steps)
    assert all(step.seconds == 0 for step in client.steps if not step.outputs)


def test_a_request_that_waits_for_another_s_end_starts_without_a_message(start: Start) -> None:
    client = start(max_running_requests=1).client
    for request_id in range(5):
        client.submit(request_id, max_tokens=3)
    client.read_until_ended(*range(5))


def test_an_idle_engine_sleeps_and_says_nothing(start: Start) -> None:
    running = start()
    client = running.client
    client.submit(1)
    client.read_until_ended(1)
    client.submit(2)
    client.read_until_ended(2)
    running.until_asleep()
    client.socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.read()


def test_others_run_while_an_adapter_loads_and_its_change_is_told_when_idle(start: Start, adapter: Make) -> None:
    gate = threading.Event()
    client = start(FakeRunner(load_gate=gate)).client
    client.submit(1, adapter=adapter("slow"))
    client.submit(2)
    client.read_until_ended(2)
    (told,) = client.adapters.values()
    assert told.loading
    assert 1 not in client.outputs
    gate.set()
    client.read_until_ended(1)
    assert client.tokens(1) == expected_tokens((5, 6, 7), 4, adapter=b"slow")
    timing = client.outputs[1][-1].timing
    assert timing is not None
    assert timing.adapter_load_s > 0


def test_a_frame_tells_of_the_adapters_that_changed_alone(start: Start, adapter: Make) -> None:
    client = start(max_resident_adapters=20).client
    names = [f"adapter {number}" for number in range(20)]
    for number, name in enumerate(names):
        client.submit(number, adapter=adapter(name), max_tokens=2)
    client.read_until_ended(*range(20))
    assert sorted(client.adapters) == sorted(names)
    at = len(client.steps)
    client.submit(20, adapter=adapter("adapter 7"), max_tokens=5)
    client.read_until_ended(20)
    told = [[a.artifact_digest for a in step.adapters] for step in client.steps[at:]]
    assert set(map(tuple, told)) == {("adapter 7",), ()}
    assert told.count(["adapter 7"]) == 2  # taken, and given back


def test_an_abort_during_a_load_leaves_the_adapter_for_later(start: Start, adapter: Make) -> None:
    gate = threading.Event()
    runner = FakeRunner(load_gate=gate)
    client = start(runner).client
    path = adapter("slow")
    client.submit(1, adapter=path)
    while not client.adapters:
        client.read()
    assert runner.loads_begun.acquire(timeout=20)
    client.abort(1)
    while client.steps[-1].status.waiting_requests:
        client.read()
    gate.set()
    while client.adapters[path.name].loading:
        client.read()
    client.submit(2, adapter=path)
    client.read_until_ended(2)
    timing = client.outputs[2][-1].timing
    assert timing is not None
    assert timing.adapter_on_device
    assert 1 not in client.outputs
    assert 1 not in client.failures


def test_an_abort_frees_everything_within_a_step(start: Start, adapter: Make) -> None:
    running = start(FakeRunner(step_s=0.02))
    client, scheduler = running.client, running._loop._scheduler
    begun: list[int] = []  # steps, when the abort came
    abort = scheduler.abort

    def noted(request_ids: Iterable[int]) -> None:
        begun.append(running.runner._started)
        abort(request_ids)

    scheduler.abort = noted  # type: ignore[method-assign]
    client.submit(1, max_tokens=200, adapter=adapter("a"))
    client.submit(2, max_tokens=200)
    while not (client.outputs.get(1) and client.outputs.get(2)):
        client.read()
    client.abort(1, 2)
    while client.steps[-1].status.running_requests:
        client.read()
    assert begun
    assert client.steps[-1].step <= begun[0]  # none was begun for them afterwards
    status = client.steps[-1].status
    assert (status.free_blocks, client.adapters["a"].in_flight) == (64, 0)


@pytest.mark.parametrize(
    ("content", "reason"), [("corrupt", "CORRUPT_ARTIFACT"), ("crash", "INTERNAL"), ("gone", "ARTIFACT_UNREACHABLE")]
)
def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(
    start: Start, adapter: Make, content: str, reason: str
) -> None:
    client = start().client
    bad = adapter(content)
    if content == "gone":
        bad.unlink()
    client.submit(1, adapter=bad)
    client.submit(2, adapter=adapter("good"))
    client.read_until_ended(1, 2)
    assert client.failures[1].reason == reason
    assert client.tokens(2) == expected_tokens((5, 6, 7), 4, adapter=b"good")
    assert list(client.adapters) == ["good"]


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(start: Start) -> None:
    client = start(FakeRunner(fail_steps={2})).client
    client.submit(1)
    client.read_until_ended(1)
    assert client.failures[1].reason == "INTERNAL"
    assert "told to fail" not in client.failures[1].message
    client.submit(2)
    client.read_until_ended(2)
    assert client.tokens(2) == expected_tokens((5, 6, 7), 4)


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_request_without_finite_logits_fails_alone_and_without_a_token(start: Start, max_tokens: int) -> None:
    client = start(FakeRunner(triggers=True)).client
    client.submit(1, (Trigger.NOT_FINITE, 6, 7), max_tokens=max_tokens)
    client.submit(2)
    client.read_until_ended(1, 2)
    assert client.failures[1].reason == "FAILED_PRECONDITION"
    assert not client.tokens(1)
    assert client.tokens(2) == expected_tokens((5, 6, 7), 4)
    status = client.steps[-1].status
    assert (status.running_requests, status.free_blocks) == (0, FakeRunner().total_blocks)


def test_steps_that_raise_in_a_row_end_the_engine_after_their_requests_are_told(start: Start) -> None:
    running = start(FakeRunner(fail_steps={1, 2, 4, 5, 6}))
    client = running.client
    for request_id in (1, 2, 3, 4, 5, 6):
        client.submit(request_id, max_tokens=1)
        client.read_until_ended(request_id)
    assert sorted(client.failures) == [1, 2, 4, 5, 6]
    with pytest.raises(EOFError):
        client.read()
    running.join()
    assert isinstance(running.error, EngineBroken)
    assert str(MAX_FAILED_STEPS) in str(running.error)


def test_shutdown_and_the_end_of_the_stream_end_the_loop(start: Start) -> None:
    for end in ("shutdown", "end of stream"):
        running = start(FakeRunner(step_s=0.01))
        running.client.submit(1, max_tokens=200)
        while 1 not in running.client.outputs:
            running.client.read()
        if end == "shutdown":
            running.client.send(Shutdown())
        else:
            running.client.socket.shutdown(socket.SHUT_WR)
        running.join()
        assert running.error is None


def test_an_oversized_frame_ends_the_loop_with_an_error(start: Start) -> None:
    running = start()
    running.client.socket.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    running.join()
    assert isinstance(running.error, MailboxBroken)


def test_a_front_end_that_does_not_read_stops_the_steps_but_not_its_aborts(start: Start) -> None:
    skipped_s = 0.0
    running = start(
        FakeRunner(max_context_tokens=10**6, total_blocks=10**5, block_tokens=64),
        max_running_requests=64,
        clock=lambda: time.monotonic() + skipped_s,
    )
    client = running.client
    for request_id in range(64):
        client.submit(request_id, max_tokens=10**5, logprobs=20)
    deadline = time.monotonic() + 60
    while not running._inbox.congested:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.until_asleep()
    skipped_s = 10.0**6
    client.abort(*range(64))
    while not client.steps or client.steps[-1].status.running_requests or not client.steps[-1].step:
        client.read()
    assert client.steps[-1].status.free_blocks == 10**5
    assert max(step.seconds for step in client.steps) < skipped_s  # the wait was no step's
