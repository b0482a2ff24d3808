"""The router's gRPC front with a scripted registry and scripted workers on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex import errors
from loraplex.router.v1 import inference_pb2, models_pb2
from loraplex.types.v1 import generation_pb2, sampling_pb2
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    BASE,
    BASE_ID,
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    adapter_entry,
    babble_forever,
    base_entry,
    code_of,
    deleted_entry,
    delta,
    digest,
    eventually,
    never_answer,
    raising,
    running_router,
    say_hello,
    worker_process,
)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql"), adapter_entry("json", "new", "old")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


@pytest.fixture
async def other() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker(worker_id="w2").start()
    yield fake
    await fake.stop()


async def refusal(router: RunningRouter, model: str = "sql", **fields: object) -> errors.LoraplexError:
    with pytest.raises(aio.AioRpcError) as caught:
        await router.generate(model, **fields)  # type: ignore[arg-type]
    return errors.from_rpc_error(caught.value)


async def drain(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


def text_of(events: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta"))


async def test_the_worker_gets_digests_sampling_and_a_deadline(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address) as router:
        sampling = sampling_pb2.SamplingParams(temperature=0, stop=["x"], logit_bias={7: -1.5})
        events = await router.generate(
            "sql", sampling=sampling, timeout_s=60, metadata=(("x-loraplex-request-id", "req-1"),)
        )
    assert text_of(events) == "Hello adapter!"
    assert events[-1].finished.usage.completion_tokens == 3
    assert events[-1].finished.facts.worker_id == "w1"
    (request,) = worker.requests
    assert request.request_id == "req-1"
    assert request.tenant == "default"
    assert request.base_digest == BASE
    assert request.adapter.artifact_digest == digest("artifact sql")
    assert request.adapter.version_digest == digest("version sql")
    assert (request.adapter.rank, request.adapter.format, request.adapter.artifact_bytes) == (8, "none", 1000)
    assert request.sampling == sampling
    assert worker.metadata[0]["x-loraplex-request-id"] == "req-1"
    remaining = worker.time_remaining_s[0]
    assert remaining is not None
    assert 30 < remaining < 60.5  # gRPC rounds a deadline on the wire, upwards


async def test_every_kind_of_input_arrives_unchanged(registry: FakeRegistry, worker: FakeWorker) -> None:
    chat = generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    tokens = generation_pb2.TokenInput(token_ids=[1, 2, 3])
    async with running_router(registry.address, worker.address) as router:
        for fields in ({"prompt": "text"}, {"chat": chat}, {"tokens": tokens}):
            request = inference_pb2.GenerateRequest(model=BASE_ID, **fields)
            assert [event async for event in router.inference.Generate(request, timeout=30)]
    assert worker.requests[0].prompt == "text"
    assert worker.requests[1].chat == chat
    assert worker.requests[2].tokens == tokens
    assert not any(request.HasField("adapter") for request in worker.requests)


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        ({"model": "nobody", "prompt": "x"}, errors.ModelNotFound, "model"),
        ({"model": "", "prompt": "x"}, errors.InvalidParameter, "model"),
        ({"model": "sql@" + digest("version sql")[:11], "prompt": "x"}, errors.InvalidParameter, "model"),
        ({"model": "sql@" + "0" * 12, "prompt": "x"}, errors.ModelNotFound, "model"),
        ({"model": "sql"}, errors.EmptyPrompt, "input"),
        ({"model": "sql", "prompt": ""}, errors.EmptyPrompt, "prompt"),
        ({"model": "sql", "chat": generation_pb2.ChatInput()}, errors.EmptyPrompt, "chat"),
        ({"model": "sql", "tokens": generation_pb2.TokenInput()}, errors.EmptyPrompt, "tokens"),
    ],
)
async def test_bad_requests_name_the_field_and_reach_no_worker(
    registry: FakeRegistry,
    worker: FakeWorker,
    request_: dict[str, object],
    error: type[errors.LoraplexError],
    field: str,
) -> None:
    async with running_router(registry.address, worker.address) as router:
        call = router.inference.Generate(inference_pb2.GenerateRequest(**request_), timeout=30)  # type: ignore[arg-type]
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(call))
    typed = errors.from_rpc_error(caught.value)
    assert type(typed) is error
    assert typed.field == field
    assert not worker.requests


async def test_a_digest_prefix_serves_an_old_version(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address) as router:
        await router.generate("json")
        await router.generate("json@" + digest("version old")[:12])
        await router.generate("json@" + digest("artifact old"))
    served = [request.adapter.artifact_digest for request in worker.requests]
    assert served == [digest("artifact new"), digest("artifact old"), digest("artifact old")]


async def test_cancelling_the_client_frees_the_request_on_the_worker(
    registry: FakeRegistry, worker: FakeWorker
) -> None:
    worker.script = babble_forever
    async with running_router(registry.address, worker.address) as router:
        call = router.inference.Generate(inference_pb2.GenerateRequest(model="sql", prompt="x"), timeout=60)
        async for _ in call:
            break
        assert worker.in_flight == 1
        call.cancel()
        await worker.until(lambda: worker.num_cancelled == 1)
        await eventually(lambda: router.router.inference.in_flight == 0)


async def test_cancelling_before_the_first_event_frees_it_too(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = never_answer
    async with running_router(registry.address, worker.address) as router:
        call = router.inference.Generate(inference_pb2.GenerateRequest(model="sql", prompt="x"), timeout=60)
        reading = asyncio.ensure_future(call.read())
        await worker.until(lambda: worker.in_flight == 1)
        call.cancel()
        await worker.until(lambda: worker.num_cancelled == 1)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_the_deadline_ends_the_call_on_both_hops(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = babble_forever
    async with running_router(registry.address, worker.address) as router:
        for timeout_s in (0.4, 4.0, 20.0):
            error = await refusal(router, timeout_s=timeout_s)
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if worker.requests:  # else it was over before the worker had begun, and tells nothing of the second hop
                break
        await worker.until(lambda: worker.num_cancelled == len(worker.requests) > 0)


async def test_the_default_time_out_applies_where_the_client_has_none(
    registry: FakeRegistry, worker: FakeWorker
) -> None:
    worker.script = never_answer
    async with running_router(registry.address, worker.address, request_timeout_s=0.4) as router:
        error = await refusal(router, timeout_s=None)
    assert isinstance(error, errors.DeadlineExceeded)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(registry: FakeRegistry, worker: FakeWorker) -> None:
    await worker.set(queued_prefill_tokens=100_000)  # at 1000 tokens a second
    async with running_router(registry.address, worker.address) as router:
        error = await refusal(router, timeout_s=20)
    assert isinstance(error, errors.DeadlineUnreachable)
    assert error.retry_after_s is not None
    assert 75 < error.retry_after_s < 90
    assert not worker.requests


async def test_an_over_long_prompt_gets_to_the_worker_that_tells_its_length(
    registry: FakeRegistry, worker: FakeWorker
) -> None:
    worker.script = raising(errors.PromptTooLong("too long"))
    await worker.set(max_context_tokens=2048)  # at 1000 tokens a second
    async with running_router(registry.address, worker.address) as router:
        assert isinstance(await refusal(router, prompt="x" * 1_000_000, timeout_s=20), errors.PromptTooLong)


@pytest.mark.parametrize(
    "error",
    [
        errors.Draining("d"),
        errors.QueueFull("q"),
        errors.NoSpace("n"),
        errors.DeviceFull("f"),
        errors.EngineDown("e"),
        errors.ArtifactUnreachable("a"),
        errors.CorruptArtifact("c"),
        errors.AdapterMismatch("m", retry_after_s=1.0, quarantined="true"),
        errors.LoraplexError("could not be loaded", stage="load"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_worker_that_cannot_is_replaced_once(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker, error: errors.LoraplexError
) -> None:
    worker.script = raising(error)
    await other.set(queued_prefill_tokens=5000)  # so that the first choice is certain
    async with running_router(registry.address, worker.address, other.address) as router:
        events = await router.generate("sql")
        assert (
            f'loraplex_router_retries_total{{reason="{error.reason}"}} 1.0' in router.router.metrics.render().decode()
        )
    assert text_of(events) == "Hello adapter!"
    assert (len(worker.requests), len(other.requests)) == (1, 1)


@pytest.mark.parametrize(
    "error",
    [errors.PromptTooLong("too long", field="prompt", limit=8, length=9), errors.LoraplexError("the step failed")],
    ids=lambda error: type(error).__name__,
)
async def test_a_refusal_of_the_request_itself_is_not_tried_again(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker, error: errors.LoraplexError
) -> None:
    for each in (worker, other):
        each.script = raising(error)
    async with running_router(registry.address, worker.address, other.address) as router:
        told = await refusal(router)
    assert type(told) is type(error)
    assert told.metadata == error.metadata
    assert len(worker.requests) + len(other.requests) == 1


async def test_what_is_wrong_with_an_adapter_on_every_worker_is_told_as_such_and_not_asked_all_of_them_again(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker
) -> None:
    for each in (worker, other):
        each.script = raising(errors.CorruptArtifact("damaged", retry_after_s=3.0, file="sql"))
    async with running_router(registry.address, worker.address, other.address) as router:
        told = await refusal(router, "sql")
        assert isinstance(told, errors.CorruptArtifact)
        assert (told.retry_after_s, told.metadata["file"]) == (3.0, "sql")
        assert (len(worker.requests), len(other.requests)) == (1, 1)
        refused = worker_pb2.AdapterResidency(
            artifact_digest=digest("artifact sql"),
            tier=generation_pb2.ADAPTER_TIER_DISK,
            quarantine_reason="CORRUPT_ARTIFACT",
        )
        for each in (worker, other):
            await each.set(adapters=[refused])
        await eventually(lambda: all(view.adapters for view in router.router.fleet.views()))
        assert isinstance(await refusal(router, "sql"), errors.CorruptArtifact)
        assert len(worker.requests) + len(other.requests) == 3
        counted = router.router.metrics.render().decode()
        assert 'loraplex_router_retries_total{reason="CORRUPT_ARTIFACT"} 1.0' in counted


async def test_a_worker_that_is_known_to_refuse_an_adapter_is_passed_over(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker
) -> None:
    refused = worker_pb2.AdapterResidency(
        artifact_digest=digest("artifact sql"),
        tier=generation_pb2.ADAPTER_TIER_DISK,
        quarantine_reason="CORRUPT_ARTIFACT",
    )
    await worker.set(adapters=[refused])
    await other.set(queued_prefill_tokens=5000)
    async with running_router(registry.address, worker.address, other.address) as router:
        assert text_of(await router.generate("sql")) == "Hello adapter!"
    assert (len(worker.requests), len(other.requests)) == (0, 1)


async def test_two_full_workers_are_both_tried_and_no_more(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker
) -> None:
    worker.script = other.script = raising(errors.QueueFull("full", retry_after_s=2))
    async with running_router(registry.address, worker.address, other.address) as router:
        error = await refusal(router)
    assert isinstance(error, errors.QueueFull)
    assert error.retry_after_s == 2
    assert (len(worker.requests), len(other.requests)) == (1, 1)


async def test_without_another_worker_the_first_refusal_stands(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = raising(errors.QueueFull("full"))
    async with running_router(registry.address, worker.address) as router:
        assert isinstance(await refusal(router), errors.QueueFull)


async def test_after_the_first_delta_nothing_is_tried_again(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker
) -> None:
    worker.script = other.script = raising(errors.EngineDown("engine died"), delta("Hel"))
    async with running_router(registry.address, worker.address, other.address) as router:
        assert isinstance(await refusal(router), errors.EngineDown)
    assert len(worker.requests) + len(other.requests) == 1


async def test_a_stream_that_ends_without_finished_is_a_lost_worker(registry: FakeRegistry, worker: FakeWorker) -> None:
    async def breaks_off(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        yield delta("Hel")

    worker.script = breaks_off
    async with running_router(registry.address, worker.address) as router:
        assert isinstance(await refusal(router), errors.WorkerLost)


async def test_a_killed_worker_process_in_mid_stream_is_unavailable(registry: FakeRegistry) -> None:
    async with worker_process("w1") as (process, address), running_router(registry.address, address) as router:
        call = router.inference.Generate(inference_pb2.GenerateRequest(model="sql", prompt="x"), timeout=60)
        events = aiter(call)
        assert (await anext(events)).delta.text == "ba "
        process.kill()
        with pytest.raises(aio.AioRpcError) as caught:
            await drain(events)
        error = errors.from_rpc_error(caught.value)
        assert isinstance(error, errors.WorkerLost)
        assert error.metadata == {"worker_id": "w1"}
        await router.until_workers(0)  # its status stream breaks off with the same connection, perhaps a moment later
        assert isinstance(await refusal(router), errors.NoWorker)


async def test_a_worker_that_stops_before_the_first_delta_is_replaced(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker
) -> None:
    worker.script = never_answer
    await other.set(queued_prefill_tokens=5000)
    async with running_router(registry.address, worker.address, other.address) as router:
        asking = asyncio.create_task(router.generate("sql"))
        await worker.until(lambda: worker.in_flight == 1)
        await worker.stop()
        assert text_of(await asking) == "Hello adapter!"


async def test_limits_refuse_with_a_hint_when_to_come_back(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = babble_forever
    async with running_router(registry.address, worker.address, max_requests=1) as router:
        call = router.inference.Generate(inference_pb2.GenerateRequest(model="sql", prompt="x"), timeout=60)
        async for _ in call:
            break
        error = await refusal(router)
        assert isinstance(error, errors.ResourceExhausted)
        assert error.retry_after_s == 1
        call.cancel()
        await eventually(lambda: router.router.inference.in_flight == 0)
        worker.script = say_hello
        assert await router.generate("sql")


async def test_reading_ones_own_write_waits_for_the_revision(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address) as router:
        asking = asyncio.create_task(router.generate("fresh", metadata=(("x-loraplex-min-revision", "2"),)))
        await asyncio.sleep(0.1)
        assert not asking.done()
        await registry.commit(adapter_entry("fresh"))
        assert text_of(await asking) == "Hello adapter!"
        error = await refusal(router, metadata=(("x-loraplex-min-revision", "two"),))
        assert isinstance(error, errors.InvalidParameter)


async def test_a_revision_that_does_not_come_is_catalog_behind(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address, revision_wait_s=0.2) as router:
        error = await refusal(router, metadata=(("x-loraplex-min-revision", "99"),))
    assert isinstance(error, errors.CatalogBehind)
    assert error.metadata == {"revision": "1", "wanted": "99"}


async def test_models_are_listed_in_pages_bases_first(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address) as router:
        names: list[str] = []
        token = ""
        for _ in range(3):
            page = await router.models.ListModels(models_pb2.ListModelsRequest(page_size=1, page_token=token))
            names += [model.name for model in page.models]
            token = page.next_page_token
        assert token == ""
        assert names == [BASE_ID, "json", "sql"]
        with pytest.raises(aio.AioRpcError) as caught:
            await router.models.ListModels(models_pb2.ListModelsRequest(page_token="nonsense"))
        assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
        model = (await router.models.GetModel(models_pb2.GetModelRequest(name="json"))).model
        assert (model.parent, model.artifact_digest, model.rank) == (BASE_ID, digest("artifact new"), 8)
        base = (await router.models.GetModel(models_pb2.GetModelRequest(name=BASE_ID))).model
        assert (base.parent, base.base_digest, base.artifact_digest) == ("", BASE, "")


async def test_deletion_and_cutover_apply_to_new_requests_only(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = babble_forever
    async with running_router(registry.address, worker.address) as router:
        call = router.inference.Generate(inference_pb2.GenerateRequest(model="sql", prompt="x"), timeout=30)
        events = aiter(call)
        await anext(events)
        revision = await registry.commit(deleted_entry("sql"), adapter_entry("json", "newer", "new", "old"))
        await router.router.catalog.wait_for_revision(revision)
        assert isinstance(await refusal(router), errors.ModelNotFound)
        assert (await anext(events)).delta.text == "ba "
        worker.script = say_hello
        await router.generate("json")
        assert worker.requests[-1].adapter.artifact_digest == digest("artifact newer")
        call.cancel()


async def test_health_follows_readiness_and_drain(registry: FakeRegistry, worker: FakeWorker) -> None:
    await registry.stop()
    async with running_router(registry.address, worker.address, ready=False) as router:
        health = health_pb2_grpc.HealthStub(router.channel)
        request = health_pb2.HealthCheckRequest(service="loraplex.router.v1.InferenceService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await refusal(router)
        assert isinstance(error, errors.RegistryUnavailable)
        await registry.start()
        statuses = health.Watch(request, timeout=60)
        async for response in statuses:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        statuses.cancel()
        await router.until_workers(1)
        assert text_of(await router.generate("sql")) == "Hello adapter!"
    await registry.stop()
    await registry.start()
