"""Sampling against transformers' logits processors where they define the same thing, and against its own promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker.engine.plan import NewRequest, SampledTokens, SequenceStep
from worker.mailbox import Sampling
from worker.model import choice
from worker.model.choice import draw
from worker.model.penalties import PenaltyRow, SeenTokens, apply_penalties
from worker.model.random import uniforms
from worker.model.sampler import LOWEST_LOGPROB, Sampler
from worker.model.scores import Scores

VOCAB = 1000
EOS = 7


def random_logits(rows: int, seed: int = 0, scale: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_once(
    logits: torch.Tensor, samplings: Sequence[Sampling], prompt: Sequence[int] = (1, 2), position: int | None = None
) -> tuple[SampledTokens, ...]:
    sampler = Sampler({EOS})
    sampler.add(NewRequest(row, tuple(prompt), sampling) for row, sampling in enumerate(samplings))
    at = len(prompt) if position is None else position
    steps = [SequenceStep(row, (1,), at - 1, (0,), -1, sample=True) for row in range(len(samplings))]
    return sampler.sample(Scores.of(logits.clone()), steps).result()[0]


def tokens_of(sampled: Sequence[SampledTokens]) -> list[int]:
    return [entry.token_ids[0] for entry in sampled]


def support(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """The tokens a row can draw, by drawing with uniform numbers on a fine grid plus each token's own."""
    grid = np.linspace(0, 1, 4000, endpoint=False)
    rows = logits.expand(len(grid), -1).clone()
    return set(draw(rows, [sampling] * len(grid), grid).tolist())


