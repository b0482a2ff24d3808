"""What an adapter of any rank and format takes on the device, on SmolLM2-135M's shapes: its bytes, no padding."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from common.adapter_format.packed import PackedAdapter, PackedModule, module_tensors, pack, quantized_module
from common.adapter_format.parts import PackedPart, num_groups
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.engine.config import EngineConfig
from worker.kernels.layout import Arena, AttentionShape
from worker.kernels.tiles import usable_chunk_bytes

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
            dtype = {"F32": np.float32, "BF16": np.uint16}[stored]
            return PackedModule(name, rank, 1.0, stored, np.ones((rank, inner), dtype), np.ones((out, rank), dtype))


def adapter_of(stored: str, rank: int, names: tuple[str, ...]) -> PackedAdapter:
    modules = [
        module(f"layers.{layer}.{name}", SHAPES[name], stored, rank) for layer in range(NUM_LAYERS) for name in names
    ]
    form = "none" if stored in ("F32", "BF16") else stored
    return PackedAdapter("0" * 64, BASE, form, tuple(sorted(modules, key=lambda one: one.name)))


def num_values_bytes(adapter: PackedAdapter) -> int:
    return sum(array.nbytes for one in adapter.modules for _, _, array in module_tensors(one))


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("names", [tuple(SHAPES), Q_AND_V], ids=["all", "q,v"])
@pytest.mark.parametrize(
    ("stored", "rank"), [*itertools.product(("int8", "int4", "BF16"), (1, 4, 8, 128)), *(("F32", r) for r in (1, 4, 8))]
)
def test_an_adapter_takes_its_packed_bytes_and_a_chunk_at_most(
    stored: str, rank: int, names: tuple[str, ...], kv: torch.dtype, tmp_path: Path
) -> None:
    adapter = adapter_of(stored, rank, names)
    file = tmp_path / "packed"
    pack(adapter, file)
    packed_bytes = file.stat().st_size
    chunk_bytes = ATTENTION.block_elements * kv.itemsize
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
        adapter_chunk_bytes=usable_chunk_bytes(chunk_bytes),
    )
    granted = config.chunks_for_adapter(packed_bytes)
    arena = Arena(ATTENTION, num_chunks=granted, dtype=kv, device=torch.device("cpu"))
    placed = DeviceAdapters(BaseShape(BASE, NUM_LAYERS, SHAPES), arena, num_slots=1).load(0, file, range(granted))
    assert placed.chunks_used * chunk_bytes <= 1.03 * packed_bytes + chunk_bytes
    assert placed.device_bytes <= 1.03 * packed_bytes
    if rank >= 8:
        assert placed.device_bytes <= 1.1 * num_values_bytes(adapter)  # tiles are not padded to full ranks
        if stored != "int4":  # many names, few bytes: of q and v alone the header is a seventh
            assert packed_bytes <= 1.1 * num_values_bytes(adapter)
