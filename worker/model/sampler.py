"""Chooses each request's next token from the step's logits.

Owns what sampling must remember of a request. Order: log probabilities are taken from the raw logits (log-softmax of
what the model said, before any parameter changes it); then biases and the minimum length, penalties, temperature and
filters. Temperature 0 is argmax after biases and penalties. A draw depends on (seed, position) and the request's own
logits only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.engine.plan import NewRequest, SampledLogprobs, SampledTokens, SequenceStep
from worker.kernels.draws import Drawing, Draws
from worker.mailbox import Sampling
from worker.model.choice import draw
from worker.model.device import send
from worker.model.penalties import PenaltyRow, SeenTokens, apply_biases, apply_penalties, has_penalties
from worker.model.random import uniforms
from worker.model.scores import Scores

LOWEST_LOGPROB: Final = -9999.0
"""Stands for log probabilities that are lower or not a number, so that every answer is valid JSON."""


@dataclass(frozen=True, slots=True)
class _Request:
    sampling: Sampling
    num_prompt_tokens: int
    seen: SeenTokens | None
    """Kept only where penalties need it."""


class Sampler:
    """Sampling of all running requests; request ids are unique while they run."""

    def __init__(self, eos_token_ids: Iterable[int], drawing: Drawing | None = None) -> None:
        """`drawing` draws; torch does where it is None."""
        self._drawing = drawing
        self._eos_biases = tuple((token, -torch.inf) for token in sorted(eos_token_ids))
        self._requests: dict[int, _Request] = {}

    def add(self, requests: Iterable[NewRequest]) -> None:
        """Remember new requests."""
        for request in requests:
            seen = SeenTokens(request.prompt_token_ids) if has_penalties(request.sampling) else None
            if seen is not None:
                for token in request.generated_token_ids:
                    seen.add(token)
            self._requests[request.request_id] = _Request(request.sampling, len(request.prompt_token_ids), seen)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Forget ended requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def sample(
        self, scores: Scores, sequences: Sequence[SequenceStep]
    ) -> tuple[tuple[SampledTokens, ...], tuple[int, ...]]:
        """Choose one token per sequence; scores in the sequences' order, their logits may be overwritten.

        Returns what each sequence gained, and the ids of requests whose logits were NaN or infinite: their tokens mean
        nothing. The device is waited for once, to read both, and more often for log probabilities and filters.
        """
        logits, likeliest = scores.logits, scores.likeliest
        requests = [self._requests[sequence.request_id] for sequence in sequences]
        positions = [sequence.position + len(sequence.token_ids) for sequence in sequences]
        reported = [row for row, request in enumerate(requests) if request.sampling.logprobs >= 0]
        raw = logits[send(np.array(reported), logits.device)] if reported else None  # a copy
        if self._constrain(logits, requests, positions):
            likeliest = logits.argmax(dim=-1)
        chosen = self._choose(logits, likeliest, requests, positions)
        # In one transfer; token ids are far below 2^53.
        read: list[list[float]] = torch.stack((chosen.double(), scores.largest.double())).tolist()
        tokens = [int(token) for token in read[0]]
        logprobs: dict[int, SampledLogprobs] = {}
        if raw is not None:
            of_reported = [tokens[row] for row in reported]
            wanted = [requests[row].sampling.logprobs for row in reported]
            logprobs = dict(zip(reported, _report(raw, of_reported, wanted), strict=True))
        for request, token in zip(requests, tokens, strict=True):
            if request.seen is not None:
                request.seen.add(token)
        sampled = tuple(
            SampledTokens(sequence.request_id, (token,), (logprobs[row],) if row in logprobs else ())
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
        )
        broken = [
            sequence.request_id for sequence, logit in zip(sequences, read[1], strict=True) if not math.isfinite(logit)
        ]
        return sampled, tuple(broken)

    def _choose(
        self, logits: Tensor, likeliest: Tensor, requests: Sequence[_Request], positions: Sequence[int]
    ) -> Tensor:
        """Return [S] int64, on the device."""
        drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
        if not drawn:
            return likeliest
        samplings = [requests[row].sampling for row in drawn]
        random = uniforms([sampling.seed for sampling in samplings], [positions[row] for row in drawn])
        index = send(np.array(drawn), logits.device)
        chosen = likeliest.clone()
        if self._drawing is not None:
            chosen[index] = torch.tensor(self._drawing.draw(logits, Draws.of(drawn, samplings, random)))
        else:
            some = logits if len(drawn) == len(requests) else logits[index]
            chosen[index] = draw(some, samplings, random)
        return chosen

    def _constrain(self, logits: Tensor, requests: Sequence[_Request], positions: Sequence[int]) -> bool:
        """Apply what parameters forbid or favour; returns whether there was anything."""
        biases: list[tuple[int, Sequence[tuple[int, float]]]] = []
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            if request.sampling.logit_bias:
                biases.append((row, request.sampling.logit_bias))
            too_short = position - request.num_prompt_tokens < request.sampling.min_tokens
            if too_short and not request.sampling.ignore_eos:
                biases.append((row, self._eos_biases))
        apply_biases(logits, biases)
        penalised = [PenaltyRow(row, r.seen, r.sampling) for row, r in enumerate(requests) if r.seen is not None]
        apply_penalties(logits, penalised)
        return bool(biases or penalised)


def _report(raw: Tensor, chosen: Sequence[int], wanted: Sequence[int]) -> list[SampledLogprobs]:
    """Log probabilities of R rows of raw logits [R, vocab]: the chosen token's, and the `wanted` likeliest ones'."""
    normalised = torch.nan_to_num(raw.log_softmax(dim=-1), nan=LOWEST_LOGPROB).clamp_(min=LOWEST_LOGPROB)
    of_chosen = normalised.gather(1, torch.tensor(chosen, device=raw.device)[:, None])[:, 0].tolist()
    values, ids = normalised.topk(min(max(wanted), raw.shape[1]), dim=-1)
    return [
        SampledLogprobs(logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for logprob, row_ids, row_values, count in zip(of_chosen, ids.tolist(), values.tolist(), wanted, strict=True)
    ]
