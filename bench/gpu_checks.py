"""Every Triton kernel against plain float32 torch, on the device there is; errors are ‖difference‖ / ‖expected‖.

Of drawing, the error is the share of rows that draw another token than torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.gpu_model import EPS, Shapes
from bench.lora_rig import Adapter, Rig, relative_error
from worker.kernels import reference
from worker.kernels.draws import Draws
from worker.kernels.layout import BLOCK_TOKENS
from worker.kernels.triton.attention import (
    AttentionWork,
    attention,
    attention_room,
    decode_items,
    prefill_items,
    queries_per_key,
    rope,
)
from worker.kernels.triton.drawing import draw
from worker.kernels.triton.fused import add_norm, rms_norm, silu_mul
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.tiles import Format
from worker.kernels.triton.work import DECODE_GROUP_ROWS, PREFILL_GROUP_ROWS
from worker.mailbox import Sampling
from worker.model import choice

LIMIT = 1.2e-2
"""bfloat16 operands of products (h, the softmax's weights) and one rounding at the end."""
DRAWN = {
    "free": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
    "top-k": Sampling(temperature=0.8, top_k=40),
    "all filters": Sampling(temperature=1.5, top_k=1000, top_p=0.9, min_p=0.001),
    "hot top-p": Sampling(temperature=2.0, top_p=0.99),
}


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison with the reference."""

    name: str
    error: float

    @property
    def ok(self) -> bool:
        """Within the limit; NaN is not."""
        return self.error < LIMIT


def checks(shapes: Shapes, device: torch.device) -> Iterator[Check]:
    """Yield the checks one by one."""
    yield from _lora(shapes, device)
    yield from _attention(shapes, device)
    yield from _between(shapes, device)
    yield from _drawing(shapes, device)


def drawing(shapes: Shapes, device: torch.device, name: str, rows: int) -> tuple[Callable[[], Tensor], ...]:
    """Return calls that draw so many rows' tokens in one of the ways of DRAWN: by the kernel, and by torch."""
    sampling = DRAWN[name]
    logits = torch.empty(rows, shapes.vocab, dtype=torch.float32, device=device).normal_(0, 4)
    uniforms = np.random.default_rng(rows).random(rows)
    draws = Draws.of(range(rows), [sampling] * rows, uniforms)
    # Of a copy each, as both overwrite what they draw from.
    return lambda: draw(logits.clone(), draws), lambda: choice.draw(logits.clone(), [sampling] * rows, uniforms)


def _drawing(shapes: Shapes, device: torch.device) -> Iterator[Check]:
    for name in DRAWN:
        by_kernel, by_torch = drawing(shapes, device, name, 4 if shapes.hidden <= 1024 else 256)
        drawn = by_kernel()
        yield Check(f"drawing {name}", float((drawn != by_torch()).float().mean()))
        yield Check(f"drawing {name} again", float((drawn != by_kernel()).float().mean()))


def _lora(shapes: Shapes, device: torch.device) -> Iterator[Check]:
    ranks = (8, 16, 64) if shapes.hidden > 1024 else (4, 16)
    for site, name in ((shapes.sites[0], "qkv"), (shapes.sites[3], "down")):
        slices = len(site.widths)
        kinds = [(fmt, rank) for fmt in Format for rank in ranks] + [(Format.INT8, 40)]
        chunk_bytes = max(128 * 1024, shapes.attention.block_elements * 2)
        adapters = [Adapter.uniform(fmt, rank, slices) for fmt, rank in kinds]
        rig = Rig(site.in_features, site.widths, adapters, device=device, chunk_bytes=chunk_bytes)
        slots = [*range(len(kinds)), -1, 0, 0, 1]
        for kind, group_rows in (("decode", DECODE_GROUP_ROWS), ("prefill", PREFILL_GROUP_ROWS)):
            x = rig.x(len(slots))
            delta = torch.zeros(len(slots), sum(site.widths), dtype=torch.bfloat16, device=device)
            rig.run(x, slots, delta, group_rows=group_rows, add=False)
            expected = rig.reference(x, slots)
            for row, (fmt, rank) in enumerate(kinds):
                yield Check(f"lora {kind} {name} {fmt.name} r={rank}", relative_error(delta[row], expected[row]))
            yield Check(f"lora {kind} {name} all rows", relative_error(delta, expected))
            added = x.new_ones(delta.shape)
            rig.run(x, slots, added, group_rows=group_rows, add=True)
            yield Check(f"lora {kind} {name} added", relative_error(added, expected + 1))


def _attention(shapes: Shapes, device: torch.device) -> Iterator[Check]:
    shape, platform = shapes.attention, Platform.of(device, torch.bfloat16)
    toy = shapes.hidden <= 1024
    lengths = [1, 17, 40] if toy else [1, 17, 255, 256, 257, 1000, 4096]
    blocks_each = [-(-length // BLOCK_TOKENS) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(sum(blocks_each) + 4, generator=generator).to(torch.int32)
    kv_shape = (len(order), shape.num_layers, 2, shape.num_kv_heads, BLOCK_TOKENS, shape.head_dim)
    chunks = torch.empty(kv_shape, dtype=torch.bfloat16, device=device).normal_(0, 1)
    first = [sum(blocks_each[:n]) for n in range(len(lengths))]
    for request, (start, count) in enumerate(zip(first, blocks_each, strict=True)):
        mine = order[start : start + count]
        used = lengths[request] % BLOCK_TOKENS
        if used:
            chunks[int(mine[-1]), :, :, :, used:] = torch.nan
    chunks[order[sum(blocks_each) :].long()] = torch.nan
    layer, arena, blocks = shape.num_layers - 1, chunks.view(-1).view(torch.uint8), order.to(device)

    def run(items: NDArray[np.int32], rows: NDArray[np.int32] | None, q: Tensor) -> Tensor:
        of_rows = None if rows is None else torch.from_numpy(rows).to(device)
        work = AttentionWork(torch.from_numpy(items).to(device), blocks, of_rows)
        out = torch.empty_like(q)
        attention(shape, platform, q, arena, layer, work, attention_room(shape, len(items), device), out)
        return out

    def expected(q: Tensor, request: int, position: int) -> Tensor:
        ids = order[first[request] :][: blocks_each[request]].long().to(device)
        seen = chunks[ids, layer].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : position + len(q)]
        keys, values = (part.repeat_interleave(queries_per_key(shape), dim=0) for part in seen)
        score = torch.einsum("thd,hnd->htn", q.float(), keys) / math.sqrt(shape.head_dim)
        visible = (
            torch.arange(position + len(q), device=device)
            <= torch.arange(position, position + len(q), device=device)[:, None]
        )
        return torch.einsum("htn,hnd->thd", score.masked_fill(~visible, -torch.inf).softmax(-1), values)

    q = torch.empty(len(lengths), shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device).normal_(0, 1)
    decodes = [(first[n], n, length - 1) for n, length in enumerate(lengths)]
    out = run(*decode_items(np.array(decodes)), q)
    for n, length in enumerate(lengths):
        yield Check(
            f"attention decode {length} keys", relative_error(out[n : n + 1], expected(q[n : n + 1], n, length - 1))
        )
    last, rows = len(lengths) - 1, min(300, lengths[-1])
    position = lengths[-1] - rows
    q = torch.empty(rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device).normal_(0, 1)
    for begin, name in ((0, "from the start"), (position, "at the end")):
        out = run(prefill_items(shape, [(first[last], 0, rows, begin)]), None, q)
        yield Check(f"attention prefill {rows} rows {name}", relative_error(out, expected(q, last, begin)))


def _between(shapes: Shapes, device: torch.device) -> Iterator[Check]:
    shape, rows = shapes.attention, 33
    adapted = (torch.arange(rows, device=device) % 2).to(torch.int32)

    def random(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 1)

    def added(delta: Tensor) -> Tensor:
        return delta.float() * adapted[:, None]

    residual, x, weight, out = (random(rows, shapes.hidden) for _ in range(4))
    delta, weight = random(rows, shapes.hidden), weight[0].contiguous()
    summed = residual.float() + x.float() + added(delta)
    add_norm(residual, x, weight, EPS, out, delta=(delta, adapted))
    yield Check("residual", relative_error(residual, summed))
    yield Check("residual + norm", relative_error(out, reference.rms_norm(summed, weight, EPS)))
    rms_norm(residual, weight, EPS, out)
    yield Check("norm", relative_error(out, reference.rms_norm(residual.float(), weight, EPS)))
    gate_up, delta = random(rows, 2 * shapes.inner), random(rows, 2 * shapes.inner)
    inner = random(rows, shapes.inner)
    silu_mul(gate_up, inner, delta=(delta, adapted))
    yield Check("silu", relative_error(inner, reference.silu_mul(gate_up.float() + added(delta))))
    heads = shape.num_heads + 2 * shape.num_kv_heads
    turned = shape.num_heads + shape.num_kv_heads
    qkv, delta = random(rows, heads * shape.head_dim), random(rows, heads * shape.head_dim)
    norm = random(turned, shape.head_dim)
    angles = torch.rand(64, shape.head_dim // 2, device=device) * 6
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    chunks = torch.zeros(
        3, shape.num_layers, 2, shape.num_kv_heads, BLOCK_TOKENS, shape.head_dim, dtype=torch.bfloat16, device=device
    )
    q = random(rows, shape.num_heads, shape.head_dim)
    rope(
        shape, qkv, angles.cos(), angles.sin(), positions, positions.long(), q, chunks.view(-1).view(torch.uint8), 0,
        delta=(delta, adapted), norm=(norm, EPS),
    )  # fmt: skip
    wide = (qkv.float() + added(delta)).view(rows, heads, shape.head_dim)
    at = angles[:rows, None]
    rotated = reference.rotate(reference.rms_norm(wide[:, :turned], norm, EPS), at.cos(), at.sin())
    yield Check("rotation", relative_error(q, rotated[:, : shape.num_heads]))
    cached = chunks[:, 0].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :rows]
    yield Check("cached keys", relative_error(cached[0], rotated[:, shape.num_heads :]))
    yield Check("cached values", relative_error(cached[1], wide[:, turned:]))
