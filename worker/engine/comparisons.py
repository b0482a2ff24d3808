"""Comparisons of two artifacts of an adapter: what waits, what one step computes, and what that holds meanwhile.

A comparison is one step long: all of its tokens are computed under both artifacts at once, on KV blocks that it has
for this step alone. So it needs no preemption, and between steps it holds nothing. It comes after every client's
request: only while nobody waits, with what a step's budget has left, or alone where nothing else runs. One that fits
into no step beside what runs is computed all the same after PATIENCE_S, in a step that is longer for it. Pure: time is
an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.plan import ComparedPositions, ComparisonStep
from worker.engine.refusal import Problem, adapter_too_large, device_full
from worker.engine.request import Request
from worker.engine.residency import Placement
from worker.mailbox import AdapterFile, Compare, Compared, Failure

PATIENCE_S: Final = 2.0
"""How long a comparison that is larger than what steps have left waits; so far apart are steps that it makes longer."""


def check(compare: Compare, config: EngineConfig) -> Problem | None:
    """Return why a comparison can never run here, or None."""
    tokens = compare.token_ids
    if not 0 <= compare.first_position < len(tokens) <= config.max_context_tokens:
        return Problem(
            "INVALID_PARAMETER",
            f"positions {compare.first_position} to {len(tokens)} cannot be compared: at most "
            f"{config.max_context_tokens} tokens fit",
            {"field": "tokens", "limit": str(config.max_context_tokens)},
        )
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        return Problem(
            "INVALID_PARAMETER",
            f"a token id is not in the vocabulary; use ids from 0 to {config.vocab_size - 1}",
            {"field": "tokens"},
        )
    files = _files(compare)
    if len(files) > config.max_resident_adapters:
        return Problem(
            "TOO_LARGE",
            f"comparing takes {len(files)} adapters on the device, this worker keeps {config.max_resident_adapters}; "
            "raise max_resident_adapters",
            {"limit": str(config.max_resident_adapters), "length": str(len(files))},
        )
    for file in files:
        problem = adapter_too_large(file, config)
        if problem is not None:
            return problem
    num_bytes = sum(file.artifact_bytes for file in files)
    if config.max_adapter_bytes is not None and num_bytes > config.max_adapter_bytes:
        return Problem(
            "TOO_LARGE",
            f"both artifacts have {num_bytes} bytes, this worker keeps at most {config.max_adapter_bytes} bytes of "
            "adapters on its device; raise max_adapter_bytes",
            {"limit": str(config.max_adapter_bytes), "length": str(num_bytes)},
        )
    outside = sum(file.vocabulary_bytes for file in files)
    if config.max_vocabulary_bytes is not None and outside > config.max_vocabulary_bytes:
        return Problem(
            "TOO_LARGE",
            f"embeddings and heads of both artifacts take {outside} bytes, this worker keeps at most "
            f"{config.max_vocabulary_bytes} of such; raise max_vocabulary_bytes",
            {"limit": str(config.max_vocabulary_bytes), "length": str(outside)},
        )
    chunks = sum(config.chunks_for_adapter(file.arena_bytes) for file in files) + 2 * config.blocks_for(len(tokens))
    if chunks > config.total_blocks:
        return Problem(
            "TOO_LARGE",
            f"both artifacts and the KV of {len(tokens)} tokens under each need {chunks} chunks, the arena has "
            f"{config.total_blocks}; raise arena_bytes",
            {"limit": str(config.total_blocks), "length": str(chunks)},
        )
    return None


class Comparisons:
    """The comparisons of one engine, in order of arrival; at most one is in a step."""

    def __init__(self, memory: Memory, config: EngineConfig) -> None:
        self._memory, self._config = memory, config
        self._waiting: dict[int, Compare] = {}
        self._in_step: ComparisonStep | None = None
        self._passed_over: tuple[int, float] | None = None  # the first one, since when no step has had room for it

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def add(self, compare: Compare) -> None:
        """Take a comparison that `check` has nothing against."""
        self._waiting[compare.request_id] = compare

    def remove(self, request_id: int) -> None:
        """Forget a comparison; what its step holds, if it is in one, is given back when that is answered."""
        self._waiting.pop(request_id, None)

    def waiting_for(self, artifact_digest: str) -> list[int]:
        """Return the ids of those that need an adapter."""
        return [
            request_id
            for request_id, compare in self._waiting.items()
            if artifact_digest in (compare.exact.artifact_digest, compare.measured.artifact_digest)
        ]

    def next(
        self, running: Collection[Request], budget: int, now: float, *, alone: bool
    ) -> tuple[list[Placement], ComparisonStep | None]:
        """Return loads to start and the comparison to compute now, with all that it needs taken.

        `budget` is what prompts left of the step's tokens; `alone` says that the step computes nothing else.
        """
        compare = next(iter(self._waiting.values()), None)
        if compare is None:
            return [], None
        if alone or 2 * len(compare.token_ids) <= budget:
            self._passed_over = None
        elif self._passed_over is None or self._passed_over[0] != compare.request_id:
            self._passed_over = (compare.request_id, now)
            return [], None
        elif now - self._passed_over[1] < PATIENCE_S:
            return [], None
        reserve = self._reserve(running)
        placements, is_ready = self._place(compare, reserve, now)
        return placements, self._start(compare, reserve, bool(running)) if is_ready else None

    def give_up(self) -> Failure | None:
        """Refuse the first one if it can never start: to be called where nothing runs, and nothing was begun for it.

        `check` knew its files' sizes only; what they take on the device is known once they have been there.
        """
        compare = next(iter(self._waiting.values()), None)
        if compare is None or self._memory.residency.is_loading:
            return None
        del self._waiting[compare.request_id]
        if self._memory.residency.pinned:
            return Failure(compare.request_id, *_BESIDE_PINNED)
        return Failure(
            compare.request_id,
            "TOO_LARGE",
            "both artifacts and the KV of the compared tokens do not fit this worker's device together; raise "
            "max_adapter_bytes, max_resident_adapters or arena_bytes",
            {"field": "max_adapter_bytes"},
        )

    def finish(self, result: ComparedPositions | None) -> Compared | None:
        """Give back what the step in flight held for its comparison; `result` is None where the step failed.

        Returns what is to be told, None where nobody wants it any more or nothing was compared.
        """
        step, self._in_step = self._in_step, None
        if step is None:
            return None
        self._memory.drop_blocks((*step.exact_block_ids, *step.measured_block_ids))
        self._memory.release(step.exact_slot)
        self._memory.release(step.measured_slot)
        known = self._waiting.pop(step.request_id, None)
        if known is None or result is None:
            return None
        return Compared(step.request_id, result.same_top, result.kl)

    def in_step(self) -> int | None:
        """Return the id of the comparison of the step in flight, unless it was removed."""
        request_id = None if self._in_step is None else self._in_step.request_id
        return request_id if request_id in self._waiting else None

    def _reserve(self, running: Collection[Request]) -> int:
        """Chunks left for running requests: what their known tokens need, and a block for each or the watermark."""
        if not running:
            return 0
        config = self._config
        promised = sum(config.blocks_for(len(r.token_ids)) - len(r.block_ids) for r in running)
        return promised + max(len(running), config.watermark_chunks)

    def _place(self, compare: Compare, reserve: int, now: float) -> tuple[list[Placement], bool]:
        """Take slots and chunks for adapters that have none; tells whether both are there already."""
        files, residency = _files(compare), self._memory.residency
        digests = {file.artifact_digest for file in files}
        placements: list[Placement] = []
        is_ready = True
        for file in files:
            slot = residency.find(file.artifact_digest)
            if slot is not None and not slot.loading:
                continue
            is_ready = False
            if slot is None:
                placement = self._memory.place(file, compare, digests, reserve=reserve, now=now)
                if placement is not None:
                    placements.append(placement)
        return placements, is_ready

    def _start(self, compare: Compare, reserve: int, has_neighbours: bool) -> ComparisonStep | None:
        memory, config = self._memory, self._config
        exact, measured = compare.exact.artifact_digest, compare.measured.artifact_digest
        each = config.blocks_for(len(compare.token_ids))
        floor = config.adapter_floor_chunks if has_neighbours else 0
        if 2 * each + reserve > memory.available((exact, measured), floor=floor):
            return None
        exact_slot, measured_slot = memory.acquire(exact), memory.acquire(measured)
        blocks = memory.take_blocks(2 * each, floor=floor)
        if blocks is None:
            raise ValueError("chunks that were available are not there")
        step = ComparisonStep(
            compare.request_id,
            compare.token_ids,
            compare.first_position,
            exact_slot,
            blocks[:each],
            measured_slot,
            blocks[each:],
        )
        self._in_step = step
        return step


_BESIDE_PINNED: Final = device_full(
    "both artifacts and the KV of the compared tokens do not fit this worker's device together beside those pinned; "
    "unpin some, or try again later"
)


def _files(compare: Compare) -> Sequence[AdapterFile]:
    """Return the adapters that a comparison needs, each once."""
    if compare.exact.artifact_digest == compare.measured.artifact_digest:
        return (compare.exact,)
    return (compare.exact, compare.measured)
