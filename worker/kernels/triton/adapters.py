"""`Placer` for the Triton kernels: an adapter's tiles in its chunks, its entries in the table on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.errors import ResourceExhausted, UnsupportedAdapter
from loraplex.ranks import MAX_GPU_RANK
from worker.kernels.layout import Arena
from worker.kernels.placing import PlacedModule, SiteShape
from worker.kernels.tiles import Field, PlacedAdapter
from worker.kernels.triton.directory import AdapterImage, Geometry, TileTable, build_image
from worker.kernels.triton.packed_parts import rank_part
from worker.kernels.triton.tile_sizes import usable_chunk_bytes
from worker.kernels.triton.tiles import Bytes, RankTile, affine_tiles, cut


@dataclass(frozen=True, slots=True, eq=False)
class TableAdapter(PlacedAdapter):
    """An adapter that kernels find by its slot in the table; it has no records."""

    slot: int


class TablePlacer:
    """Owns the table. Adapters are copied on a stream of their own, after all that the engine's has enqueued."""

    def __init__(self, arena: Arena, sites: Sequence[SiteShape], *, num_slots: int) -> None:
        """Take the table's memory."""
        self.geometry = Geometry(tuple(sites), MAX_GPU_RANK)
        self._num_layers, self._chunk_bytes = arena.shape.num_layers, arena.chunk_bytes
        self._chunks = arena.memory.view(arena.num_chunks, arena.chunk_bytes)
        device = arena.memory.device
        self.table = TileTable(
            self.geometry,
            num_layers=self._num_layers,
            num_slots=num_slots,
            chunk_bytes=arena.chunk_bytes,
            device=device,
        )
        self.usable_chunk_bytes = usable_chunk_bytes(sites, arena.chunk_bytes)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def place(
        self, slot: int, version_digest: str, modules: Sequence[PlacedModule], chunk_ids: Sequence[int]
    ) -> TableAdapter:
        """See Placer."""
        image = self._image(modules)
        used = len(image.chunks)
        if used > len(chunk_ids):
            raise ResourceExhausted(
                f"the adapter needs {used} chunks of {self._chunk_bytes} bytes, {len(chunk_ids)} were given"
            )
        with self._beside_steps():
            self._copy(image, chunk_ids[:used])
            self.table.put(slot, image, chunk_ids[:used])
        records = np.zeros((0, len(Field)), dtype=np.int64)
        return TableAdapter(version_digest, records, records.reshape(-1), image.tile_bytes, used, slot)

    def forget(self, slot: int) -> None:
        """See Placer. On the engine's stream: what is enqueued still reads the entries, a later load writes them."""
        self.table.clear(slot)

    def _image(self, modules: Sequence[PlacedModule]) -> AdapterImage:
        tiles: dict[tuple[int, int], list[tuple[RankTile, ...]]] = {}
        affines: dict[tuple[int, int], list[tuple[Bytes, ...]]] = {}
        for module in modules:
            if sum(part.rank for part in module.parts) > MAX_GPU_RANK:
                raise UnsupportedAdapter(
                    f"{module.name} has a rank above {MAX_GPU_RANK}, the largest that workers on GPUs compute; "
                    "register it with a lower rank, or serve it with workers on CPUs",
                    field="rank",
                    limit=MAX_GPU_RANK,
                )
            by_layer = tiles.setdefault((module.site, module.index), [()] * self._num_layers)
            by_layer[module.layer] = cut(tuple(rank_part(part) for part in module.parts))
            if module.affine is not None:
                of_layers = affines.setdefault((module.site, module.index), [()] * self._num_layers)
                of_layers[module.layer] = affine_tiles(module.affine.scale, module.affine.shift)
        return build_image(self.geometry, self._num_layers, tiles, self._chunk_bytes, affines)

    def _copy(self, image: AdapterImage, chunk_ids: Sequence[int]) -> None:
        if self._device.type == "cpu":
            memory = self._chunks.numpy()
            memory[list(chunk_ids)] = image.chunks
            return
        host = torch.empty(image.chunks.shape, dtype=torch.uint8, pin_memory=True)
        host.numpy()[...] = image.chunks
        for chunk, content in zip(chunk_ids, host, strict=True):
            self._chunks[chunk].copy_(content, non_blocking=True)

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Enqueue on the loading stream, and wait for it: also after an error, as the chunks then get another owner.

        Steps run on the default stream. All that is enqueued there now may read what the chunks held before.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()
