"""Adapters as tiles that a step finds by records on the host (`worker.kernels.tiles`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.adapter_format.parts import FORMAT_NONE, PackedPart
from worker.adapters.load_plans import LoadPlan, MappedFile
from worker.kernels.layout import Arena, Site
from worker.kernels.placing import PlacedModule
from worker.kernels.tiles import (
    AffineTile,
    Format,
    PlacedAdapter,
    Tile,
    lay_out,
    max_affine_columns,
    max_tile_ranks,
    place_tiles,
    usable_chunk_bytes,
)

_FORMATS: Final = {"F32": Format.FLOAT32, "BF16": Format.BFLOAT16, "F16": Format.FLOAT16}


class RecordPlacer:
    """`Placer` that keeps nothing on the device beside the tiles."""

    def __init__(self, arena: Arena) -> None:
        """In host memory pieces are copied by compiled code, which is made ready here."""
        self._arena = arena
        self.usable_chunk_bytes = usable_chunk_bytes(arena.chunk_bytes)
        self.plans_loads = arena.memory.device.type == "cpu"
        """Whether `plan` and `carry_out` are for this arena."""
        if self.plans_loads:
            from worker.kernels.cpu.compiling import compile_kernels  # noqa: PLC0415 - a GPU's worker does without

            compile_kernels()

    def place(
        self, slot: int, version_digest: str, modules: Sequence[PlacedModule], chunk_ids: Sequence[int]
    ) -> PlacedAdapter:
        """See Placer."""
        del slot
        if self.plans_loads:
            plan, file = self.plan(modules)
            return self.carry_out(plan, version_digest, file, chunk_ids)
        adapter, copies = place_tiles(
            [tile for module in modules for tile in self._tiles(module)],
            version_digest=version_digest,
            num_places=self._arena.shape.num_layers * len(Site),
            chunk_bytes=self._arena.chunk_bytes,
            chunk_ids=chunk_ids,
        )
        memory = self._arena.memory
        for offset, piece in copies:
            content = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            memory[offset : offset + len(content)].copy_(torch.from_numpy(content.copy()))
        torch.cuda.current_stream(memory.device).synchronize()  # all copied before any step can see the slot
        return adapter

    def plan(self, modules: Sequence[PlacedModule]) -> tuple[LoadPlan, MappedFile]:
        """Work out how a file's modules get into chunks of the arena; returns the file, too.

        Raises ResourceExhausted for one that no chunks hold.
        """
        layout, pieces = lay_out(
            [tile for module in modules for tile in self._tiles(module)],
            num_places=self._arena.shape.num_layers * len(Site),
            chunk_bytes=self._arena.chunk_bytes,
        )
        file = MappedFile.behind([part.a for module in modules for part in module.parts])
        program, constants = _program(pieces, file)
        parts = [part for module in modules for part in module.parts]
        reusable = len(file.bytes) > 0 and not any(map(_is_converted, parts))
        return LoadPlan(layout, program, constants, _checks(modules, file), reusable), file

    def carry_out(
        self, plan: LoadPlan, version_digest: str, file: MappedFile, chunk_ids: Sequence[int]
    ) -> PlacedAdapter:
        """Copy a file by its plan into the first of the chunks `chunk_ids`. Raises ResourceExhausted."""
        from worker.kernels.cpu.copying import carry_out  # noqa: PLC0415 - as above

        adapter = plan.layout.put(version_digest, chunk_ids)
        chunks = np.array(chunk_ids[: plan.layout.num_chunks], dtype=np.int64)
        addresses = (file.address, int(plan.constants.ctypes.data), self._arena.memory.data_ptr())
        carry_out(plan.program, *addresses, chunks, self._arena.chunk_bytes)
        return adapter

    def is_sound(self, plan: LoadPlan, file: MappedFile) -> bool:
        """Tell whether a file's scales and affines are finite numbers, as readers ask for."""
        from worker.kernels.cpu.copying import is_sound  # noqa: PLC0415 - as above

        return bool(is_sound(plan.checks, file.address))

    def forget(self, slot: int) -> None:
        """See Placer."""

    def _tiles(self, module: PlacedModule) -> list[Tile | AffineTile]:
        """Cut a module into tiles, its affine behind the others; pieces are views of the file where they can be."""
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
        return _FORMATS[part.dtype], part.a, part.b.T, scale, None
    if part.a_scale is None or part.b_scale is None:
        return Format.INT8, part.a, part.b, np.asarray(part.scale, np.float32), None
    if part.a_scale.dtype == part.b_scale.dtype == np.float16:
        return Format.INT4, part.a, part.b, part.a_scale, part.b_scale
    a_scale, b_scale = (scales.astype(np.float32, copy=False) for scales in (part.a_scale, part.b_scale))
    return Format.INT4_WIDE, part.a, part.b, a_scale, b_scale


def _is_converted(part: PackedPart) -> bool:
    """Tell whether a tile has values of the part in another format than the file, so that a plan brings them along."""
    return part.a_scale is not None and part.b_scale is not None and part.a_scale.dtype != part.b_scale.dtype


def _program(
    pieces: Iterable[tuple[int, NDArray[Any]]], file: MappedFile
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the program that puts pieces where they belong, and what of them is not in the file as it is needed."""
    from worker.kernels.cpu.copying import Column, Copy  # noqa: PLC0415 - as above

    rows = []
    constants: list[NDArray[np.uint8]] = []
    at = 0
    for to, piece in pieces:
        place = file.place_of(piece)
        if place is not None and piece.flags.c_contiguous:
            rows.append((Copy.FILE, place, to, piece.nbytes, 0, 0))
        elif place is not None and piece.itemsize in (2, 4):  # rank rows of a B that lies as [out, rank]
            turned = Copy.TURNED_16 if piece.itemsize == 2 else Copy.TURNED_32
            rows.append((turned, place, to, piece.shape[1], piece.shape[0], piece.strides[1] // piece.itemsize))
        else:
            constants.append(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            rows.append((Copy.CONSTANTS, at, to, piece.nbytes, 0, 0))
            at += piece.nbytes
    program = np.array(rows, dtype=np.int64).reshape(-1, len(Column))
    return program, np.concatenate(constants) if constants else np.zeros(1, np.uint8)


def _checks(modules: Sequence[PlacedModule], file: MappedFile) -> NDArray[np.int64]:
    """Return what `is_sound` is to look at: scales, which are not negative, and affines."""
    rows = []
    for module in modules:
        signed = () if module.affine is None else (module.affine.scale, module.affine.shift)
        of_parts = (one for part in module.parts for one in (part.scale, part.a_scale, part.b_scale))
        scales = [one for one in of_parts if isinstance(one, np.ndarray)]
        for values, sign in (*((one, 0) for one in scales), *((one, 1) for one in signed)):
            place = file.place_of(values)
            if place is not None:
                rows.append((place, values.size, 8 * values.itemsize, sign))
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
