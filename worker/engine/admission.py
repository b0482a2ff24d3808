"""Who may start now: hands adapter references, adapter slots and a place in the batch to waiting requests, in order.

A request is admitted when its adapter is resident and chunks for all of its known tokens can be had, beside what
running requests still need for theirs and a watermark for their answers to grow. It takes them later, as it computes.
One that does not fit may be overtaken by later ones that do, for `max_adapter_wait_s` from the first that overtook it;
then it goes before all others, and nobody gets a chunk, a slot or a place until it fits. Waiting requests hold
nothing: they only claim their adapters against eviction for later ones. So nothing can deadlock: running requests end,
loads end, and the first in order always gets what becomes free. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.request import Request
from worker.engine.residency import Placement, Slot
from worker.engine.waiting import WaitingQueue
from worker.mailbox import AdapterFile

LOOKAHEAD_REQUESTS: Final = 128
"""How far behind the first waiting request others are considered in one step."""
LOOKAHEAD_LOADS: Final = 32
"""The same while the batch is full, when only adapters can be loaded ahead of their requests."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What one pass decided. The caller takes `admitted` out of the queue and starts the loads of `placements`."""

    admitted: tuple[Request, ...]
    placements: tuple[Placement, ...]
    claimed: frozenset[str] = frozenset()
    """Adapters that requests which were considered need."""
    reserve: int = 0
    """Chunks that must be left: for running requests, and for those that were considered and still wait."""
    may_place: bool = True
    """Whether no waiting request lacks a slot or chunks for its adapter."""
    lacking: tuple[Request, ...] = ()
    """Requests whose adapter is nowhere in the engine, and its file not on the disk."""


def admit(
    waiting: WaitingQueue, running: Sequence[Request], memory: Memory, config: EngineConfig, now: float
) -> Admission:
    """Pass over the waiting requests once, in order; admitted ones hold their adapter and cached prefix afterwards."""
    return _Pass(running, memory, config, now).over(waiting)


def place_ahead(
    waiting: WaitingQueue, running: Sequence[Request], memory: Memory, config: EngineConfig, now: float
) -> tuple[Placement, ...]:
    """Take slots and chunks for adapters of waiting requests, beside all that those before them need; admit nobody."""
    return _Pass(running, memory, config, now, admitting=False).over(waiting).placements


