"""Adapters' factors in the arena, by slot.

Owns the slot table and what a packed file must be to fit the base; how factors lie is the backend's `Placer`. A slot
becomes visible to steps in one assignment, when all of its tiles are in place. Knows nothing of requests, files'
origins, eviction, or who owns which chunk.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from common.adapter_format.packed import EMBEDDING, HEAD, PackedAdapter, PackedModule, open_packed
from loraplex.errors import BaseMismatch, CorruptArtifact
from worker.adapters.load_plans import FileForm, LoadPlans, MappedFile
from worker.adapters.record_placement import RecordPlacer
from worker.adapters.vocabulary import VocabularyMemory
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
        placer: Placer | None = None,
        vocabulary: VocabularyMemory | None = None,
        open_file: Callable[[Path], PackedAdapter] = open_packed,
    ) -> None:
        """`placer` is the backend's; without one tiles are found by records. `open_file` reads a packed file.

        Without `vocabulary` the base's embedding and head are nothing that an adapter can change.
        """
        self._open_file = open_file
        self._base, self._arena, self._num_slots = base, arena, num_slots
        self._vocabulary = vocabulary
        self._placer = RecordPlacer(arena) if placer is None else placer
        self._plans = LoadPlans()
        self._slots: dict[int, PlacedAdapter] = {}
        self._lock = threading.Lock()

    @property
    def usable_chunk_bytes(self) -> int:
        """See Placer."""
        return self._placer.usable_chunk_bytes

    def load(self, slot: int, path: Path, chunk_ids: Sequence[int]) -> PlacedAdapter:
        """Bring the packed file at `path` into an empty slot and the first of the arena's chunks `chunk_ids`.

        Raises BaseMismatch when it is bound to another base, CorruptArtifact (naming the tensor) when it is damaged,
        ResourceExhausted when the chunks, or what is left beside the arena, do not hold it, and UnsupportedAdapter
        when the backend's kernels do not compute it.
        """
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} lies outside 0..{self._num_slots - 1}")
        with self._lock:
            if slot in self._slots:
                raise ValueError(f"slot {slot} is in use; release it first")
        adapter = self._load_as_before(path, chunk_ids) or self._load_new(slot, path, chunk_ids)
        with self._lock:
            self._slots[slot] = adapter
        return adapter

    def _load_as_before(self, path: Path, chunk_ids: Sequence[int]) -> PlacedAdapter | None:
        """Load a file that lies as an earlier one did; None where none has, or where a reader should have a look."""
        placer = self._placer
        if not isinstance(placer, RecordPlacer) or not placer.plans_loads:
            return None
        with path.open("rb") as stream:
            form = FileForm.read(stream)
        plan = None if form is None else self._plans.find(form)
        if form is None or plan is None:
            return None
        file = MappedFile.open(path)
        if not placer.is_sound(plan, file):
            return None
        return placer.carry_out(plan, form.version_digest, file, chunk_ids)

    def _load_new(self, slot: int, path: Path, chunk_ids: Sequence[int]) -> PlacedAdapter:
        packed = self._open_file(path)
        modules = self._modules(packed, path)
        vocabulary = None if self._vocabulary is None else self._vocabulary.load(packed, path.name)
        try:
            if vocabulary is None:
                return self._place(slot, path, packed.version_digest, modules, chunk_ids)
            adapter = self._placer.place(slot, packed.version_digest, modules, chunk_ids)
            return replace(adapter, vocabulary=vocabulary)
        except BaseException:
            if self._vocabulary is not None and vocabulary is not None:
                self._vocabulary.release(vocabulary)
            raise

    def _place(
        self, slot: int, path: Path, version_digest: str, modules: Sequence[PlacedModule], chunk_ids: Sequence[int]
    ) -> PlacedAdapter:
        """Place what lies in the arena alone, and remember how."""
        placer = self._placer
        if not (isinstance(placer, RecordPlacer) and placer.plans_loads):
            return placer.place(slot, version_digest, modules, chunk_ids)
        plan, file = placer.plan(modules)
        adapter = placer.carry_out(plan, version_digest, file, chunk_ids)
        with path.open("rb") as stream:
            form = FileForm.read(stream)
        if form is not None and plan.reusable:
            self._plans.keep(form, plan)
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
            self._placer.forget(slot)
            if self._vocabulary is not None and known.vocabulary is not None:
                self._vocabulary.release(known.vocabulary)

    def _modules(self, packed: PackedAdapter, path: Path) -> list[PlacedModule]:
        """Find the place of every module in the arena. Raises BaseMismatch or CorruptArtifact."""
        if packed.base_digest != self._base.base_digest:
            raise BaseMismatch(
                f"the adapter was packed for base {packed.base_digest[:12]}, this worker serves "
                f"{self._base.base_digest[:12]}; register it again on this base",
                expected=self._base.base_digest,
                actual=packed.base_digest,
            )
        if packed.matrices and self._vocabulary is None:
            name = packed.matrices[0].name
            raise CorruptArtifact(f"{path.name}: {name} cannot be replaced here", file=path.name, tensor=name)
        outside = () if self._vocabulary is None else (EMBEDDING, HEAD)
        return [self._module(module, path) for module in packed.modules if module.name not in outside]

    def _module(self, module: PackedModule, path: Path) -> PlacedModule:
        layer, name = self._locate(module, path)
        site = next(site for site, names in SITE_MODULES.items() if name in names)
        index = SITE_MODULES[site].index(name)
        out = sum(self._base.module_shapes[before][1] for before in SITE_MODULES[site][:index])
        return PlacedModule(module.name, layer, site, index, out, module.parts, module.affine)

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
