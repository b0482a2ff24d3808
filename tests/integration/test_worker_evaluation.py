"""EvaluateAdapter over real gRPC around a real engine process (without a model): what comes, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from common.adapter_format.packed import PackedAdapter, PackedModule, pack, version_digest
from common.adapter_format.quantize import quantize
from loraplex.errors import (
    ArtifactUnreachable,
    BaseMismatch,
    DeadlineExceeded,
    Draining,
    EngineDown,
    FailedPrecondition,
    InvalidRequest,
    LoraplexError,
    QueueFull,
    TooLarge,
    VersionMismatch,
    from_rpc_error,
)
from loraplex.types.v1.evaluation_pb2 import Evaluation, EvaluationProgress
from loraplex.worker.v1.worker_pb2 import EvaluateAdapterRequest, EvaluateAdapterResponse
from tests.fake_runner import expected_comparison, expected_tokens
from tests.tiny_base import CHAT_TEMPLATE, write_tiny_base
from tests.worker_front import (
    TOLD_AFTER_1_S,
    VOCAB,
    ArtifactServer,
    Front,
    running_front,
    serving_artifacts,
    told_long_before,
)
from worker.evaluation.evaluator import ANSWER_TOKENS, TENANT
from worker.evaluation.prompts import built_in_prompts
from worker.evaluation.tally import Tally
from worker.text.chat import Message
from worker.text.model import TextModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXACT, MEASURED = b"exact factors", b"factors in int8"
SLOW = {"STEP_S": "0.01"}


def idle(fields) -> bool:
    return fields["running_requests"] == fields["waiting_requests"] == fields["queued_prefill_tokens"] == 0 and not any(
        adapter.in_flight for adapter in fields["adapters"].values()
    )


@dataclass
class Outcome:
    progress: list[EvaluationProgress] = field(default_factory=list)
    evaluation: Evaluation | None = None
    error: LoraplexError | None = None


async def evaluate(front: Front, request: EvaluateAdapterRequest, within: float | None = 60) -> Outcome:
    outcome = Outcome()
    try:
        async for event in front.stub.EvaluateAdapter(request, timeout=within):
            assert outcome.evaluation is None, "something follows the figures"
            if event.HasField("progress"):
                outcome.progress.append(event.progress)
            else:
                outcome.evaluation = event.evaluation
    except grpc.RpcError as error:
        outcome.error = from_rpc_error(error)
    return outcome


async def begun(front: Front, request: EvaluateAdapterRequest) -> Any:
    """Return a call that has told progress and is in the middle of its work."""
    call = front.stub.EvaluateAdapter(request, timeout=60)
    async with asyncio.timeout(60):
        while (event := await call.read()).progress.done_prompts == 0:
            assert isinstance(event, EvaluateAdapterResponse)
    return call


async def error_of(call: Any) -> LoraplexError | None:
    """Read a call to its end, which is an error."""
    try:
        while await call.read():
            pass
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None


async def nothing_left(front: Front) -> None:
    """Wait until neither the worker nor its engine holds anything for anybody."""
    await front.status_where(idle)
    held = ("kv_blocks_in_use", "adapter_references", "waiting_requests", "running_requests", "streams", "tasks")
    async with asyncio.timeout(60):
        while any((resources := front.app._resources())[name] for name in held):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert front.app._engine.num_requests == 0, resources


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = write_tiny_base(tmp_path_factory.mktemp("evaluation") / "base")
    (folder / "chat_template.jinja").write_text(f"chat\n{CHAT_TEMPLATE}")
    return folder


@pytest.fixture(scope="module", name="artifacts")
def fixture_artifacts() -> ArtifactServer:
    server = ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone
    for blob in (EXACT, MEASURED):
        server.add(blob)
    return server


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="registry_port")
async def fixture_registry_port(artifacts):
    async with serving_artifacts(artifacts) as port:
        yield port


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="front")
async def fixture_front(base, registry_port, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    async with running_front(base, cache, registry_port=registry_port, environment={"TOTAL_BLOCKS": "256"}) as front:
        yield front


def request(front: Front, artifacts: ArtifactServer, exact: bytes = EXACT, measured: bytes = MEASURED, **changes: Any):
    fields = {
        "base_digest": front.base_digest,
        "version_digest": "ab" * 32,
        "artifact_digest": artifacts.add(measured),
        "exact_artifact_digest": artifacts.add(exact),
        **changes,
    }
    return EvaluateAdapterRequest(**fields)


async def expected(base: Path, exact: bytes, measured: bytes, context: int = 256) -> Tally:
    """The figures, prompt by prompt, of what the fake model says under each artifact."""
    text, tally = TextModel.load(base), Tally()
    for prompt in built_in_prompts().texts:
        tokens = list(await text.encode_chat([Message("user", prompt)], limit=10_000))
        if len(tokens) > context - ANSWER_TOKENS:
            continue
        answer = expected_tokens(tokens, ANSWER_TOKENS, adapter=exact, vocab_size=VOCAB, eos=1)
        found = expected_comparison([*tokens, *answer[:-1]], len(tokens) - 1, exact, measured, VOCAB, 1)
        tally.add(found.same_top, found.kl)
    return tally


async def test_the_figures_are_those_of_the_exact_artifact_s_own_answers(front: Front, base, artifacts):
    outcome = await evaluate(front, request(front, artifacts))
    wanted = await expected(base, EXACT, MEASURED)
    found = outcome.evaluation
    assert outcome.error is None
    assert found is not None
    assert 50 < wanted.num_prompts <= len(built_in_prompts().texts)
    assert (found.num_prompts, found.num_positions) == (wanted.num_prompts, wanted.num_positions)
    assert found.num_positions == found.num_prompts * ANSWER_TOKENS
    assert (found.top1_agreement, found.mean_kl, found.max_kl) == (
        wanted.top1_agreement,
        wanted.mean_kl,
        wanted.max_kl,
    )
    assert 0 <= found.top1_agreement < 0.5
    assert (found.base_digest, found.prompt_set) == (front.base_digest, built_in_prompts().version)
    assert (found.device, bool(found.worker_version)) == ("cpu float32", True)
    assert outcome.progress[0].done_prompts == 0
    assert outcome.progress[-1].total_prompts == wanted.num_prompts
    done = [progress.done_prompts for progress in outcome.progress]
    assert done == sorted(set(done))
    assert len(done) > 5
    await nothing_left(front)


async def test_an_artifact_agrees_wholly_with_itself(front: Front, artifacts):
    found = (await evaluate(front, request(front, artifacts, EXACT, EXACT))).evaluation
    assert found is not None
    assert (found.top1_agreement, found.mean_kl, found.max_kl) == (1.0, 0.0, 0.0)
    await nothing_left(front)


async def test_a_second_one_is_refused_until_the_first_is_over(base, artifacts, registry_port, tmp_path):
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, environment=SLOW) as front:
        first = await begun(front, request(front, artifacts))
        refused = await evaluate(front, request(front, artifacts))
        assert isinstance(refused.error, QueueFull)
        assert refused.error.retry_after_s
        first.cancel()
        await nothing_left(front)
        second = await begun(front, request(front, artifacts))
        second.cancel()


async def test_cancelling_leaves_nothing(base, artifacts, registry_port, tmp_path):
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, environment=SLOW) as front:
        for moment in (0.0, 0.05, 0.3):
            call = front.stub.EvaluateAdapter(request(front, artifacts), timeout=60)
            await asyncio.sleep(moment)
            call.cancel()
            await nothing_left(front)
        (await begun(front, request(front, artifacts))).cancel()
        await nothing_left(front)


async def test_cancelling_during_the_download_leaves_nothing(base, artifacts, registry_port, tmp_path):
    async with running_front(base, tmp_path / "cache", registry_port=registry_port) as front:
        artifacts.gate = asyncio.Event()
        try:
            call = front.stub.EvaluateAdapter(request(front, artifacts), timeout=60)
            await front.status_where(lambda fields: any(adapter.loading for adapter in fields["adapters"].values()))
            call.cancel()
            await nothing_left(front)
        finally:
            artifacts.gate.set()
            artifacts.gate = None


async def test_a_deadline_that_passes_is_told_and_leaves_nothing(base, artifacts, registry_port, tmp_path, monkeypatch):
    told_long_before(monkeypatch)
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, environment=SLOW) as front:
        outcome = await evaluate(front, request(front, artifacts), within=TOLD_AFTER_1_S)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert "give it more time" in outcome.error.message
        await nothing_left(front)


async def test_an_engine_that_dies_ends_it_and_the_next_one_evaluates(base, artifacts, registry_port, tmp_path):
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, environment=SLOW) as front:
        call = await begun(front, request(front, artifacts))
        link = front.app._engine._link
        assert link is not None
        os.kill(link.pid, signal.SIGKILL)
        assert isinstance(await error_of(call), EngineDown)
        await front.status_where(lambda fields: fields["state"] == 2)
        await nothing_left(front)
        (await begun(front, request(front, artifacts))).cancel()


async def test_a_drain_does_not_wait_for_it(base, artifacts, registry_port, tmp_path):
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, environment=SLOW) as front:
        call = await begun(front, request(front, artifacts))
        front.stop.set()
        assert isinstance(await error_of(call), Draining)


async def test_clients_are_served_beside_it(base, artifacts, registry_port, tmp_path):
    told = {"STEP_S": "0.01"}
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, environment=told) as front:
        call = await begun(front, request(front, artifacts))
        answer = await front.generate(front.request([50, 51], max_tokens=20))
        assert answer.token_ids() == expected_tokens([50, 51], 20, vocab_size=VOCAB, eos=1)
        assert TENANT not in json.dumps(str(answer.messages))
        call.cancel()


@pytest.mark.parametrize("name", ["base_digest", "version_digest", "artifact_digest", "exact_artifact_digest"])
async def test_what_is_no_digest_is_refused_by_name(front: Front, artifacts, name):
    wrong: dict[str, Any] = {name: "AB" * 32}
    outcome = await evaluate(front, request(front, artifacts, **wrong))
    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.error.field == name
    assert "64 lower-case hex" in outcome.error.message


async def test_another_base_is_refused(front: Front, artifacts):
    outcome = await evaluate(front, request(front, artifacts, base_digest="cd" * 32))
    assert isinstance(outcome.error, BaseMismatch)
    assert outcome.error.field == "base_digest"


async def test_an_artifact_that_nobody_has_is_refused(front: Front, artifacts):
    outcome = await evaluate(front, request(front, artifacts, artifact_digest="cd" * 32))
    assert isinstance(outcome.error, LoraplexError)
    assert outcome.error.reason in {"ARTIFACT_NOT_FOUND", ArtifactUnreachable.reason}
    await nothing_left(front)


def packed(folder: Path, seed: int) -> dict[str, bytes]:
    """The files of one version, by format."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=(64, 4)).astype(np.float32)
    modules = (PackedModule("layers.0.self_attn.q_proj", 4, 2.0, "F32", a, b),)
    exact = PackedAdapter(version_digest("cd" * 32, modules), "cd" * 32, "none", modules)
    files = {"version": exact.version_digest.encode()}
    for form in ("none", "int8"):
        pack(exact if form == "none" else quantize(exact, form).adapter, folder / form)
        files[form] = (folder / form).read_bytes()
    return files


