"""Chooses each request's next token from the step's logits.

Owns what sampling must remember of a request. Order: log probabilities are taken from the raw logits (log-softmax of
what the model said, before any parameter changes it); then biases and the minimum length, penalties, temperature and
filters. Temperature 0 is argmax after biases and penalties. A draw depends on (seed, position) and the request's own
logits only. The device is given all of it and not waited for; what it chose is read when it is asked for.
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
from worker.model.device import Read, send
from worker.model.penalties import PenaltyRow, SeenTokens, apply_biases, apply_penalties, has_penalties
from worker.model.random import uniforms
from worker.model.scores import Chosen, Scores

LOWEST_LOGPROB: Final = -9999.0
"""Stands for log probabilities that are lower or not a number, so that every answer is valid JSON."""


@dataclass(frozen=True, slots=True)
class _Request:
    sampling: Sampling
    num_prompt_tokens: int
    seen: SeenTokens | None
    """Kept only where penalties need it."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Log probabilities of some rows: the chosen token's, and the likeliest ones'."""

    rows: Sequence[int]
    wanted: Sequence[int]
    """How many of the likeliest each row asked for."""
    tensors: tuple[Tensor, Tensor, Tensor]
    """[R] of the chosen tokens; [R, K] the likeliest, and [R, K] int64 which tokens those are."""

    @classmethod
    def of(cls, raw: Tensor, chosen: Tensor, rows: Sequence[int], wanted: Sequence[int]) -> _Report:
        """Compute it of raw logits [R, vocab] and chosen tokens [R], on the device."""
        normalised = torch.nan_to_num(raw.log_softmax(dim=-1), nan=LOWEST_LOGPROB).clamp_(min=LOWEST_LOGPROB)
        of_chosen = normalised.gather(1, chosen[:, None])[:, 0]
        values, ids = normalised.topk(min(max(wanted), raw.shape[1]), dim=-1)
        return cls(rows, wanted, (of_chosen, values, ids))

    def logprobs(self, of_chosen: Tensor, values: Tensor, ids: Tensor) -> dict[int, SampledLogprobs]:
        """Return each row's, from the tensors on the host."""
        each = zip(self.rows, self.wanted, of_chosen.tolist(), values.tolist(), ids.tolist(), strict=True)
        return {
            row: SampledLogprobs(logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
            for row, count, logprob, row_values, row_ids in each
        }


class Sample:
    """A step's tokens, on the device; it may have yet to compute them."""

    def __init__(
        self,
        chosen: Tensor,
        largest: Tensor,
        sequences: Sequence[SequenceStep],
        requests: Sequence[_Request],
        report: _Report | None,
    ) -> None:
        self.chosen = Chosen(chosen, {sequence.request_id: row for row, sequence in enumerate(sequences)})
        self._sequences, self._requests, self._report = sequences, requests, report
        # In one transfer; token ids are far below 2^53.
        packed = torch.stack((chosen.double(), largest.double()))
        self._read = Read((packed,) if report is None else (packed, *report.tensors))
        self._result: tuple[tuple[SampledTokens, ...], tuple[int, ...]] | None = None

    def result(self) -> tuple[tuple[SampledTokens, ...], tuple[int, ...]]:
        """Wait for them; return what each sequence gained, and the ids of requests with NaN or infinite logits.

        Tokens of the latter mean nothing.
        """
        if self._result is None:
            packed, *reported = self._read.wait()
            chosen, largest = packed.tolist()
            tokens = [int(token) for token in chosen]
            for request, token in zip(self._requests, tokens, strict=True):
                if request.seen is not None:
                    request.seen.add(token)
            logprobs = {} if self._report is None else self._report.logprobs(*reported)
            sampled = tuple(
                SampledTokens(sequence.request_id, (token,), (logprobs[row],) if row in logprobs else ())
                for row, (sequence, token) in enumerate(zip(self._sequences, tokens, strict=True))
            )
            broken = [
                sequence.request_id
                for sequence, logit in zip(self._sequences, largest, strict=True)
                if not math.isfinite(logit)
            ]
            self._result = (sampled, tuple(broken))
        return self._result


class Sampler:
    """Sampling of all running requests; request ids are unique while they run."""

    def __init__(self, eos_token_ids: Iterable[int], drawing: Drawing | None = None) -> None:
        """`drawing` draws; torch does where it is None."""
        self._drawing = drawing
        self._eos_biases = tuple((token, -torch.inf) for token in sorted(eos_token_ids))
        self._requests: dict[int, _Request] = {}
        self._last: Sample | None = None

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

    def sample(self, scores: Scores, sequences: Sequence[SequenceStep]) -> Sample:
        """Choose one token per sequence; scores in the sequences' order, their logits may be overwritten.

        The device is waited for only where penalties need to know the tokens of the step before.
        """
        logits, likeliest = scores.logits, scores.likeliest
        requests = [self._requests[sequence.request_id] for sequence in sequences]
        if self._last is not None and any(request.seen is not None for request in requests):
            self._last.result()
        positions = [sequence.position + len(sequence.token_ids) for sequence in sequences]
        reported = [row for row, request in enumerate(requests) if request.sampling.logprobs >= 0]
        index = send(np.array(reported), logits.device) if reported else None
        raw = None if index is None else logits[index]  # a copy
        if self._constrain(logits, requests, positions):
            likeliest = logits.argmax(dim=-1)
        chosen = self._choose(logits, likeliest, requests, positions)
        report = None
        if raw is not None and index is not None:
            wanted = [requests[row].sampling.logprobs for row in reported]
            report = _Report.of(raw, chosen[index], reported, wanted)
        self._last = Sample(chosen, scores.largest, sequences, requests, report)
        return self._last

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
            chosen[index] = self._drawing.draw(logits, Draws.of(drawn, samplings, random))
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
