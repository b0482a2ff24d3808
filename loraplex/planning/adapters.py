"""What an adapter weighs, by rank, format and targets: its packed file, and its tiles in a device's chunks.

Follows what the registry packs and what workers lay out, tile by tile; tests hold it to both. Two layouts: `records` is
that of workers on CPUs, `table` that of workers on GPUs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from loraplex.errors import InvalidParameter
from loraplex.planning.shapes import DTYPE_BYTES, SITES, ModelShape
from loraplex.ranks import MAX_GPU_RANK

Layout = Literal["records", "table"]

FORMATS: Final = ("int8", "int4", "none")
BLOCK_TOKENS: Final = 16
"""Positions of one KV block."""

_INT4_GROUP: Final = 64
_INT4_SHARE: Final = 0.3  # of the 16-bit bytes: what the registry spends on int4 at most
_ENTRY_BYTES: Final = 70  # of a tensor in a file's header without its name, as that bound counts it
_MULTIPLE: Final = 16  # of quantized rows' values
_HEADER_ALIGNMENT: Final = 64
_TILE_RANKS: Final = 16
_RECORD_ALIGNMENT: Final = 64
_RECORD_SHARE: Final = 8  # a piece takes an eighth of a chunk at most
_TABLE_ALIGNMENT: Final = 32
_TABLE_COLUMNS: Final = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Rank rows of one number format: none, int8 or int4; `item_bytes` is that of format none."""

    format: str
    rank: int
    in_features: int
    out_features: int
    item_bytes: int = 2

    @property
    def value_bytes(self) -> int:
        """Bytes of the part's tensors in a packed file."""
        both = self.in_features + self.out_features
        match self.format:
            case "int8":
                return self.rank * (both + 4)
            case "int4":
                scales = _groups(self.in_features) + _groups(self.out_features)
                return self.rank * (both // 2 + 2 * scales)
            case _:
                return self.rank * both * self.item_bytes


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """An adapter by its modules' parts; names as in a packed file, e.g. "layers.0.mlp.up_proj"."""

    format: str
    dtype: str
    modules: Mapping[str, tuple[Part, ...]]

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max(sum(part.rank for part in parts) for parts in self.modules.values())

    def file_bytes(self) -> int:
        """Return the packed file's size; exact but for what decimals its scales have in the header."""
        tensors = [tensor for name, parts in self.modules.items() for tensor in _tensors(name, parts, self.dtype)]
        header: dict[str, object] = {"__metadata__": {"loraplex": _facts(self)}}
        at = 0
        for name, dtype, shape, _, size in sorted(tensors, key=lambda tensor: (-tensor[3], tensor[0])):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        raw = 8 + len(json.dumps(header, separators=(",", ":")))
        return -(-raw // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT + at


@dataclass(frozen=True, slots=True)
class Weight:
    """What one adapter takes, in bytes and in an arena's chunks."""

    file_bytes: int
    device_bytes: int
    """Of its tiles, without what chunks' ends leave unused."""
    chunks: int
    granted_chunks: int
    """Taken before its load, when only the file's size is known; what it does not need is free again afterwards."""


def adapter_shape(
    shape: ModelShape, *, rank: int, form: str, targets: Sequence[str], dtype: str = "bfloat16"
) -> AdapterShape:
    """Return the adapter of one rank on `targets` of all layers; `dtype` is that of its uploaded factors.

    int8 counts no correcting rank rows, which few modules of rank below 8 get. int4 is taken to spend what it may: 0.3
    of the 16-bit bytes; adapters whose errors are small spend less. Raises InvalidParameter, naming the flag.
    """
    if form not in FORMATS:
        raise InvalidParameter(f"--format {form!r} is not known; give {', '.join(FORMATS)}", field="format")
    if rank < 1:
        raise InvalidParameter(f"--rank is {rank}; give 1 or more", field="rank")
    sizes = shape.module_shapes()
    for name in targets:
        if form != "none" and any(size % _MULTIPLE for size in sizes[name]):
            raise InvalidParameter(
                f"--format {form}: {name} maps {sizes[name][0]} to {sizes[name][1]} features, no multiples of "
                f"{_MULTIPLE}; such adapters are served in format none",
                field="format",
            )
    names = sorted(f"layers.{layer}.{name}" for layer in range(shape.num_layers) for name in targets)
    inner_out = {name: sizes[name.split(".", 2)[2]] for name in names}
    if form == "int4":
        return AdapterShape(form, "", _int4_modules(inner_out, rank))
    item = DTYPE_BYTES[dtype]
    modules = {name: (Part(form, rank, *inner_out[name], item),) for name in names}
    return AdapterShape(form, dtype if form == "none" else "", modules)


def weigh(shape: ModelShape, adapter: AdapterShape, layout: Layout, chunk_bytes: int) -> Weight:
    """Return what an adapter takes in an arena of such chunks. Raises InvalidParameter for one that cannot be there."""
    if layout == "table" and adapter.max_rank > MAX_GPU_RANK:
        raise InvalidParameter(
            f"--rank is {adapter.max_rank}; workers on GPUs compute up to {MAX_GPU_RANK}", field="rank"
        )
    pieces: Counter[int] = Counter()
    for part, count in Counter(part for parts in adapter.modules.values() for part in parts).items():
        for size, times in Counter(_pieces(part, layout, chunk_bytes)).items():
            pieces[size] += times * count
    usable_chunk = chunk_bytes if layout == "records" else chunk_bytes // _TABLE_ALIGNMENT * _TABLE_ALIGNMENT
    if max(pieces) > usable_chunk or usable_chunk_bytes(shape, layout, chunk_bytes) < 1:
        raise InvalidParameter(
            f"a chunk of this model, {chunk_bytes} bytes, does not hold an adapter's tile of {max(pieces)} bytes; "
            "its adapters cannot be kept in the arena",
            field="model",
        )
    file_bytes = adapter.file_bytes()
    granted = -(-file_bytes // usable_chunk_bytes(shape, layout, chunk_bytes)) + 1
    device_bytes = sum(size * count for size, count in pieces.items())
    return Weight(file_bytes, device_bytes, _first_fit(pieces, usable_chunk), granted)


def num_fitting(weight: Weight, chunks: int) -> int:
    """Return how many adapters of one weight so many free chunks hold, loaded one after the other."""
    return 0 if weight.granted_chunks > chunks else (chunks - weight.granted_chunks) // weight.chunks + 1


def usable_chunk_bytes(shape: ModelShape, layout: Layout, chunk_bytes: int) -> int:
    """Return the bytes of a file for which one chunk is granted."""
    if layout == "records":
        return chunk_bytes - chunk_bytes // _RECORD_SHARE
    sizes = set(shape.module_shapes().values())
    tiles = [size for inner_out in sizes for size in _table_pieces(Part("none", _TILE_RANKS, *inner_out))]
    growth = max(
        sum(_table_pieces(part)) / part.value_bytes
        for inner_out in sizes
        for form in FORMATS
        for rank in range(1, _TILE_RANKS + 1)
        for part in (Part(form, rank, *inner_out),)
    )
    return int((chunk_bytes // _TABLE_ALIGNMENT * _TABLE_ALIGNMENT - max(tiles)) / growth)


def table_bytes_per_slot(shape: ModelShape) -> int:
    """Return what the table of tiles takes on a GPU for each adapter slot, used or not."""
    sizes = shape.module_shapes()
    ranges = 0
    for names in SITES:
        for name in names:
            ranges += sum(-(-size // _TABLE_COLUMNS) for size in sizes[name])
    tiles = -(-MAX_GPU_RANK // _TILE_RANKS) + 1
    return shape.num_layers * (-(-ranges * tiles // 16) * 16) * 8


def _int4_modules(sizes: Mapping[str, tuple[int, int]], rank: int) -> dict[str, tuple[Part, ...]]:
    """Spend the bytes that int4 may on rank rows in int8: 1/16 of each module's, then 1/8, in the modules' order."""

    def split(name: str, num_int8: int) -> tuple[Part, ...]:
        leading = (Part("int8", num_int8, *sizes[name]),) if num_int8 else ()
        return (*leading, Part("int4", rank - num_int8, *sizes[name]))

    def cost(name: str, parts: tuple[Part, ...]) -> tuple[int, int]:
        names = sum(len(tensor[0]) + _ENTRY_BYTES for tensor in _tensors(name, parts, ""))
        return sum(part.value_bytes for part in parts), names

    modules = {name: split(name, 0) for name in sizes}
    room_16 = sum(2 * rank * sum(size) for size in sizes.values())
    names_16 = sum(2 * (len(name) + _ENTRY_BYTES) for name in sizes)
    spent = [sum(costs) for costs in zip(*(cost(name, parts) for name, parts in modules.items()), strict=True)]
    with_names = sum(spent) <= _INT4_SHARE * (room_16 + names_16)
    room = _INT4_SHARE * (room_16 + names_16) - sum(spent) if with_names else _INT4_SHARE * room_16 - spent[0]
    levels = sorted({max(1, rank // 16), max(1, rank // 8)}) if rank > 1 else []
    for level in levels:
        for name, parts in modules.items():
            wider = split(name, level)
            more = [after - before for before, after in zip(cost(name, parts), cost(name, wider), strict=True)]
            price = sum(more) if with_names else more[0]
            if price <= room:
                room -= price
                modules[name] = wider
    return modules


def _pieces(part: Part, layout: Layout, chunk_bytes: int) -> list[int]:
    """Return the sizes of what gets a place of its own in a chunk."""
    return _record_pieces(part, chunk_bytes) if layout == "records" else _table_pieces(part)


def _record_pieces(part: Part, chunk_bytes: int) -> list[int]:
    """Return A, B and scales of up to 16 rank rows each, as many as an eighth of a chunk holds, on 64 bytes."""
    rows: tuple[int, ...]
    match part.format:
        case "int8":
            rows = (part.in_features, part.out_features, 4)
        case "int4":
            inner, out = part.in_features, part.out_features
            rows = (inner // 2, out // 2, 2 * _groups(inner), 2 * _groups(out))
        case _:
            rows = (part.in_features * part.item_bytes, part.out_features * part.item_bytes, 4)
    ranks = max(1, min(_TILE_RANKS, chunk_bytes // _RECORD_SHARE // max(*rows[:2], 1)))
    counts = [min(ranks, part.rank - first) for first in range(0, part.rank, ranks)]
    return [-(-count * row // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT for count in counts for row in rows]


def _table_pieces(part: Part) -> list[int]:
    """Return tiles: up to 16 rank rows of a factor by 1 024 columns, with scales, on 32 bytes; none is in 16 bits."""
    sizes = []
    full, rest = divmod(part.rank, _TILE_RANKS)
    for rows in (*(_TILE_RANKS,) * full, *((rest,) if rest else ())):
        for features, of_a in ((part.in_features, True), (part.out_features, False)):
            for first in range(0, features, _TABLE_COLUMNS):
                groups = _groups(min(_TABLE_COLUMNS, features - first))
                if part.format == "int4":
                    size = rows * groups * (_INT4_GROUP // 2 + 2)
                else:
                    size = rows * groups * _INT4_GROUP * (1 if part.format == "int8" else 2) + (4 * rows if of_a else 0)
                sizes.append(-(-size // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT)
    return sizes


def _first_fit(pieces: Mapping[int, int], chunk_bytes: int) -> int:
    """Return the chunks that pieces take, {size: how many}: the largest first, each in the first chunk with room."""
    used: list[int] = []
    for size in sorted(pieces, reverse=True):
        left = pieces[size]
        for chunk, filled in enumerate(used):
            here = min((chunk_bytes - filled) // size, left)
            used[chunk] += here * size
            left -= here
        per_chunk = chunk_bytes // size
        used += [per_chunk * size] * (left // per_chunk)
        if left % per_chunk:
            used.append(left % per_chunk * size)
    return len(used)


def _tensors(name: str, parts: Sequence[Part], dtype: str) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Yield (name, dtype, shape, item bytes, bytes) of a module's tensors in a packed file."""
    for part in parts:
        rank, inner, out = part.rank, part.in_features, part.out_features
        match part.format:
            case "int8":
                yield f"{name}.A.q8", "I8", [rank, inner], 1, rank * inner
                yield f"{name}.B.q8", "I8", [rank, out], 1, rank * out
                yield f"{name}.scale.q8", "F32", [rank], 4, 4 * rank
            case "int4":
                yield f"{name}.A.q4", "U8", [rank, inner // 2], 1, rank * (inner // 2)
                yield f"{name}.B.q4", "U8", [rank, out // 2], 1, rank * (out // 2)
                for factor, width in (("A", inner), ("B", out)):
                    groups = _groups(width)
                    yield f"{name}.{factor}_scale.q4", "F16", [rank, groups], 2, 2 * rank * groups
            case _:
                item = part.item_bytes
                code = {"float32": "F32", "float16": "F16"}.get(dtype, "BF16")
                yield f"{name}.A", code, [rank, inner], item, item * rank * inner
                yield f"{name}.B", code, [out, rank], item, item * out * rank


def _facts(adapter: AdapterShape) -> str:
    """Return what a packed file says of itself, with digits in the places of its digests."""
    ranks = {name: sum(part.rank for part in parts) for name, parts in adapter.modules.items()}
    facts = {
        "base_digest": "0" * 64,
        "format": adapter.format,
        "modules": {
            name: {"rank": rank, "scale": 2.0} if adapter.format == "none" else {"rank": rank}
            for name, rank in ranks.items()
        },
        "packer": 1,
        "version_digest": "0" * 64,
    }
    return json.dumps(facts, separators=(",", ":"))


def _groups(width: int) -> int:
    return -(-width // _INT4_GROUP)