class _Pass:
    """One pass: what is left to give, and who was passed over."""

    def __init__(
        self, running: Sequence[Request], memory: Memory, config: EngineConfig, now: float, *, admitting: bool = True
    ) -> None:
        self._memory, self._config, self._now = memory, config, now
        self._num_running = len(running)
        self._adapters = {request.adapter.artifact_digest for request in running if request.adapter is not None}
        # What running requests need until all tokens known now are computed.
        self._promised = sum(
            [config.blocks_for(len(request.token_ids)) - len(request.block_ids) for request in running]
        )
        self._claimed: set[str] = set()
        self._admitting, self._placing = admitting, True
        self._admits_later = not admitting
        self._ready_blocks = 0  # of requests that could be admitted, where that is left for later
        self._admitted: list[Request] = []
        self._placements: list[Placement] = []
        self._passed: list[Request] = []
        self._lacking: list[Request] = []
        self._waiting_blocks = 0  # of all that were considered and not admitted

    def over(self, waiting: WaitingQueue) -> Admission:
        """Consider the requests in order; see `admit`."""
        for request in self._ordered(waiting):
            if not (self._placing or (self._admitting and self._has_place)):
                break
            self._consider(request)
        return Admission(
            tuple(self._admitted),
            tuple(self._placements),
            frozenset(self._claimed),
            self._reserve + self._waiting_blocks,
            self._placing,
            tuple(self._lacking),
        )

    @property
    def _has_place(self) -> bool:
        return self._num_running < self._config.max_running_requests

    @property
    def _reserve(self) -> int:
        """Chunks that must be left for running requests: a block for each, or the watermark; none for nobody."""
        if not self._num_running:
            return 0
        return self._promised + max(self._num_running, self._config.watermark_chunks)

    def _is_aged(self, request: Request) -> bool:
        since_s = request.passed_over_s
        return since_s is not None and self._now - since_s >= self._config.max_adapter_wait_s

    def _ordered(self, waiting: WaitingQueue) -> list[Request]:
        """Return the queue's order, but first those that have aged, then those for whom an adapter has been loaded.

        The latter were first when their loads began. Tenants' counters have moved since, not least by those loads, and
        without this two tenants could have their adapters push out each other's unused for ever.
        """
        lookahead = LOOKAHEAD_REQUESTS if self._has_place else LOOKAHEAD_LOADS
        ordered = list(islice(self._able(waiting), lookahead))
        aged = [request for request in ordered if request.passed_over_s is not None and self._is_aged(request)]
        first = sorted(aged, key=lambda request: (request.passed_over_s or 0.0, request.sequence))
        unused = [waiting.find(slot.request_id) for slot in self._memory.residency.unused()]
        first += sorted([request for request in unused if request is not None], key=lambda request: request.sequence)
        if not first:
            return ordered
        return list(dict.fromkeys([*first, *ordered]))

    def _able(self, waiting: WaitingQueue) -> Iterator[Request]:
        """Iterate over the queue in order, but for those that cannot go on without their adapter's file."""
        for request in waiting.in_order():
            if request.adapter is None or request.adapter.on_disk or not self._lacks(request.adapter):
                yield request
            else:
                self._lacking.append(request)

    def _lacks(self, adapter: AdapterFile) -> bool:
        """Tell whether an adapter whose file has left is nowhere in the engine either."""
        digest = adapter.artifact_digest
        return self._memory.residency.find(digest) is None and digest not in self._memory.on_host

    def _consider(self, request: Request) -> None:
        adapter = request.adapter
        slot: Slot | None = None
        if adapter is not None:
            slot = self._memory.residency.find(adapter.artifact_digest)
            if slot is None and not adapter.on_disk and self._lacks(adapter):  # since this pass has begun
                self._lacking.append(request)
                return
            if slot is None and self._placing:
                reserve = self._reserve + self._ready_blocks
                placement = self._memory.place(adapter, request, self._claimed, reserve=reserve, now=self._now)
                if placement is None:
                    self._placing = False  # strictly in order: a later adapter must not take what this one waits for
                else:
                    self._placements.append(placement)
            self._claimed.add(adapter.artifact_digest)
        ready = adapter is None or (slot is not None and not slot.loading)
        if ready and self._admitting and self._has_place and self._fits_batch(request) and self._start(request):
            return
        self._passed.append(request)
        blocks = self._config.blocks_for(len(request.token_ids))
        self._waiting_blocks += blocks
        if ready and self._admits_later:
            self._ready_blocks += blocks
        if self._is_aged(request):
            self._admitting = self._placing = False

    def _fits_batch(self, request: Request) -> bool:
        adapters = self._adapters if request.adapter is None else self._adapters | {request.adapter.artifact_digest}
        return len(adapters) < 2 or self._num_running < self._config.max_mixed_requests

    def _start(self, request: Request) -> bool:
        """Admit a request if its known tokens fit; returns whether it did."""
        memory, config = self._memory, self._config
        cached = memory.find_prefix(request)
        needed = config.blocks_for(len(request.token_ids)) - len(cached)
        floor = config.adapter_floor_chunks if self._num_running else 0
        room = memory.available(self._claimed, floor=floor) - memory.num_idle(cached)
        if needed + self._reserve > room:
            return False
        if request.adapter is not None:
            request.adapter_slot = memory.acquire(request.adapter.artifact_digest)
            self._adapters.add(request.adapter.artifact_digest)
        memory.share(cached)
        request.block_ids = cached
        request.published_blocks = len(cached)
        request.computed_tokens = len(cached) * config.block_tokens
        request.passed_over_s = None
        if not request.was_admitted:
            request.admitted_s = self._now
        self._promised += needed
        self._num_running += 1
        self._admitted.append(request)
        for passed in self._passed:
            if passed.passed_over_s is None:
                passed.passed_over_s = self._now
        self._passed.clear()
        return True
