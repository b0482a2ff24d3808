"""A base model of random weights on a device, behind the worker's own runner, and adapters of random bytes.

Shapes are Llama-3.1-8B's, or toys for a dry run. Nothing is downloaded, and nothing the steps compute means anything:
`bench.gpu_checks` is where kernels are held against the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bench.lora_parts import random_part
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.engine.plan import BASE_SLOT, NewRequest, SequenceStep, StepPlan
from worker.kernels.layout import BLOCK_TOKENS, Arena, AttentionShape, Batch
from worker.kernels.linear import Linear
from worker.kernels.placing import SiteShape
from worker.kernels.triton.adapters import TableAdapter
from worker.kernels.triton.attention import attention, attention_room
from worker.kernels.triton.backend import FORMATS, TritonKernels
from worker.kernels.triton.directory import AdapterImage, build_image
from worker.kernels.triton.lora import LoraConfig, allocate_h, expand, shrink
from worker.kernels.triton.plan import plan_step
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.tiles import Format, cut
from worker.mailbox import Sampling
from worker.model.batch import build_step
from worker.model.config import ModelConfig
from worker.model.decoder import Decoder
from worker.model.rope import RopeConfig
from worker.model.runner import ModelRunner
from worker.model.sampler import Sampler
from worker.model.weights import LayerWeights, ModelWeights

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
        """Heads, and the chunk by them."""
        return AttentionShape(self.layers, self.heads, self.kv_heads, self.head_dim)

    @property
    def config(self) -> ModelConfig:
        """As config.json would say it; biases and norms that there might be are not."""
        rope = RopeConfig("default", 500_000.0, self.head_dim)
        flags = dict.fromkeys(("tied_embeddings", "qk_norm", "qkv_bias", "o_bias", "mlp_bias"), False)
        return ModelConfig(
            "llama", self.vocab, self.hidden, self.inner, self.layers, self.heads, self.kv_heads, self.head_dim, EPS,
            rope, self.context + BLOCK_TOKENS, **flags,
        )  # fmt: skip

    @property
    def base(self) -> BaseShape:
        """What adapters fit."""
        return BaseShape("", self.layers, self.config.module_shapes())

    @property
    def sites(self) -> tuple[SiteShape, ...]:
        """qkv, o, gate_up, down."""
        return self.base.sites()

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


class Slots(DeviceAdapters):
    """Slots that are filled with copies of one image, not from files."""

    def put(self, slot: int, adapter: TableAdapter) -> None:
        """Take an adapter that lies in the arena."""
        self._slots[slot] = adapter


class Base:
    """A model whose requests have the full context, in a runner with graphs and in one without.

    Chunks from `first_adapter_chunk` on are the adapters'.
    """

    def __init__(self, shapes: Shapes, device: torch.device, *, batch: int, adapter_chunks: int) -> None:
        self.shapes, self.device, self.batch = shapes, device, batch
        config, dtype = shapes.config, torch.bfloat16

        def random(*shape: int, std: float) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, std)

        def linear(site: SiteShape) -> Linear:
            return Linear.plain(random(sum(site.widths), site.in_features, std=0.5 / site.in_features**0.5), None)

        norm = torch.ones(shapes.hidden, dtype=dtype, device=device)
        layers = tuple(
            LayerWeights(norm, linear(qkv), None, linear(o), norm, linear(gate_up), linear(down))
            for qkv, o, gate_up, down in [shapes.sites] * shapes.layers
        )
        head = Linear.plain(random(shapes.vocab, shapes.hidden, std=0.02), None)
        weights = ModelWeights(head, layers, norm, head)
        self.chunk_bytes = shapes.attention.block_elements * 2
        self.blocks_each = -(-(shapes.context + 1) // BLOCK_TOKENS)
        self.first_adapter_chunk = batch * self.blocks_each
        chunks = self.first_adapter_chunk + adapter_chunks
        self.arena = Arena(shapes.attention, num_chunks=chunks, dtype=dtype, device=device)
        self.arena.kv[: self.first_adapter_chunk].normal_(0, 1)
        cos, sin = (table.to(device) for table in config.rope.tables(config.max_context_tokens))
        self.kernels = TritonKernels(self.arena, cos, sin)
        self.placer = self.kernels.placer(shapes.sites, num_slots=batch)
        self.slots = Slots(shapes.base, self.arena, num_slots=batch, placer=self.placer)
        decoder = Decoder(config, weights, self.kernels)

        def runner(*, graphs: bool) -> ModelRunner:
            return ModelRunner(
                config, decoder, Sampler(()), self.arena, self.slots, self.kernels, device=device, dtype="bfloat16",
                max_context_tokens=config.max_context_tokens, max_running_requests=batch, max_prefill_tokens=512,
                eos_token_ids=frozenset(), cuda_graphs=graphs,
            )  # fmt: skip

        self.with_graphs, self.without = runner(graphs=True), runner(graphs=False)
        self.decoder = decoder

    def sequences(self, batch: int, slots: list[int] | None) -> list[SequenceStep]:
        """One row each of `batch` requests at the full context, with the adapters in `slots` or without."""
        return [
            SequenceStep(
                n,
                (n % self.shapes.vocab,),
                self.shapes.context,
                tuple(range(n * self.blocks_each, (n + 1) * self.blocks_each)),
                BASE_SLOT if slots is None else slots[n],
                sample=True,
            )
            for n in range(batch)
        ]

    def layout(self, batch: int, slots: list[int] | None) -> Batch:
        """Return the rows of such a step."""
        return build_step(self.sequences(batch, slots), self.slots.get).batch

    def announce(self) -> None:
        """Tell both runners of greedy requests."""
        for each in (self.with_graphs, self.without):
            new = tuple(NewRequest(n, (0,), Sampling(temperature=0.0)) for n in range(self.batch))
            each.execute(StepPlan(0, new, (), ()))


def fill_slots(base: Base, fmt: Format, rank: int) -> AdapterImage:
    """Fill all slots with adapters of one rank and format: one layer's random factors, a copy of its own for each."""
    shapes, table = base.shapes, base.placer.table
    tiles = {}
    for site, part in base.placer.geometry.modules():
        width = shapes.sites[site].widths[part]
        made, _ = random_part(fmt, rank, shapes.sites[site].in_features, width, 10 * site + part)
        tiles[site, part] = [cut((made,))] * shapes.layers
    image = build_image(base.placer.geometry, shapes.layers, tiles, base.chunk_bytes)
    each = len(image.chunks)
    on_device = torch.from_numpy(image.chunks).to(base.device)
    memory = base.arena.memory.view(base.arena.num_chunks, -1)
    nothing = np.zeros((0, 9), dtype=np.int64)
    for slot in range(base.batch):
        first = base.first_adapter_chunk + slot * each
        memory[first : first + each] = on_device
        base.slots.release(slot)
        table.put(slot, image, range(first, first + each))
        base.slots.put(slot, TableAdapter("", nothing, nothing[:, 0], image.tile_bytes, each, slot))
    return image


