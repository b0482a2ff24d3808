"""Files that lie like one that was loaded before are loaded by its plan: each with its own bytes, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.adapter_format.packed import PackedAdapter, PackedAffine, PackedModule, open_packed, pack, quantized_module
from common.adapter_format.parts import PackedPart
from common.adapter_format.quantize import quantize
from loraplex.errors import BaseMismatch, CorruptArtifact, ResourceExhausted
from tests.unit.worker.model.tiny import BASE_DIGEST, random_adapter
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.kernels.layout import Arena, AttentionShape
from worker.kernels.tiles import AFFINE, Field, PlacedAdapter, read_affine, read_tile
from worker.model.config import parse_config

CONFIG = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 80,
        "intermediate_size": 144,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
)
CHUNKS = tuple(range(60, 0, -1))


def slots(base_digest: str = BASE_DIGEST) -> DeviceAdapters:
    base = BaseShape(base_digest, CONFIG.num_layers, CONFIG.module_shapes())
    shape = AttentionShape(CONFIG.num_layers, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim)
    arena = Arena(shape, num_chunks=70, dtype=torch.float32, device=torch.device("cpu"))
    arena.memory.fill_(0xFF)
    return DeviceAdapters(base, arena, num_slots=8)


def read(adapters: DeviceAdapters, slot: int) -> list[torch.Tensor]:
    """All numbers of an adapter as kernels read them."""
    found: list[torch.Tensor] = []
    for record in adapters.get(slot).records:
        if record[Field.FORMAT] == AFFINE:
            found += read_affine(adapters._arena.memory, record)[1:]
        else:
            found += read_tile(adapters._arena.memory, record)
    return found


RANKS = {"self_attn.q_proj": 20, "self_attn.k_proj": 1, "mlp.down_proj": 3}


def plain(dtype: str) -> Callable[[Path, int], Path]:
    return lambda folder, seed: random_adapter(CONFIG, folder / f"{seed}", ranks=RANKS, seed=seed, dtype=dtype)


def quantized(quantization: str) -> Callable[[Path, int], Path]:
    def make(folder: Path, seed: int) -> Path:
        exact = open_packed(random_adapter(CONFIG, folder / f"{seed}.exact", ranks={"mlp.up_proj": 16}, seed=seed))
        rng = np.random.default_rng(seed)
        affine = PackedAffine(*rng.normal(size=(2, 144)).astype(np.float32))
        modules = tuple(replace(one, affine=affine) for one in quantize(exact, quantization).adapter.modules)
        pack(replace(exact, format=quantization, modules=modules), folder / f"{seed}")
        return folder / f"{seed}"

    return make


MADE = {
    "F32": plain("F32"),
    "F16": plain("F16"),
    "BF16": plain("BF16"),
    "int8 with affines": quantized("int8"),
    "int4 with affines": quantized("int4"),
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were looked through by a reader."""
    names: list[str] = []
    load_new = DeviceAdapters._load_new

    def noted(adapters: DeviceAdapters, slot: int, path: Path, chunk_ids: Sequence[int]) -> PlacedAdapter:
        names.append(path.name)
        return load_new(adapters, slot, path, chunk_ids)

    monkeypatch.setattr(DeviceAdapters, "_load_new", noted)
    return names


@pytest.mark.parametrize("kind", MADE)
def test_files_that_lie_alike_are_loaded_by_one_plan_each_with_its_own_numbers(
    kind: str, tmp_path: Path, opened: list[str]
) -> None:
    files = [MADE[kind](tmp_path, seed) for seed in (1, 4, 7)]  # scales are the same, as seeds are
    adapters = slots()
    for slot, file in enumerate(files):
        adapters.load(slot, file, CHUNKS[20 * slot : 20 * slot + 20])
        fresh = slots()
        fresh.load(slot, file, CHUNKS)
        assert adapters.get(slot).version_digest == open_packed(file).version_digest
        assert all(torch.equal(*pair) for pair in zip(read(adapters, slot), read(fresh, slot), strict=True))
    assert not torch.equal(read(adapters, 0)[0], read(adapters, 1)[0])
    same = {name: opened.count(name) for name in ("1", "4", "7")}
    if kind != "int4 with affines":  # there the leading components' number depends on the values
        assert same == {"1": 2, "4": 1, "7": 1}


