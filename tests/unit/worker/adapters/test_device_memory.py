"""What an adapter of any rank and format takes on the device, on SmolLM2-135M's shapes: its bytes, no padding.

Tiles of CPUs and of GPUs are laid out differently; both are loaded as a worker does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.adapter_format.packed import (
    PackedAdapter,
    PackedAffine,
    PackedModule,
    module_tensors,
    pack,
    quantized_module,
)
from common.adapter_format.parts import PackedPart, num_groups
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.engine.config import EngineConfig
from worker.kernels.layout import Arena, AttentionShape
from worker.kernels.tiles import usable_chunk_bytes
from worker.kernels.triton.adapters import TablePlacer
from worker.kernels.triton.tile_sizes import usable_chunk_bytes as gpu_chunk_bytes

BASE = "1" * 64
NUM_LAYERS = 30
ATTENTION = AttentionShape(NUM_LAYERS, num_heads=9, num_kv_heads=3, head_dim=64)
SHAPES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
Q_AND_V = ("self_attn.q_proj", "self_attn.v_proj")


def int8(rank: int, inner: int, out: int) -> PackedPart:
    ones = np.ones((rank, inner + out), np.int8)
    return PackedPart("int8", rank, np.ones(rank, np.float32), "I8", ones[:, :inner], ones[:, inner:])


def int4(rank: int, inner: int, out: int) -> PackedPart:
    a, b = (np.ones((rank, width // 2), np.uint8) for width in (inner, out))
    a_scale, b_scale = (np.ones((rank, num_groups(width)), np.float16) for width in (inner, out))
    return PackedPart("int4", rank, 1.0, "U8", a, b, a_scale, b_scale)


def module(name: str, shape: tuple[int, int], stored: str, rank: int) -> PackedModule:
    """As quantizing leaves them: an int4 module has its leading rows in int8 where it has several."""
    inner, out = shape
    match stored:
        case "int8":
            return quantized_module(name, (int8(rank, inner, out),))
        case "int4":
            leading = max(1, rank // 16) if rank > 1 else 0
            first = (int8(leading, inner, out),) if leading else ()
            return quantized_module(name, (*first, int4(rank - leading, inner, out)))
        case _:
            dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[stored]
            return PackedModule(name, rank, 1.0, stored, np.ones((rank, inner), dtype), np.ones((out, rank), dtype))


def adapter_of(stored: str, rank: int, names: tuple[str, ...]) -> PackedAdapter:
    modules = [
        module(f"layers.{layer}.{name}", SHAPES[name], stored, rank) for layer in range(NUM_LAYERS) for name in names
    ]
    form = stored if stored in ("int8", "int4") else "none"
    return PackedAdapter("0" * 64, BASE, form, tuple(sorted(modules, key=lambda one: one.name)))


def with_affines(adapter: PackedAdapter) -> PackedAdapter:
    """As DoRA leaves them: two numbers for each output of every module."""

    def scaled(one: PackedModule) -> PackedModule:
        ones = np.ones(one.parts[0].out_features, np.float32)
        return replace(one, affine=PackedAffine(ones, ones))

    return replace(adapter, modules=tuple(map(scaled, adapter.modules)))


def num_values_bytes(adapter: PackedAdapter) -> int:
    return sum(array.nbytes for one in adapter.modules for _, _, array in module_tensors(one))


@dataclass(frozen=True, slots=True)
class Taken:
    """What an adapter was given, and what of it it uses."""

    packed_bytes: int
    chunk_bytes: int
    num_chunks: int
    tile_bytes: int

    def assert_no_more_than_its_file(self) -> None:
        assert self.num_chunks * self.chunk_bytes <= 1.03 * self.packed_bytes + self.chunk_bytes
        assert self.tile_bytes <= 1.03 * self.packed_bytes


def load(adapter: PackedAdapter, kv: torch.dtype, file: Path, *, gpu: bool) -> Taken:
    """Load an adapter into as many chunks as the engine grants a file of so many bytes."""
    pack(adapter, file)
    packed_bytes = file.stat().st_size
    chunk_bytes = ATTENTION.block_elements * kv.itemsize
    base = BaseShape(BASE, NUM_LAYERS, SHAPES)
    usable = gpu_chunk_bytes(base.sites(), chunk_bytes) if gpu else usable_chunk_bytes(chunk_bytes)
    config = EngineConfig(
        vocab_size=1,
        eos_token_ids=frozenset(),
        max_context_tokens=2,
        block_tokens=16,
        total_blocks=1,
        max_running_requests=1,
        max_prefill_tokens=1,
        max_resident_adapters=1,
        chunk_bytes=chunk_bytes,
        adapter_chunk_bytes=usable,
    )
    granted = config.chunks_for_adapter(packed_bytes)
    arena = Arena(ATTENTION, num_chunks=granted, dtype=kv, device=torch.device("cpu"))
    placer = TablePlacer(arena, base.sites(), num_slots=1) if gpu else None
    placed = DeviceAdapters(base, arena, num_slots=1, placer=placer).load(0, file, range(granted))
    return Taken(packed_bytes, chunk_bytes, placed.chunks_used, placed.device_bytes)


MODULES = pytest.mark.parametrize("names", [tuple(SHAPES), Q_AND_V], ids=["all", "q,v"])


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float32])
@MODULES
@pytest.mark.parametrize(
    ("stored", "rank"), [*itertools.product(("int8", "int4", "BF16"), (1, 4, 8, 128)), *(("F32", r) for r in (1, 4, 8))]
)
def test_an_adapter_takes_its_packed_bytes_and_a_chunk_at_most(
    stored: str, rank: int, names: tuple[str, ...], kv: torch.dtype, tmp_path: Path
) -> None:
    adapter = adapter_of(stored, rank, names)
    taken = load(adapter, kv, tmp_path / "packed", gpu=False)
    taken.assert_no_more_than_its_file()
    if rank >= 8:
        assert taken.tile_bytes <= 1.1 * num_values_bytes(adapter)  # tiles are not padded to full ranks
        if stored != "int4":  # many names, few bytes: of q and v alone the header is a seventh
            assert taken.packed_bytes <= 1.1 * num_values_bytes(adapter)


@MODULES
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("stored", "rank"), [("int8", 1), ("int8", 16), ("int4", 4), ("BF16", 8)])
def test_affines_take_their_bytes_too(
    stored: str, rank: int, gpu: bool, names: tuple[str, ...], tmp_path: Path
) -> None:
    adapter = with_affines(adapter_of(stored, rank, names))
    taken = load(adapter, torch.bfloat16, tmp_path / "packed", gpu=gpu)
    taken.assert_no_more_than_its_file()
    affines = sum(8 * SHAPES[one.name.split(".", 2)[2]][1] for one in adapter.modules)
    assert taken.tile_bytes >= affines + num_values_bytes(adapter_of(stored, rank, names))


@MODULES
@pytest.mark.parametrize(
    ("stored", "rank"),
    [
        *itertools.product(("int8", "int4", "BF16"), (*range(1, 9), 12, 16, 64, 128)),
        *itertools.product(("F16", "F32"), (1, 3, 8)),
    ],
)
def test_on_a_gpu_it_takes_no_more(stored: str, rank: int, names: tuple[str, ...], tmp_path: Path) -> None:
    """Tiles are kept in bfloat16 there whatever 16 or 32 bits the file has."""
    adapter = adapter_of(stored, rank, names)
    taken = load(adapter, torch.bfloat16, tmp_path / "packed", gpu=True)
    taken.assert_no_more_than_its_file()
    assert taken.tile_bytes <= (1.07 if rank < 4 else 1.03) * num_values_bytes(adapter)
