"""Sampling parameters as clients send them, checked, with defaults filled in: ready for the engine.

The ranges are those of common/sampling_limits.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from common import sampling_limits as limits
from loraplex.errors import InvalidParameter
from loraplex.types.v1.sampling_pb2 import SamplingParams
from worker import mailbox

SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Parameters of one request, all in range."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    max_tokens: int | None
    """None: what the context has left."""
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    n: int

    def for_choice(self, index: int, *, seed: int, room: int) -> mailbox.Sampling:
        """Return the engine's parameters of choice `index`; `room` is what the context has left, in tokens.

        `seed` is the request's own or a fresh one; the choices get distinct seeds derived from it.
        """
        max_tokens = min(room, self.max_tokens or room)
        return mailbox.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=choice_seed(seed, index),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
        )


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of a choice, 0 to 2^63 - 1: a hash, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> (64 - SEED_BITS)


def _in_range(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> float:
    inside = (low < value if above_low else low <= value) and value <= high  # NaN is never inside
    if not inside:
        interval = f"{'(' if above_low else '['}{low:g}, {high:g}]"
        raise InvalidParameter(f"{field} value {value:g} is out of range; give one in {interval}", field=field)
    return value


def _penalty(field: str, value: float) -> float:
    return _in_range(field, value, -limits.MAX_PENALTY, limits.MAX_PENALTY)


def check_sampling(params: SamplingParams, *, vocab_size: int) -> CheckedSampling:
    """Check every parameter. Raises InvalidParameter, naming the field and its range."""

    def given(field: str, default: float) -> float:
        return float(getattr(params, field)) if params.HasField(field) else default  # type: ignore[arg-type]

    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        raise InvalidParameter("max_tokens is 0; give at least 1", field="max_tokens")
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise InvalidParameter(
            f"min_tokens {params.min_tokens} is larger than max_tokens {max_tokens}; give at most max_tokens",
            field="min_tokens",
        )
    n = params.n if params.HasField("n") else 1
    if not 1 <= n <= limits.MAX_CHOICES:
        raise InvalidParameter(f"n is {n}; give 1 to {limits.MAX_CHOICES}", field="n")
    logprobs = params.logprobs if params.HasField("logprobs") else None
    if logprobs is not None and logprobs > limits.MAX_LOGPROBS:
        raise InvalidParameter(f"logprobs is {logprobs}; give 0 to {limits.MAX_LOGPROBS}", field="logprobs")
    return CheckedSampling(
        temperature=_in_range("temperature", given("temperature", 1.0), 0, limits.MAX_TEMPERATURE),
        top_p=_in_range("top_p", given("top_p", 1.0), 0, 1, above_low=True),
        top_k=min(params.top_k, vocab_size),
        min_p=_in_range("min_p", given("min_p", 0.0), 0, 1),
        seed=params.seed if params.HasField("seed") else None,
        stop=_check_stops(tuple(params.stop)),
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=logprobs,
        repetition_penalty=_in_range(
            "repetition_penalty", given("repetition_penalty", 1.0), 0, limits.MAX_REPETITION_PENALTY, above_low=True
        ),
        presence_penalty=_penalty("presence_penalty", given("presence_penalty", 0.0)),
        frequency_penalty=_penalty("frequency_penalty", given("frequency_penalty", 0.0)),
        logit_bias=_check_biases(dict(params.logit_bias), vocab_size),
        n=n,
    )


def _check_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > limits.MAX_STOPS:
        raise InvalidParameter(f"stop has {len(stops)} strings; give at most {limits.MAX_STOPS}", field="stop")
    for at, stop in enumerate(stops):
        if not 1 <= len(stop) <= limits.MAX_STOP_CHARS:
            raise InvalidParameter(
                f"stop[{at}] has {len(stop)} characters; give 1 to {limits.MAX_STOP_CHARS}", field=f"stop[{at}]"
            )
    return stops


def _check_biases(biases: dict[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > limits.MAX_LOGIT_BIASES:
        raise InvalidParameter(
            f"logit_bias has {len(biases)} entries; give at most {limits.MAX_LOGIT_BIASES}", field="logit_bias"
        )
    for token_id, bias in biases.items():
        field = f"logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise InvalidParameter(
                f"{field}: there is no such token; the vocabulary has ids 0 to {vocab_size - 1}", field=field
            )
        if not abs(bias) <= limits.MAX_LOGIT_BIAS:  # NaN is never inside
            raise InvalidParameter(
                f"{field} is {bias:g}; give {-limits.MAX_LOGIT_BIAS:g} to {limits.MAX_LOGIT_BIAS:g}", field=field
            )
    return tuple(sorted(biases.items()))
