from __future__ import annotations

import numpy as np

from worker.engine.plan import SequenceStep
from worker.kernels.tiles import PlacedAdapter
from worker.model.batch import build_step

ADAPTERS = {slot: PlacedAdapter(str(slot), np.zeros((0, 9), np.int64), np.zeros(9, np.int64), 0, 0) for slot in (0, 3)}


def decode(request_id: int, position: int, slot: int = -1, first_block: int = 0) -> SequenceStep:
    blocks = tuple(range(first_block, first_block + position // 16 + 1))
    return SequenceStep(request_id, (100 + request_id,), position, blocks, slot, sample=True)


def test_rows_of_an_adapter_are_neighbours_and_results_keep_the_plans_order() -> None:
    sequences = (
        decode(1, 4, slot=3, first_block=0),
        SequenceStep(2, (7, 8, 9), 15, (5, 6), 0, sample=False),
        decode(3, 20, slot=-1, first_block=10),
        decode(4, 16, slot=3, first_block=20),
        SequenceStep(5, (4, 5), 0, (30,), -1, sample=True),
    )
    looked_up: list[int] = []

    def adapter_in(slot: int) -> PlacedAdapter:
        looked_up.append(slot)
        return ADAPTERS[slot]

    step = build_step(sequences, adapter_in)
    batch = step.batch
    assert batch.token_ids.tolist() == [103, 4, 5, 7, 8, 9, 101, 104]
    assert batch.positions.tolist() == [20, 0, 1, 15, 16, 17, 4, 16]
    assert batch.slots.tolist() == [11 * 16 + 4, 30 * 16, 30 * 16 + 1, 5 * 16 + 15, 6 * 16, 6 * 16 + 1, 4, 21 * 16]
    assert [(rows.start, rows.count, rows.position) for rows in batch.requests] == [
        *[(0, 1, 20), (1, 2, 0), (3, 3, 15), (6, 1, 4), (7, 1, 16)],
    ]
    assert [rows.adapter for rows in batch.requests] == [None, None, ADAPTERS[0], ADAPTERS[3], ADAPTERS[3]]
    assert sorted(looked_up) == [0, 3]
    assert [sequence.request_id for sequence in step.sampled] == [3, 5, 1, 4]
    assert step.sampled_rows.tolist() == [0, 2, 6, 7]


def test_a_step_that_samples_nothing_has_no_sampled_rows() -> None:
    step = build_step((SequenceStep(1, (1, 2), 0, (0,), -1, sample=False),), ADAPTERS.__getitem__)
    assert step.sampled == ()
    assert step.sampled_rows.shape == (0,)
