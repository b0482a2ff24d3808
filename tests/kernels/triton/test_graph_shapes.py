"""Which captured step stands for a decode step: all that can come, by the smallest, and LoRA only where it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.kernels.placing import SiteShape
from worker.kernels.triton.directory import Geometry, TileTable
from worker.kernels.triton.graph_shapes import GraphShape, bucket_of, choose, graph_shapes, row_buckets
from worker.kernels.triton.work import DECODE_GROUP_ROWS, FixedWork, plan_work, tiles_needed

CPU = torch.device("cpu")
SHAPES = graph_shapes(24, max_row_pieces=40, max_pieces=700, max_rank_tiles=17)


@pytest.mark.parametrize(
    ("most", "buckets"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (24, (1, 2, 4, 8, 16, 24))]
)
def test_buckets_of_rows(most: int, buckets: tuple[int, ...]) -> None:
    assert row_buckets(most) == buckets


def test_the_largest_is_captured_first_and_buffers_bound_the_keys() -> None:
    assert SHAPES[0] == GraphShape(24, 700, 17)
    assert sorted(SHAPES, reverse=True) == SHAPES
    assert {shape.pieces for shape in SHAPES if shape.rows == 24} == {96, 700}  # 768 and 960 have no room
    assert {shape.pieces for shape in SHAPES if shape.rows == 2} == {8, 64, 80}
    assert {shape.rank_tiles for shape in SHAPES} == {0, 1, 4, 17}


def test_without_adapters_there_is_no_lora() -> None:
    assert {s.rank_tiles for s in graph_shapes(4, max_row_pieces=1, max_pieces=4, max_rank_tiles=0)} == {0}


@given(rows=st.integers(1, 24), per_row=st.integers(1, 40), tiles=st.integers(0, 17))
def test_every_step_that_has_room_gets_the_smallest_graph_that_holds_it(rows: int, per_row: int, tiles: int) -> None:
    pieces = rows * per_row
    bucket = bucket_of(SHAPES, rows)
    assert bucket is not None
    chosen = choose(SHAPES, bucket=bucket, pieces=pieces, rank_tiles=tiles)
    if pieces > 700:
        assert chosen is None
        return
    assert chosen is not None
    assert rows <= chosen.rows < 2 * rows
    assert chosen.pieces >= pieces
    assert (chosen.rank_tiles > 0) == (tiles > 0)
    assert chosen.rank_tiles >= tiles
    smaller = [s for s in SHAPES if s.rows >= rows and s.pieces >= pieces and (s.rank_tiles > 0) == (tiles > 0)]
    assert chosen == min(s for s in smaller if s.rank_tiles >= tiles)


def test_more_rows_than_any_have_no_graph() -> None:
    assert bucket_of(SHAPES, 25) is None
    assert bucket_of([], 1) is None


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_a_plan_has_room_with_the_tiles_it_needs_and_with_none_fewer(
    adapters: list[tuple[int, int, int]], spare: int
) -> None:
    """Rank tiles of each row's own adapter, by module of a fused site."""
    geometry = Geometry((SiteShape(64, (64, 32, 32)), SiteShape(64, (64,))), 80)
    table = TileTable(geometry, num_layers=1, num_slots=len(adapters), chunk_bytes=1 << 16, device=CPU)
    for slot, counts in enumerate(adapters):
        table.summary[slot, :3, 0] = counts
    slots = np.arange(len(adapters))
    plan = plan_work(slots, table, group_rows=DECODE_GROUP_ROWS)
    rows = len(adapters) + spare
    needed = tiles_needed(plan, rows)
    FixedWork(geometry, rows=rows, max_tiles=needed, group_rows=DECODE_GROUP_ROWS, device=CPU).fill(plan)
    if needed > 1:
        with pytest.raises(ValueError, match="does not fit"):
            FixedWork(geometry, rows=rows, max_tiles=needed - 1, group_rows=DECODE_GROUP_ROWS, device=CPU).fill(plan)