def attention_alone(base: Base, batch: int) -> Callable[[], None]:
    """Return a call that computes the attention of a decode step in all layers."""
    shape, device = base.shapes.attention, base.device
    (work,) = plan_step(shape, None, base.layout(batch, None)).to(device).attention
    room = attention_room(shape, len(work.items), device)
    q = torch.zeros(batch, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    out, platform = torch.empty_like(q), Platform.of(device, torch.bfloat16)

    def call() -> None:
        for layer in range(shape.num_layers):
            attention(shape, platform, q, base.arena.memory, layer, work, room, out)

    return call


def lora_alone(base: Base, batch: int, *, kernel: Literal["shrink", "expand"]) -> Callable[[], None]:
    """Return a call that computes one half of a decode step's LoRA at all sites of all layers."""
    device, table = base.device, base.placer.table
    (work,) = plan_step(base.shapes.attention, table, base.layout(batch, list(range(batch)))).to(device).lora
    config = LoraConfig(base.placer.geometry, Platform.of(device, torch.bfloat16), FORMATS)
    h = allocate_h(config, work, device).zero_()
    inputs = [torch.ones(batch, site.in_features, dtype=torch.bfloat16, device=device) for site in base.shapes.sites]
    deltas = [torch.empty(batch, sum(site.widths), dtype=torch.bfloat16, device=device) for site in base.shapes.sites]

    def call() -> None:
        for layer in range(base.shapes.layers):
            for site, (x, delta) in enumerate(zip(inputs, deltas, strict=True)):
                if kernel == "shrink":
                    shrink(config, site, x, base.arena.memory, table.entries[layer], work, h)
                else:
                    expand(config, site, delta, base.arena.memory, table.entries[layer], work, h, add=False)

    return call
