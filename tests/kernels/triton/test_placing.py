"""Adapters into the table and the arena, on the host: what the engine grants suffices, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.adapter_format.packed import PackedAdapter, open_packed
from common.adapter_format.quantize import quantize
from tests.unit.worker.model.tiny import random_adapter
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.kernels.layout import Arena, AttentionShape
from worker.kernels.triton.adapters import TableAdapter, TablePlacer
from worker.kernels.triton.tile_sizes import usable_chunk_bytes
from worker.model.config import ModelConfig, parse_config

CHUNKS = 64


def config(hidden: int, inner: int, layers: int = 2) -> ModelConfig:
    return parse_config(
        {
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    )


def arena_of(of: ModelConfig) -> Arena:
    shape = AttentionShape(of.num_layers, of.num_heads, of.num_kv_heads, of.head_dim)
    arena = Arena(shape, num_chunks=CHUNKS, dtype=torch.bfloat16, device=torch.device("cpu"))
    arena.memory.fill_(0xFF)
    return arena


def adapters_of(of: ModelConfig, arena: Arena) -> tuple[DeviceAdapters, TablePlacer]:
    base = BaseShape("b" * 64, of.num_layers, of.module_shapes())
    placer = TablePlacer(arena, base.sites(), num_slots=2)
    return DeviceAdapters(base, arena, num_slots=2, placer=placer), placer


def factor_bytes(adapter: PackedAdapter) -> int:
    """Of the numbers alone: a tiny adapter's file is mostly its header."""
    arrays = [
        array
        for module in adapter.modules
        for part in module.parts
        for array in (part.a, part.b, part.a_scale, part.b_scale)
        if array is not None
    ]
    return sum(array.nbytes for array in arrays)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    hidden=st.sampled_from([128, 160, 320]),
    inner=st.sampled_from([160, 512, 1088]),
    rank=st.integers(1, 40),
    kind=st.sampled_from(["F32", "F16", "BF16", "int8", "int4"]),
    modules=st.sets(st.sampled_from(sorted(config(128, 160).module_shapes())), min_size=1),
)
def test_the_chunks_that_the_engine_grants_suffice(
    hidden: int, inner: int, rank: int, kind: str, modules: set[str], tmp_path: Path
) -> None:
    of = config(hidden, inner, layers=10)
    adapters, placer = adapters_of(of, arena_of(of))
    stored = kind if kind.isupper() else "F32"
    file = random_adapter(of, tmp_path / "a", ranks=dict.fromkeys(modules, rank), seed=rank, dtype=stored, layers=[3])
    packed = open_packed(file)
    if stored != kind:
        packed = quantize(packed, kind).adapter
    granted = -(-factor_bytes(packed) // adapters.usable_chunk_bytes) + 1
    assert len(placer._image(adapters._modules(packed, file)).chunks) <= granted


def test_only_the_first_of_the_granted_chunks_are_written(tmp_path: Path) -> None:
    of = config(128, 160)
    arena = arena_of(of)
    adapters, _ = adapters_of(of, arena)
    file = random_adapter(of, tmp_path / "a", ranks=dict.fromkeys(of.module_shapes(), 20), seed=1)
    granted = tuple(range(60, 10, -1))
    placed = adapters.load(0, file, granted)
    assert 2 < placed.chunks_used < len(granted)
    assert placed.device_bytes <= placed.chunks_used * arena.chunk_bytes
    written = (arena.memory.view(CHUNKS, -1) != 0xFF).any(dim=1).nonzero().flatten().tolist()
    assert written == sorted(granted[: placed.chunks_used])


@pytest.mark.parametrize("rank", [245, 256])
def test_an_adapter_of_the_largest_rank_comes_to_the_device_in_int8_too(rank: int, tmp_path: Path) -> None:
    of = config(128, 512)
    adapters, placer = adapters_of(of, arena_of(of))
    file = random_adapter(of, tmp_path / "a", ranks={"mlp.up_proj": rank}, seed=1, dtype="F32")
    exact = open_packed(file)
    outliers = []
    for module in exact.modules:
        a = module.a.copy()
        a[:, 5] = 30 * np.abs(a).max()  # in every row, so that each would need a correction
        outliers.append(replace(module, a=a))
    packed = quantize(replace(exact, modules=tuple(outliers)), "int8").adapter
    assert {module.rank for module in packed.modules} == {256}
    assert len(placer._image(adapters._modules(packed, file)).chunks) > 0


def test_chunks_smaller_than_a_tile_are_of_no_use() -> None:
    sites = BaseShape("", 1, config(4096, 14336).module_shapes()).sites()
    assert usable_chunk_bytes(sites, 16 * 1024 * 2 + 64) < 1  # the largest tile itself
    assert usable_chunk_bytes(sites, 2 << 20) > (2 << 20) / 1.05


def test_a_released_slot_keeps_no_entry_and_the_other_keeps_its_own(tmp_path: Path) -> None:
    of = config(128, 160)
    arena = arena_of(of)
    adapters, placer = adapters_of(of, arena)
    file = random_adapter(of, tmp_path / "a", ranks={"mlp.up_proj": 17, "self_attn.v_proj": 3}, seed=1)
    first, second = adapters.load(0, file, range(30)), adapters.load(1, file, range(30, 60))
    assert isinstance(first, TableAdapter)
    assert isinstance(second, TableAdapter)
    assert (first.slot, second.slot) == (0, 1)
    stride, entries = placer.table.stride, placer.table.entries
    kept = entries[:, stride:].clone()
    assert entries[:, :stride].any()
    adapters.release(0)
    assert not entries[:, :stride].any()
    assert not placer.table.summary[0].any()
    assert torch.equal(entries[:, stride:], kept)
    with pytest.raises(ValueError, match="in use"):
        adapters.load(1, file, range(30))
    assert torch.equal(entries[:, stride:], kept)
