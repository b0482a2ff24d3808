"""What the machine asks of the kernels' compile-time choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

COMPILE: Final = {"enable_fp_fusion": True}
"""Options of every launch. Fused multiply-add is said aloud because Triton's default is about to change."""


def power_of_2(count: int) -> int:
    """Round up to a power of two, as the lengths of Triton's ranges must be."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Platform:
    """Choices that follow from the device and from nothing else."""

    dot: Any
    """Triton dtype of the operands of matrix products."""
    slow_int8: bool
    """INT8 becomes floating point by arithmetic on bits, as the conversion instruction is slow."""
    stages: int
    """Loads in flight in loops."""

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Platform:
        """Return the choices for a 16-bit model on CUDA or in the interpreter. Raises ValueError for others."""
        names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        if triton.knobs.runtime.interpret:  # which computes in float32 whatever the model's dtype
            return cls(tl.float32, slow_int8=False, stages=1)
        if dtype not in names:
            raise ValueError(f"the Triton kernels compute models of bfloat16 or float16, not {dtype}")
        if device.type != "cuda":
            raise ValueError(f"the Triton kernels run on CUDA devices, not on {device}")
        old = torch.cuda.get_device_capability(device) < (9, 0)  # less shared memory, slow conversions
        return cls(names[dtype], slow_int8=old, stages=2 if old else 3)
