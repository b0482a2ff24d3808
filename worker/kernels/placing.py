"""How adapters come into the arena: a backend's affair, as each wants factors laid out in its own way.

Which chunks an adapter gets, and when they are free again, is the engine's; what of them it uses, the placement says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.adapter_format.packed import PackedAffine
from common.adapter_format.parts import PackedPart
from worker.kernels.layout import Site
from worker.kernels.tiles import PlacedAdapter


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A place adapters attach: the features its modules read, and what each of them writes, in the fused order."""

    in_features: int
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedModule:
    """One module of an adapter, which the base has."""

    name: str
    layer: int
    site: Site
    index: int
    """Its number in the site's fused order."""
    out: int
    """First column of the site's output that it writes to."""
    parts: tuple[PackedPart, ...]
    affine: PackedAffine | None = None


class Placer(Protocol):
    """Lays adapters out in the arena of one backend. `place` may run on any thread, several at a time."""

    usable_chunk_bytes: int
    """An adapter whose file has so many bytes needs at most one chunk for each, and one more."""

    def place(
        self, slot: int, version_digest: str, modules: Sequence[PlacedModule], chunk_ids: Sequence[int]
    ) -> PlacedAdapter:
        """Copy an adapter into the first of the chunks `chunk_ids` of the arena, which no enqueued step reads.

        When this returns, steps may use the adapter. `slot` is one that no step uses. Raises ResourceExhausted when the
        chunks do not hold it, or UnsupportedAdapter; then nothing of it is left.
        """
        ...

    def forget(self, slot: int) -> None:
        """Note that the slot is empty, and that its adapter's chunks will be written to."""
        ...
