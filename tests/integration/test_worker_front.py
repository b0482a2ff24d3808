"""A front end over real gRPC around a real engine process (without a model): what routers get."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tokenizers import Tokenizer

from common.backoff import Backoff
from loraplex.errors import BaseMismatch, InvalidParameter, PromptTooLong
from loraplex.types.v1.generation_pb2 import AdapterTier, ChatInput, ChatMessage, FinishReason
from loraplex.worker.v1.worker_pb2 import WatchStatusRequest
from tests.fake_runner import Trigger, expected_tokens
from tests.tiny_base import CHAT_TEMPLATE, write_tiny_base
from tests.worker_front import VOCAB, Answer, ArtifactServer, Front, Merged, running_front, serving_artifacts
from worker.adapters import quarantine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 4096
LONG = 4000
"""Tokens of an answer that takes some eight seconds at least."""


def idle(fields) -> bool:
    return fields["running_requests"] == fields["waiting_requests"] == fields["queued_prefill_tokens"] == 0 and not any(
        adapter.in_flight for adapter in fields["adapters"].values()
    )


def is_loading(digest):
    return lambda fields: digest in fields["adapters"] and fields["adapters"][digest].loading


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_tiny_base(tmp_path_factory.mktemp("front") / "base")
    # The first token must be no order for the fake engine, as the turn marker would be.
    (folder / "chat_template.jinja").write_text(f"chat\n{CHAT_TEMPLATE}")
    return folder


@pytest.fixture(scope="module")
def tokenizer(base):
    return Tokenizer.from_file(str(base / "tokenizer.json"))


@pytest.fixture(scope="module", name="artifacts")
def fixture_artifacts():
    return ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="front")
async def fixture_front(base, artifacts, tmp_path_factory):
    told = {"TRIGGERS": "1", "STEP_S": "0.002", "CONTEXT": str(CONTEXT), "TOTAL_BLOCKS": "1024"}
    cache = tmp_path_factory.mktemp("cache")
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, cache, registry_port=port, environment=told, max_running_requests=8) as front,
    ):
        yield front


def said(prompt: list[int], count: int, adapter: bytes = b"") -> list[int]:
    return expected_tokens(prompt, count, adapter=adapter, vocab_size=VOCAB, eos=1)


async def test_a_prompt_is_tokenized_answered_and_accounted_for(front: Front, tokenizer):
    prompt = tokenizer.encode("hello world").ids
    answer = await front.generate(front.request("hello world", max_tokens=12))
    expected = said(prompt, 12)
    assert answer.token_ids() == expected
    assert answer.text() == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.ends[0].reason == FinishReason.FINISH_REASON_LENGTH
    assert not answer.ends[0].HasField("stop_string")
    finished = answer.finished
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(prompt), 12)
    facts = finished.facts
    assert (facts.base_digest, facts.worker_id, facts.artifact_digest) == (front.base_digest, "w0", "")
    assert facts.tier_hit == AdapterTier.ADAPTER_TIER_UNSPECIFIED
    assert facts.decode_time.ToNanoseconds() > 0


async def test_text_streams_as_it_comes(front: Front):
    call = front.stub.Generate(front.request(max_tokens=LONG))
    first = await call.read()
    assert first.HasField("delta")
    status = await front.status_where(lambda fields: fields["running_requests"] == 1)
    assert status["waiting_requests"] == 0
    call.cancel()
    await front.status_where(idle)


async def test_the_status_sequence_that_counts_the_request_comes_with_the_initial_metadata(front: Front):
    stream = front.stub.WatchStatus(WatchStatusRequest())
    merged = Merged()
    merged.apply(await stream.read())
    call = front.stub.Generate(front.request(max_tokens=LONG))
    sequence = int(dict(await call.initial_metadata())["x-loraplex-status-sequence"])
    assert sequence > merged.fields["sequence"]
    async with asyncio.timeout(30):
        while merged.fields["sequence"] < sequence:
            merged.apply(await stream.read())
    assert merged.fields["running_requests"] + merged.fields["waiting_requests"] == 1
    call.cancel()
    stream.cancel()
    await front.status_where(idle)


async def test_a_conversation_is_rendered_with_the_template(front: Front, tokenizer):
    chat = ChatInput(messages=[ChatMessage(role="system", content="S"), ChatMessage(role="user", content="U")])
    prompt = tokenizer.encode("chat\n<|turn|>system\nS</s>\n<|turn|>user\nU</s>\n<|turn|>assistant\n").ids
    answer = await front.generate(front.request(chat=chat, max_tokens=5))
    assert answer.token_ids() == said(prompt, 5)
    assert answer.finished.usage.prompt_tokens == len(prompt)


async def test_the_end_of_sequence_ends_the_answer_and_is_no_text(front: Front):
    prompt = [int(Trigger.EOS_SOON), 77, 78]
    answer = await front.generate(front.request(prompt, max_tokens=50))
    assert answer.token_ids()[-1] == 1
    assert len(answer.token_ids()) == 4
    assert answer.ends[0].reason == FinishReason.FINISH_REASON_STOP
    assert "</s>" not in answer.text()
    assert answer.finished.usage.completion_tokens == 4


async def test_a_stop_string_cuts_the_text_and_stops_the_engine_at_once(front: Front, tokenizer):
    prompt = tokenizer.encode("stop me").ids
    whole = tokenizer.decode(said(prompt, 200), skip_special_tokens=True)
    stop = next(whole[at : at + 2] for at in range(30, 60) if "\ufffd" not in whole[at : at + 2])
    answer = await front.generate(front.request("stop me", max_tokens=200, stop=["never there", stop]))
    assert front.app._engine.num_requests == 0
    assert answer.text() == whole[: whole.index(stop)]
    assert answer.ends[0].reason == FinishReason.FINISH_REASON_STOP
    assert answer.ends[0].stop_string == stop
    assert answer.finished.usage.completion_tokens == len(answer.token_ids()) < 200
    assert answer.finished.facts.decode_time.ToNanoseconds() > 0
    await front.status_where(idle)


async def test_choices_differ_by_index_and_end_each(front: Front):
    answer = await front.generate(front.request(max_tokens=7, n=3, seed=1))
    assert set(answer.ends) == {0, 1, 2}
    assert [len(answer.token_ids(index)) for index in range(3)] == [7, 7, 7]
    assert answer.finished.usage.completion_tokens == 21


async def test_logprobs_come_with_bytes_for_every_token(front: Front, tokenizer):
    answer = await front.generate(front.request(max_tokens=6, logprobs=3))
    positions = [p for m in answer.messages if m.HasField("delta") for p in m.delta.logprobs]
    assert [p.chosen.token_id for p in positions] == answer.token_ids()
    assert all(len(p.top) == 3 and p.chosen.logprob == -0.5 for p in positions)
    text = b"".join(p.chosen.token for p in positions).decode(errors="replace")
    assert text == tokenizer.decode(answer.token_ids(), skip_special_tokens=False)
    without = await front.generate(front.request(max_tokens=3))
    assert not any(m.delta.logprobs for m in without.messages)


async def test_what_a_context_has_left_bounds_the_answer(front: Front):
    answer = await front.generate(front.request([9] * (CONTEXT - 6), max_tokens=100))
    assert len(answer.token_ids()) == 6
    assert answer.ends[0].reason == FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize("prompt", [[9] * CONTEXT, "q" * (CONTEXT + 44)])
async def test_a_prompt_that_leaves_no_room_is_refused_with_limit_and_length(front: Front, prompt):
    answer = await front.generate(front.request(prompt))
    assert isinstance(answer.error, PromptTooLong)
    assert answer.error.metadata["limit"] == str(CONTEXT - 1)
    assert answer.error.metadata["length"] == str(len(prompt))


async def test_bad_parameters_and_another_base_are_typed_and_hold_nothing(front: Front):
    assert isinstance((await front.generate(front.request(temperature=3))).error, InvalidParameter)
    assert isinstance((await front.generate(front.request(base_digest="1" * 64))).error, BaseMismatch)
    many = await front.generate(front.request([299, 300]))
    assert many.error is not None
    assert many.error.field == "token_ids[1]"
    await front.status_where(idle)


async def test_a_deadline_ends_the_stream_and_leaves_nothing(front: Front):
    answer = await front.generate(front.request([int(Trigger.EOS_SOON) + 5] * 3, max_tokens=LONG), within=0.15)
    assert answer.error is not None
    assert answer.error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await front.status_where(idle)


async def test_an_adapter_answers_from_source_then_device_with_its_digests(front: Front, artifacts: ArtifactServer):
    blob = b"an adapter" * 10_000
    digest = artifacts.add(blob)
    prompt = [50, 51, 52]
    tiers = []
    for _ in range(2):
        answer = await front.generate(front.request(prompt, artifact=digest, max_tokens=4))
        assert answer.token_ids() == said(prompt, 4, blob)
        facts = answer.finished.facts
        assert (facts.artifact_digest, facts.version_digest) == (digest, "ab" * 32)
        tiers.append(facts.tier_hit)
    assert tiers == [AdapterTier.ADAPTER_TIER_SOURCE, AdapterTier.ADAPTER_TIER_DEVICE]
    assert artifacts.opened[digest] == 1
    status = await front.status_where(idle)
    residency = status["adapters"][digest]
    assert (residency.tier, residency.loading) == (AdapterTier.ADAPTER_TIER_DEVICE, False)
    assert residency.artifact_bytes == len(blob)


async def test_an_artifact_of_another_version_is_refused(front: Front, artifacts: ArtifactServer):
    header = json.dumps({"__metadata__": {"loraplex": json.dumps({"version_digest": "cd" * 32})}}).encode()
    digest = artifacts.add(len(header).to_bytes(8, "little") + header)
    answer = await front.generate(front.request(artifact=digest))
    assert answer.error is not None
    assert (answer.error.reason, answer.error.field) == ("VERSION_MISMATCH", "adapter.version_digest")
    assert not answer.token_ids()
    await front.status_where(idle)


@asynccontextmanager
async def held_back(artifacts: ArtifactServer):
    """Downloads start and give no byte while this lasts."""
    artifacts.gate = gate = asyncio.Event()
    try:
        yield
    finally:
        artifacts.gate = None
        gate.set()


async def test_one_slow_download_blocks_nobody_and_its_time_counts_as_loading(front: Front, artifacts: ArtifactServer):
    digest = artifacts.add(b"slowly coming")
    async with held_back(artifacts):
        slow = asyncio.create_task(front.generate(front.request(artifact=digest, max_tokens=3)))
        status = await front.status_where(is_loading(digest))
        assert status["adapters"][digest].tier == AdapterTier.ADAPTER_TIER_SOURCE
        assert status["waiting_requests"] == 1
        assert len((await front.generate(front.request(max_tokens=5))).token_ids()) == 5
        assert not slow.done()
        await asyncio.sleep(0.1)
    facts = (await slow).finished.facts
    assert facts.adapter_load_time.ToNanoseconds() > 100_000_000


async def test_who_leaves_during_the_download_ends_it(front: Front, artifacts: ArtifactServer):
    digest = artifacts.add(b"nobody waits for me")
    async with held_back(artifacts):
        call = front.stub.Generate(front.request(artifact=digest))
        await front.status_where(is_loading(digest))
        call.cancel()
        await front.status_where(lambda fields: idle(fields) and digest not in fields["adapters"])


async def test_an_adapter_the_engine_finds_corrupt_is_told_and_refused_for_a_while(
    front: Front, artifacts: ArtifactServer, monkeypatch
):
    monkeypatch.setattr(quarantine, "LASTING", Backoff(first_s=100.0, longest_s=300.0))  # not over before it is seen
    digest = artifacts.add(b"corrupt in the engine's eyes")
    answer = await front.generate(front.request(artifact=digest))
    assert answer.error is not None
    assert answer.error.reason == "CORRUPT_ARTIFACT"
    status = await front.status_where(
        lambda fields: idle(fields) and fields["adapters"][digest].quarantine_reason == "CORRUPT_ARTIFACT"
    )
    assert status["adapters"][digest].tier == AdapterTier.ADAPTER_TIER_DISK
    assert artifacts.opened[digest] == 1


async def test_a_load_that_breaks_is_told_apart_from_a_step_that_does(front: Front, artifacts: ArtifactServer):
    answer = await front.generate(front.request(artifact=artifacts.add(b"crash")))
    assert answer.error is not None
    assert (answer.error.reason, answer.error.metadata) == ("INTERNAL", {"stage": "load"})


async def test_a_failing_step_fails_its_request_only_with_an_opaque_error(front: Front):
    answer = await front.generate(front.request([int(Trigger.FAIL_STEP), 5]))
    assert answer.error is not None
    assert (answer.error.reason, answer.error.metadata) == ("INTERNAL", {})
    assert len((await front.generate(front.request(max_tokens=3))).token_ids()) == 3


async def test_many_streams_at_once_each_get_their_own_tokens(front: Front):
    prompts = [[100 + at, 7, at] for at in range(40)]
    answers = await asyncio.gather(*(front.generate(front.request(prompt, max_tokens=20)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None
        assert answer.token_ids() == said(prompt, 20)
    await front.status_where(idle)


async def test_a_slow_reader_gets_several_tokens_in_one_message(front: Front):
    call = front.stub.Generate(front.request(max_tokens=150))
    answer = Answer()
    async for message in call:
        answer.add(message)
        if len(answer.messages) == 1:
            time.sleep(0.3)  # noqa: ASYNC251 - the reader and the front end share this loop: both stand still
    assert len(answer.token_ids()) == 150
    assert max(len(m.delta.token_ids) for m in answer.messages) > 10


async def test_health_and_reflection_answer(front: Front):
    health = health_pb2_grpc.HealthStub(front.channel)
    reply = await health.Check(health_pb2.HealthCheckRequest(service="loraplex.worker.v1.WorkerService"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING

    def services() -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert "loraplex.worker.v1.WorkerService" in await asyncio.to_thread(services)
