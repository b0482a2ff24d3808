"""Adapters' factors in the arena, by slot.

Owns the slot table and how a packed file becomes tiles. A slot becomes visible to steps in one assignment, when all of
its tiles are in place. Knows nothing of requests, files' origins, eviction, or who owns which chunk.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, PackedModule, open_packed
from common.adapter_format.parts import FORMAT_NONE, PackedPart
from loraplex.errors import BaseMismatch, CorruptArtifact
from worker.kernels.layout import Arena, Site
from worker.kernels.tiles import Format, PlacedAdapter, Tile, max_tile_ranks, place_tiles

SITE_MODULES: Final = {
    Site.QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    Site.O: ("self_attn.o_proj",),
    Site.GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    Site.DOWN: ("mlp.down_proj",),
}
"""The modules of each site in the order of the decoder's fused weights."""

_MODULE: Final = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(\w+\.\w+)")


@dataclass(frozen=True, slots=True)
class BaseShape:
    """What a packed adapter must fit: the base's digest and its linears."""

    base_digest: str
    num_layers: int
    module_shapes: dict[str, tuple[int, int]]
    """(in, out) features by module name."""


class DeviceAdapters:
    """The slot table. `load` may run on any thread; the rest is the engine's."""

    def __init__(self, base: BaseShape, arena: Arena, *, num_slots: int) -> None:
        self._base, self._arena, self._num_slots = base, arena, num_slots
        self._slots: dict[int, PlacedAdapter] = {}
        self._lock = threading.Lock()

    def load(self, slot: int, path: Path, chunk_ids: Sequence[int]) -> PlacedAdapter:
        """Bring the packed file at `path` into an empty slot and the first of the arena's chunks `chunk_ids`.

        Raises BaseMismatch when it is bound to another base, CorruptArtifact (naming the tensor) when it is damaged,
        ResourceExhausted when the chunks do not hold it.
        """
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} lies outside 0..{self._num_slots - 1}")
        adapter, copies = self._place(open_packed(path), path, chunk_ids)
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
        with self._lock:
            if slot in self._slots:
                raise ValueError(f"slot {slot} is in use; release it first")
            self._slots[slot] = adapter
        return adapter

    def get(self, slot: int) -> PlacedAdapter:
        """Return the slot's adapter. Raises KeyError when nothing is loaded there."""
        with self._lock:
            return self._slots[slot]

    def release(self, slot: int) -> None:
        """Empty the slot; whoever granted its chunks has them back. An empty slot is ignored."""
        with self._lock:
            self._slots.pop(slot, None)

    def _place(
        self, packed: PackedAdapter, path: Path, chunk_ids: Sequence[int]
    ) -> tuple[PlacedAdapter, list[tuple[int, NDArray[Any]]]]:
        if packed.base_digest != self._base.base_digest:
            raise BaseMismatch(
                f"the adapter was packed for base {packed.base_digest[:12]}, this worker serves "
                f"{self._base.base_digest[:12]}; register it again on this base",
                expected=self._base.base_digest,
                actual=packed.base_digest,
            )
        tiles = [tile for module in packed.modules for tile in self._tiles(module, path)]
        return place_tiles(
            tiles,
            version_digest=packed.version_digest,
            num_places=self._base.num_layers * len(Site),
            chunk_bytes=self._arena.chunk_bytes,
            chunk_ids=chunk_ids,
        )

    def _locate(self, module: PackedModule, path: Path) -> tuple[int, str]:
        """Return the module's layer and its name in it; raises CorruptArtifact when the base has no such linear."""
        match = _MODULE.fullmatch(module.name)
        shape = self._base.module_shapes.get(match[2]) if match else None
        if match is None or shape is None or int(match[1]) >= self._base.num_layers:
            raise CorruptArtifact(
                f"{path.name}: the base has no linear {module.name}", file=path.name, tensor=module.name
            )
        sizes = {(part.in_features, part.out_features) for part in module.parts}
        if sizes != {shape}:
            raise CorruptArtifact(
                f"{path.name}: {module.name} maps {sorted(sizes)} (inputs, outputs); on this base it is {shape}",
                file=path.name,
                tensor=module.name,
            )
        return int(match[1]), match[2]

    def _tiles(self, module: PackedModule, path: Path) -> list[Tile]:
        """Cut a module into tiles."""
        layer, name = self._locate(module, path)
        site = next(site for site, names in SITE_MODULES.items() if name in names)
        names = SITE_MODULES[site]
        out = sum(self._base.module_shapes[before][1] for before in names[: names.index(name)])
        inner, outer = self._base.module_shapes[name]
        cut: list[Tile] = []
        for part in module.parts:
            kind, a, b, scale, b_scale = _rows_of(part)
            ranks = max_tile_ranks(max(a[:1].nbytes, b[:1].nbytes), self._arena.chunk_bytes)
            for rows in (slice(first, first + ranks) for first in range(0, part.rank, ranks)):
                b_scale_rows = None if b_scale is None else b_scale[rows]
                place = layer * len(Site) + site
                cut.append(Tile(place, kind, out, inner, outer, a[rows], b[rows], scale[rows], b_scale_rows))
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


_FORMATS: Final = {"F32": Format.FLOAT32, "BF16": Format.BFLOAT16, "F16": Format.FLOAT16}
