"""Cutting factors into tiles, placing tiles in chunks, and planning a step: all on the host, without Triton."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.lora_parts import random_part
from common.adapter_format.packed import PackedModule
from worker.kernels.placing import SiteShape
from worker.kernels.triton.directory import Geometry, ModuleTiles, TileTable, build_image
from worker.kernels.triton.packed_parts import rank_part
from worker.kernels.triton.placement import place
from worker.kernels.triton.tile_sizes import aligned_factor_bytes
from worker.kernels.triton.tiles import ALIGNMENT, Format, RankTile, cut, rank_rows
from worker.kernels.triton.work import BLOCK_CELLS, FixedWork, StepWork, plan_work, to_device

CPU = torch.device("cpu")
SMOLLM2 = (
    SiteShape(576, (576, 192, 192)),
    SiteShape(576, (576,)),
    SiteShape(576, (1536, 1536)),
    SiteShape(1536, (576,)),
)
SMOLLM2_LAYERS, SMOLLM2_CHUNK = 30, 360 * 1024


@pytest.mark.parametrize(
    ("rank", "rows"),
    [(1, (1,)), (7, (7,)), (16, (16,)), (17, (16, 1)), (40, (16, 16, 8)), (47, (16, 16, 15))],
)
def test_a_remainder_is_a_tile_of_its_own(rank: int, rows: tuple[int, ...]) -> None:
    assert rank_rows(rank) == rows


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("fmt", [Format.INT8, Format.BF16])
def test_a_tile_is_its_rows_and_the_scales_of_a(fmt: Format, rank: int) -> None:
    part, _ = random_part(fmt, rank, 128, 64, 0)
    (tile,) = cut((part,))
    size = part.a.nbytes
    assert tile.a[0][:size].tobytes() == part.a.tobytes()
    assert tile.a[0][size:].view(np.float32).tolist() == part.scale.tolist()
    assert tile.b[0].tobytes() == part.b_t.tobytes()


def test_parts_of_several_formats_have_tiles_of_their_own() -> None:
    parts = tuple(random_part(fmt, rank, 64, 64, 0)[0] for fmt, rank in ((Format.INT8, 2), (Format.INT4, 30)))
    assert [(t.format, t.rows) for t in cut(parts)] == [(Format.INT8, 2), (Format.INT4, 16), (Format.INT4, 14)]


@pytest.mark.parametrize("field", ["a", "b_t"])
@pytest.mark.parametrize("fmt", [Format.INT8, Format.INT4, Format.FP16])
def test_factors_of_another_shape_are_refused(fmt: Format, field: str) -> None:
    part, _ = random_part(fmt, 8, 128, 128, 0)
    with pytest.raises(ValueError, match=r"\(8, 63|127\)|nibbles"):
        cut((replace(part, **{field: getattr(part, field)[:, :-1]}),))


def test_int4_without_group_scales_is_refused() -> None:
    part, _ = random_part(Format.INT4, 8, 128, 128, 0)
    with pytest.raises(ValueError, match="a_scale and b_scale"):
        cut((replace(part, a_scale=None),))


@given(st.lists(st.integers(1, 3000), max_size=60))
def test_placed_tiles_share_no_byte_and_no_chunk_boundary(sizes: list[int]) -> None:
    chunk_bytes = 3072
    placed = place(sizes, chunk_bytes)
    taken = np.zeros((placed.num_chunks, chunk_bytes), dtype=np.int64)
    for size, chunk, offset in zip(sizes, placed.chunks, placed.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert offset + size <= chunk_bytes
        taken[chunk, offset : offset + size] += 1
    assert taken.max(initial=0) <= 1
    assert taken.any(axis=1).all()


def test_a_tile_larger_than_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        place([100, 4097], 4096)


def smollm2(fmt: Format, rank: int, modules: set[tuple[int, int]] | None = None) -> tuple[Geometry, ModuleTiles, int]:
    """An adapter of the model's shapes, the same in all layers, and the bytes of its packed parts."""
    geometry = Geometry(SMOLLM2, rank)
    tiles: dict[tuple[int, int], list[tuple[RankTile, ...]]] = {}
    packed = 0
    for site, slice_ in geometry.modules():
        if modules is None or (site, slice_) in modules:
            part, _ = random_part(fmt, rank, SMOLLM2[site].in_features, SMOLLM2[site].widths[slice_], 0)
            tiles[site, slice_] = [cut((part,))] * SMOLLM2_LAYERS
            scales = part.scale.nbytes if fmt is not Format.INT4 else 2 * (part.a.nbytes + part.b_t.nbytes) // 32
            packed += SMOLLM2_LAYERS * (part.a.nbytes + part.b_t.nbytes + scales)
    return geometry, tiles, packed