def test_greedy_is_argmax() -> None:
    logits = random_logits(5)
    assert tokens_of(sample_once(logits, [Sampling(temperature=0.0)] * 5)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=1, seed=3),
        Sampling(top_k=12),
        Sampling(top_p=0.6),
        Sampling(top_p=0.9, top_k=20),
        Sampling(temperature=0.6, top_p=0.8),
        Sampling(temperature=1.7, top_k=9, top_p=0.7),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(sampling: Sampling) -> None:
    logits = random_logits(1, seed=4)
    expected = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    probabilities = expected.softmax(-1)[0]
    visible = set(torch.nonzero(probabilities > 1 / 2000)[:, 0].tolist())
    kept = set(torch.nonzero(torch.isfinite(expected[0]))[:, 0].tolist())
    drawn = support(logits, sampling)
    assert visible <= drawn <= kept


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.26, 0.14, 0.1]]))
    assert support(logits, Sampling(min_p=0.5)) == {0, 1}
    assert support(logits, Sampling(min_p=0.25)) == {0, 1, 2}
    # after min-p, top-p counts what min-p left: 0.5 / 0.76 ≥ 0.6
    assert support(logits, Sampling(min_p=0.5, top_p=0.6)) == {0}
    assert support(logits, Sampling(top_k=2, top_p=0.66)) == {0, 1}
    assert support(logits, Sampling(top_k=2, top_p=0.65)) == {0}


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 3] = 2.0
    assert support(logits, Sampling(top_k=2)) == set(range(6))
    assert support(logits, Sampling(top_k=1)) == {3}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=1.5, min_p=0.1),
    ],
)
def test_frequencies_follow_the_probabilities(sampling: Sampling) -> None:
    logits = random_logits(1, seed=2, vocab=12, scale=1.5)
    draws = 20000
    scaled = logits[0].double() / sampling.temperature
    probabilities = scaled.softmax(-1)
    if sampling.top_k:
        probabilities[probabilities < probabilities.sort(descending=True)[0][sampling.top_k - 1]] = 0
    if sampling.min_p:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    if sampling.top_p < 1:
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        probabilities[order[before >= sampling.top_p]] = 0
    probabilities /= probabilities.sum()
    chosen = draw(logits.expand(draws, -1).clone(), [sampling] * draws, uniforms([11] * draws, range(draws)))
    counts = torch.bincount(chosen, minlength=12).double()
    assert not counts[probabilities == 0].any()
    expected = (probabilities * draws)[probabilities > 0]
    statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    assert statistic < len(expected) + 6 * math.sqrt(2 * len(expected))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.99),
        Sampling(top_k=700),
        Sampling(min_p=1e-4),
        Sampling(min_p=1e-3, top_p=0.95),
        Sampling(top_k=300, min_p=1e-3, top_p=0.97),
    ],
)
def test_short_candidate_lists_change_no_token(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 200
    logits = torch.cat([random_logits(rows // 2, scale=0.5), random_logits(rows // 2, scale=4.0)])
    numbers = uniforms([5] * rows, range(rows))
    chosen = {}
    for sizes in ((), (4, 64), (256, 900)):
        monkeypatch.setattr(choice, "PRESELECT", sizes)
        chosen[sizes] = draw(logits.clone(), [sampling] * rows, numbers).tolist()
    assert chosen[()] == chosen[4, 64] == chosen[256, 900]
    assert len(set(chosen[()])) > 20


def test_a_filter_that_drops_nothing_changes_no_token() -> None:
    logits, numbers = random_logits(100), uniforms([3] * 100, range(100))
    free = draw(logits.clone(), [Sampling()] * 100, numbers)
    filtered = draw(logits.clone(), [Sampling(min_p=1e-30)] * 100, numbers)
    assert torch.equal(free, filtered)


def test_draws_do_not_depend_on_the_neighbours() -> None:
    samplings = [
        Sampling(seed=1),
        Sampling(temperature=0.0),
        Sampling(seed=2, top_p=0.9),
        Sampling(seed=3, top_k=300, temperature=1.4),
        Sampling(seed=4, min_p=0.02, repetition_penalty=1.3),
        Sampling(seed=5, top_p=0.999, temperature=2.0),
    ]
    logits = random_logits(len(samplings))
    together = tokens_of(sample_once(logits, samplings))
    backwards = tokens_of(sample_once(logits.flip(0), samplings[::-1]))[::-1]
    alone = [tokens_of(sample_once(logits[row : row + 1], [s]))[0] for row, s in enumerate(samplings)]
    assert together == backwards == alone


def test_seed_and_position_decide_the_draw() -> None:
    logits = random_logits(1, scale=0.1)
    draws = {
        (seed, position): tokens_of(sample_once(logits, [Sampling(seed=seed)], position=position))[0]
        for seed in (0, 1, 2**63 - 1)
        for position in (2, 3, 90)
    }
    again = {key: tokens_of(sample_once(logits, [Sampling(seed=key[0])], position=key[1]))[0] for key in draws}
    assert draws == again
    assert len(set(draws.values())) > 6


def test_repetition_penalty_is_the_one_of_transformers() -> None:
    logits = random_logits(2)
    prompts = [[3, 5, 5, 9, 999], [7, 8]]
    assert (logits[0, [3, 5, 9, 999]] > 0).any()
    assert (logits[0, [3, 5, 9, 999]] < 0).any()
    actual = logits.clone()
    sampling = Sampling(repetition_penalty=1.7)
    apply_penalties(actual, [PenaltyRow(row, SeenTokens(prompt), sampling) for row, prompt in enumerate(prompts)])
    for row, prompt in enumerate(prompts):
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt]), logits[row : row + 1])
        torch.testing.assert_close(actual[row : row + 1], expected)


def test_a_penalised_token_loses_to_the_next() -> None:
    logits = random_logits(2)
    forced = logits.clone()
    forced[:, 5] = logits.max(-1).values * 1.2  # the likeliest, until it is penalised
    wanted = [Sampling(temperature=0.0, repetition_penalty=1.7)] * 2
    assert tokens_of(sample_once(forced, wanted, prompt=[3, 5])) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=0.0), [0, 0, 0, 0, 0]),
        (Sampling(temperature=0.0, presence_penalty=0.6), [0, 1, 0, 0, 0]),  # 3.0-0.6 | 2.5-0.6 | 2.0-0.6
        (Sampling(temperature=0.0, frequency_penalty=0.3), [0, 0, 1, 0, 1]),
        (Sampling(temperature=0.0, frequency_penalty=0.6), [0, 1, 0, 2, 1]),
        (Sampling(temperature=0.0, frequency_penalty=-1.0), [0, 0, 0, 0, 0]),
        (Sampling(temperature=0.0, repetition_penalty=1.3), [1, 0, 0, 0, 0]),  # token 0 is in the prompt
    ],
)
def test_penalties_count_the_answer(sampling: Sampling, expected: list[int]) -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, -5.0]])
    sampler = Sampler({3})
    sampler.add([NewRequest(1, (0, 0), sampling)])
    chosen = []
    for step in range(5):
        part = SequenceStep(1, (0,), 1 + step, (0,), -1, sample=True)
        sampled, _ = sampler.sample(Scores.of(logits.clone()), [part]).result()
        chosen += tokens_of(sampled)
    assert chosen == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, frequency_penalty=0.3),
        Sampling(temperature=0.0, presence_penalty=0.6, repetition_penalty=1.1),
        Sampling(seed=9, frequency_penalty=0.4),
        Sampling(temperature=0.0, min_tokens=5, logit_bias=((3, 9.0),)),
    ],
)
@pytest.mark.parametrize("known", [1, 3])
def test_a_request_that_comes_again_with_its_answer_so_far_goes_on_as_if_it_had_never_left(
    sampling: Sampling, known: int
) -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, -5.0]])

    def run(sampler: Sampler, first: int) -> list[int]:
        steps = [SequenceStep(1, (0,), 1 + step, (0,), -1, sample=True) for step in range(first, 7)]
        return [
            token
            for step in steps
            for token in tokens_of(sampler.sample(Scores.of(logits.clone()), [step]).result()[0])
        ]

    sampler = Sampler({3})
    sampler.add([NewRequest(1, (0, 0), sampling)])
    whole = run(sampler, 0)
    sampler.forget([1])
    sampler.add([NewRequest(1, (0, 0), sampling, tuple(whole[:known]))])
    assert run(sampler, known) == whole[known:]


