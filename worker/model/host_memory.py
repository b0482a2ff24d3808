"""Page-locked memory for the host tier: how much, and from where. Loads cut from it what they send to the device."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from worker.adapters.host import HostTier
from worker.model.device import free_bytes

_SHARE: Final = 0.1
_MOST_BYTES: Final = 8 * 2**30


def open_host_tier(device: torch.device, budget_bytes: int | None) -> HostTier | None:
    """Return the host tier of a worker on `device`, of the bytes that free memory allows where nobody said.

    None on a CPU, where the mapped file is in the host's memory already, and where no byte may be taken.
    """
    if device.type != "cuda" or budget_bytes == 0:
        return None
    if budget_bytes is None:
        budget_bytes = min(_MOST_BYTES, int(free_bytes(torch.device("cpu")) * _SHARE))
    return HostTier(budget_bytes, page_locked)


def page_locked(num_bytes: int) -> NDArray[np.uint8]:
    """Return page-locked memory; its pages are locked for as long as the array lives. Raises RuntimeError."""
    memory: NDArray[Any] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory
