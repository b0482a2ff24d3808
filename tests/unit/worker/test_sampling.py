"""Sampling parameters: every range, every default, and what the engine gets."""

from __future__ import annotations

import math

import pytest

from loraplex.errors import InvalidParameter
from loraplex.types.v1.sampling_pb2 import SamplingParams
from worker.sampling import check_sampling, choice_seed

GOOD = [
    ("temperature", 0.0), ("temperature", 2.0), ("top_p", 1.0), ("top_p", 1e-6), ("min_p", 0.0), ("min_p", 1.0),
    ("repetition_penalty", 2.0), ("repetition_penalty", 1e-6), ("presence_penalty", -2.0), ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0), ("frequency_penalty", 2.0), ("logprobs", 0), ("logprobs", 20), ("n", 1), ("n", 16),
    ("max_tokens", 1), ("max_tokens", 2**32 - 1), ("seed", -(2**63)), ("seed", 2**63 - 1), ("top_k", 2**32 - 1),
    ("stop", ["x"] * 16), ("stop", ["x" * 256]), ("logit_bias", {299: -100.0}), ("logit_bias", {0: 100.0}),
]  # fmt: skip
BAD = [
    ("temperature", -0.01), ("temperature", 2.01), ("temperature", math.nan), ("temperature", math.inf),
    ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.01), ("min_p", 1.01),
    ("repetition_penalty", 0.0), ("repetition_penalty", 2.01), ("repetition_penalty", math.nan),
    ("presence_penalty", -2.01), ("presence_penalty", 2.01), ("frequency_penalty", -2.01),
    ("frequency_penalty", math.nan), ("logprobs", 21), ("n", 0), ("n", 17), ("max_tokens", 0),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_ends_of_each_range_are_inside(field, value):
    check_sampling(SamplingParams(**{field: value}), vocab_size=300)


@pytest.mark.parametrize(("field", "value"), BAD)
def test_out_of_range_names_the_field(field, value):
    with pytest.raises(InvalidParameter, match=field) as caught:
        check_sampling(SamplingParams(**{field: value}), vocab_size=300)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"logit_bias": {300: 1.0}}, "logit_bias[300]"),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3]"),
        ({"logit_bias": {3: math.nan}}, "logit_bias[3]"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ],
)
def test_lists_maps_and_pairs_are_checked(params, field):
    with pytest.raises(InvalidParameter) as caught:
        check_sampling(SamplingParams(**params), vocab_size=3000 if len(params.get("logit_bias", ())) > 1 else 300)
    assert caught.value.field == field


def test_defaults_are_those_of_the_proto():
    checked = check_sampling(SamplingParams(), vocab_size=300)
    sampling = checked.for_choice(0, seed=5, room=77)
    assert (checked.n, checked.stop, checked.seed) == (1, (), None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (77, 0, False, -1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert sampling.logit_bias == ()


def test_what_is_set_reaches_the_engine():
    params = SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, max_tokens=9, min_tokens=2, ignore_eos=True, logprobs=0,
        repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=1, logit_bias={5: 2, 3: -1},
    )  # fmt: skip
    sampling = check_sampling(params, vocab_size=300).for_choice(0, seed=1, room=77)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (9, 2, True, 0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0, 1.0)
    assert sampling.logit_bias == ((3, -1.0), (5, 2.0))


def test_the_context_bounds_max_and_min_tokens():
    sampling = check_sampling(SamplingParams(max_tokens=50, min_tokens=40), vocab_size=300).for_choice(
        0, seed=1, room=10
    )
    assert (sampling.max_tokens, sampling.min_tokens) == (10, 10)


def test_choices_get_distinct_repeatable_seeds_that_fit_63_bits():
    seeds = [choice_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert choice_seed(1, 3) == choice_seed(1, 3)
