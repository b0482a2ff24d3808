"""Draws a row's token: what `worker.kernels.draws` asks for, without sorting the vocabulary.

Filters keep what is at least as likely as some value. That is found by partitioning the candidates around a pivot and
going on where it must lie, so work shrinks by halves; and most of the vocabulary is no candidate: what is less likely
than a bound that both filters imply cannot be kept.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from worker.kernels.cpu.largest import ordered_top
from worker.kernels.cpu.numbers import COMPILED, exp_negative

PARAMETERS: Final = 5
"""Numbers of a row: temperature, top_k, top_p, min_p, uniform."""

_BLOCK: Final = 64
_COLDEST: Final = np.float32(1e-30)
"""Temperatures below this are this one, at which only the largest logits have any weight: their inverses overflow."""
_SURELY: Final = 0.999
"""Keeps roundings of the bound on the safe side."""


@njit(**COMPILED)
def draw(logits: Any, parameters: Any, candidates: Any, scratch: Any, places: Any) -> Any:
    """Return the drawn token of one row; any, where a logit is NaN.

    logits [V] float32, overwritten; parameters [PARAMETERS] float64; candidates, scratch [V] float32 and places [V]
    int32 are room.
    """
    temperature, top_k, top_p = parameters[0], int(parameters[1]), parameters[2]
    min_p, uniform = np.float32(parameters[3]), parameters[4]
    total = _weights(logits, max(np.float32(temperature), _COLDEST))
    if not total > 0:
        return 0
    size = len(logits)
    bounded = min_p > np.float32(0) or 0 < top_k < size
    least = min_p
    if 0 < top_k < size:
        least = max(least, _kth_block(logits, top_k, scratch))
    if top_p < 1 and not bounded:
        # All that is lighter weighs less than the share that top-p drops.
        least = max(least, np.float32((1 - top_p) * total / size * _SURELY))
    count = 0
    for k in range(size):
        weight = logits[k]
        if weight >= least and weight > np.float32(0):
            candidates[count], places[count] = weight, k
            count += 1
    if 0 < top_k < count:
        scratch[:count] = candidates[:count]
        count = _keep(candidates, places, count, _cutoff(scratch, count, np.float64(top_k), True))
    if top_p < 1:
        kept = total
        if bounded:
            kept = 0.0
            for j in range(count):
                kept += np.float64(candidates[j])
        scratch[:count] = candidates[:count]
        count = _keep(candidates, places, count, _cutoff(scratch, count, top_p * kept, False))
    return _walk(candidates, places, count, uniform)


@njit(**COMPILED)
def _weights(logits: Any, temperature: Any) -> float:
    """Replace logits by exp((logit - largest) / temperature) and return their sum."""
    largest = ordered_top(logits)
    for k in range(len(logits)):
        logits[k] = exp_negative((logits[k] - largest) / temperature)
    total = 0.0
    for k in range(len(logits)):
        total += np.float64(logits[k])
    return total


@njit(**COMPILED)
def _kth_block(weights: Any, top_k: int, scratch: Any) -> Any:
    """Return a value that at least `top_k` weights reach: the k-th of blocks' largest ones, 0 for too few blocks."""
    blocks = (len(weights) + _BLOCK - 1) // _BLOCK
    if top_k > blocks:
        return np.float32(0)
    for b in range(blocks):
        scratch[b] = ordered_top(weights[b * _BLOCK : min((b + 1) * _BLOCK, len(weights))])
    return _cutoff(scratch, blocks, np.float64(top_k), True)


@njit(**COMPILED)
def _cutoff(values: Any, count: int, target: float, by_count: bool) -> Any:
    """Return the smallest of `count` values such that all greater ones weigh, or number, less than `target`.

    The largest is returned where the target is not above 0. Reorders values.
    """
    low, high = 0, count
    above = 0.0
    while True:
        pivot = _middle(values[low], values[(low + high) // 2], values[high - 1])
        # [low, greater) is above the pivot, [greater, equal) is the pivot, [less, high) below it.
        greater, at, less = low, low, high
        weight = 0.0
        while at < less:
            value = values[at]
            if value > pivot:
                values[at], values[greater] = values[greater], value
                weight += 1.0 if by_count else np.float64(value)
                greater += 1
                at += 1
            elif value < pivot:
                less -= 1
                values[at], values[less] = values[less], value
            else:
                at += 1
        if greater > low and above + weight >= target:
            high = greater
            continue
        here = above + weight + (less - greater) * (1.0 if by_count else np.float64(pivot))
        if less == high or here >= target:
            return pivot
        above, low = here, less


@njit(**COMPILED)
def _middle(a: Any, b: Any, c: Any) -> Any:
    return max(min(a, b), min(max(a, b), c))


@njit(**COMPILED)
def _keep(candidates: Any, places: Any, count: int, least: Any) -> int:
    """Drop candidates below `least`; returns how many are left."""
    left = 0
    for j in range(count):
        if candidates[j] >= least:
            candidates[left], places[left] = candidates[j], places[j]
            left += 1
    return left


@njit(**COMPILED)
def _walk(candidates: Any, places: Any, count: int, uniform: float) -> Any:
    """Return the place at which the running sum passes uniform · total."""
    total = 0.0
    for j in range(count):
        total += np.float64(candidates[j])
    target = min(uniform * total, np.nextafter(total, 0.0))
    passed = 0.0
    for j in range(count - 1):
        passed += np.float64(candidates[j])
        if passed > target:
            return places[j]
    return places[count - 1]
