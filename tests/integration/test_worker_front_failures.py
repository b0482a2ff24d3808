"""A front end when things go wrong: the engine dies, readers do not read, clients vanish, the registry is away."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.backoff import Backoff
from loraplex.errors import (
    ArtifactUnreachable,
    Draining,
    EngineDown,
    FailedPrecondition,
    QueueFull,
    ResourceExhausted,
    from_rpc_error,
)
from loraplex.worker.v1.worker_pb2 import WatchStatusRequest, WorkerState
from loraplex.worker.v1.worker_pb2_grpc import WorkerServiceStub
from tests.fake_runner import Trigger
from tests.tiny_base import write_tiny_base
from tests.worker_front import (
    TOLD_AFTER_1_S,
    ArtifactServer,
    Front,
    Merged,
    running_front,
    serving_artifacts,
    told_long_before,
)
from worker.adapters.download import RetryPolicy
from worker.engine_client import EnginePatience
from worker.engine_link import EngineStartError
from worker.generation import StreamLimits

SERVING, NOT_SERVING, DRAINING = (
    WorkerState.WORKER_STATE_SERVING,
    WorkerState.WORKER_STATE_NOT_SERVING,
    WorkerState.WORKER_STATE_DRAINING,
)
SLOW = {"STEP_S": "0.005", "CONTEXT": "4096", "TOTAL_BLOCKS": "2048", "TRIGGERS": "1"}
LARGE_WINDOW_TOKENS = 3000


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("front") / "base")


def idle(fields: dict[str, Any]) -> bool:
    return bool(fields["running_requests"] == fields["waiting_requests"] == fields["queued_prefill_tokens"] == 0)


def engine_pid() -> int:
    (engine,) = [
        child for child in psutil.Process().children() if any("fake_engine_process" in part for part in child.cmdline())
    ]
    return engine.pid


async def health(front: Front) -> int:
    reply = await health_pb2_grpc.HealthStub(front.channel).Check(health_pb2.HealthCheckRequest())
    return int(reply.status)


async def test_a_killed_engine_fails_its_requests_fast_and_the_next_one_works(base, tmp_path):
    patience = EnginePatience(Backoff(first_s=0.3, longest_s=30))  # status has told of the loss before the next starts
    async with running_front(base, tmp_path / "cache", environment=SLOW, engine_patience=patience) as front:
        before = (await front.status_where(idle))["epoch"]
        stream = front.stub.WatchStatus(WatchStatusRequest())
        merged = Merged()
        merged.apply(await stream.read())
        running = [asyncio.create_task(front.generate(front.request(max_tokens=4000))) for _ in range(3)]
        await front.status_where(lambda fields: fields["running_requests"] == 3)
        os.kill(engine_pid(), signal.SIGKILL)
        async with asyncio.timeout(10):  # half of what the answers take at least
            answers = await asyncio.gather(*running)
        for answer in answers:
            assert isinstance(answer.error, EngineDown)
            assert answer.error.code is grpc.StatusCode.UNAVAILABLE

        states, epochs = [], []
        async with asyncio.timeout(60):
            while merged.fields["state"] != SERVING or merged.fields["epoch"] == before:
                merged.apply(await stream.read())
                states.append(merged.fields["state"])
                epochs.append(merged.fields["epoch"])
        assert NOT_SERVING in states
        assert set(epochs) == {before, merged.fields["epoch"]}
        assert [message.full for message in merged.messages].count(True) == 2
        stream.cancel()
        answer = await front.generate(front.request(max_tokens=5))
        assert len(answer.token_ids()) == 5
        await front.status_where(idle)


async def test_while_the_engine_is_down_requests_are_refused_as_unavailable_and_health_says_so(base, tmp_path):
    patient = EnginePatience(backoff=Backoff(first_s=20, longest_s=20))
    async with running_front(base, tmp_path / "cache", engine_patience=patient) as front:
        assert await health(front) == health_pb2.HealthCheckResponse.SERVING
        os.kill(engine_pid(), signal.SIGKILL)
        await front.status_where(lambda fields: fields["state"] == NOT_SERVING)
        answer = await front.generate(front.request())
        assert isinstance(answer.error, EngineDown)
        assert answer.error.retry_after_s is not None
        assert await health(front) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_engine_that_hangs_is_killed_and_replaced(base, tmp_path):
    impatient = EnginePatience(silence_timeout_s=0.5, backoff=Backoff(first_s=0.01, longest_s=30), exit_timeout_s=1)
    async with running_front(base, tmp_path / "cache", environment=SLOW, engine_patience=impatient) as front:
        answer = await front.generate(front.request([int(Trigger.HANG), 5]))
        assert isinstance(answer.error, EngineDown)
        front.app._engine._patience = replace(impatient, silence_timeout_s=300)  # the next one may stand still a while
        await front.status_where(lambda fields: fields["state"] == SERVING)
        assert len((await front.generate(front.request(max_tokens=3))).token_ids()) == 3


async def test_an_engine_that_cannot_start_ends_the_worker_with_its_reason(base, tmp_path):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running_front(
            base, tmp_path / "cache", environment={"START_FAILURE": "INVALID_BASE_MODEL"}, wait_ready=False
        ) as front:
            await front.task
    (error,) = caught.value.exceptions
    assert isinstance(error, EngineStartError)
    assert "told not to start [INVALID_BASE_MODEL]" in str(error)


async def test_an_engine_that_crashes_before_it_was_ever_ready_ends_the_worker_in_the_end(base, tmp_path):
    options = EnginePatience(backoff=Backoff(first_s=0.001, longest_s=30), max_failed_starts=3)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running_front(
            base, tmp_path / "cache", environment={"VOCAB_SIZE": "no number"}, engine_patience=options, wait_ready=False
        ) as front:
            await front.task
    assert isinstance(caught.value.exceptions[0], EngineStartError)


async def test_while_the_engine_starts_the_status_says_so_and_requests_are_told_to_wait(base, tmp_path):
    told = {"START_GATE": str(tmp_path / "gate")}
    async with running_front(base, tmp_path / "cache", environment=told, wait_ready=False) as front:
        status = await front.status_where(lambda fields: fields.get("base_digest", "") != "")
        assert status["state"] == WorkerState.WORKER_STATE_STARTING
        front.base_digest = status["base_digest"]
        answer = await front.generate(front.request())
        assert isinstance(answer.error, EngineDown)
        assert "loading" in answer.error.message
        (tmp_path / "gate").touch()
        await front.status_where(lambda fields: fields["state"] == SERVING)


async def test_a_full_queue_refuses_with_a_time_to_wait_and_takes_again_later(base, tmp_path):
    async with running_front(
        base, tmp_path / "cache", environment=SLOW, max_running_requests=1, max_waiting_requests=2
    ) as front:
        calls = [front.stub.Generate(front.request(max_tokens=4000)) for _ in range(3)]
        await front.status_where(lambda fields: (fields["running_requests"], fields["waiting_requests"]) == (1, 2))
        refused = await front.generate(front.request())
        assert isinstance(refused.error, QueueFull)
        assert refused.error.retry_after_s is not None
        assert refused.error.retry_after_s > 0
        for call in calls:
            call.cancel()
        await front.status_where(idle)
        assert len((await front.generate(front.request(max_tokens=2))).token_ids()) == 2


async def a_reader_that_stops(front: Front) -> tuple[aio.Channel, aio.UnaryStreamCall]:
    """Open a stream whose client has a small window and reads nothing after the first message."""
    channel = aio.insecure_channel(
        f"127.0.0.1:{front.port}", options=[("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    )
    call = WorkerServiceStub(channel).Generate(front.request(max_tokens=LARGE_WINDOW_TOKENS, logprobs=20))
    await call.read()
    return channel, call


async def read_to_the_end(call) -> Exception | None:
    try:
        while await call.read() is not aio.EOF:
            pass
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None


async def test_a_reader_that_never_reads_is_cut_off_before_memory_grows(base, tmp_path):
    limits = StreamLimits(max_buffered_tokens=4200)
    async with running_front(base, tmp_path / "cache", environment={**SLOW, "STEP_S": "0"}, limits=limits) as front:
        channel, call = await a_reader_that_stops(front)
        status = await front.status_where(idle)
        assert status["free_blocks"] == status["total_blocks"]
        error = await read_to_the_end(call)
        assert isinstance(error, ResourceExhausted)
        assert "cut off" in error.message
        await channel.close()
        assert front.app._engine.num_requests == 0


async def test_a_message_nobody_takes_for_too_long_ends_the_stream(base, tmp_path):
    limits = StreamLimits(max_buffered_tokens=10**9, stall_timeout_s=0.3)
    async with running_front(base, tmp_path / "cache", environment={**SLOW, "STEP_S": "0"}, limits=limits) as front:
        channel, call = await a_reader_that_stops(front)
        await front.status_where(idle)
        async with asyncio.timeout(30):
            await front.app._idle.wait()
        error = await read_to_the_end(call)
        assert isinstance(error, ResourceExhausted)
        await channel.close()


async def test_cancelled_streams_leave_nothing_long_before_their_answers_would_have_ended(base, tmp_path):
    server = ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone
    digest = server.add(b"an adapter")
    async with (
        serving_artifacts(server) as port,
        running_front(base, tmp_path / "cache", environment=SLOW, registry_port=port, max_running_requests=8) as front,
    ):
        calls = [front.stub.Generate(front.request(max_tokens=4000, n=2, artifact=digest)) for _ in range(5)]
        status = await front.status_where(lambda f: (f["running_requests"], f["waiting_requests"]) == (8, 2))
        assert status["adapters"][digest].in_flight == 5
        for call in calls:
            call.cancel()
        status = await front.status_where(idle, within=10)  # half of what the answers take at least
        assert (status["free_blocks"], status["adapters"][digest].in_flight) == (status["total_blocks"], 0)
        assert (front.app._engine.num_requests, front.app._admission.num_tickets) == (0, 0)


async def test_a_client_that_vanishes_while_a_message_is_stuck_leaves_nothing(base, tmp_path):
    endless = StreamLimits(max_buffered_tokens=10**9)
    async with running_front(base, tmp_path / "cache", environment=SLOW, limits=endless) as front:
        channel, call = await a_reader_that_stops(front)
        await asyncio.sleep(1)  # until the window is full and the handler is stuck in a write
        assert front.app._engine.num_requests == 1
        call.cancel()
        await channel.close()
        await front.status_where(idle, within=8)  # of some 15 that the answer takes at least
        assert (front.app._engine.num_requests, front.app._admission.num_tickets) == (0, 0)


async def test_a_client_whose_connection_breaks_leaves_nothing(base, tmp_path):
    async with running_front(base, tmp_path / "cache", environment=SLOW) as front:
        channel = aio.insecure_channel(f"127.0.0.1:{front.port}", options=[("grpc.use_local_subchannel_pool", 1)])
        calls = [WorkerServiceStub(channel).Generate(front.request(max_tokens=4000, n=2)) for _ in range(3)]
        await asyncio.gather(*(call.read() for call in calls))
        await channel.close()
        status = await front.status_where(idle, within=10)  # half of what the answers take at least
        assert status["free_blocks"] == status["total_blocks"]
        assert front.app._engine.num_requests == 0


async def test_a_worker_starts_and_serves_without_a_registry_and_finds_it_later(base, tmp_path):
    server = ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone
    digest = server.add(b"an adapter that comes late")
    async with serving_artifacts(server) as port:
        pass  # a port that was free a moment ago
    async with running_front(base, tmp_path / "cache", registry_port=port) as front:
        assert len((await front.generate(front.request(max_tokens=3))).token_ids()) == 3
        missing = await front.generate(front.request(artifact=digest, max_tokens=3))
        assert isinstance(missing.error, ArtifactUnreachable)
        async with serving_artifacts(server, port), asyncio.timeout(60):
            while (answer := await front.generate(front.request(artifact=digest, max_tokens=3))).error is not None:
                assert isinstance(answer.error, ArtifactUnreachable)
                await asyncio.sleep(answer.error.retry_after_s or 0)  # as long as it says
            assert len(answer.token_ids()) == 3
        assert len((await front.generate(front.request(artifact=digest, max_tokens=3))).token_ids()) == 3


async def test_a_deadline_bounds_the_wait_for_an_unreachable_adapter_and_the_answer_says_why(
    base, tmp_path, monkeypatch
):
    told_long_before(monkeypatch)
    async with running_front(base, tmp_path / "cache") as front:
        front.app._store._retry = RetryPolicy(tries=10**6)  # so that it is not given up before
        answer = await front.generate(front.request(artifact="f" * 64), within=TOLD_AFTER_1_S)
        assert isinstance(answer.error, ArtifactUnreachable)  # said before the deadline, which would be gRPC's error
        assert answer.error.retry_after_s
        await front.status_where(lambda fields: idle(fields) and not fields["adapters"])


async def test_a_drain_announces_finishes_what_is_open_refuses_what_is_new_and_ends(base, tmp_path):
    server = ArtifactServer(gate=asyncio.Event())  # type: ignore[abstract]  # it serves downloads alone
    digest = server.add(b"comes when the test says so")
    assert server.gate is not None
    async with (
        serving_artifacts(server) as port,
        running_front(base, tmp_path / "cache", environment=SLOW, registry_port=port, drain_timeout_s=60.0) as front,
    ):
        watcher = front.stub.WatchStatus(WatchStatusRequest())
        open_stream = asyncio.create_task(front.generate(front.request(max_tokens=150, artifact=digest)))
        await front.status_where(lambda fields: fields["waiting_requests"] == 1)
        front.stop.set()
        states, refused = Merged(), None
        async with asyncio.timeout(60):
            async for message in watcher:
                states.apply(message)
                if states.fields["state"] == DRAINING and refused is None:
                    await asyncio.sleep(0.1)  # past drain_notice_s
                    assert await health(front) == health_pb2.HealthCheckResponse.NOT_SERVING
                    refused = await front.generate(front.request())
                    server.gate.set()
        assert refused is not None
        assert isinstance(refused.error, Draining)
        assert len((await open_stream).token_ids()) == 150
        assert states.fields["running_requests"] == 0
        async with asyncio.timeout(30):
            await front.task


async def test_a_drain_cuts_off_what_does_not_finish_in_time(base, tmp_path):
    async with running_front(base, tmp_path / "cache", environment=SLOW, drain_timeout_s=0.2) as front:
        open_stream = asyncio.create_task(front.generate(front.request(max_tokens=4000)))
        await front.status_where(lambda fields: fields["running_requests"] == 1)
        front.stop.set()
        answer = await open_stream
        assert isinstance(answer.error, Draining)
        async with asyncio.timeout(30):
            await front.task


async def test_a_taken_port_and_a_shared_cache_folder_are_told(base, tmp_path):
    async with running_front(base, tmp_path / "cache") as front:
        with pytest.raises(FailedPrecondition, match="port is taken"):
            async with running_front(base, tmp_path / "other", port=front.port):
                pass
        with pytest.raises(FailedPrecondition, match="a cache folder of its own"):
            async with running_front(base, tmp_path / "cache", wait_ready=False) as second:
                await second.task


async def test_a_drain_cuts_off_who_still_waits_for_an_adapter(base, tmp_path):
    server = ArtifactServer(gate=asyncio.Event())  # type: ignore[abstract]  # it serves downloads alone
    digest = server.add(b"never comes")
    async with (
        serving_artifacts(server) as port,
        running_front(base, tmp_path / "cache", registry_port=port, drain_timeout_s=0.2) as front,
    ):
        waiting = asyncio.create_task(front.generate(front.request(artifact=digest)))
        await front.status_where(lambda fields: digest in fields["adapters"] and fields["adapters"][digest].loading)
        front.stop.set()
        assert isinstance((await waiting).error, Draining)
        async with asyncio.timeout(30):
            await front.task
    assert not list((tmp_path / "cache" / "artifacts" / ".incoming").iterdir())


async def test_a_stop_while_a_crashed_engine_waits_for_its_restart_ends_at_once(base, tmp_path):
    patience = EnginePatience(Backoff(first_s=30, longest_s=30), exit_timeout_s=3)
    async with running_front(base, tmp_path / "cache", engine_patience=patience) as front:
        os.kill(engine_pid(), signal.SIGKILL)
        await front.status_where(lambda fields: fields["state"] == NOT_SERVING)
        front.stop.set()
        async with asyncio.timeout(15):
            await front.task
