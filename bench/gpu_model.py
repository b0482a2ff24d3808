"""A base model of random weights on a device, its decode step over the Triton kernels, and adapters of random bytes.

Shapes are Llama-3.1-8B's, or toys for a dry run. Nothing is downloaded, and nothing the step computes means anything:
`bench.gpu_checks` is where kernels are held against the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.lora_parts import random_part
from worker.kernels.triton.attention import AttentionShape, AttentionWork, attention, attention_room, rope
from worker.kernels.triton.directory import Geometry, SiteShape, TileTable, build_image
from worker.kernels.triton.fused import add_norm, rms_norm, silu_mul
from worker.kernels.triton.lora import LoraConfig, allocate_h, expand, shrink
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.tiles import Format, cut
from worker.kernels.triton.work import DECODE_GROUP_ROWS, StepWork, plan_work, to_device

BLOCK_TOKENS = 16
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's sizes, and the context that decodes attend to."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    @property
    def attention(self) -> AttentionShape:
        """Heads and chunk."""
        return AttentionShape(self.layers, self.heads, self.kv_heads, self.head_dim)

    @property
    def sites(self) -> tuple[SiteShape, ...]:
        """qkv, o, gate_up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            SiteShape(self.hidden, (q, kv, kv)),
            SiteShape(q, (self.hidden,)),
            SiteShape(self.hidden, (self.inner, self.inner)),
            SiteShape(self.inner, (self.hidden,)),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads, in 16 bit."""
        layer = sum(site.in_features * sum(site.widths) for site in self.sites)
        return 2 * (self.layers * layer + self.vocab * self.hidden)

    def adapter_elements(self, rank: int) -> int:
        """Elements of both factors of all modules."""
        return self.layers * rank * sum(len(s.widths) * s.in_features + sum(s.widths) for s in self.sites)


LLAMA_8B = Shapes(32, 4096, 14336, 32, 8, 128, 128256, 1024)
TOY = Shapes(2, 64, 96, 4, 2, 32, 100, 40)


class Base:
    """Weights and the arena; chunks from `first_adapter_chunk` on are the adapters'."""

    def __init__(self, shapes: Shapes, device: torch.device, *, batch: int, adapter_chunks: int) -> None:
        self.shapes, self.device = shapes, device

        def random(*shape: int, std: float) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std)

        self.weights = [
            [random(sum(site.widths), site.in_features, std=0.5 / site.in_features**0.5) for site in shapes.sites]
            for _ in range(shapes.layers)
        ]
        self.head = random(shapes.vocab, shapes.hidden, std=0.02)
        self.norm = torch.ones(shapes.hidden, dtype=torch.bfloat16, device=device)
        angle = torch.arange(shapes.context + 1, device=device)[:, None] * 0.01
        angle = angle * torch.ones(shapes.head_dim // 2, device=device)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.chunk_bytes = shapes.attention.chunk_bytes(2)
        self.blocks_each = -(-(shapes.context + 1) // BLOCK_TOKENS)
        self.first_adapter_chunk = batch * self.blocks_each
        chunks = self.first_adapter_chunk + adapter_chunks
        self.arena = torch.empty(chunks, self.chunk_bytes, dtype=torch.uint8, device=device)
        self.arena[: self.first_adapter_chunk].view(torch.bfloat16).normal_(0, 1)


class Adapters:
    """`count` resident adapters of one rank and format: one layer's random factors, a copy of its own for each."""

    def __init__(self, base: Base, fmt: Format, rank: int, count: int, formats: frozenset[Format]) -> None:
        shapes = base.shapes
        geometry = Geometry(shapes.sites, rank)
        self.config = LoraConfig(geometry, Platform.of(base.device, torch.bfloat16), formats)
        self.table = TileTable(
            geometry, num_layers=shapes.layers, num_slots=count, chunk_bytes=base.chunk_bytes, device=base.device
        )
        tiles = {}
        for site, part in geometry.modules():
            width = shapes.sites[site].widths[part]
            made, _ = random_part(fmt, rank, shapes.sites[site].in_features, width, 10 * site + part)
            tiles[site, part] = [cut((made,))] * shapes.layers
        image = build_image(geometry, shapes.layers, tiles, base.chunk_bytes)
        self.bytes_each, self.chunks_each = image.tile_bytes, len(image.chunks)
        on_device = torch.from_numpy(image.chunks).to(base.device)
        for slot in range(count):
            first = base.first_adapter_chunk + slot * self.chunks_each
            base.arena[first : first + self.chunks_each] = on_device
            self.table.put(slot, image, range(first, first + self.chunks_each))


class DecodeStep:
    """One decode step of `batch` rows at the full context, with the adapters in `slots` or with none."""

    def __init__(self, base: Base, batch: int, adapters: Adapters | None, slots: list[int]) -> None:
        shapes, device = base.shapes, base.device
        self.base, self.adapters = base, adapters
        shape = shapes.attention
        blocks = torch.arange(batch * base.blocks_each, dtype=torch.int32, device=device).view(batch, -1)
        items = torch.tensor([(n, n, 1, shapes.context) for n in range(batch)], dtype=torch.int32, device=device)
        self.attention = AttentionWork(items, blocks, 1, shapes.context + 1)
        self.room = attention_room(shape, self.attention, device)
        self.positions = torch.full((batch,), shapes.context, dtype=torch.int32, device=device)
        self.slots = blocks[:, -1].long() * BLOCK_TOKENS + shapes.context % BLOCK_TOKENS

        def buffer(width: int) -> Tensor:
            return torch.zeros(batch, width, dtype=torch.bfloat16, device=device)

        self.residual, self.x = buffer(shapes.hidden).normal_(0, 1), buffer(shapes.hidden)
        self.products = [buffer(sum(site.widths)) for site in shapes.sites]
        self.deltas = [buffer(sum(site.widths)) for site in shapes.sites]
        self.q = torch.zeros(batch, shapes.heads, shapes.head_dim, dtype=torch.bfloat16, device=device)
        self.attended, self.inner = torch.zeros_like(self.q), buffer(shapes.inner)
        self.logits = buffer(shapes.vocab)
        self.work: StepWork | None = None
        if adapters is not None:
            plan = plan_work(np.array(slots), adapters.table, group_rows=DECODE_GROUP_ROWS)
            self.work = to_device(plan, device)
            self.h = allocate_h(adapters.config, self.work, device)
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _site(self, layer: int, site: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute the site's product, with shrink and expand beside it on the side stream; return the delta, if any."""
        if self.adapters is None or self.work is None:
            torch.mm(x, self.base.weights[layer][site].t(), out=self.products[site])
            return None
        if self.side is None:
            self._lora(layer, site, x)
        else:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self._lora(layer, site, x)
        torch.mm(x, self.base.weights[layer][site].t(), out=self.products[site])
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        return self.deltas[site], self.work.sites[site].adapted

    def _lora(self, layer: int, site: int, x: Tensor) -> None:
        assert self.adapters is not None
        assert self.work is not None
        config, entries, arena = self.adapters.config, self.adapters.table.entries[layer], self.base.arena.view(-1)
        shrink(config, site, x, arena, entries, self.work, self.h)
        expand(config, site, self.deltas[site], arena, entries, self.work, self.h, add=False)

    def __call__(self) -> None:
        """Run the step once; every buffer stays where it is, so that it can be captured."""
        base, shapes = self.base, self.base.shapes
        shape, arena = shapes.attention, base.arena.view(-1)
        platform = Platform.of(base.device, torch.bfloat16)
        rms_norm(self.residual, base.norm, EPS, self.x)
        for layer in range(shapes.layers):
            delta = self._site(layer, 0, self.x)
            rope(
                shape,
                self.products[0],
                base.cos,
                base.sin,
                self.positions,
                self.slots,
                self.q,
                arena,
                layer,
                delta=delta,
            )
            attention(shape, platform, self.q, arena, layer, self.attention, self.room, self.attended)
            delta = self._site(layer, 1, self.attended.view(len(self.q), -1))
            add_norm(self.residual, self.products[1], base.norm, EPS, self.x, delta=delta)
            delta = self._site(layer, 2, self.x)
            silu_mul(self.products[2], self.inner, delta=delta)
            delta = self._site(layer, 3, self.inner)
            add_norm(self.residual, self.products[3], base.norm, EPS, self.x, delta=delta)
        torch.mm(self.x, base.head.t(), out=self.logits)

    def lora_only(self, kernel: Callable[..., None]) -> None:
        """Run `shrink` or `expand` alone over all layers and sites, as a step does."""
        assert self.adapters is not None
        assert self.work is not None
        config, arena = self.adapters.config, self.base.arena.view(-1)
        inputs = (self.x, self.attended.view(len(self.q), -1), self.x, self.inner)
        for layer in range(self.base.shapes.layers):
            entries = self.adapters.table.entries[layer]
            for site, x in enumerate(inputs):
                if kernel is shrink:
                    shrink(config, site, x, arena, entries, self.work, self.h)
                else:
                    expand(config, site, self.deltas[site], arena, entries, self.work, self.h, add=False)
