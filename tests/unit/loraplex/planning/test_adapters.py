"""The planner's adapters against real ones: packed files, and what they take of a real arena."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, PackedModule, pack
from common.adapter_format.quantize import quantize
from loraplex.errors import InvalidParameter
from loraplex.planning.adapters import AdapterShape, Layout, Part, adapter_shape, num_fitting, usable_chunk_bytes, weigh
from loraplex.planning.shapes import MODULES, SHAPES, ModelShape
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.plan import AdapterLoad
from worker.engine.rates import StepRates
from worker.kernels.layout import Arena, AttentionShape
from worker.kernels.triton.adapters import TablePlacer
from worker.mailbox import AdapterFile

BASE = "1" * 64
SMOL = SHAPES["SmolLM2-135M"]
TINY = ModelShape("tiny", "llama", 64, 96, 2, 4, 2, 16, 160, 256)
# Widths above a table's 1 024 columns, and no multiples of 64.
ODD = ModelShape("odd", "llama", 1040, 2096, 2, 8, 8, 160, 320, 256)
Q_AND_V = ("self_attn.q_proj", "self_attn.v_proj")


def random_adapter(shape: ModelShape, rank: int, targets: tuple[str, ...], dtype: str) -> PackedAdapter:
    """Normal factors whose effect is about a tenth of a typical weight's, as the benchmarks' adapters have them."""
    rng = np.random.default_rng(rank)
    modules = []
    for layer, name in itertools.product(range(shape.num_layers), targets):
        inner, out = shape.module_shapes()[name]
        a: NDArray[Any]
        b: NDArray[Any]
        a = rng.standard_normal((rank, inner), np.float32) / np.sqrt(inner, dtype=np.float32)
        b = rng.standard_normal((out, rank), np.float32) * np.float32(0.1 / np.sqrt(rank))
        if dtype == "BF16":
            a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
        modules.append(PackedModule(f"layers.{layer}.{name}", rank, 2.0, dtype, a, b))
    return PackedAdapter("0" * 64, BASE, "none", tuple(sorted(modules, key=lambda module: module.name)))


@dataclass(frozen=True, slots=True)
class Real:
    """What a worker takes for an adapter."""

    file_bytes: int
    device_bytes: int
    chunks: int
    granted: int
    fitting: int


def load(adapter: PackedAdapter, shape: ModelShape, layout: Layout, file: Path, *, num_chunks: int) -> Real:
    """Load the adapter as a worker does, and have its engine place copies until the chunks are taken."""
    pack(adapter, file)
    size = file.stat().st_size
    attention = AttentionShape(shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    base = BaseShape(BASE, shape.num_layers, shape.module_shapes())
    arena = Arena(attention, num_chunks=num_chunks, dtype=torch.bfloat16, device=torch.device("cpu"))
    placer = TablePlacer(arena, base.sites(), num_slots=1) if layout == "table" else None
    adapters = DeviceAdapters(base, arena, num_slots=1, placer=placer)
    config = EngineConfig(
        vocab_size=1,
        eos_token_ids=frozenset(),
        max_context_tokens=2,
        block_tokens=16,
        total_blocks=num_chunks,
        max_running_requests=1,
        max_prefill_tokens=1,
        max_resident_adapters=1000,
        chunk_bytes=arena.chunk_bytes,
        adapter_chunk_bytes=adapters.usable_chunk_bytes,
    )
    assert adapters.usable_chunk_bytes == usable_chunk_bytes(shape, layout, arena.chunk_bytes)
    granted = config.chunks_for_adapter(size)
    placed = adapters.load(0, file, range(granted))
    memory = Memory(config, StepRates(1.0, 1.0))
    digests: list[str] = []

    class Claimant:
        request_id, tenant = 1, "default"

    while True:
        one = AdapterFile(artifact_digest=f"{len(digests):064x}", path=str(file), artifact_bytes=size)
        slot = memory.place(one, Claimant(), digests, reserve=0, now=0.0)
        if slot is None:
            break
        memory.loaded(slot.slot, AdapterLoad(placed.device_bytes, placed.chunks_used), 0.1)
        digests.append(one.artifact_digest)
    return Real(size, placed.device_bytes, placed.chunks_used, granted, len(digests))


LAYOUTS = pytest.mark.parametrize("layout", ["records", "table"])


@LAYOUTS
@pytest.mark.parametrize(
    ("shape", "rank", "targets", "form", "dtype"),
    [
        (SMOL, 16, MODULES, "int8", "BF16"),
        (SMOL, 8, MODULES, "none", "BF16"),
        (SMOL, 24, Q_AND_V, "none", "F32"),
        (SMOL, 64, Q_AND_V, "int8", "BF16"),
        (TINY, 8, MODULES, "int8", "F32"),
        (TINY, 5, Q_AND_V, "none", "F32"),
        (ODD, 20, MODULES, "int8", "BF16"),
        (ODD, 20, MODULES, "none", "F32"),
    ],
    ids=lambda value: getattr(value, "name", "") if isinstance(value, ModelShape) else "",
)
def test_bytes_chunks_and_adapters_that_fit_are_the_workers(
    shape: ModelShape, rank: int, targets: tuple[str, ...], form: str, dtype: str, layout: Layout, tmp_path: Path
) -> None:
    chunk_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 16 * 2
    kind = adapter_shape(shape, rank=rank, form=form, targets=targets, dtype={"F32": "float32"}.get(dtype, "bfloat16"))
    try:
        planned = weigh(shape, kind, layout, chunk_bytes)
    except InvalidParameter:
        assert (shape, layout) == (TINY, "table")  # its chunks are smaller than a tile: workers refuse it too
        return
    adapter = quantize(random_adapter(shape, rank, targets, dtype), form).adapter
    num_chunks = 7 * planned.granted_chunks
    real = load(adapter, shape, layout, tmp_path / "packed", num_chunks=num_chunks)
    assert planned.device_bytes == real.device_bytes
    assert planned.chunks == real.chunks
    assert planned.granted_chunks == real.granted
    assert abs(planned.file_bytes - real.file_bytes) <= 64
    assert num_fitting(planned, num_chunks) == real.fitting >= 6


@LAYOUTS
@pytest.mark.parametrize(("rank", "targets"), [(16, MODULES), (8, Q_AND_V)])
def test_int4_is_planned_as_random_adapters_spend_it(
    rank: int, targets: tuple[str, ...], layout: Layout, tmp_path: Path
) -> None:
    """Which modules get rank rows in int8 depends on their numbers; random ones are worst, and spend what they may."""
    chunk_bytes = 2 * SMOL.num_layers * SMOL.num_kv_heads * SMOL.head_dim * 16 * 2
    planned = weigh(SMOL, adapter_shape(SMOL, rank=rank, form="int4", targets=targets), layout, chunk_bytes)
    adapter = quantize(random_adapter(SMOL, rank, targets, "BF16"), "int4").adapter
    real = load(adapter, SMOL, layout, tmp_path / "packed", num_chunks=7 * planned.granted_chunks)
    assert planned.file_bytes == pytest.approx(real.file_bytes, rel=0.01)
    assert planned.device_bytes == pytest.approx(real.device_bytes, rel=0.01)
    assert abs(planned.chunks - real.chunks) <= 1


@LAYOUTS
def test_a_given_int4_adapter_is_weighed_exactly(layout: Layout, tmp_path: Path) -> None:
    chunk_bytes = 2 * SMOL.num_layers * SMOL.num_kv_heads * SMOL.head_dim * 16 * 2
    adapter = quantize(random_adapter(SMOL, 8, Q_AND_V, "BF16"), "int4").adapter
    kind = AdapterShape(
        "int4",
        "",
        {
            module.name: tuple(
                Part(part.format, part.rank, part.in_features, part.out_features) for part in module.parts
            )
            for module in adapter.modules
        },
    )
    planned = weigh(SMOL, kind, layout, chunk_bytes)
    real = load(adapter, SMOL, layout, tmp_path / "packed", num_chunks=7 * planned.granted_chunks)
    assert (planned.device_bytes, planned.chunks) == (real.device_bytes, real.chunks)
    assert num_fitting(planned, 7 * planned.granted_chunks) == real.fitting


def test_what_cannot_be_packed_or_computed_is_refused_by_flag() -> None:
    with pytest.raises(InvalidParameter, match="--rank is 0"):
        adapter_shape(SMOL, rank=0, form="int8", targets=MODULES)
    with pytest.raises(InvalidParameter, match="--format 'int2'"):
        adapter_shape(SMOL, rank=8, form="int2", targets=MODULES)
    uneven = ModelShape("uneven", "llama", 60, 96, 2, 4, 2, 15, 160, 256)
    with pytest.raises(InvalidParameter, match=r"self_attn\.q_proj.*multiples of 16"):
        adapter_shape(uneven, rank=8, form="int8", targets=MODULES)
    with pytest.raises(InvalidParameter, match="--rank is 257"):
        weigh(SMOL, adapter_shape(SMOL, rank=257, form="int8", targets=MODULES), "table", 368640)


def test_too_few_chunks_for_a_load_hold_none() -> None:
    weight = weigh(SMOL, adapter_shape(SMOL, rank=16, form="int8", targets=MODULES), "records", 368640)
    assert num_fitting(weight, weight.granted_chunks - 1) == 0
    assert num_fitting(weight, weight.granted_chunks) == 1
    assert num_fitting(weight, weight.granted_chunks + weight.chunks) == 2
