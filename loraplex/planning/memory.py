"""The memory of one worker, as it will divide it: base weights, arena, and what is left for intermediate results.

The arena is one allocation of equal chunks, each a KV block of 16 tokens or a part of adapters. Sizes of
weights, tables and chunks are exact; what is marked so is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex.errors import InvalidParameter
from loraplex.planning.adapters import BLOCK_TOKENS, Layout, table_bytes_per_slot
from loraplex.planning.devices import Device
from loraplex.planning.shapes import DTYPE_BYTES, MODULES, SITES, ModelShape

CUDA_FRACTION: Final = 0.8
CPU_FRACTION: Final = 0.25
CPU_DEFAULT_BYTES: Final = 2**30
"""What the arena takes where nobody says: of what is free once the weights are loaded."""
WATERMARK: Final = 0.01
"""Share of the arena that is kept for running requests to grow when others or adapters come."""
CONTEXT_BYTES: Final = 700 * 2**20
"""Of a GPU, before the first tensor: driver, libraries, compiled kernels. An estimate."""
PROCESS_BYTES: Final = 900 * 2**20
"""Of a CPU's memory beside weights and arena: two Python processes with torch. An estimate."""
MOST_STEP_TOKENS: Final = 2048
"""A step computes no more tokens, unless a worker is told otherwise."""

_MAX_NUMBER: Final = 10**9  # of requests, tokens and adapters: more is a slip
_PANEL_OUTPUTS: Final = 32  # weights on a CPU lie in panels, filled up to so many outputs
_ROOM_BYTES: Final = 128 * 2**20  # of attention's partial results on a GPU
_KEYS_PER_SPLIT: Final = 256
_TILES_PER_MODULE: Final = 17


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How one worker is to be set up. None leaves a size to the worker's own rule; `dtype` auto likewise."""

    concurrency: int = 16
    context_tokens: int = 2048
    """Prompt plus answer of each of `concurrency` requests."""
    dtype: str = "auto"
    base_quantization: str = "none"
    arena_bytes: int | None = None
    max_resident_adapters: int = 32
    max_running_requests: int = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the account."""

    name: str
    num_bytes: int
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Where a device's memory goes. Chunks are the arena's; the KV cache asked for and a reserve come first."""

    device_bytes: int
    layout: Layout
    dtype: str
    base_bytes: int
    arena_bytes: int
    fixed: tuple[Item, ...]
    """Taken before the arena."""
    workspace: tuple[Item, ...]
    """Taken beside the arena, of what it leaves."""
    chunk_bytes: int
    num_chunks: int
    kv_bytes_per_token: int
    max_context_tokens: int
    kv_chunks: int
    """For the requests asked for, each with its whole context."""
    reserve_chunks: int
    """Kept free beside them when an adapter is loaded."""

    @property
    def adapter_chunks(self) -> int:
        """Chunks for adapters beside those requests."""
        return self.num_chunks - self.kv_chunks - self.reserve_chunks

    @property
    def spare_bytes(self) -> int:
        """What is left of the device's memory; negative where the workspace may not fit."""
        taken = self.base_bytes + self.arena_bytes + sum(item.num_bytes for item in (*self.fixed, *self.workspace))
        return self.device_bytes - taken


