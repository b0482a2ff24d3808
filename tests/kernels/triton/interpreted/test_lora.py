"""LoRA over tiles: rank x popularity x format, parts and layers that differ, odd sizes, rows left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.lora_rig import CPU, Adapter, Parts, Rig, relative_error
from worker.kernels.triton.lora import LoraConfig, allocate_h, expand, shrink
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.tiles import Format
from worker.kernels.triton.work import FixedWork, plan_work

DECODE, PREFILL = 8, 64
KINDS = pytest.mark.parametrize("group_rows", [DECODE, PREFILL], ids=["decode", "prefill"])
EXACT = 3e-6

POPULARITY: dict[str, Callable[[int], list[int]]] = {
    "identical": lambda n: [3] * n,
    "distinct": lambda n: [i % 6 for i in range(n)],
    "uniform": lambda n: np.random.default_rng(0).integers(0, 3, n).tolist(),
    "zipf": lambda n: np.minimum(np.random.default_rng(1).zipf(1.5, n) - 1, 5).tolist(),
    "with base": lambda n: [-1 if i % 2 else i % 3 for i in range(n)],
}


def check(rig: Rig, slots: list[int], group_rows: int, *, layer: int = 1) -> None:
    x = rig.x(len(slots))
    before = torch.randn(len(slots), sum(rig.widths), generator=torch.Generator().manual_seed(1))
    y = before.clone()
    rig.run(x, slots, y, group_rows=group_rows, add=True, layer=layer)
    assert relative_error(y - before, rig.reference(x, slots, layer)) < EXACT
    base = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[base], before[base])


@pytest.fixture(scope="module")
def mixed() -> Rig:
    """Six adapters of all formats and ranks on a fused site of sizes that are multiples of nothing."""
    kinds = [
        (Format.INT8, 8),
        (Format.INT4, 24),
        (Format.BF16, 16),
        (Format.FP16, 4),
        (Format.INT8, 33),
        (Format.INT4, 3),
    ]
    return Rig(150, (72, 24), [Adapter.uniform(fmt, rank, 2) for fmt, rank in kinds])


@KINDS
@pytest.mark.parametrize("popularity", POPULARITY)
def test_any_mix_of_adapters(mixed: Rig, popularity: str, group_rows: int) -> None:
    check(mixed, POPULARITY[popularity](11), group_rows)


@KINDS
@pytest.mark.parametrize("fmt", Format)
def test_every_remainder_in_every_format(fmt: Format, group_rows: int) -> None:
    """Beside tiles of each number of rows lies garbage in the arena."""
    rig = Rig(64, (64,), [Adapter.uniform(fmt, rank, 1) for rank in (*range(1, 17), 37)])
    check(rig, [*range(17), -1, *range(17)], group_rows)


@KINDS
def test_the_largest_rank(group_rows: int) -> None:
    check(
        Rig(64, (64,), [Adapter.uniform(Format.INT8, 256, 1), Adapter.uniform(Format.INT4, 4, 1)]), [1, 0], group_rows
    )


@KINDS
@pytest.mark.parametrize("fmt", [Format.INT8, Format.INT4, Format.BF16])
def test_factors_of_several_column_ranges(fmt: Format, group_rows: int) -> None:
    check(Rig(2064, (1088,), [Adapter.uniform(fmt, 20, 1)]), [0], group_rows)


@pytest.mark.parametrize("group_rows", [DECODE, PREFILL])
def test_more_ranges_than_parts(group_rows: int) -> None:
    check(Rig(5 * 1024 + 64, (64,), [Adapter.uniform(Format.INT8, 4, 1)]), [0, 0], group_rows)


@KINDS
def test_parts_ranks_and_modules_that_differ_by_layer(group_rows: int) -> None:
    """One layer's module has a part in another format, another none at all: both layers share one plan."""
    rotated: Parts = [(Format.INT8, 2), (Format.INT4, 14)]
    plain: Parts = [(Format.INT4, 40)]
    rig = Rig(96, (64, 32), [Adapter([[rotated, None], [plain, rotated]]), Adapter([[None, plain], [None, None]])])
    for layer in (0, 1):
        check(rig, [0, 1, -1, 0], group_rows, layer=layer)


