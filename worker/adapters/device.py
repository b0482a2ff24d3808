"""Adapters' factors in the arena, by slot.

Owns the slot table and what a packed file must be to fit the base; how factors lie is the backend's `Placer`. A slot
becomes visible to steps in one assignment, when all of its tiles are in place. Knows nothing of requests, files'
origins, eviction, or who owns which chunk.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.adapter_format.packed import PackedAdapter, PackedModule, open_packed
from loraplex.errors import BaseMismatch, CorruptArtifact
from worker.adapters.record_placement import RecordPlacer
from worker.kernels.layout import Arena, Site
from worker.kernels.placing import PlacedModule, Placer, SiteShape
from worker.kernels.tiles import PlacedAdapter

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

    def sites(self) -> tuple[SiteShape, ...]:
        """Return the shape of each site, in their order."""
        return tuple(
            SiteShape(self.module_shapes[names[0]][0], tuple(self.module_shapes[name][1] for name in names))
            for _, names in sorted(SITE_MODULES.items())
        )


class DeviceAdapters:
    """The slot table. `load` may run on any thread; the rest is the engine's."""

    def __init__(
        self,
        base: BaseShape,
        arena: Arena,
        *,
        num_slots: int,
        placement: Placer | None = None,
        open_file: Callable[[Path], PackedAdapter] = open_packed,
    ) -> None:
        """`placement` is the backend's; without one tiles are found by records. `open_file` reads a packed file."""
        self._open_file = open_file
        self._base, self._arena, self._num_slots = base, arena, num_slots
        self._placement = RecordPlacer(arena) if placement is None else placement
        self._slots: dict[int, PlacedAdapter] = {}
        self._lock = threading.Lock()

    @property
    def usable_chunk_bytes(self) -> int:
        """See Placer."""
        return self._placement.usable_chunk_bytes

    def load(self, slot: int, path: Path, chunk_ids: Sequence[int]) -> PlacedAdapter:
        """Bring the packed file at `path` into an empty slot and the first of the arena's chunks `chunk_ids`.

        Raises BaseMismatch when it is bound to another base, CorruptArtifact (naming the tensor) when it is damaged,
        ResourceExhausted when the chunks do not hold it, UnsupportedAdapter when the backend's kernels do not.
        """
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} lies outside 0..{self._num_slots - 1}")
        with self._lock:
            if slot in self._slots:
                raise ValueError(f"slot {slot} is in use; release it first")
        packed = self._open_file(path)
        modules = self._modules(packed, path)
        adapter = self._placement.place(slot, packed.version_digest, modules, chunk_ids)
        with self._lock:
            self._slots[slot] = adapter
        return adapter

    def get(self, slot: int) -> PlacedAdapter:
        """Return the slot's adapter. Raises KeyError when nothing is loaded there."""
        with self._lock:
            return self._slots[slot]

    def release(self, slot: int) -> None:
        """Empty the slot; whoever granted its chunks has them back. An empty slot is ignored."""
        with self._lock:
            known = self._slots.pop(slot, None)
        if known is not None:
            self._placement.forget(slot)

    def _modules(self, packed: PackedAdapter, path: Path) -> list[PlacedModule]:
        """Find the place of every module. Raises BaseMismatch or CorruptArtifact."""
        if packed.base_digest != self._base.base_digest:
            raise BaseMismatch(
                f"the adapter was packed for base {packed.base_digest[:12]}, this worker serves "
                f"{self._base.base_digest[:12]}; register it again on this base",
                expected=self._base.base_digest,
                actual=packed.base_digest,
            )
        return [self._module(module, path) for module in packed.modules]

    def _module(self, module: PackedModule, path: Path) -> PlacedModule:
        layer, name = self._locate(module, path)
        site = next(site for site, names in SITE_MODULES.items() if name in names)
        index = SITE_MODULES[site].index(name)
        out = sum(self._base.module_shapes[before][1] for before in SITE_MODULES[site][:index])
        return PlacedModule(module.name, layer, site, index, out, module.parts)

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