def account(shape: ModelShape, device: Device, plan: WorkerPlan) -> MemoryAccount:
    """Divide a device's memory as a worker does. Raises InvalidParameter, naming the flag, for what does not fit."""
    _check(shape, device, plan)
    on_cpu = device.kind == "cpu"
    dtype = plan.dtype
    if dtype == "auto":
        dtype = "bfloat16" if not on_cpu or shape.stored_dtype == "bfloat16" else "float32"
    item_bytes = DTYPE_BYTES[dtype]
    base_bytes = _cpu_weights(shape, plan, dtype) if on_cpu else _gpu_weights(shape, item_bytes)
    fixed = Item(
        "two processes" if on_cpu else "CUDA context and kernels", PROCESS_BYTES if on_cpu else CONTEXT_BYTES, True
    )
    free_bytes = device.memory_bytes - fixed.num_bytes - base_bytes
    chunk_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * BLOCK_TOKENS * item_bytes
    if free_bytes < chunk_bytes:
        raise InvalidParameter(
            f"--device {device.name}: the base takes {_gb(base_bytes)} of its {_gb(device.memory_bytes)}; nothing is "
            "left. A worker has one device: take one with more memory, or a smaller base"
            + (", or --base-quantization int8" if on_cpu and plan.base_quantization == "none" else ""),
            field="device",
        )
    arena_bytes = plan.arena_bytes
    if arena_bytes is None:
        share = int(free_bytes * (CPU_FRACTION if on_cpu else CUDA_FRACTION))
        arena_bytes = min(CPU_DEFAULT_BYTES, share) if on_cpu else share
    elif arena_bytes > free_bytes:
        raise InvalidParameter(
            f"--arena: {_gb(arena_bytes)} are asked for, {_gb(free_bytes)} are free beside the base", field="arena"
        )
    num_chunks = arena_bytes // chunk_bytes
    if num_chunks < 1:
        raise InvalidParameter(
            f"--arena: {arena_bytes} bytes hold no KV block of this model; give {chunk_bytes} at least", field="arena"
        )
    positions = min(shape.max_context_tokens, num_chunks * BLOCK_TOKENS)
    kv_chunks = plan.concurrency * -(-plan.context_tokens // BLOCK_TOKENS)
    reserve = max(plan.concurrency, int(num_chunks * WATERMARK))
    if kv_chunks > num_chunks:
        most = num_chunks // -(-plan.context_tokens // BLOCK_TOKENS)
        remedy = "give a larger --arena, " if on_cpu and plan.arena_bytes is None else ""
        raise InvalidParameter(
            f"--concurrency: {plan.concurrency} requests of {plan.context_tokens} tokens take "
            f"{_gb(kv_chunks * chunk_bytes)} of KV cache, the arena has {_gb(num_chunks * chunk_bytes)}, which is "
            f"{most} such requests; {remedy}lower --concurrency or --context",
            field="concurrency",
        )
    return MemoryAccount(
        device_bytes=device.memory_bytes,
        layout="records" if on_cpu else "table",
        dtype=dtype,
        base_bytes=base_bytes,
        arena_bytes=arena_bytes,
        fixed=(fixed,),
        workspace=_workspace(shape, plan, positions, item_bytes, on_cpu=on_cpu),
        chunk_bytes=chunk_bytes,
        num_chunks=num_chunks,
        kv_bytes_per_token=chunk_bytes // BLOCK_TOKENS,
        max_context_tokens=positions,
        kv_chunks=kv_chunks,
        reserve_chunks=min(reserve, num_chunks - kv_chunks),
    )


def _check(shape: ModelShape, device: Device, plan: WorkerPlan) -> None:
    if not device.memory_bytes:
        raise InvalidParameter(
            f"--memory: say how much memory the {device.name} has, e.g. --memory 16GiB", field="memory"
        )
    for name in ("concurrency", "context_tokens", "max_resident_adapters", "max_running_requests"):
        if not 1 <= getattr(plan, name) <= _MAX_NUMBER:
            flag = "--context" if name == "context_tokens" else f"--{name.replace('_', '-')}"
            given = str(getattr(plan, name))[:40]
            raise InvalidParameter(f"{flag} is {given}; give 1 to {_MAX_NUMBER}", field=flag[2:])
    if plan.context_tokens > shape.max_context_tokens:
        raise InvalidParameter(
            f"--context is {plan.context_tokens}; {shape.name} has positions for {shape.max_context_tokens}",
            field="context",
        )
    if plan.concurrency > plan.max_running_requests:
        raise InvalidParameter(
            f"--concurrency is {plan.concurrency}; a worker computes --max-running-requests "
            f"{plan.max_running_requests} at a time",
            field="concurrency",
        )
    if plan.dtype not in ("auto", "float32", "bfloat16"):
        raise InvalidParameter(f"--dtype {plan.dtype!r} is not known; give auto, float32 or bfloat16", field="dtype")
    if plan.base_quantization not in ("none", "int8"):
        raise InvalidParameter(
            f"--base-quantization {plan.base_quantization!r} is not known; give none or int8", field="base_quantization"
        )
    if plan.base_quantization != "none" and device.kind != "cpu":
        raise InvalidParameter("--base-quantization int8 is for CPUs; leave it out", field="base_quantization")


def _fused(shape: ModelShape) -> list[tuple[int, int, bool]]:
    """Return (in, out, has a bias) of a layer's fused linears."""
    sizes = shape.module_shapes()
    return [
        (sizes[names[0]][0], sum(sizes[name][1] for name in names), shape.has_bias(site))
        for site, names in enumerate(SITES)
    ]


def _norm_elements(shape: ModelShape) -> int:
    """Norms as a worker keeps them: those of heads once for each head."""
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim if shape.qk_norm else 0
    return shape.num_layers * (2 * shape.hidden_size + heads) + shape.hidden_size


def _gpu_weights(shape: ModelShape, item_bytes: int) -> int:
    linears = sum(inner * out + (out if biased else 0) for inner, out, biased in _fused(shape))
    outer = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return (shape.num_layers * linears + outer + _norm_elements(shape)) * item_bytes


def _cpu_weights(shape: ModelShape, plan: WorkerPlan, dtype: str) -> int:
    """Matrices in panels of whole 32 outputs, with float32 biases, and scales where they are int8; norms in float32."""
    item = 2 if shape.stored_dtype == "bfloat16" else DTYPE_BYTES[dtype]
    extra = 4
    if plan.base_quantization == "int8":
        item, extra = 1, 8

    def panels(inner: int, out: int) -> int:
        return -(-out // _PANEL_OUTPUTS) * _PANEL_OUTPUTS * (inner * item + extra)

    layer = sum(panels(inner, out) for inner, out, _ in _fused(shape))
    outer = panels(shape.hidden_size, shape.vocab_size) * (1 if shape.tied_embeddings else 2)
    return shape.num_layers * layer + outer + _norm_elements(shape) * 4


def _workspace(
    shape: ModelShape, plan: WorkerPlan, positions: int, item_bytes: int, *, on_cpu: bool
) -> tuple[Item, ...]:
    rows, sizes = plan.max_running_requests, shape.module_shapes()
    q, kv = sizes["self_attn.q_proj"][1], sizes["self_attn.k_proj"][1]
    widths = 2 * shape.hidden_size + 2 * q + 2 * kv + 3 * shape.intermediate_size
    activations = MOST_STEP_TOKENS * widths * (4 if on_cpu else item_bytes)
    logits = 2 * rows * shape.vocab_size * 4
    items = [
        Item("rotary tables", 4 * positions * shape.head_dim),
        Item(f"activations of a step of {MOST_STEP_TOKENS} tokens", activations, True),
        Item(f"logits of {rows} requests", logits, True),
    ]
    if on_cpu:
        return tuple(items)
    slots = plan.max_resident_adapters
    pieces = min(
        rows * -(-positions // _KEYS_PER_SPLIT), max(_ROOM_BYTES // (4 * shape.num_heads * (shape.head_dim + 2)), rows)
    )
    outputs = sum(sizes[name][1] for name in MODULES)
    h = rows * 3 * _TILES_PER_MODULE * 4 * 8 * 16 * 4  # cells of the site with most modules, 4 parts of 8 rows of 16
    graphs = pieces * shape.num_heads * (shape.head_dim + 2) * 4 + rows * outputs * item_bytes + h
    return (
        Item(f"table of {slots} adapter slots", slots * table_bytes_per_slot(shape)),
        *items,
        Item("buffers of CUDA graphs", graphs, True),
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
