"""Which kernels a worker computes with: the device's own where they can compute this model, else torch's operators."""

from __future__ import annotations

import importlib.util
from typing import Final

import structlog
import torch

from worker.kernels.eager import EagerBackend
from worker.kernels.interface import Backend
from worker.kernels.layout import AttentionShape
from worker.kernels.placing import SiteShape

log = structlog.get_logger(__name__)

MAX_HEAD_DIM: Final = 128
"""Larger heads would not fit the shared memory that the attention kernel is compiled for."""
MAX_WIDTH: Final = 16384
"""Of hidden states: a program of the norm kernel holds a whole row."""
MIN_CAPABILITY: Final = (8, 0)
"""The first generation of GPUs that multiplies bfloat16."""


def choose_backend(
    shape: AttentionShape,
    sites: tuple[SiteShape, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
) -> Backend:
    """Return the kernels for a device and a model's shape; `dtype` is that of its KV, `threads` compute on a CPU."""
    if device.type == "cpu":
        # Their compiler takes a second to import, which a GPU's worker can do without.
        from worker.kernels.cpu.backend import CpuBackend  # noqa: PLC0415
        from worker.kernels.cpu.pool import shared_pool  # noqa: PLC0415

        return CpuBackend(shared_pool(threads))
    reason = why_not_triton(shape, sites, dtype=dtype, capability=_capability(device)) or _why_it_does_not_run(device)
    if reason is not None:
        log.warning("kernels.eager", device=device.type, reason=reason)
        return EagerBackend()
    from worker.kernels.triton.backend import TritonBackend  # noqa: PLC0415 - Triton is there on GPUs only

    log.info("kernels.triton", device=device.type)
    return TritonBackend()


def why_not_triton(
    shape: AttentionShape, sites: tuple[SiteShape, ...], *, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Return why the Triton kernels cannot compute a model, None if they can. `capability` is a CUDA device's."""
    if capability is None:
        return "the Triton kernels are for CUDA devices"
    if capability < MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}; the Triton kernels need 8.0"
    if dtype != torch.bfloat16:
        return f"the Triton kernels compute in bfloat16, not in {dtype}; give --dtype bfloat16"
    head_dim = shape.head_dim
    if head_dim % 2 or not 8 < head_dim <= MAX_HEAD_DIM:
        return f"the model's heads have {head_dim} dimensions; the Triton kernels compute even numbers up to 128"
    hidden = sites[0].in_features
    if hidden > MAX_WIDTH:
        return f"the model's hidden states have {hidden} features; the Triton kernels compute up to {MAX_WIDTH}"
    from worker.kernels.triton.tile_sizes import usable_chunk_bytes  # noqa: PLC0415

    chunk_bytes = shape.block_elements * dtype.itemsize
    if usable_chunk_bytes(sites, chunk_bytes) < 1:
        return f"a chunk of this model, {chunk_bytes} bytes, does not hold an adapter's tile"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _why_it_does_not_run(device: torch.device) -> str | None:
    """Run one small kernel: Triton needs a C compiler on the machine, and a driver that its version knows."""
    try:
        from worker.kernels.triton.fused import rms_norm  # noqa: PLC0415

        ones = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
        rms_norm(ones, ones[0], 0.0, torch.empty_like(ones))
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - whatever Triton raises: a slower worker is better than none
        return f"Triton does not run here: {error}"
    return None
