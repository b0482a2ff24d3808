"""Merged folders, loaded by transformers, answer as PEFT does with the adapter beside the base."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from common.adapter_format.packed import PackedAdapter
from common.adapter_format.quantize import quantize
from common.merging.__main__ import main as merging
from common.merging.dtypes import narrow
from common.merging.folder import RECORD, write_merged
from loraplex.errors import AlreadyExists, BaseMismatch, LoraplexError, NoSpace, NotFound, UnsupportedAdapter
from loraplex.manifest import BaseManifest, read_manifest
from tests.peft_in_memory import packed_from_peft
from tests.tiny_base import write_tiny_tokenizer
from tests.unit.worker.model.tiny import (
    VOCAB,
    first_logits,
    make_model,
    open_runner,
    relative_error,
    save_model,
    whole_logits,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

PROMPT = torch.randint(0, VOCAB, (29,), generator=torch.Generator().manual_seed(8)).tolist()
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OUTSIDE = ["embed_tokens", "lm_head"]


class Case:
    """A base on the disk, and a PEFT model of it with a random adapter."""

    def __init__(self, folder: Path, variant: str, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        self.folder = folder / "base"
        save_model(make_model(variant).to(dtype), self.folder, max_shard_size="40kB")
        write_tiny_tokenizer(self.folder, 300, add_bos=False)
        (self.folder / "generation_config.json").write_text('{"eos_token_id": 2}')
        self.manifest: BaseManifest = read_manifest(self.folder)
        base = load_model(self.folder)
        torch.manual_seed(3)
        self.model: PeftModel = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_magnitude" in name:
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.6, 1.4))
                elif "lora_" in name or "modules_to_save" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        self.model.eval()
        self.adapter: PackedAdapter = packed_from_peft(self.model, self.manifest.digest())

    def merged(self, out: Path, **options: Any) -> Any:
        write_merged(self.folder, self.manifest, self.adapter, out, **options)
        return load_model(out)


def load_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama_untied", {"r": 4, "target_modules": ALL}),
    "rslora": ("qwen2_bias", {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ALL}),
    "patterns": ("qwen3_qk_norm", {"r": 4, "target_modules": ALL, "rank_pattern": {"v_proj": 7}}),
    "one-layer": ("mistral_window", {"r": 8, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "dora": ("llama_untied", {"r": 4, "use_dora": True, "target_modules": ALL}),
    "dora-on-biases": ("llama_biases", {"r": 4, "use_dora": True, "target_modules": ALL}),
    "dora-qwen2": ("qwen2_bias", {"r": 4, "use_dora": True, "target_modules": ALL}),
    "biases-where-there-are-some": ("llama_biases", {"r": 4, "lora_bias": True, "target_modules": ALL}),
    "biases-where-there-are-none": ("llama_tied", {"r": 4, "lora_bias": True, "target_modules": ["v_proj", "up_proj"]}),
    "qwen3-gets-biases": ("qwen3_qk_norm", {"r": 4, "lora_bias": True, "target_modules": ["o_proj"]}),
    "embedding-tied": ("llama_tied", {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}),
    "embedding-untied": ("llama_untied", {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}),
    "head-tied": ("llama_tied", {"r": 4, "target_modules": ["q_proj", "lm_head"]}),
    "both-tied": ("qwen3_bias_tied", {"r": 4, "target_modules": ["v_proj", *OUTSIDE]}),
    "head-dora": ("llama_untied", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "lm_head"]}),
    "saved-head": ("llama_untied", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved-both": ("llama_untied", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": OUTSIDE}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_merged_folder_answers_as_peft(name: str, tmp_path: Path) -> None:
    variant, config = CASES[name]
    case = Case(tmp_path, variant, **config)
    expected = whole_logits(case.model, PROMPT)
    with case.model.disable_adapter():
        assert relative_error(whole_logits(case.model, PROMPT), expected) > 0.05  # the adapter does something
    merged = case.merged(tmp_path / "merged")
    assert relative_error(whole_logits(merged, PROMPT), expected) < 1e-4
    tied = variant.endswith("tied") and not variant.endswith("untied")
    apart = any(one in OUTSIDE for one in (*config["target_modules"], *config.get("modules_to_save", ())))
    assert bool(merged.config.tie_word_embeddings) is (tied and not apart)


@pytest.mark.parametrize("name", ["lora", "dora-on-biases", "biases-where-there-are-none", "both-tied", "saved-both"])
def test_a_worker_serves_a_merged_folder(name: str, tmp_path: Path) -> None:
    variant, config = CASES[name]
    case = Case(tmp_path, variant, **config)
    case.merged(tmp_path / "merged")
    assert read_manifest(tmp_path / "merged").digest() != case.manifest.digest()
    runner = open_runner(tmp_path / "merged", threads=1)
    assert relative_error(first_logits(runner, PROMPT), whole_logits(case.model, PROMPT)[-1]) < 1e-4


def test_a_peft_folder_is_merged_by_the_weights_of_its_base(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama_biases", r=4, use_dora=True, target_modules=["q_proj", "down_proj"])
    case.model.save_pretrained(str(tmp_path / "peft"))
    options = {"base-dir": case.folder, "peft-folder": tmp_path / "peft", "out": tmp_path / "merged"}
    assert merging([f"--{name}={value}" for name, value in options.items()]) == 0
    merged = load_model(tmp_path / "merged")
    assert relative_error(whole_logits(merged, PROMPT), whole_logits(case.model, PROMPT)) < 1e-4


def test_the_folder_is_a_whole_model_sharded_as_the_base(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama_tied", r=4, target_modules=["q_proj", "lm_head"])
    told: list[tuple[int, int]] = []
    write_merged(
        case.folder,
        case.manifest,
        case.adapter,
        tmp_path / "merged",
        facts={"artifact_digest": "a" * 64},
        progress=lambda done, total: told.append((done, total)),
    )
    shards = sorted(file.name for file in case.folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(file.name for file in (tmp_path / "merged").iterdir()) == sorted(
        [*(file.name for file in case.folder.iterdir()), RECORD]
    )
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == shards[-1]
    assert set(index["weight_map"].values()) == set(shards)
    assert told[-1][0] == told[-1][1] == sum((tmp_path / "merged" / name).stat().st_size for name in shards)
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (case.folder / "tokenizer.json").read_bytes()
    record = json.loads((tmp_path / "merged" / RECORD).read_text())
    assert record == {
        "base_digest": case.manifest.digest(),
        "version_digest": case.adapter.version_digest,
        "artifact_digest": "a" * 64,
    }


def test_dtypes_are_the_bases_or_the_one_asked_for(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama_untied", torch.bfloat16, r=4, target_modules=ALL)
    expected = whole_logits(case.model, PROMPT)
    rounded = case.merged(tmp_path / "as-base")
    assert {tensor.dtype for tensor in read_manifest(tmp_path / "as-base").tensors} == {"BF16"}
    assert relative_error(whole_logits(rounded, PROMPT), expected) < 0.03
    exact = case.merged(tmp_path / "exact", dtype="float32")
    assert {tensor.dtype for tensor in read_manifest(tmp_path / "exact").tensors} == {"F32"}
    assert json.loads((tmp_path / "exact" / "config.json").read_text())["dtype"] == "float32"
    assert relative_error(whole_logits(exact, PROMPT), expected) < 1e-4
    half = case.merged(tmp_path / "half", dtype="float16")
    assert relative_error(whole_logits(half, PROMPT), expected) < 0.01


def test_float16_that_is_too_small_is_refused_by_tensor(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama_untied", r=4, target_modules=["q_proj"])
    with torch.no_grad():
        for name, parameter in case.model.named_parameters():
            if "layers.1.self_attn.q_proj.lora_B" in name:
                parameter[0] = 1e6
    case.adapter = packed_from_peft(case.model, case.manifest.digest())
    with pytest.raises(UnsupportedAdapter, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        case.merged(tmp_path / "merged", dtype="float16")
    assert [file.name for file in tmp_path.iterdir()] == ["base"]


def test_a_quantized_artifact_merges_as_it_is_served(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama_untied", r=8, target_modules=ALL)
    expected = whole_logits(case.model, PROMPT)
    exact = case.adapter
    for form, bound in (("int8", 0.02), ("int4", 0.25)):
        case.adapter = quantize(exact, form).adapter
        error = relative_error(whole_logits(case.merged(tmp_path / form), PROMPT), expected)
        assert 1e-4 < error < bound


@pytest.mark.parametrize(
    ("variant", "target", "module"),
    [
        ("mistral_window", "v_proj", "v_proj"),
        ("qwen2_bias", "o_proj", "o_proj"),
        ("qwen3_qk_norm", "up_proj", "up_proj"),
    ],
)
def test_a_bias_that_the_family_has_no_place_for_is_refused(
    variant: str, target: str, module: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, variant, r=4, lora_bias=True, target_modules=[target])
    with pytest.raises(UnsupportedAdapter, match=module) as refused:
        case.merged(tmp_path / "merged")
    assert refused.value.field == "lora_bias"
    assert [file.name for file in tmp_path.iterdir()] == ["base"]


def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch) -> None:
    case = Case(tmp_path, "llama_untied", r=4, target_modules=["q_proj"])
    taken = tmp_path / "taken"
    taken.mkdir()

    def refused(out: Path, kind: type[LoraplexError], **options: Any) -> None:
        with pytest.raises(kind):
            case.merged(out, **options)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["base", "taken"]

    refused(taken, AlreadyExists)
    refused(case.folder, AlreadyExists)
    refused(tmp_path / "no" / "merged", NotFound)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    refused(tmp_path / "merged", NoSpace)
    monkeypatch.undo()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(tmp_path / "merged", NoSpace)
    monkeypatch.undo()

    def interrupted(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.merged(tmp_path / "merged", progress=interrupted)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base", "taken"]
    case.adapter = PackedAdapter("5" * 64, "6" * 64, "none", case.adapter.modules)
    refused(tmp_path / "merged", BaseMismatch)


def test_values_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    values[:4] = [0, np.inf, -np.inf, 1.00390625]  # the last one lies half-way
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(narrow(values, "BF16"), expected)
    assert narrow(np.full(1, np.nan, np.float32), "BF16") == 0x7FC0
