"""Small arrays on their way to the device: many in one transfer, from page-locked memory where the device is a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to the device on the current stream, without waiting for it.

    torch's allocator of page-locked memory notes the copy, and gives the memory to nobody else before it is done.
    """
    if device.type == "cpu":
        return list(tensors)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    host = torch.empty(_bytes(shapes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for target, tensor in zip(_views(host, shapes), tensors, strict=True):
        target.numpy()[...] = tensor.numpy()
    return _views(host.to(device, non_blocking=True), shapes)


class Staged:
    """Arrays at fixed places on the device: what a captured graph reads, written anew for each step."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._host = torch.zeros(_bytes(shapes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host.to(device, copy=True)
        # Written through numpy: torch would wake its threads for so little.
        self._bytes: NDArray[np.uint8] = self._host.numpy()
        self._arrays: list[NDArray[Any]] = [view.numpy() for view in _views(self._host, shapes)]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.tensors = _views(self._device, shapes)
        """On the device, in the order of the shapes."""

    def blank(self) -> list[NDArray[Any]]:
        """Return the arrays on the host, all zeros, once the last copy has read them; `copy` sends them."""
        if self._copied is not None:
            self._copied.synchronize()  # done long ago, unless the last step read nothing back
        self._bytes.fill(0)
        return self._arrays

    def copy(self) -> None:
        """Copy the arrays to the device on the current stream, without waiting for it."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _bytes(shapes: Shapes) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // 16) * 16 for shape, dtype in shapes)


def _views(buffer: Tensor, shapes: Shapes) -> list[Tensor]:
    """Tensors one after the other in a buffer of bytes, each on 16 bytes, as compiled kernels take them to be."""
    out = []
    start = 0
    for shape, dtype in shapes:
        size = math.prod(shape) * dtype.itemsize
        out.append(buffer[start : start + size].view(dtype).view(shape))
        start += -(-size // 16) * 16
    return out
