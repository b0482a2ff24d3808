"""Status: what is merged, what is told, and how often."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from loraplex.types.v1.generation_pb2 import AdapterTier
from tests.worker_front import Merged
from worker import status as module
from worker.mailbox import AdapterOnDevice, EngineStatus, Ready
from worker.messages import status_message
from worker.status import (
    AdapterStatus,
    AdapterTable,
    State,
    StatusBoard,
    Tier,
    WorkerStatus,
    adapter_status,
    assemble,
)

READY = Ready("cpu", "float32", 300, 256, 16, 64, 1000.0, 100.0, 8)


def test_an_adapter_is_told_once_with_its_fastest_tier():
    cached = {"disk": 1, "device": 2, "on its way up": 3}
    in_flight = {"coming": 2, "device": 1, "asked for": 1}
    on_device = {
        "device": AdapterOnDevice("device", loading=False, in_flight=9, device_bytes=20),
        "on its way up": AdapterOnDevice("on its way up", loading=True, in_flight=0, device_bytes=0),
        "evicted from disk": AdapterOnDevice("evicted from disk", loading=False, in_flight=0, device_bytes=7),
    }
    table = AdapterTable(
        lambda digest: adapter_status(
            digest,
            cached_bytes=cached.get(digest),
            fetching=digest == "coming",
            in_flight=in_flight.get(digest, 0),
            held=on_device.get(digest),
        )
    )
    table.touch(["coming", "nowhere", *cached, *in_flight, *on_device])
    assert table.view() == {
        "disk": AdapterStatus("disk", Tier.DISK, loading=False, in_flight=0, artifact_bytes=1),
        "device": AdapterStatus("device", Tier.DEVICE, loading=False, in_flight=1, artifact_bytes=2),
        "on its way up": AdapterStatus("on its way up", Tier.DISK, loading=True, in_flight=0, artifact_bytes=3),
        "coming": AdapterStatus("coming", Tier.SOURCE, loading=True, in_flight=2, artifact_bytes=0),
        "asked for": AdapterStatus("asked for", Tier.SOURCE, loading=False, in_flight=1, artifact_bytes=0),
        "evicted from disk": AdapterStatus("evicted from disk", Tier.DEVICE, False, 0, 7),
    }


def test_the_table_looks_up_what_was_touched_alone_and_what_it_showed_stays():
    truth = {name: AdapterStatus(name, Tier.DISK, False, 0, 5) for name in "abc"}
    asked = []

    def look_up(digest):
        asked.append(digest)
        return truth.get(digest)

    table = AdapterTable(look_up)
    table.touch("abc")
    before = table.view()
    assert table.view() is before
    asked.clear()
    truth["a"] = AdapterStatus("a", Tier.DEVICE, False, 1, 5)
    del truth["b"]
    assert table.view() is before
    table.touch("abc")
    after = table.view()
    assert sorted(asked) == ["a", "b", "c"]
    assert (after, set(before)) == (truth, {"a", "b", "c"})
    assert after["c"] is before["c"]
    table.touch("c")
    asked.clear()
    table.view()
    assert asked == ["c"]


def whole(engine: EngineStatus | None, *, active: int = 0, unseen: int = 0, ready: Ready | None = READY):
    return assemble(
        worker_id="w", epoch="e", sequence=1, state=State.SERVING, base_digest="b", ready=ready, engine=engine,
        active_choices=active, unseen_tokens=unseen, adapters={},
    )  # fmt: skip


def test_what_the_engine_does_not_run_is_waiting():
    status = whole(EngineStatus(3, 1, 40, 5, 900.0, 90.0), active=7, unseen=10)
    assert (status.running_requests, status.waiting_requests, status.queued_prefill_tokens) == (3, 4, 50)
    assert (status.prefill_tokens_per_second, status.free_blocks) == (900.0, 5)


def test_memory_is_told_by_use_and_empty_without_an_engine():
    engine = EngineStatus(
        3,
        1,
        40,
        5,
        900.0,
        90.0,
        kv_blocks=7,
        adapter_chunks=3,
        prefix_blocks=2,
        num_preempted=1,
        num_cached_tokens=9,
    )
    for status, told in ((whole(engine), (7, 3, 2, 1, 9)), (whole(None), (0, 0, 0, 0, 0))):
        of_memory = (status.kv_blocks, status.adapter_chunks, status.prefix_blocks)
        assert (*of_memory, status.num_preempted, status.num_cached_tokens) == told


def test_what_is_computed_on_and_in_is_told_until_the_engine_is_lost():
    ready = Ready("cpu", "bfloat16", 300, 256, 16, 64, 1000.0, 100.0, 8, "int8")
    status = whole(None, ready=ready)
    assert (status.device, status.dtype, status.base_quantization) == ("cpu", "bfloat16", "int8")
    told = status_message(None, status)
    assert (told.device, told.dtype, told.base_quantization) == ("cpu", "bfloat16", "int8")
    lost = status_message(status, whole(None, ready=None))
    assert {name: getattr(lost, name) for name in ("device", "dtype", "base_quantization") if lost.HasField(name)} == {
        "device": "", "dtype": "", "base_quantization": "",
    }  # fmt: skip
    assert not status_message(status, status).HasField("dtype")


def test_requests_that_the_engine_has_yet_to_drop_do_not_make_a_negative_queue():
    assert whole(EngineStatus(3, 0, 0, 5, 900.0, 90.0), active=1).waiting_requests == 0


def test_before_the_engines_first_report_its_calibration_counts():
    status = whole(None)
    assert (status.prefill_tokens_per_second, status.decode_tokens_per_second, status.free_blocks) == (1000, 100, 64)


STATUSES = st.builds(
    WorkerStatus,
    worker_id=st.just("w"),
    epoch=st.sampled_from(["e1", "e2"]),
    sequence=st.integers(0, 9),
    state=st.sampled_from(State),
    running_requests=st.integers(0, 2),
    queued_prefill_tokens=st.integers(0, 2),
    adapters=st.lists(
        st.builds(
            AdapterStatus, st.sampled_from("abc"), st.sampled_from(Tier), st.booleans(), st.integers(0, 1), st.just(5)
        ),
        max_size=3,
    ).map(lambda found: {adapter.artifact_digest: adapter for adapter in found}),
)


@given(st.lists(STATUSES, min_size=1, max_size=6))
def test_whoever_applies_all_messages_knows_what_a_newcomer_is_told(statuses):
    follower = Merged()
    previous = None
    for status in statuses:
        follower.apply(status_message(previous, status))
        previous = status
        newcomer = Merged()
        newcomer.apply(status_message(None, status))
        assert follower.fields == newcomer.fields


def test_unchanged_fields_are_not_told_again():
    before = WorkerStatus("w", "e", 1, State.SERVING, adapters={"a": AdapterStatus("a", Tier.DISK, False, 0, 5)})
    after = WorkerStatus("w", "e", 2, State.SERVING, running_requests=1, adapters=before.adapters)
    message = status_message(before, after)
    assert {descriptor.name for descriptor, _ in message.ListFields()} == {
        "worker_id", "epoch", "sequence", "running_requests",
    }  # fmt: skip
    gone = status_message(after, WorkerStatus("w", "e", 3, State.SERVING, running_requests=1))
    assert list(gone.removed_artifact_digests) == ["a"]


def test_a_new_epoch_makes_everything_known_void():
    before = WorkerStatus("w", "e1", 1, State.SERVING, adapters={"a": AdapterStatus("a", Tier.DEVICE, False, 0, 5)})
    message = status_message(before, WorkerStatus("w", "e2", 2, State.NOT_SERVING, adapters=before.adapters))
    assert message.full
    assert [adapter.tier for adapter in message.adapters] == [AdapterTier.ADAPTER_TIER_DEVICE]


def board() -> StatusBoard:
    return StatusBoard(lambda sequence: WorkerStatus("w", "e", sequence, State.SERVING))


async def test_a_burst_of_changes_is_told_in_one_message_and_no_more_than_ten_a_second():
    made = board()
    stream = made.follow()
    loop = asyncio.get_running_loop()
    started = loop.time()
    seen = [(await anext(stream)).sequence]
    for _ in range(3):
        for _ in range(20):
            made.changed()
        seen.append((await anext(stream)).sequence)
    assert seen == [0, 20, 40, 60]
    assert loop.time() - started >= 3 * module.MIN_INTERVAL_S * 0.95
    await stream.aclose()


async def test_silence_is_broken_by_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    stream = board().follow()
    async with asyncio.timeout(60):
        assert [(await anext(stream)).sequence for _ in range(3)] == [0, 0, 0]
    await stream.aclose()


async def test_the_end_tells_the_last_status_and_ends_every_stream():
    made = board()

    async def collect() -> list[int]:
        return [status.sequence async for status in made.follow()]

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(collect()) for _ in range(3)]
        await asyncio.sleep(0)
        made.changed()
        made.end()
    assert all(stream.result()[-1] == made.sequence for stream in streams)
