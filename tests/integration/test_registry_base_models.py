"""Base models: registered by their manifests, and refused where they cannot be served."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator

import pytest

from loraplex import errors
from loraplex.manifest import TensorInfo, read_manifest
from loraplex.registry.v1 import base_model_pb2 as b
from tests.running_registry import (
    Client,
    base_request,
    refusal,
    registry_here,
)
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter"), base_folder, seed=1)


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "state"


@pytest.fixture
async def empty_registry(state_dir, database_url) -> AsyncIterator[Client]:
    async with registry_here(state_dir, database_url, max_upload_bytes=2**24, upload_idle_timeout_s=5) as client:
        yield client


@pytest.fixture
async def registry(empty_registry: Client, base_folder) -> Client:
    await empty_registry.add_base(base_folder)
    return empty_registry


async def test_a_base_is_registered_once_and_told_with_its_manifest(empty_registry, base_folder):
    manifest = read_manifest(base_folder)
    first = await empty_registry.add_base(base_folder, "owner/tiny")
    again = await empty_registry.add_base(base_folder, "owner/tiny")
    assert first == again
    assert (first.base_model.digest, first.base_model.architecture) == (manifest.digest(), "LlamaForCausalLM")
    assert (first.base_model.num_parameters, first.revision) == (manifest.num_parameters, 1)
    found = await empty_registry.bases.GetBaseModel(b.GetBaseModelRequest(base_id="owner/tiny"))
    assert found.base_model == first.base_model
    assert found.manifest == base_request(manifest, "x").manifest


async def test_another_model_under_a_known_id_is_refused(registry, tmp_path):
    other = write_tiny_base(tmp_path / "other", seed=5)
    error = await refusal(registry.add_base(other), errors.AlreadyExists)
    assert error.field == "base_id"


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
async def test_every_supported_architecture_is_accepted(empty_registry, tmp_path, architecture):
    folder = write_tiny_base(tmp_path / "base", architecture=architecture, dtype="BF16")
    answer = await empty_registry.add_base(folder, architecture)
    assert answer.base_model.architecture == architecture


HUGE = TensorInfo("a", (2**63, 2), "F32", "0" * 64)
DEEP = TensorInfo("a", (1,) * 9, "F32", "0" * 64)  # many large sizes would take hours to multiply


def _without_layer(manifest):
    return dataclasses.replace(manifest, tensors=tuple(t for t in manifest.tensors if ".1.mlp.up_proj" not in t.name))


def _config(**fields):
    return lambda m: dataclasses.replace(m, config_json=json.dumps({**json.loads(m.config_json), **fields}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_config(architectures=["MixtralForCausalLM"]), "manifest.config_json"),
        (_config(architectures=[]), "manifest.config_json"),
        (_config(architectures=["Qwen2ForCausalLM"]), "manifest.config_json"),
        (_config(model_type="mixtral"), "manifest.config_json"),
        (_config(model_type=None), "manifest.config_json"),
        (_config(num_hidden_layers=3), "manifest.tensors"),
        (_config(num_hidden_layers="2"), "manifest.config_json"),
        (_without_layer, "manifest.tensors"),
        (lambda m: dataclasses.replace(m, tensors=()), "manifest.tensors"),
        (lambda m: dataclasses.replace(m, tensors=m.tensors[::-1]), "manifest.tensors"),
        (lambda m: dataclasses.replace(m, tensors=m.tensors + m.tensors[-1:]), "manifest.tensors"),
        (lambda m: dataclasses.replace(m, tensors=(HUGE, *m.tensors)), "manifest.tensors"),
        (lambda m: dataclasses.replace(m, tensors=(DEEP, *m.tensors)), "manifest.tensors"),
        (lambda m: dataclasses.replace(m, tokenizer_sha256="abc"), "manifest"),
    ],
)  # fmt: skip
async def test_a_manifest_that_cannot_be_served_is_refused(empty_registry, base_folder, change, field):
    manifest = change(read_manifest(base_folder))
    error = await refusal(empty_registry.bases.CreateBaseModel(base_request(manifest, "x")), errors.InvalidBaseModel)
    assert error.field == field


@pytest.mark.parametrize("config", ["", "{", "[]", "3", "[" * 50_000])
async def test_a_config_that_is_no_json_object_is_refused(empty_registry, base_folder, config):
    request = base_request(read_manifest(base_folder), "x")
    request.manifest.config_json = config
    await refusal(empty_registry.bases.CreateBaseModel(request), errors.InvalidBaseModel)


async def test_a_digest_that_is_not_the_manifest_s_is_refused(empty_registry, base_folder):
    request = base_request(read_manifest(base_folder), "x")
    request.manifest.digest = "0" * 64
    error = await refusal(empty_registry.bases.CreateBaseModel(request), errors.InvalidBaseModel)
    assert error.field == "manifest.digest"


BAD_IDS = ["", "..", "../x", "a/../b", "a/b/c", "/a", "a/", "-a", "a b", "a\0", "a@b", "a" * 97]


@pytest.mark.parametrize("base_id", BAD_IDS)
async def test_base_ids_outside_the_grammar_are_refused(empty_registry, base_folder, base_id):
    error = await refusal(empty_registry.add_base(base_folder, base_id), errors.InvalidName)
    assert error.field == "base_id"
    await refusal(empty_registry.bases.GetBaseModel(b.GetBaseModelRequest(base_id=base_id)), errors.InvalidName)


async def test_an_unknown_base_is_told_with_those_that_are_known(registry, adapter_folder):
    error = await refusal(registry.upload(adapter_folder, "x", "other"), errors.BaseModelNotFound)
    assert "tiny" in error.message
    await refusal(registry.bases.GetBaseModel(b.GetBaseModelRequest(base_id="other")), errors.BaseModelNotFound)


async def test_without_a_base_id_there_must_be_exactly_one_base(empty_registry, base_folder, adapter_folder):
    error = await refusal(empty_registry.upload(adapter_folder, "x"), errors.FailedPrecondition)
    assert "base add" in error.message
    await empty_registry.add_base(base_folder, "one")
    assert (await empty_registry.upload(adapter_folder, "x")).adapter.base_id == "one"
    await empty_registry.add_base(base_folder, "two")
    error = await refusal(empty_registry.upload(adapter_folder, "y"), errors.InvalidParameter)
    assert error.field == "base_id"
    assert "one, two" in error.message


async def test_a_name_means_one_thing_only(empty_registry, base_folder, adapter_folder):
    await empty_registry.add_base(base_folder, "base-one")
    await empty_registry.add_base(base_folder, "base-two")
    await empty_registry.upload(adapter_folder, "x", "base-one")
    for call in (
        empty_registry.upload(adapter_folder, "base-one", "base-one"),  # a base's id
        empty_registry.upload(adapter_folder, "x", "base-two"),  # an adapter of another base
    ):
        assert (await refusal(call, errors.AlreadyExists)).field == "name"
    assert (await refusal(empty_registry.add_base(base_folder, "x"), errors.AlreadyExists)).field == "base_id"
