"""Drawing as a function of torch tensors: what a backend calls."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.kernels.draws import Draws
from worker.kernels.triton.draw import draw_kernel
from worker.kernels.triton.platform import COMPILE
from worker.kernels.triton.staging import send

SEGMENTS: Final = 64
"""Parts that a row is cut into for its walk."""
WIDTH: Final = 64
"""Neighbours that are read at once in each part."""
WARPS: Final = 16
_COLDEST: Final = 1e-30
"""Temperatures below this are this one, at which only the largest logits have any weight: their inverses overflow."""


def unit(vocab: int) -> float:
    """Return the fixed-point number that a weight of 1 is: a power of two of which `vocab` sum up to 2⁶² at most."""
    return 2.0 ** (62 - vocab.bit_length())


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Return the drawn tokens, [R] int64 on the device; see Drawing. Nothing waits for the device."""
    count, vocab = len(draws.rows), logits.shape[1]
    logits = logits.contiguous()
    wholes = np.empty((count, 3), dtype=np.int64)
    wholes[:, 0], wholes[:, 1] = draws.rows, draws.top_k
    wholes[:, 2] = np.asarray(draws.min_p, dtype=np.float32).view(np.int32)
    numbers = np.empty((count, 3), dtype=np.float64)
    numbers[:, 0] = 1 / np.maximum(draws.temperature, _COLDEST)
    numbers[:, 1], numbers[:, 2] = draws.top_p, draws.uniform
    of_wholes, of_numbers = send([torch.from_numpy(wholes), torch.from_numpy(numbers)], logits.device)
    filtered = bool(((wholes[:, 1] > 0) | (wholes[:, 2] > 0) | (numbers[:, 1] < 1)).any())
    ids = torch.empty(count * vocab if filtered else 1, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    draw_kernel[(count,)](
        logits, ids, of_wholes, of_numbers, tokens,
        VOCAB=vocab, UNIT=unit(vocab), SEGMENTS=SEGMENTS, WIDTH=WIDTH, num_warps=WARPS, **COMPILE,
    )  # fmt: skip
    return tokens
