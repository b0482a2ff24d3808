"""Hostile and broken variants: what does not fit is refused by the tensor, and what does nothing is no adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from common.adapter_format.base_weights import no_weights
from common.adapter_format.packed import open_packed, pack
from common.adapter_format.quantize import quantize
from common.adapter_format.tensor_file import open_tensors, write_tensors
from common.adapter_format.validate import WEIGHTS_FILE
from loraplex.errors import (
    AdapterMismatch,
    CorruptArtifact,
    FailedPrecondition,
    InvalidAdapter,
    UnsupportedAdapter,
)
from tests.peft_variants import VARIANTS, Variant, make_variant, quietly_loaded
from tests.variant_bases import examined

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

PREFIX = "base_model.model.model.layers.0.self_attn"
MAGNITUDE = f"{PREFIX}.q_proj.lora_magnitude_vector"
BIAS = f"{PREFIX}.q_proj.lora_B.bias"
EMBEDDING = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory, bases) -> Callable[[str], Path]:
    """Make a variant once."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            make_variant(name, bases[VARIANTS[name].base][0], folder / name)
        return Path(folder / name)

    return make


@pytest.fixture
def upload(tmp_path, bases, made):
    """Check a variant whose tensors or config were changed first."""

    def run(name: str, change: Callable[[Tensors], object] = lambda tensors: None, weights=None, **config):
        shutil.copytree(made(name), tmp_path / "changed", dirs_exist_ok=True)
        folder = tmp_path / "changed"
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)
        fields = json.loads((folder / "adapter_config.json").read_text()) | config
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return examined(folder, bases[VARIANTS[name].base], weights)

    return run


def setting(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("variant", "tensor"),
    [
        ("dora", MAGNITUDE),
        ("lora_bias", BIAS),
        ("embedding_and_head", f"{EMBEDDING}.lora_embedding_A"),
        ("embedding_and_head", f"{EMBEDDING}.lora_embedding_B"),
        ("embedding_and_head", f"{EMBEDDING}.base_layer.weight"),
        ("embedding_and_head", f"{HEAD}.lora_B.weight"),
        ("saved_both", f"{EMBEDDING}.weight"),
        ("saved_both", f"{HEAD}.weight"),
    ],
)
class TestEachPart:
    @pytest.mark.parametrize(
        "resize", [lambda t: t[:-1], lambda t: torch.cat([t, t[-1:]]), lambda t: t[None]], ids=["short", "long", "deep"]
    )
    def test_of_another_shape_is_refused(self, upload, variant, tensor, resize):
        with pytest.raises(AdapterMismatch) as caught:
            upload(variant, setting(tensor, resize))
        assert caught.value.metadata["tensor"] == tensor

    def test_that_is_missing_is_refused_unless_nothing_depends_on_it(self, upload, variant, tensor):
        if ".base_layer." in tensor:
            assert upload(variant, lambda tensors: tensors.pop(tensor)).facts.equal_to_base != ()
            return
        with pytest.raises(AdapterMismatch) as caught:
            upload(variant, lambda tensors: tensors.pop(tensor))
        assert caught.value.metadata["tensor"] == tensor

    def test_that_is_not_finite_is_refused(self, upload, variant, tensor):
        with pytest.raises((CorruptArtifact, AdapterMismatch)) as caught:
            upload(variant, setting(tensor, poisoned))
        assert caught.value.metadata["tensor"] == tensor

    def test_of_a_dtype_that_is_not_served_is_refused(self, upload, variant, tensor):
        with pytest.raises((UnsupportedAdapter, AdapterMismatch)) as caught:
            upload(variant, setting(tensor, torch.Tensor.double))
        assert caught.value.metadata["tensor"] == tensor


