from __future__ import annotations

import torch

from worker.engine.plan import SequenceStep
from worker.kernels.layout import LayerFactors
from worker.model.batch import MAX_PADDING, build_step

CPU = torch.device("cpu")
FACTORS: dict[int, tuple[LayerFactors, ...]] = {0: ((None,) * 4,), 3: ((None,) * 4,)}


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
    step = build_step(sequences, FACTORS.__getitem__, block_tokens=16, device=CPU)
    assert step.rows.token_ids.tolist() == [103, 4, 5, 7, 8, 9, 101, 104]
    assert step.rows.positions.tolist() == [20, 0, 1, 15, 16, 17, 4, 16]
    slots = [11 * 16 + 4, 30 * 16, 30 * 16 + 1, 5 * 16 + 15, 6 * 16, 6 * 16 + 1, 4, 21 * 16]
    assert step.rows.attention.slots.tolist() == slots
    assert [(group.start, group.end) for group in step.rows.lora] == [(3, 6), (6, 8)]
    assert [sequence.request_id for sequence in step.sampled] == [1, 3, 4, 5]
    assert step.sampled_rows.tolist() == [6, 0, 7, 2]


def test_a_later_chunk_sees_its_past_and_itself_causally() -> None:
    sequences = (SequenceStep(1, (1, 2, 3), 2, (0,), -1, sample=True),)
    (chunk,) = build_step(sequences, FACTORS.__getitem__, block_tokens=16, device=CPU).rows.attention.chunks
    assert chunk.visible is not None
    assert chunk.visible.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_first_chunk_needs_no_mask() -> None:
    sequences = (SequenceStep(1, (1, 2, 3), 0, (0,), -1, sample=True),)
    (chunk,) = build_step(sequences, FACTORS.__getitem__, block_tokens=16, device=CPU).rows.attention.chunks
    assert chunk.visible is None


def test_decodes_are_grouped_so_that_padding_is_bounded() -> None:
    positions = [0, 5, 15, 16, 40, 300, 17, 5000, 31, 600]
    sequences = tuple(decode(index, position) for index, position in enumerate(positions))
    attention = build_step(sequences, FACTORS.__getitem__, block_tokens=16, device=CPU).rows.attention
    seen = []
    for group in attention.decodes:
        width = len(group.blocks) // len(group.rows)
        for row, length, beyond in zip(group.rows.tolist(), group.lengths.tolist(), group.beyond, strict=True):
            assert positions[row] + 1 == length
            assert width <= MAX_PADDING * (positions[row] // 16 + 1)
            assert beyond.shape == (1, width * 16)
            assert int((~beyond).sum()) == length
            assert not beyond[0, :length].any()
            seen.append(row)
    assert sorted(seen) == list(range(len(positions)))
    assert len(attention.decodes) == 4  # 1-2 blocks, 3, 19 and 38, 313: not one per sequence