def int4_module(seed: int, wide: type[np.floating]) -> PackedModule:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 256, (4, width // 2), np.uint8) for width in (80, 64))
    a_scale = rng.uniform(0.1, 1, (4, 2)).astype(np.float16)
    b_scale = rng.uniform(0.1, 1, (4, 1)).astype(wide)
    return quantized_module("layers.0.self_attn.q_proj", (PackedPart("int4", 4, 1.0, "U8", a, b, a_scale, b_scale),))


def one_module(folder: Path, module: PackedModule, name: str, form: str = "int4") -> Path:
    pack(PackedAdapter(f"{ord(name):064x}", BASE_DIGEST, form, (module,)), folder / name)
    return folder / name


@pytest.mark.parametrize(("wide", "by_plan"), [(np.float16, True), (np.float32, False)])
def test_values_that_are_converted_on_the_way_are_every_files_own(
    wide: type[np.floating], by_plan: bool, tmp_path: Path, opened: list[str]
) -> None:
    adapters = slots()
    for slot, seed in enumerate((1, 2)):
        file = one_module(tmp_path, int4_module(seed, wide), "ab"[slot])
        adapters.load(slot, file, CHUNKS[20 * slot : 20 * slot + 20])
        fresh = slots()
        fresh.load(0, file, CHUNKS)
        assert all(torch.equal(*pair) for pair in zip(read(adapters, slot), read(fresh, 0), strict=True))
    assert opened.count("b") == (1 if by_plan else 2)


def test_another_scale_is_another_form(tmp_path: Path) -> None:
    ones = np.ones((2, 80), np.float32)
    adapters = slots()
    for slot, scale in enumerate((1.0, 2.0)):
        module = PackedModule("layers.0.self_attn.q_proj", 2, scale, "F32", ones, np.ones((64, 2), np.float32))
        adapters.load(slot, one_module(tmp_path, module, "ab"[slot], "none"), CHUNKS[slot : slot + 1])
        assert (read(adapters, slot)[0] == scale).all()


def unsound(value: float, *, at: str) -> PackedModule:
    scale = np.array([0.1, value if at == "scale" else 0.1], np.float32)
    part = PackedPart("int8", 2, scale, "I8", np.ones((2, 80), np.int8), np.ones((2, 64), np.int8))
    shift = np.full(64, value if at == "shift" else -1.0, np.float32)
    module = quantized_module("layers.0.self_attn.q_proj", (part,))
    return replace(module, affine=PackedAffine(np.full(64, -0.0, np.float32), shift))


@pytest.mark.parametrize(
    ("value", "at", "named"),
    [
        (np.nan, "scale", "scale.q8"),
        (np.inf, "scale", "scale.q8"),
        (-0.5, "scale", "scale.q8"),
        (np.nan, "shift", "affine_shift"),
        (-np.inf, "shift", "affine_shift"),
    ],
)
def test_a_file_with_unsound_numbers_is_refused_though_it_lies_like_a_sound_one(
    value: float, at: str, named: str, tmp_path: Path
) -> None:
    adapters = slots()
    adapters.load(0, one_module(tmp_path, unsound(0.2, at=at), "a", "int8"), CHUNKS[:20])
    adapters.load(1, one_module(tmp_path, unsound(-0.0, at=at), "b", "int8"), CHUNKS[20:40])
    with pytest.raises(CorruptArtifact) as refused:
        adapters.load(2, one_module(tmp_path, unsound(value, at=at), "c", "int8"), CHUNKS[40:])
    assert refused.value.metadata["tensor"].endswith(named)
    with pytest.raises(KeyError):
        adapters.get(2)


def test_a_file_that_was_cut_off_is_refused_though_its_header_is_known(tmp_path: Path) -> None:
    adapters = slots()
    file = MADE["F32"](tmp_path, 1)
    adapters.load(0, file, CHUNKS)
    short = tmp_path / "short"
    short.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptArtifact, match="truncated"):
        adapters.load(1, short, CHUNKS)


def test_what_a_plan_needs_of_chunks_is_checked_for_each_load(tmp_path: Path) -> None:
    adapters = slots()
    file = MADE["F32"](tmp_path, 1)
    used = adapters.load(0, file, CHUNKS).chunks_used
    before = adapters._arena.memory.clone()
    with pytest.raises(ResourceExhausted, match="chunks"):
        adapters.load(1, file, CHUNKS[: used - 1])
    assert torch.equal(adapters._arena.memory, before)


def test_a_file_of_another_base_is_refused_every_time(tmp_path: Path) -> None:
    adapters = slots("c" * 64)
    for _ in range(2):
        with pytest.raises(BaseMismatch):
            adapters.load(0, MADE["F32"](tmp_path, 1), CHUNKS)
