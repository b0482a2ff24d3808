from __future__ import annotations

import numpy as np
import pytest

from worker.model.random import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    wide = philox4x32(np.array([counter], dtype=np.uint64).T, np.array([key], dtype=np.uint64).T)
    assert wide[:, 0].tolist() == words


def test_a_draw_depends_on_its_seed_and_position_only() -> None:
    alone = uniforms([2**63 - 1], [17])[0]
    among = uniforms([5, 2**63 - 1, 7], [17, 17, 18])
    assert among[1] == alone
    assert len({*among, *uniforms([5, 5, 5 + 2**32], [18, 19, 17])}) == 6


def test_draws_are_uniform_over_positions_and_over_seeds() -> None:
    for draws in (uniforms([42] * 20000, range(20000)), uniforms(range(20000), [3] * 20000)):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert (((counts - 1000) ** 2) / 1000).sum() < 50  # chi-square, 19 degrees of freedom: p ≈ 1e-4
