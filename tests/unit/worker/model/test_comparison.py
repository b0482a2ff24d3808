"""Comparing two artifacts: the arithmetic against a direct computation, and whole comparisons against single steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from common.adapter_format.packed import open_packed, pack
from common.adapter_format.quantize import quantize
from tests.unit.worker.model.tiny import GREEDY, VOCAB, open_runner, random_adapter
from worker.engine.plan import ComparedPositions, ComparisonStep, NewRequest, SequenceStep, StepPlan
from worker.model.comparison import compare_logits
from worker.model.config import read_config
from worker.model.runner import ModelRunner

RANKS = {"self_attn.q_proj": 8, "self_attn.v_proj": 4, "mlp.down_proj": 16}
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(3, VOCAB, 37))


def test_divergences_and_agreement_are_those_of_a_direct_computation() -> None:
    rng = np.random.default_rng(0)
    exact, measured = rng.normal(0, 3, (2, 21, 50)).astype(np.float32)  # more positions than are compared at a time
    found = compare_logits(torch.from_numpy(np.concatenate([exact, measured])))
    for position in range(21):
        p, q = (np.exp(row.astype(np.float64)) for row in (exact[position], measured[position]))
        p, q = p / p.sum(), q / q.sum()
        assert found.kl[position] == pytest.approx(sum(p * np.log(p / q)), rel=1e-5)
        assert found.same_top[position] == (p.argmax() == q.argmax())
    assert len(found.kl) == 21
    assert 0 < sum(found.same_top) < 21


def test_equal_logits_diverge_by_exactly_nothing_and_rounding_never_below_it() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)) * 8
    same = compare_logits(torch.cat([logits, logits]))
    assert same.kl == (0.0,) * 40
    assert all(same.same_top)
    near = compare_logits(torch.cat([logits, logits + torch.randn_like(logits) * 1e-6]))
    assert all(0 <= kl < 1e-5 for kl in near.kl)


def test_logits_that_are_not_finite_are_not_passed_off_as_near() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = math.nan
    assert math.isnan(compare_logits(logits).kl[0])


@pytest.fixture(scope="module")
def artifacts(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter as it is, in int8 and in int4, and one that its factors were shaken out of."""
    folder = tmp_path_factory.mktemp("artifacts")
    config = read_config(llama_folder)
    files = {"none": random_adapter(config, folder / "none", ranks=RANKS, seed=3, gain=0.6)}
    files["spoilt"] = random_adapter(config, folder / "spoilt", ranks=RANKS, seed=4, gain=0.6)
    exact = open_packed(files["none"])
    for form in ("int8", "int4"):
        files[form] = folder / form
        pack(quantize(exact, form).adapter, files[form])
    return files


@pytest.fixture
def runner(llama_folder: Path, artifacts: dict[str, Path]) -> ModelRunner:
    runner = open_runner(llama_folder, max_resident_adapters=len(artifacts))
    for slot, path in enumerate(artifacts.values()):
        first = 100 + 30 * slot
        runner.prepare_adapter(slot, path, tuple(range(first, first + 30)))
    return runner


def compare(runner: ModelRunner, exact: int, measured: int, beside: tuple[SequenceStep, ...] = ()) -> ComparedPositions:
    step = ComparisonStep(9, TOKENS, 4, exact, (0, 1, 2), measured, (3, 4, 5))
    new = tuple(NewRequest(sequence.request_id, sequence.token_ids, GREEDY) for sequence in beside)
    result = runner.execute(StepPlan(1, new, beside, (), step))
    assert not result.broken_request_ids
    assert result.compared is not None
    return result.compared


def test_int8_is_near_int4_farther_and_another_adapter_far(runner: ModelRunner, artifacts: dict[str, Path]) -> None:
    slots = {name: slot for slot, name in enumerate(artifacts)}
    found = {name: compare(runner, slots["none"], slot) for name, slot in slots.items()}
    assert all(len(one.kl) == len(TOKENS) - 4 for one in found.values())
    assert found["none"].kl == (0.0,) * 33
    assert all(found["none"].same_top)
    mean = {name: sum(one.kl) / 33 for name, one in found.items()}
    assert 0 < mean["int8"] < mean["int4"] < mean["spoilt"]
    assert sum(found["spoilt"].same_top) < sum(found["int4"].same_top) <= 33


def test_a_comparison_s_logits_are_those_of_requests_for_either_artifact(
    runner: ModelRunner, artifacts: dict[str, Path]
) -> None:
    """Both artifacts' greedy tokens, position by position as requests of their own, say where they agree."""
    slots = {name: slot for slot, name in enumerate(artifacts)}

    def greedy(slot: int) -> list[int]:
        chosen = []
        for end in range(5, len(TOKENS) + 1):
            step = SequenceStep(end, TOKENS[:end], 0, (10, 11, 12)[: -(-end // 16)], slot, sample=True)
            plan = StepPlan(end, (NewRequest(end, TOKENS[:end], GREEDY),), (step,), (end - 1,))
            chosen.append(runner.execute(plan).sampled[0].token_ids[0])
        return chosen

    exact, spoilt = greedy(slots["none"]), greedy(slots["spoilt"])
    found = compare(runner, slots["none"], slots["spoilt"])
    assert found.same_top == tuple(a == b for a, b in zip(exact, spoilt, strict=True))


def test_requests_in_its_step_are_sampled_as_without_it_and_it_is_the_same_beside_them(
    runner: ModelRunner, artifacts: dict[str, Path]
) -> None:
    slots = {name: slot for slot, name in enumerate(artifacts)}
    asked = SequenceStep(1, TOKENS[:20], 0, (20, 21), slots["int4"], sample=True)
    alone = compare(runner, slots["none"], slots["int8"])
    expected = runner.execute(StepPlan(1, (NewRequest(1, asked.token_ids, GREEDY),), (asked,), ())).sampled
    step = ComparisonStep(9, TOKENS, 4, slots["none"], (0, 1, 2), slots["int8"], (3, 4, 5))
    new = NewRequest(2, asked.token_ids, GREEDY)
    both = runner.execute(StepPlan(2, (new,), (SequenceStep(2, *_rest(asked)),), (1,), step))
    assert both.sampled[0].token_ids == expected[0].token_ids
    assert both.compared == alone


def _rest(step: SequenceStep) -> tuple[tuple[int, ...], int, tuple[int, ...], int, bool]:
    return step.token_ids, step.position, step.block_ids, step.adapter_slot, step.sample


def test_a_comparison_without_finite_logits_is_told_as_broken(
    runner: ModelRunner, llama_folder: Path, tmp_path: Path, artifacts: dict[str, Path]
) -> None:
    wild = random_adapter(read_config(llama_folder), tmp_path / "wild", ranks=RANKS, seed=3, gain=1e25)
    runner.release_adapter(3)
    runner.prepare_adapter(3, wild, tuple(range(190, 220)))
    step = ComparisonStep(9, TOKENS, 4, 0, (0, 1, 2), 3, (3, 4, 5))
    assert runner.execute(StepPlan(1, (), (), (), step)).broken_request_ids == (9,)