@KINDS
def test_a_delta_buffer_is_written_whole_for_adapted_rows(mixed: Rig, group_rows: int) -> None:
    slots = [2, -1, 0, 2, 5]
    x = mixed.x(len(slots))
    delta = torch.full((len(slots), sum(mixed.widths)), torch.nan)
    mixed.run(x, slots, delta, group_rows=group_rows, add=False)
    adapted = [row for row, slot in enumerate(slots) if slot >= 0]
    assert relative_error(delta[adapted], mixed.reference(x, slots)[adapted]) < EXACT
    assert delta[1].isnan().all()


def test_a_delta_row_is_zero_where_the_adapter_has_no_module() -> None:
    rig = Rig(64, (64, 16, 16), [Adapter([[None, [(Format.INT8, 8)], None]] * 2)])
    delta = torch.full((1, 96), torch.nan)
    rig.run(rig.x(1), [0], delta, group_rows=DECODE, add=False)
    assert (delta[0, :64] == 0).all()
    assert (delta[0, 80:] == 0).all()
    assert (delta[0, 64:80] != 0).all()


@KINDS
def test_a_row_alone_and_in_a_batch_is_the_same_to_the_bit(mixed: Rig, group_rows: int) -> None:
    slots = [0, 1, 1, 2, 1, -1, 4, 0, 1, 5, 1, 1]
    x = mixed.x(len(slots))
    together = torch.zeros(len(slots), sum(mixed.widths))
    mixed.run(x, slots, together, group_rows=group_rows, add=False)
    for row in (0, 4, 6, 11):
        alone = torch.zeros(1, sum(mixed.widths))
        mixed.run(x[row : row + 1], [slots[row]], alone, group_rows=group_rows, add=False)
        assert torch.equal(alone[0], together[row])


@KINDS
def test_a_captured_plan_has_room_to_spare(mixed: Rig, group_rows: int) -> None:
    """Grids are sized to the room; programs without work return."""
    config = LoraConfig(mixed.geometry, Platform.of(CPU, torch.bfloat16))
    fixed = FixedWork(mixed.geometry, rows=4, max_tiles=3, group_rows=group_rows, device=CPU)
    slots = [4, -1, 0]
    fixed.fill(plan_work(np.array(slots), mixed.table, group_rows=group_rows))
    x = mixed.x(len(slots))
    delta = torch.full((len(slots), sum(mixed.widths)), torch.nan)
    h = allocate_h(config, fixed.work, CPU).fill_(torch.nan)
    shrink(config, 1, x, mixed.arena.view(-1), mixed.table.entries[1], fixed.work, h)
    expand(config, 1, delta, mixed.arena.view(-1), mixed.table.entries[1], fixed.work, h, add=False)
    assert relative_error(delta[[0, 2]], mixed.reference(x, slots)[[0, 2]]) < EXACT
    assert delta[1].isnan().all()


@KINDS
def test_int8_by_arithmetic_on_bits(mixed: Rig, group_rows: int) -> None:
    """What GPUs before sm_90 do."""
    slots = [0, 4]
    config = LoraConfig(mixed.geometry, replace(Platform.of(CPU, torch.bfloat16), slow_int8=True))
    work = plan_work(np.array(slots), mixed.table, group_rows=group_rows)
    x, h = mixed.x(2), allocate_h(config, work, CPU)
    delta = torch.zeros(2, sum(mixed.widths))
    shrink(config, 1, x, mixed.arena.view(-1), mixed.table.entries[1], work, h)
    expand(config, 1, delta, mixed.arena.view(-1), mixed.table.entries[1], work, h, add=False)
    assert relative_error(delta, mixed.reference(x, slots)) < EXACT


def test_output_of_the_model_s_dtype() -> None:
    """The interpreter cuts float32 off to bfloat16 where a GPU rounds."""
    rig = Rig(64, (64,), [Adapter.uniform(Format.INT8, 8, 1)])
    x, before = rig.x(3), torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    y = before.clone()
    rig.run(x, [0, 0, -1], y, group_rows=DECODE, add=True)
    wanted = before.float() + rig.reference(x, [0, 0, -1])
    assert relative_error(y, wanted) < 8e-3
    assert torch.equal(y[2], before[2])
