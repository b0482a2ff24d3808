"""A front end that is dedicated to one adapter: what it fetches, tells, serves and refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.errors import ArtifactNotFound, FailedPrecondition, NotServedHere, from_rpc_error
from loraplex.types.v1.generation_pb2 import AdapterTier
from loraplex.worker.v1.worker_pb2 import (
    EvaluateAdapterRequest,
    LoadAdapterRequest,
    PinAdapterRequest,
    PrefetchAdapterRequest,
    UnloadAdapterRequest,
    WorkerState,
)
from tests.fake_runner import expected_tokens
from tests.tiny_base import write_tiny_base
from tests.worker_front import VOCAB, ArtifactServer, running_front, serving_artifacts

BLOB = b"the adapter that the worker is for"
STEERING: tuple[tuple[str, Any, dict[str, bool]], ...] = (
    ("LoadAdapter", LoadAdapterRequest, {}),
    ("PrefetchAdapter", PrefetchAdapterRequest, {"to_device": True}),
    ("PinAdapter", PinAdapterRequest, {"pinned": True}),
    ("PinAdapter", PinAdapterRequest, {"pinned": False}),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("front") / "base")


@pytest.fixture
def artifacts() -> ArtifactServer:
    return ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone


async def test_it_serves_its_adapter_as_the_engines_base_and_nothing_else(base, artifacts, tmp_path) -> None:
    digest, other = artifacts.add(BLOB), artifacts.add(b"another")
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path, registry_port=port, dedicated=digest) as front,
    ):
        status = await front.status_where(
            lambda fields: fields["adapters"] and fields["adapters"][digest].tier == AdapterTier.ADAPTER_TIER_DEVICE
        )
        assert status["dedicated_artifact_digest"] == digest

        prompt = [5, 6, 7]
        answer = await front.generate(front.request(prompt, artifact=digest, max_tokens=8))
        assert answer.token_ids() == expected_tokens(prompt, 8, adapter=b"", vocab_size=VOCAB, eos=1)
        facts = answer.finished.facts
        assert (facts.artifact_digest, facts.version_digest) == (digest, "ab" * 32)
        assert facts.tier_hit == AdapterTier.ADAPTER_TIER_DEVICE
        assert facts.adapter_load_time.ToNanoseconds() == 0

        for refused in (None, other):
            answer = await front.generate(front.request(prompt, artifact=refused, max_tokens=8))
            assert isinstance(answer.error, NotServedHere)
            assert answer.error.code is grpc.StatusCode.UNAVAILABLE
        assert artifacts.opened[other] == 0
        evaluation = EvaluateAdapterRequest(
            base_digest=front.base_digest,
            version_digest="ab" * 32,
            artifact_digest=digest,
            exact_artifact_digest=digest,
        )
        with pytest.raises(grpc.RpcError) as failed:
            async for _ in front.stub.EvaluateAdapter(evaluation, timeout=60):
                pass
        assert isinstance(from_rpc_error(failed.value), NotServedHere)
        await front.status_where(lambda fields: fields["adapters"][digest].in_flight == 0)


async def test_nothing_is_brought_to_it_or_taken_from_it(base, artifacts, tmp_path) -> None:
    digest, other = artifacts.add(BLOB), artifacts.add(b"another")
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path, registry_port=port, dedicated=digest) as front,
    ):
        own, foreign = (
            {"base_digest": front.base_digest, "adapter": front.request(artifact=name).adapter}
            for name in (digest, other)
        )

        async def answered(name: str, request: Any) -> Any:
            try:
                return await getattr(front.stub, name)(request, timeout=60)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

        for name, kind, more in STEERING:
            with pytest.raises(NotServedHere):
                await answered(name, kind(**foreign, **more))
            answer = await answered(name, kind(**own, **more))
            assert getattr(answer, "tier_hit" if name == "LoadAdapter" else "tier") == AdapterTier.ADAPTER_TIER_DEVICE
        assert artifacts.opened[other] == 0
        gone = await answered("UnloadAdapter", UnloadAdapterRequest(artifact_digest=other))
        assert gone.tier == AdapterTier.ADAPTER_TIER_UNSPECIFIED
        for from_disk in (False, True):
            with pytest.raises(FailedPrecondition):
                await answered("UnloadAdapter", UnloadAdapterRequest(artifact_digest=digest, from_disk=from_disk))
        assert front.app._engine.adapters == {}  # to the engine it is the base
        assert front.app._steering.num_pinned == 0


async def test_it_starts_when_its_source_does(base, artifacts, tmp_path) -> None:
    digest = artifacts.add(BLOB)
    async with serving_artifacts(artifacts) as port:
        pass
    async with running_front(base, tmp_path, registry_port=port, dedicated=digest, wait_ready=False) as front:
        status = await front.status_where(lambda fields: bool(fields.get("base_digest")), within=60)
        assert status["state"] == WorkerState.WORKER_STATE_STARTING
        async with serving_artifacts(artifacts, port):
            await front.status_where(lambda fields: fields["state"] == WorkerState.WORKER_STATE_SERVING, within=60)
    assert artifacts.opened[digest] == 1
    async with running_front(base, tmp_path, registry_port=port, dedicated=digest):  # from its disk, without a source
        pass


async def test_an_adapter_that_is_not_there_ends_the_start(base, artifacts, tmp_path) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with (
            serving_artifacts(artifacts) as port,
            running_front(base, tmp_path, registry_port=port, dedicated="0" * 64, wait_ready=False) as front,
        ):
            await asyncio.wait_for(front.task, 60)
    assert ended.group_contains(ArtifactNotFound)


async def test_it_stops_while_it_waits_for_its_source(base, artifacts, tmp_path) -> None:
    digest = artifacts.add(BLOB)
    async with serving_artifacts(artifacts) as port:
        pass
    async with running_front(base, tmp_path, registry_port=port, dedicated=digest, wait_ready=False) as front:
        await front.status_where(lambda fields: bool(fields.get("base_digest")), within=60)
    assert front.task.done()
