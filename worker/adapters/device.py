"""Adapters' factors on the device, by slot.

Owns the slot table and how a packed file becomes the tensors of each site. A slot becomes visible to steps in one
assignment, when all of its tensors are on the device; a step that has looked up an adapter keeps it alive, so a release
never pulls weights from under it. Knows nothing of requests, files' origins or eviction.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.adapter_format.packed import PackedAdapter, PackedModule, open_packed
from loraplex.errors import BaseMismatch, CorruptArtifact
from worker.kernels.layout import Expand, LayerFactors, Site, SiteFactors

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


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """An adapter ready to be applied."""

    version_digest: str
    layers: tuple[LayerFactors, ...]
    device_bytes: int


class DeviceAdapters:
    """The slot table. `load` may run on any thread; the rest is the engine's."""

    def __init__(self, base: BaseShape, *, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        """Factors are kept in `dtype`, the model's: float32 loses nothing, bfloat16 rounds wider factors."""
        self._base, self._device, self._dtype = base, device, dtype
        self._num_slots = num_slots
        self._slots: dict[int, DeviceAdapter] = {}
        self._lock = threading.Lock()

    @property
    def device_bytes(self) -> int:
        """Bytes of all loaded adapters."""
        with self._lock:
            return sum(adapter.device_bytes for adapter in self._slots.values())

    def load(self, slot: int, path: Path) -> int:
        """Bring the packed file at `path` into an empty slot and return its bytes on the device.

        Raises BaseMismatch when it is bound to another base, CorruptArtifact (naming the tensor) when it is damaged.
        """
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} lies outside 0..{self._num_slots - 1}")
        adapter = self._build(open_packed(path), path)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # all copied before any step can see the slot
        with self._lock:
            if slot in self._slots:
                raise ValueError(f"slot {slot} is in use; release it first")
            self._slots[slot] = adapter
        return adapter.device_bytes

    def get(self, slot: int) -> DeviceAdapter:
        """Return the slot's adapter. Raises KeyError when nothing is loaded there."""
        with self._lock:
            return self._slots[slot]

    def release(self, slot: int) -> None:
        """Empty the slot; its memory goes when the last step that looked it up is done. An empty slot is ignored."""
        with self._lock:
            self._slots.pop(slot, None)

    def _build(self, packed: PackedAdapter, path: Path) -> DeviceAdapter:
        if packed.base_digest != self._base.base_digest:
            raise BaseMismatch(
                f"the adapter was packed for base {packed.base_digest[:12]}, this worker serves "
                f"{self._base.base_digest[:12]}; register it again on this base",
                expected=self._base.base_digest,
                actual=packed.base_digest,
            )
        by_layer: list[dict[str, PackedModule]] = [{} for _ in range(self._base.num_layers)]
        for module in packed.modules:
            layer, name = self._place(module, path)
            by_layer[layer][name] = module
        layers = tuple(self._layer(modules) for modules in by_layer)
        tensors = [tensor for layer in layers for site in layer if site for tensor in _tensors(site)]
        return DeviceAdapter(packed.version_digest, layers, sum(t.numel() * t.element_size() for t in tensors))

    def _place(self, module: PackedModule, path: Path) -> tuple[int, str]:
        """Return the module's layer and its name in it; raises CorruptArtifact when the base has no such linear."""
        match = _MODULE.fullmatch(module.name)
        shape = self._base.module_shapes.get(match[2]) if match else None
        if match is None or shape is None or int(match[1]) >= self._base.num_layers:
            raise CorruptArtifact(
                f"{path.name}: the base has no linear {module.name}", file=path.name, tensor=module.name
            )
        if module.a.shape != (module.rank, shape[0]) or module.b.shape != (shape[1], module.rank):
            raise CorruptArtifact(
                f"{path.name}: {module.name} has A {list(module.a.shape)} and B {list(module.b.shape)}; rank "
                f"{module.rank} on this base asks for {[module.rank, shape[0]]} and {[shape[1], module.rank]}",
                file=path.name,
                tensor=module.name,
            )
        return int(match[1]), match[2]

    def _layer(self, modules: dict[str, PackedModule]) -> LayerFactors:
        return (
            self._site(Site.QKV, modules),
            self._site(Site.O, modules),
            self._site(Site.GATE_UP, modules),
            self._site(Site.DOWN, modules),
        )

    def _site(self, site: Site, modules: dict[str, PackedModule]) -> SiteFactors | None:
        """Stack the site's A factors, so that its modules' inputs are read once."""
        shrinks: list[NDArray[Any]] = []
        expands: list[Expand] = []
        out = rank = 0
        for name in SITE_MODULES[site]:
            width = self._base.module_shapes[name][1]
            module = modules.get(name)
            if module is not None:
                shrinks.append(_convert(module.a, module.dtype, self._dtype))
                factor = self._tensor(_convert(module.b, module.dtype, self._dtype))
                columns, rows = slice(out, out + width), slice(rank, rank + module.rank)
                expands.append(Expand(columns, rows, factor.t(), module.scale))
                rank += module.rank
            out += width
        return SiteFactors(self._tensor(np.concatenate(shrinks)).t(), tuple(expands)) if shrinks else None

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).view(self._dtype).to(self._device)


def _convert(array: NDArray[Any], stored: str, wanted: torch.dtype) -> NDArray[Any]:
    """Copy a packed factor out of its mapped file as float32, or as the bits of bfloat16 (rounded to nearest even).

    In numpy, which uses one thread: torch would start a second pool of threads for the thread that loads, and the two
    pools would hold each other up in the middle of steps.
    """
    if stored == "BF16" and wanted == torch.bfloat16:
        return array.copy()
    wide = (array.astype(np.uint32) << 16).view(np.float32) if stored == "BF16" else array.astype(np.float32)
    if wanted == torch.float32:
        return wide
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _tensors(site: SiteFactors) -> list[Tensor]:
    return [site.shrink_t, *(expand.factor_t for expand in site.expands)]
