"""Which device and number format a worker computes in, from what was asked and what the machine has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.errors import InvalidParameter

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(asked: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`. Raises InvalidParameter when it is not there."""
    available = torch.cuda.is_available()
    if asked == "auto":
        return torch.device("cuda" if available else "cpu")
    if asked not in ("cpu", "cuda"):
        raise InvalidParameter(f"device {asked!r} is not known; give auto, cpu or cuda", field="device")
    if asked == "cuda" and not available:
        raise InvalidParameter("device cuda was asked for, but torch sees no CUDA device; give cpu", field="device")
    return torch.device(asked)


def choose_dtype(asked: str, device: torch.device, *, stored_bfloat16: bool) -> str:
    """Return `float32` or `bfloat16`. Raises InvalidParameter.

    `auto` is bfloat16 on GPUs that have it. CPUs' kernels compute in float32 in any case; there it is the dtype of keys
    and values, and `auto` is bfloat16 if the base is stored so: its answers have been rounded like that in training.
    """
    if asked in DTYPES:
        return asked
    if asked != "auto":
        raise InvalidParameter(f"dtype {asked!r} is not known; give auto, float32 or bfloat16", field="dtype")
    wanted = torch.cuda.is_bf16_supported() if device.type == "cuda" else stored_bfloat16
    return "bfloat16" if wanted else "float32"


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it, or for what the device does; on a CPU the array is shared."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # torch gives this page-locked memory to nobody else before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


class Read:
    """Tensors on their way to the host, behind what the device had been given to do before."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = tuple(tensors)
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._host = tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors)
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Return them on the host, without waiting for what the device was given to do after."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def free_bytes(device: torch.device) -> int:
    """Memory that new allocations could take now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * 2**30  # no Linux: assume a small machine


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