async def test_files_that_are_not_of_the_version_or_not_exact_are_refused(front: Front, artifacts, tmp_path):
    one, other = packed(tmp_path, 1), packed(tmp_path, 2)
    version = one["version"].decode()
    mixed = await evaluate(front, request(front, artifacts, one["none"], other["int8"], version_digest=version))
    assert isinstance(mixed.error, VersionMismatch)
    swapped = await evaluate(front, request(front, artifacts, one["int8"], one["none"], version_digest=version))
    assert isinstance(swapped.error, InvalidRequest)
    assert swapped.error.field == "exact_artifact_digest"
    right = await evaluate(front, request(front, artifacts, one["none"], one["int8"], version_digest=version))
    assert right.error is None
    await nothing_left(front)


async def test_limits_that_cannot_hold_it_are_named(base, artifacts, registry_port, tmp_path):
    async with running_front(base, tmp_path / "cache", registry_port=registry_port, max_resident_adapters=1) as front:
        outcome = await evaluate(front, request(front, artifacts))
        assert isinstance(outcome.error, TooLarge)
        assert "max_resident_adapters" in outcome.error.message
        await nothing_left(front)
    short = {"CONTEXT": str(ANSWER_TOKENS + 8)}
    async with running_front(base, tmp_path / "other", registry_port=registry_port, environment=short) as front:
        outcome = await evaluate(front, request(front, artifacts))
        assert isinstance(outcome.error, FailedPrecondition)
        assert "--max-context-tokens" in outcome.error.message
