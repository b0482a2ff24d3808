"""Variants of adapters at the registry: what needs the weights of the base, what is told, what repacking keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.adapter_format.packed import PackedAdapter, open_packed
from loraplex import errors, wire
from loraplex.records import LoadFacts, PackingReport
from loraplex.registry.v1 import adapter_pb2 as a
from tests.peft_variants import make_variant, write_base
from tests.running_registry import Client, nothing_is_left, refusal, registry_here
from tests.tiny_base import write_tiny_base

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> Path:
    return write_base("tied", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def head_dora(tmp_path_factory, base_folder) -> Path:
    return make_variant("head_dora_tied", base_folder, tmp_path_factory.mktemp("adapters") / "head_dora")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, base_folder) -> Path:
    return make_variant("saved_head_lora_embedding", base_folder, tmp_path_factory.mktemp("adapters") / "saved")


async def report_of(client: Client, name: str) -> PackingReport:
    response = await client.adapters.GetAdapter(a.GetAdapterRequest(name=name))
    return wire.packing_report(response.reports[0])


async def stored(client: Client, digest: str, tmp_path: Path) -> PackedAdapter:
    file = tmp_path / digest
    file.write_bytes((await client.download(digest))[1])
    return open_packed(file)


async def test_dora_is_refused_where_the_registry_has_no_weights(tmp_path, base_folder, head_dora):
    async with registry_here(tmp_path) as client:
        await client.add_base(base_folder)
        error = await refusal(client.upload(head_dora, "dora"), errors.FailedPrecondition)
        assert error.field == "base_dirs"
        assert "use_dora" in error.message
        assert "--base-dirs" in error.message
        assert await nothing_is_left(client, tmp_path)


async def test_weights_of_another_base_do_not_do(tmp_path, base_folder, head_dora):
    other = write_tiny_base(tmp_path / "other", vocab=304, tie_word_embeddings=True, seed=9)
    (tmp_path / "empty").mkdir()
    folders = f"{other},{tmp_path / 'empty'}"
    async with registry_here(tmp_path / "state", base_dirs=folders) as client:
        await client.add_base(base_folder)
        error = await refusal(client.upload(head_dora, "dora"), errors.FailedPrecondition)
        assert str(other) in error.message


async def test_dora_is_packed_with_the_weights_of_its_base(tmp_path, base_folder, head_dora):
    async with registry_here(tmp_path, base_dirs=str(base_folder), default_quantization="int8") as client:
        await client.add_base(base_folder)
        done = await client.upload(head_dora, "dora")
        version = done.adapter.current
        assert (version.num_modules, version.num_base_modules, version.format) == (3, 15, "int8")
        assert list(version.target_modules) == ["lm_head", "q_proj"]
        exact = await stored(client, version.exact_artifact_digest, tmp_path)
        served = await stored(client, version.artifact_digest, tmp_path)
        for module, ours in zip(exact.modules, served.modules, strict=True):
            assert module.affine is not None
            assert ours.affine is not None
            np.testing.assert_array_equal(ours.affine.scale, module.affine.scale)
            assert module.affine.magnitude is not None
            assert ours.affine.magnitude is None
        report = await report_of(client, "dora")
        assert report.load == LoadFacts(
            num_file_tensors=10,
            num_file_modules=3,
            equal_to_base=("base_model.model.lm_head.base_layer.weight",),
            features=("DoRA", "lm_head LoRA"),
            base_check="weights",
            trained_on=str(base_folder)[:200],
        )
        assert report == wire.packing_report(done.report)
        assert report.estimated_sizes == ("int4",)
        assert report.format_errors["int8"] == report.mean_error < 0.02 < report.format_errors["int4"] < 0.2
        assert report.format_errors["none"] == 0


async def test_repacking_keeps_all_that_an_adapter_has(tmp_path, base_folder, head_dora, saved):
    async with registry_here(tmp_path, base_dirs=str(base_folder)) as client:
        await client.add_base(base_folder)
        for name, folder in (("dora", head_dora), ("saved", saved)):
            first = (await client.upload(folder, name)).adapter.current
            before = await report_of(client, name)
            exact = await stored(client, first.artifact_digest, tmp_path)
            for form in (a.ADAPTER_FORMAT_INT4, a.ADAPTER_FORMAT_INT8, a.ADAPTER_FORMAT_NONE):
                request = a.UpdateAdapterRequest(name=name, format=form)
                version = (await client.adapters.UpdateAdapter(request)).adapter.current
                assert version.version_digest == first.version_digest
                served = await stored(client, version.artifact_digest, tmp_path)
                assert [module.name for module in served.modules] == [module.name for module in exact.modules]
                assert [m.affine is None for m in served.modules] == [m.affine is None for m in exact.modules]
                for ours, matrix in zip(served.matrices, exact.matrices, strict=True):
                    np.testing.assert_array_equal(ours.weight, matrix.weight)
                after = await report_of(client, name)
                assert (after.format, after.load) == (version.format, before.load)
            assert version.artifact_digest == first.artifact_digest


async def test_a_saved_head_is_told_and_counted(tmp_path, base_folder, saved):
    async with registry_here(tmp_path) as client:
        await client.add_base(base_folder)
        version = (await client.upload(saved, "saved")).adapter.current
        assert list(version.target_modules) == ["embed_tokens", "lm_head", "q_proj"]
        assert (version.num_modules, version.num_base_modules) == (4, 16)
        load = (await report_of(client, "saved")).load
        assert load is not None
        assert load.features == ("embed_tokens LoRA", "saved lm_head")
        assert load.base_check == "manifest"