def test_many_distinct_tokens_outgrow_no_buffer() -> None:
    sampler = Sampler(())
    sampler.add([NewRequest(1, (0,), Sampling(temperature=0.0, presence_penalty=2.0))])
    chosen = set()
    logits = torch.arange(300.0)[None] * 1e-3
    for step in range(300):
        chosen.update(
            tokens_of(
                sampler.sample(
                    Scores.of(logits.clone()), [SequenceStep(1, (0,), step, (0,), -1, sample=True)]
                ).result()[0]
            )
        )
    assert len(chosen) == 300


def test_biases_move_logits_and_repeat_on_every_token() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0]])
    assert tokens_of(sample_once(logits, [Sampling(temperature=0.0, logit_bias=((0, -100.0),))])) == [1]
    assert tokens_of(sample_once(logits, [Sampling(temperature=0.0, logit_bias=((0, -0.6), (2, 0.6)))])) == [2]
    assert set(tokens_of(sample_once(logits.expand(50, 3), [Sampling(logit_bias=((1, 100.0),))] * 50))) == {1}


@pytest.mark.parametrize(
    ("sampling", "position", "banned"),
    [
        (Sampling(temperature=0.0, min_tokens=3), 2, True),
        (Sampling(temperature=0.0, min_tokens=3), 4, True),
        (Sampling(temperature=0.0, min_tokens=3), 5, False),
        (Sampling(temperature=0.0, min_tokens=3, ignore_eos=True), 2, False),
        (Sampling(temperature=0.0), 2, False),
    ],
)
def test_the_end_is_forbidden_until_min_tokens(sampling: Sampling, position: int, banned: bool) -> None:
    logits = random_logits(1)
    logits[0, EOS] = 50.0
    assert (tokens_of(sample_once(logits, [sampling], position=position)) != [EOS]) == banned


def test_logprobs_are_the_raw_models_whatever_the_parameters() -> None:
    logits = random_logits(3)
    expected = logits.log_softmax(-1)
    samplings = [
        Sampling(temperature=0.0, logprobs=3, logit_bias=((11, 100.0),)),
        Sampling(temperature=0.3, top_k=2, repetition_penalty=1.5, logprobs=0),
        Sampling(temperature=0.0),
    ]
    sampled = sample_once(logits, samplings)
    assert sampled[0].token_ids == (11,)
    (first,) = sampled[0].logprobs
    assert first.logprob == pytest.approx(float(expected[0, 11]))
    assert [token for token, _ in first.top] == expected[0].argsort(descending=True)[:3].tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0].sort(descending=True)[0][:3].tolist())
    assert sampled[1].logprobs[0].logprob == pytest.approx(float(expected[1, sampled[1].token_ids[0]]))
    assert sampled[1].logprobs[0].top == ()
    assert sampled[2].logprobs == ()


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=5, min_p=0.1)]
)
def test_broken_logits_give_some_token_and_a_finite_logprob(sampling: Sampling) -> None:
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.full((1, VOCAB), value)
        wanted = [structs.replace(sampling, logprobs=2)]
        (sampled,) = sample_once(logits, wanted)
        assert 0 <= sampled.token_ids[0] < VOCAB
        assert sampled.logprobs[0].logprob == LOWEST_LOGPROB


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 2.0])
def test_any_temperature_is_computed_without_overflow(temperature: float) -> None:
    logits = random_logits(1) * 100
    (token,) = tokens_of(sample_once(logits, [Sampling(temperature=temperature, top_p=0.9)]))
    assert token == int(logits.argmax())