@pytest.mark.parametrize(
    ("variant", "config", "field"),
    [
        ("dora", {"use_dora": False}, "use_dora"),
        ("plain", {"use_dora": True}, "use_dora"),
        ("lora_bias", {"lora_bias": False}, "lora_bias"),
        ("plain", {"lora_bias": True}, "lora_bias"),
        ("dora", {"lora_bias": True}, "lora_bias"),
        ("embedding", {"lora_bias": True}, "lora_bias"),
        ("embedding", {"target_modules": ["q_proj"]}, "target_modules"),
        ("plain", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ("saved_head", {"modules_to_save": None}, "modules_to_save"),
        ("saved_head", {"modules_to_save": ["proj"]}, "modules_to_save"),
        ("saved_head", {"modules_to_save": ["norm"]}, "modules_to_save"),
        ("saved_head", {"modules_to_save": "lm_head"}, "modules_to_save"),
    ],
)
def test_a_config_that_contradicts_the_file_is_refused_by_its_field(upload, variant, config, field):
    with pytest.raises(InvalidAdapter) as caught:
        upload(variant, **config)
    assert caught.value.field == field


@pytest.mark.parametrize(("tensor", "value"), [(MAGNITUDE, 3.4e38), (f"{PREFIX}.q_proj.lora_A.weight", 1e38)])
def test_a_dora_beyond_float32_is_refused(upload, tensor, value):
    with pytest.raises(InvalidAdapter, match="beyond float32") as caught:
        upload("dora", setting(tensor, lambda tensor: torch.full_like(tensor, value)))
    assert caught.value.metadata["module"] == "layers.0.self_attn.q_proj"


def test_dora_without_the_weights_of_the_base_is_refused(upload):
    with pytest.raises(FailedPrecondition, match="DoRA"):
        upload("dora", weights=no_weights)


def test_a_copy_of_the_base_that_differs_is_refused(upload):
    with pytest.raises(AdapterMismatch, match="its values differ") as caught:
        upload("head", setting(f"{HEAD}.base_layer.weight", lambda tensor: tensor + 1e-3))
    assert caught.value.metadata["tensor"] == f"{HEAD}.base_layer.weight"


@pytest.mark.parametrize("rows", [303, 320])
def test_a_resized_vocabulary_is_refused(upload, rows):
    with pytest.raises(AdapterMismatch, match="resized"):
        upload("head", setting(f"{HEAD}.base_layer.weight", lambda tensor: tensor[:1].repeat(rows, 1)))


def test_a_copy_in_another_precision_is_told_from_the_base(upload):
    copy = f"{EMBEDDING}.base_layer.weight"
    plain = upload("embedding_tied")
    assert plain.facts.equal_to_base == (copy,)
    rounded = setting(copy, lambda tensor: tensor.bfloat16())
    assert upload("embedding_tied", rounded).facts.equal_to_base == (copy,)
    with pytest.raises(FailedPrecondition, match="other precision"):
        upload("embedding_tied", rounded, weights=no_weights)
    with pytest.raises(AdapterMismatch, match="its values differ"):
        upload("embedding_tied", setting(copy, lambda tensor: (tensor * 1.02).bfloat16()))


def test_a_copy_in_float32_of_a_base_in_16_bits_is_the_base(upload, bases):
    wide = load_file(bases["bf16"][0] / "model.safetensors")["model.embed_tokens.weight"].float()
    name = f"{EMBEDDING}.weight"
    assert upload("bf16_base", lambda t: t.update({name: wide})).facts.equal_to_base == (name,)
    with pytest.raises(AdapterMismatch, match="its values differ"):
        upload("bf16_base", lambda t: t.update({name: wide * (1 + 2.0**-12)}))


def test_names_and_what_equals_the_base_do_not_change_the_version(upload, bases):
    version = upload("dora").adapter.version_digest

    def spell(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"{name}.weight" if "magnitude" in name else name] = tensors.pop(name)

    assert upload("dora", spell).adapter.version_digest == version
    own = load_file(bases["llama"][0] / "model.safetensors")["lm_head.weight"]
    saved = upload("dora", lambda tensors: tensors.update({f"{HEAD}.weight": own}), modules_to_save=["lm_head"])
    assert saved.facts.equal_to_base == (f"{HEAD}.weight",)
    assert saved.adapter.version_digest == version


@pytest.mark.parametrize(
    ("variant", "tensor"),
    [
        ("dora", MAGNITUDE),
        ("lora_bias", BIAS),
        ("saved_both", f"{HEAD}.weight"),
        ("embedding", f"{EMBEDDING}.lora_embedding_A"),
    ],
)
def test_any_change_is_another_version(upload, variant, tensor):
    changed = setting(tensor, lambda values: values + 1e-3)
    assert upload(variant, changed).adapter.version_digest != upload(variant).adapter.version_digest


UNTRAINED: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", UNTRAINED)
def test_an_untrained_adapter_is_refused_and_one_with_any_part_trained_is_not(tmp_path, bases, kind, dtype):
    fields = {"target_modules": ["q_proj"], "r": 2, **UNTRAINED[kind]}
    base = bases["llama"]
    with quietly_loaded(base[0]) as loaded:
        model = get_peft_model(loaded, Variant(fields).lora_config())
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
        model.save_pretrained(str(tmp_path))
    with pytest.raises(InvalidAdapter, match="changes nothing"):
        examined(tmp_path, base)
    trained = {
        "dora": "lora_magnitude_vector",
        "lora_bias": "lora_B.bias",
        "embedding": "lora_embedding_A",
        "saved": "lm_head.weight",
    }[kind]
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    name = next(name for name in tensors if name.endswith(trained))
    tensors[name] = (tensors[name] + 0.1).contiguous()
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    assert examined(tmp_path, base).adapter.modules


@pytest.mark.parametrize("form", ["none", "int8", "int4"])
@pytest.mark.parametrize("variant", ["saved_both", "embedding_and_head", "embedding_dora"])
def test_a_packed_file_that_lost_or_changed_anything_is_refused(tmp_path, upload, variant, form):
    adapter = quantize(upload(variant).adapter, form).adapter
    pack(adapter, tmp_path / "whole")
    whole = open_tensors(tmp_path / "whole")
    triples = {name: (name, tensor.dtype, tensor.array()) for name, tensor in whole.tensors.items()}
    assert open_packed(tmp_path / "whole").modules

    def refused(changed: dict[str, tuple[str, str, np.ndarray]], header: str | None = None) -> None:
        with (tmp_path / "damaged").open("wb") as stream:
            write_tensors(stream, list(changed.values()), {"loraplex": header or whole.metadata["loraplex"]})
        with pytest.raises(CorruptArtifact):
            open_packed(tmp_path / "damaged")

    for name, (_, dtype, array) in triples.items():
        refused({key: triple for key, triple in triples.items() if key != name})
        refused(triples | {name: (name, dtype, array[None])})
        if "affine" in name or "magnitude" in name:
            refused(triples | {name: (name, dtype, np.full_like(array, np.nan))})
            refused(triples | {name: (name, dtype, array[:-1])})
    facts = json.loads(whole.metadata["loraplex"])
    affines = [name for name, module in facts["modules"].items() if "affine" in module]
    for name in affines[:1]:
        for kind in (None, "other"):
            module = {key: value for key, value in facts["modules"][name].items() if key != "affine"}
            module |= {"affine": kind} if kind else {}
            refused(triples, json.dumps(facts | {"modules": facts["modules"] | {name: module}}))
    names = facts.get("matrices", [])
    refused(triples, json.dumps(facts | {"matrices": [*names, "norm"]}))
    refused(triples, json.dumps(facts | {"matrices": names[1:]})) if names else None


def test_a_packed_file_that_changes_and_replaces_the_head_is_refused(tmp_path, upload):
    adapter = upload("head").adapter
    pack(adapter, tmp_path / "whole")
    whole = open_tensors(tmp_path / "whole")
    triples = [(name, tensor.dtype, tensor.array()) for name, tensor in whole.tensors.items()]
    triples.append(("lm_head.weight", "F32", np.zeros((304, 64), np.float32)))
    facts = json.loads(whole.metadata["loraplex"]) | {"matrices": ["lm_head"]}
    with (tmp_path / "damaged").open("wb") as stream:
        write_tensors(stream, triples, {"loraplex": json.dumps(facts)})
    with pytest.raises(CorruptArtifact, match="both changes and replaces lm_head"):
        open_packed(tmp_path / "damaged")
