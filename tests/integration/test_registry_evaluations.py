"""RecordEvaluation on a real registry: what it keeps, what it refuses, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplex.errors import AdapterNotFound, InvalidName, InvalidParameter
from loraplex.registry.v1 import adapter_pb2 as a
from loraplex.types.v1.evaluation_pb2 import Evaluation
from tests.running_registry import Client, refusal, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter") / "one", base_folder, rank=4, seed=1)


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "state"


@pytest.fixture
async def registry(state_dir, database_url, base_folder, adapter_folder) -> AsyncIterator[Client]:
    async with registry_here(state_dir, database_url, default_quantization="int8") as client:
        await client.add_base(base_folder)
        await client.upload(adapter_folder, "x")
        yield client


async def get(client: Client, name: str = "x") -> a.GetAdapterResponse:
    return await client.adapters.GetAdapter(a.GetAdapterRequest(name=name), timeout=10)


async def repack(client: Client, form: int) -> a.AdapterVersion:
    request = a.UpdateAdapterRequest(name="x", format=form)  # type: ignore[arg-type]
    return (await client.adapters.UpdateAdapter(request, timeout=30)).adapter.current


def figures(version: a.AdapterVersion, **changes: Any) -> Evaluation:
    told: dict[str, Any] = {
        "version_digest": version.version_digest,
        "artifact_digest": version.artifact_digest,
        "exact_artifact_digest": version.exact_artifact_digest,
        "base_digest": version.base_digest,
        "prompt_set": 1,
        "num_prompts": 90,
        "num_positions": 3000,
        "top1_agreement": 0.9925,
        "mean_kl": 0.00125,
        "max_kl": 0.5,
        "worker_version": "1.2.3",
        "device": "cpu bfloat16",
    }
    return Evaluation(**{**told, **changes})


def record(client: Client, evaluation: Evaluation, name: str = "x"):
    request = a.RecordEvaluationRequest(name=name, evaluation=evaluation)
    return client.adapters.RecordEvaluation(request, timeout=10)


async def test_what_is_recorded_is_told_with_the_adapter(registry):
    version = (await get(registry)).adapter.current
    assert version.exact_artifact_digest != version.artifact_digest
    assert list((await get(registry)).evaluations) == []
    done = await record(registry, figures(version))
    assert done.report.evaluation == figures(version)
    assert done.report.format == "int8"
    assert done.report.create_time.seconds > 0
    assert list((await get(registry)).evaluations) == [done.report]
    assert (await get(registry)).adapter.current == version


async def test_a_later_evaluation_of_an_artifact_replaces_the_earlier(registry):
    version = (await get(registry)).adapter.current
    first = await record(registry, figures(version))
    second = await record(registry, figures(version, top1_agreement=0.5))
    assert second.revision == first.revision + 1
    assert [report.evaluation.top1_agreement for report in (await get(registry)).evaluations] == [0.5]


async def test_each_format_keeps_its_own_and_has_it_again_when_it_comes_back(registry):
    int8 = (await get(registry)).adapter.current
    await record(registry, figures(int8, top1_agreement=0.99))
    int4 = await repack(registry, a.ADAPTER_FORMAT_INT4)
    await record(registry, figures(int4, top1_agreement=0.97))
    told = [(report.format, report.evaluation.top1_agreement) for report in (await get(registry)).evaluations]
    assert told == [("int4", 0.97), ("int8", 0.99)]
    back = await repack(registry, a.ADAPTER_FORMAT_INT8)
    assert back.artifact_digest == int8.artifact_digest
    assert {report.format for report in (await get(registry)).evaluations} == {"int4", "int8"}


async def test_the_exact_artifact_may_be_evaluated_against_itself(registry):
    version = (await get(registry)).adapter.current
    done = await record(registry, figures(version, artifact_digest=version.exact_artifact_digest))
    assert done.report.format == "none"


async def test_it_goes_with_its_adapter(registry, adapter_folder):
    await record(registry, figures((await get(registry)).adapter.current))
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"), timeout=10)
    await registry.upload(adapter_folder, "x")
    assert list((await get(registry)).evaluations) == []


async def test_it_outlives_the_registry(state_dir, database_url, base_folder, adapter_folder):
    async with registry_here(state_dir, database_url, default_quantization="int8") as client:
        await client.add_base(base_folder)
        version = (await client.upload(adapter_folder, "x")).adapter.current
        done = await record(client, figures(version))
    async with registry_here(state_dir, database_url) as client:
        assert list((await get(client)).evaluations) == [done.report]


async def test_watchers_see_one_revision_and_the_same_adapter(registry):
    adapter = (await get(registry)).adapter
    watch = registry.adapters.Watch(a.WatchRequest())
    async for event in watch:
        if event.HasField("synced"):
            break
    done = await record(registry, figures(adapter.current))
    async for event in watch:
        if event.HasField("change"):
            break
    watch.cancel()
    assert event.change.revision == done.revision
    assert [entry.adapter for entry in event.change.entries] == [adapter]


@pytest.mark.parametrize(("field", "value"), [("top1_agreement", math.nan), ("artifact_digest", "ab" * 32)])
async def test_what_cannot_be_true_or_is_another_s_is_refused_and_not_stored(registry, field, value):
    version = (await get(registry)).adapter.current
    error = await refusal(record(registry, figures(version, **{field: value})), InvalidParameter)
    assert error.field == f"evaluation.{field}"
    assert list((await get(registry)).evaluations) == []


async def test_an_artifact_that_was_replaced_takes_no_more_figures(registry):
    before = (await get(registry)).adapter.current
    await repack(registry, a.ADAPTER_FORMAT_INT4)
    error = await refusal(record(registry, figures(before)), InvalidParameter)
    assert error.field == "evaluation.artifact_digest"
    assert "evaluate the adapter again" in error.message


async def test_an_adapter_that_nobody_registered_has_none(registry):
    version = (await get(registry)).adapter.current
    await refusal(record(registry, figures(version), name="y"), AdapterNotFound)
    await refusal(record(registry, figures(version), name="No Name"), InvalidName)
