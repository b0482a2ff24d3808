"""Adapters as tiles that a step finds by records on the host (`worker.kernels.tiles`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.adapter_format.parts import FORMAT_NONE, PackedPart
from worker.kernels.layout import Arena, Site
from worker.kernels.placing import PlacedModule
from worker.kernels.tiles import (
    AffineTile,
    Format,
    PlacedAdapter,
    Tile,
    max_affine_columns,
    max_tile_ranks,
    place_tiles,
    usable_chunk_bytes,
)

_FORMATS: Final = {"F32": Format.FLOAT32, "BF16": Format.BFLOAT16, "F16": Format.FLOAT16}


class RecordPlacer:
    """`Placer` that keeps nothing on the device beside the tiles."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.usable_chunk_bytes = usable_chunk_bytes(arena.chunk_bytes)

    def place(
        self, slot: int, version_digest: str, modules: Sequence[PlacedModule], chunk_ids: Sequence[int]
    ) -> PlacedAdapter:
        """See Placer."""
        del slot
        adapter, copies = place_tiles(
            [tile for module in modules for tile in self._tiles(module)],
            version_digest=version_digest,
            num_places=self._arena.shape.num_layers * len(Site),
            chunk_bytes=self._arena.chunk_bytes,
            chunk_ids=chunk_ids,
        )
        memory = self._arena.memory
        if memory.device.type == "cpu":
            # In numpy, which uses one thread: torch would start a second pool of threads for the thread that loads, and
            # the two pools would hold each other up in the middle of steps.
            array = memory.numpy()
            for offset, piece in copies:
                array[offset : offset + piece.nbytes] = piece.reshape(-1).view(np.uint8)
        else:
            for offset, piece in copies:
                memory[offset : offset + piece.nbytes].copy_(torch.from_numpy(piece.reshape(-1).view(np.uint8).copy()))
            torch.cuda.current_stream(memory.device).synchronize()  # all copied before any step can see the slot
        return adapter

    def forget(self, slot: int) -> None:
        """See Placer."""

    def _tiles(self, module: PlacedModule) -> list[Tile | AffineTile]:
        """Cut a module into tiles, its affine behind the others."""
        place = module.layer * len(Site) + module.site
        cut: list[Tile | AffineTile] = []
        for part in module.parts:
            kind, a, b, scale, b_scale = _rows_of(part)
            inner, outer = part.in_features, part.out_features
            ranks = max_tile_ranks(max(a[:1].nbytes, b[:1].nbytes), self._arena.chunk_bytes)
            for rows in (slice(first, first + ranks) for first in range(0, part.rank, ranks)):
                b_scale_rows = None if b_scale is None else b_scale[rows]
                cut.append(Tile(place, kind, module.out, inner, outer, a[rows], b[rows], scale[rows], b_scale_rows))
        if module.affine is not None:
            scale, shift = module.affine.scale, module.affine.shift
            step = max_affine_columns(self._arena.chunk_bytes)
            for first in range(0, len(scale), step):
                columns = slice(first, first + step)
                cut.append(AffineTile(place, module.out + first, scale[columns], shift[columns]))
        return cut


def _rows_of(
    part: PackedPart,
) -> tuple[Format, NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Return a part's format, A and Bᵀ with rank rows first, and their scales as tiles carry them."""
    if part.format == FORMAT_NONE:
        scale = np.full(part.rank, part.scale, dtype=np.float32)
        return _FORMATS[part.dtype], part.a, np.ascontiguousarray(part.b.T), scale, None
    if part.a_scale is None or part.b_scale is None:
        return Format.INT8, part.a, part.b, np.asarray(part.scale, np.float32), None
    if part.a_scale.dtype == part.b_scale.dtype == np.float16:
        return Format.INT4, part.a, part.b, part.a_scale, part.b_scale
    return Format.INT4_WIDE, part.a, part.b, part.a_scale.astype(np.float32), part.b_scale.astype(np.float32)
