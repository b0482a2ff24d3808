"""Counter-based random numbers: a pure function of (seed, position), so that a request's luck is its own.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), vectorised over requests. There
is no state to keep, restore or share: whatever is batched with a request, its draws stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each of R counters [4, R] under keys [2, R]; all words below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low = c0 * np.uint64(_MULTIPLIERS[0])
        high = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (high >> _SHIFT) ^ c1 ^ k0, high & _LOW, (low >> _SHIFT) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position); seeds count modulo 2^64."""
    wide = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    counter = np.zeros((4, len(wide)), dtype=np.uint64)
    counter[0] = np.array(positions, dtype=np.uint64) & _LOW
    words = philox4x32(counter, np.stack((wide & _LOW, wide >> _SHIFT)))
    bits = (words[0] >> np.uint64(5)) << np.uint64(26) | words[1] >> np.uint64(6)
    fractions: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions
