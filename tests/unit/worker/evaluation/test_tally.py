"""The figures of an evaluation."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from worker.evaluation.outcome import computed_in
from worker.evaluation.tally import Tally
from worker.mailbox import Ready


def test_figures_are_over_all_positions_not_over_prompts() -> None:
    tally = Tally()
    tally.add((True, True, False), (0.0, 0.1, 0.5))
    tally.add((True,), (0.2,))
    assert (tally.num_prompts, tally.num_positions) == (2, 4)
    assert (tally.top1_agreement, tally.max_kl) == (0.75, 0.5)
    assert tally.mean_kl == pytest.approx(0.2)


def test_the_order_of_prompts_does_not_change_a_bit() -> None:
    answers = [((True,), (1e-9,)), ((False, True), (0.3, 1e-17)), ((True,), (7.0,))]
    means = set()
    for order in itertools.permutations(answers):
        tally = Tally()
        for answer in order:
            tally.add(*answer)
        means.add(tally.mean_kl)
    assert len(means) == 1


@pytest.mark.parametrize(("same_top", "kl"), [((), ()), ((True,), (0.1, 0.2))])
def test_nothing_and_halves_are_no_answer(same_top: tuple[bool, ...], kl: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="divergences"):
        Tally().add(same_top, kl)


def test_an_evaluation_tells_that_its_base_was_quantized() -> None:
    ready = Ready("cpu", "bfloat16", 300, 256, 16, 64, 1000.0, 100.0, 8)
    assert computed_in(ready) == "cpu bfloat16"
    assert computed_in(structs.replace(ready, base_quantization="int8")) == "cpu bfloat16, int8 base"
