"""A small arena with random adapters in it, and what their factors make of x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.lora_parts import Factors, Floats, random_part
from worker.kernels.placing import SiteShape
from worker.kernels.triton.directory import Geometry, TileTable, build_image
from worker.kernels.triton.lora import LoraConfig, allocate_h, expand, shrink
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.tiles import Format, RankTile, cut
from worker.kernels.triton.work import plan_work, to_device

CPU = torch.device("cpu")
LAYERS = 2

Parts = Sequence[tuple[Format, int]]
"""A module's parts: format and rank."""


@dataclass(frozen=True)
class Adapter:
    """Parts by layer and slice; None where it does not attach."""

    layers: Sequence[Sequence[Parts | None]]

    @classmethod
    def uniform(cls, fmt: Format, rank: int, slices: int) -> Adapter:
        """One part of the same rank in every module of every layer."""
        return cls([[[(fmt, rank)]] * slices] * LAYERS)

    @property
    def most_rank(self) -> int:
        """Largest rank of a module."""
        return max(sum(rank for _, rank in parts) for layer in self.layers for parts in layer if parts)


class Rig:
    """One site with `features` inputs and `widths` outputs; chunks are scattered over an arena full of garbage."""

    def __init__(
        self,
        features: int,
        widths: tuple[int, ...],
        adapters: Sequence[Adapter],
        *,
        device: torch.device = CPU,
        chunk_bytes: int = 128 * 1024,
        seed: int = 0,
    ) -> None:
        self.features, self.widths, self.device = features, widths, device
        self.geometry = Geometry(
            (SiteShape(32, (16,)), SiteShape(features, widths)), max(a.most_rank for a in adapters)
        )
        self.table = TileTable(
            self.geometry, num_layers=LAYERS, num_slots=len(adapters), chunk_bytes=chunk_bytes, device=device
        )
        random = np.random.default_rng(seed)
        self.factors: list[dict[tuple[int, int], list[Factors]]] = []
        images = []
        for slot, adapter in enumerate(adapters):
            tiles: dict[tuple[int, int], list[tuple[RankTile, ...]]] = {(1, n): [] for n in range(len(widths))}
            factors: dict[tuple[int, int], list[Factors]] = {}
            for layer, modules in enumerate(adapter.layers):
                for n, parts in enumerate(modules):
                    made = [
                        random_part(fmt, rank, features, widths[n], 1000 * slot + 100 * layer + 10 * n + index)
                        for index, (fmt, rank) in enumerate(parts or ())
                    ]
                    tiles[1, n].append(cut(tuple(part for part, _ in made)))
                    factors[layer, n] = [of for _, of in made]
            images.append(build_image(self.geometry, LAYERS, tiles, chunk_bytes))
            self.factors.append(factors)
        free = random.permutation(sum(len(image.chunks) for image in images) + 2).tolist()
        garbage = random.integers(0, 256, (len(free), chunk_bytes), dtype=np.uint8)
        self.arena = torch.from_numpy(garbage).to(device)
        for slot, image in enumerate(images):
            ids = [free.pop() for _ in image.chunks]
            self.arena[ids] = torch.from_numpy(image.chunks).to(device)
            self.table.put(slot, image, ids)

    def x(self, rows: int) -> Tensor:
        """Random inputs in bfloat16, the same for the same number of rows."""
        return (
            torch.randn(rows, self.features, generator=torch.Generator().manual_seed(rows)).bfloat16().to(self.device)
        )

    def run(self, x: Tensor, slots: Sequence[int], y: Tensor, *, group_rows: int, add: bool, layer: int = 1) -> None:
        """Shrink and expand, with h full of NaN before."""
        config = LoraConfig(self.geometry, Platform.of(self.device, torch.bfloat16))
        work = to_device(plan_work(np.array(slots), self.table, group_rows=group_rows), self.device)
        h = allocate_h(config, work, self.device).fill_(torch.nan)
        entries = self.table.entries[layer]
        shrink(config, 1, x, self.arena.view(-1), entries, work, h)
        expand(config, 1, y, self.arena.view(-1), entries, work, h, add=add)

    def reference(self, x: Tensor, slots: Sequence[int], layer: int = 1) -> Tensor:
        """Σ b (a x) in float32, from the decoded factors."""
        out = torch.zeros(len(slots), sum(self.widths), device=self.device)
        for row, slot in enumerate(slots):
            columns = torch.split(out[row], list(self.widths))
            for n in range(len(self.widths)):
                for of in self.factors[slot][layer, n] if slot >= 0 else ():
                    columns[n].add_(self._tensor(of.b) @ (self._tensor(of.a) @ x[row].float()))
        return out

    def _tensor(self, array: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖."""
    return float((actual.float() - expected).norm() / expected.norm())