@pytest.mark.parametrize("fmt", [Format.INT8, Format.INT4, Format.BF16])
@pytest.mark.parametrize("rank", [1, 7, 8, 40])
def test_tiles_are_as_large_as_they_are_said_to_be(fmt: Format, rank: int) -> None:
    """`tile_sizes` knows what `cut` makes, and a place no more than that and what its alignment takes."""
    geometry, tiles, packed = smollm2(fmt, rank)
    image = build_image(geometry, SMOLLM2_LAYERS, tiles, SMOLLM2_CHUNK)
    said = [
        size
        for site, part in geometry.modules()
        for factor, features in ((0, SMOLLM2[site].in_features), (1, SMOLLM2[site].widths[part]))
        for size in aligned_factor_bytes(fmt, rank, features, of_a=factor == 0)
    ]
    assert image.tile_bytes == SMOLLM2_LAYERS * sum(said)
    assert packed <= image.tile_bytes <= 1.045 * packed


@pytest.mark.parametrize("q_and_v", [False, True], ids=["all", "q,v"])
@pytest.mark.parametrize("rank", [*range(1, 9), 12, 16, 64, 128])
@pytest.mark.parametrize("stored", ["int8", "int4", "none"])
def test_an_adapter_of_an_8b_model_costs_what_it_weighs(stored: str, rank: int, q_and_v: bool) -> None:
    """Against its numbers alone, without the file's header: chunks to 1.03 and one chunk, tiles to 1.02."""
    modules = [(4096, 4096), (4096, 1024)]
    if not q_and_v:
        modules += [(4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
    leading = max(1, rank // 16) if stored == "int4" and rank > 1 else 0  # rows in int8
    fmt = {"int8": Format.INT8, "int4": Format.INT4, "none": Format.BF16}[stored]
    parts = [(Format.INT8, leading), (fmt, rank - leading)]
    layers, chunk_bytes = 32, 2 << 20
    packed, sizes = 0, []
    for module in modules:
        for form, rows in parts:
            values = rows * sum(module)
            packed += {
                Format.INT8: values + 4 * rows,
                Format.INT4: values // 2 + values // 64 * 2,
                Format.BF16: 2 * values,
            }[form]
            for features, of_a in zip(module, (True, False), strict=True):
                sizes += aligned_factor_bytes(form, rows, features, of_a=of_a)
    placed = place(sizes * layers, chunk_bytes)
    assert placed.num_chunks * chunk_bytes <= 1.03 * layers * packed + chunk_bytes
    assert placed.used_bytes <= 1.02 * layers * packed


def test_ranks_beyond_the_geometry_and_odd_chunks_are_refused() -> None:
    _, tiles, _ = smollm2(Format.INT8, 64, {(0, 0)})
    with pytest.raises(ValueError, match="4 rank tiles, room is for 2"):
        build_image(Geometry(SMOLLM2, 16), SMOLLM2_LAYERS, tiles, SMOLLM2_CHUNK)
    with pytest.raises(ValueError, match="multiple of 32"):
        build_image(Geometry(SMOLLM2, 64), SMOLLM2_LAYERS, tiles, SMOLLM2_CHUNK + 16)


def test_an_entry_says_where_its_tile_lies() -> None:
    geometry, tiles, _ = smollm2(Format.INT8, 40, {(0, 1), (3, 0)})
    image = build_image(geometry, SMOLLM2_LAYERS, tiles, SMOLLM2_CHUNK)
    chunk_ids = np.random.default_rng(0).permutation(50)[: len(image.chunks)].tolist()
    arena = np.zeros((50, SMOLLM2_CHUNK), dtype=np.uint8)
    arena[chunk_ids] = image.chunks
    table = TileTable(geometry, num_layers=SMOLLM2_LAYERS, num_slots=2, chunk_bytes=SMOLLM2_CHUNK, device=CPU)
    table.put(1, image, chunk_ids)
    entries = table.entries[7, geometry.stride :].tolist()
    for module in ((0, 1), (3, 0)):
        for t, tile in enumerate(tiles[module][7]):
            for factor, cut_tiles in ((0, tile.a), (1, tile.b)):
                first = geometry.bases()[*module, factor] + t * geometry.ranges(*module, factor)
                for entry, wanted in zip(entries[first:], cut_tiles, strict=False):
                    assert (entry & 31, entry >> 5 & 7) == (tile.rows, Format.INT8)
                    start = (entry >> 8) * ALIGNMENT
                    assert arena.reshape(-1)[start : start + len(wanted)].tobytes() == wanted.tobytes()
    table.clear(1)
    assert not table.entries.any()
    assert not table.summary.any()


@pytest.fixture(scope="module")
def table() -> TileTable:
    table = TileTable(Geometry(SMOLLM2, 64), num_layers=1, num_slots=4, chunk_bytes=SMOLLM2_CHUNK, device=CPU)
    for slot, (rank, modules) in enumerate([(8, None), (40, None), (64, {(0, 0), (0, 2)}), (16, {(3, 0)})]):
        _, tiles, _ = smollm2(Format.INT8, rank, modules)
        one_layer = {module: by_layer[:1] for module, by_layer in tiles.items()}
        image = build_image(table.geometry, 1, one_layer, SMOLLM2_CHUNK)
        table.put(slot, image, range(len(image.chunks)))
    return table


def spans(words: torch.Tensor) -> list[tuple[int, int]]:
    return [(int(word) & 0xFFFFFFFF, int(word) >> 32 & 0xFF) for word in words]


@given(slots=st.lists(st.integers(-1, 3), max_size=40), group_rows=st.sampled_from([8, 64]))
def test_every_adapted_row_is_in_one_group(table: TileTable, slots: list[int], group_rows: int) -> None:
    plan = plan_work(np.array(slots, dtype=np.int64), table, group_rows=group_rows)
    order = plan.order.tolist()
    assert sorted(order) == [row for row, slot in enumerate(slots) if slot >= 0]
    for site, work in enumerate(plan.sites):
        attached = {0: {0, 1, 2}, 1: {0, 1}, 2: {0, 1}, 3: {0, 1, 3}}[site]
        rows: list[int] = []
        for start, count in spans(work.groups[:, 0, 1]):
            assert 1 <= count <= group_rows
            assert len({slots[row] for row in order[start : start + count]}) == 1
            rows += order[start : start + count]
        assert sorted(rows) == [row for row, slot in enumerate(slots) if slot in attached]
        assert work.adapted.tolist() == [int(slot in attached) for slot in slots]
        tiles = work.groups[:, :, 1] >> 40 & 63
        assert int(tiles.sum()) == len(work.cells)
        firsts = work.groups[:, :, 0] >> 32
        assert firsts.flatten().tolist() == (tiles.flatten().cumsum(0) - tiles.flatten()).tolist()
        covered = [
            cell
            for word in work.blocks[:, 0].tolist()
            for cell in range(word & 0xFFFFFFFF, (word & 0xFFFFFFFF) + (word >> 32))
        ]
        assert covered == list(range(len(work.cells)))
        assert all(1 <= word >> 32 <= BLOCK_CELLS for word in work.blocks[:, 0].tolist())


def test_a_plan_is_the_same_after_the_copy(table: TileTable) -> None:
    plan = plan_work(np.array([1, -1, 0, 1, 2]), table, group_rows=8)
    copied = to_device(plan, CPU)

    def tensors(work: StepWork) -> list[torch.Tensor]:
        return [work.order, *(t for s in work.sites for t in (s.cells, s.groups, s.blocks, s.adapted))]

    for before, after in zip(tensors(plan), tensors(copied), strict=True):
        assert torch.equal(before, after)
        assert after.data_ptr() % 16 == 0


def test_a_fixed_place_is_filled_anew(table: TileTable) -> None:
    fixed = FixedWork(table.geometry, rows=4, max_tiles=4, group_rows=8, device=CPU)
    addresses = fixed.work.sites[0].cells.data_ptr()
    fixed.fill(plan_work(np.array([0, 1, 2, 2]), table, group_rows=8))
    plan = plan_work(np.array([1]), table, group_rows=8)
    fixed.fill(plan)
    for site, wanted in zip(fixed.work.sites, plan.sites, strict=True):
        assert torch.equal(site.cells[: len(wanted.cells)], wanted.cells)
        assert not site.cells[len(wanted.cells) :].any()
        assert not site.groups[len(wanted.groups) :].any()
        assert site.adapted.tolist() == [*wanted.adapted.tolist(), 0, 0, 0]
    assert fixed.work.sites[0].cells.data_ptr() == addresses
    with pytest.raises(ValueError, match="5 entries does not fit the 4"):
        fixed.fill(plan_work(np.array([0, 1, 2, 2, -1]), table, group_rows=8))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_an_unquantized_module_keeps_its_bits_or_is_rounded_to_bfloat16(dtype: str) -> None:
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((12, 64), (32, 12)))
    kept = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    stored = [t.to(kept) for t in (a, b)]
    arrays = [t.view(torch.uint16).numpy() if dtype == "BF16" else t.numpy() for t in stored]
    (stored_part,) = PackedModule("layers.0.self_attn.q_proj", 12, 0.25, dtype, arrays[0], arrays[1]).parts
    part = rank_part(stored_part)
    assert part.format is Format.BF16
    assert part.scale.tolist() == [0.25] * 12
    for factor, wanted in ((part.a, stored[0]), (part.b_t.T, stored[1])):
        bits = torch.from_numpy(np.ascontiguousarray(factor))
        assert torch.equal(bits.view(torch.bfloat16), wanted.to(torch.bfloat16))
    assert [tile.rows for tile in cut((part,))] == [12]
