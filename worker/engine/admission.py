"""Who may start now: hands KV blocks, adapter references and adapter slots to waiting requests, in order.

A request is admitted when its adapter is resident and all KV blocks that it can ever need are free, so that a running
request never waits for memory. One that does not fit may be overtaken by later ones that do, for `max_adapter_wait_s`
from the first that overtook it; then admission is closed behind it until what it needs has drained. Waiting requests
hold nothing: they only claim their adapters against eviction by later ones. So nothing can deadlock: running requests
end, loads end, and the first in order always gets what becomes free. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.request import Request
from worker.engine.residency import Placement, Slot

LOOKAHEAD_REQUESTS: Final = 256
"""How far behind the first waiting request others are considered in one step."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What one pass decided. The caller takes `admitted` out of the queue and starts the loads of `placements`."""

    admitted: tuple[Request, ...]
    placements: tuple[Placement, ...]


def admit(
    waiting: Iterable[Request],
    *,
    num_running: int,
    memory: Memory,
    config: EngineConfig,
    now: float,
) -> Admission:
    """Pass over the waiting requests once, in order; admitted ones hold their blocks and reference afterwards."""
    room = config.max_running_requests - num_running
    admitted: list[Request] = []
    placements: list[Placement] = []
    passed: list[Request] = []
    claimed: set[str] = set()
    admitting = True
    placing = True
    for seen, request in enumerate(waiting):
        if not (placing or (admitting and room)) or seen == LOOKAHEAD_REQUESTS:
            break
        slot: Slot | None = None
        if request.adapter is not None:
            slot = memory.residency.find(request.adapter.artifact_digest)
            if slot is None and placing:
                placement = memory.place(request.adapter, claimed, reserve=0, tenant=request.tenant, now=now)
                if placement is None:
                    placing = False  # strictly in order: a later adapter must not take what this one waits for
                else:
                    placements.append(placement)
            claimed.add(request.adapter.artifact_digest)
        ready = request.adapter is None or (slot is not None and not slot.loading)
        if admitting and room and ready and request.num_blocks <= memory.available(claimed):
            _start(request, memory, now)
            admitted.append(request)
            room -= 1
            _mark_passed_over(passed, now)
        else:
            passed.append(request)
            if request.passed_over_s is not None and now - request.passed_over_s >= config.max_adapter_wait_s:
                admitting = False
    return Admission(tuple(admitted), tuple(placements))


def _start(request: Request, memory: Memory, now: float) -> None:
    if request.adapter is not None:
        request.adapter_slot = memory.acquire(request.adapter.artifact_digest)
    blocks = memory.take_blocks(request.num_blocks)
    if blocks is None:
        raise ValueError("chunks that were available are not there")
    request.block_ids = blocks
    request.admitted_s = now


def _mark_passed_over(passed: list[Request], now: float) -> None:
    for request in passed:
        if request.passed_over_s is None:
            request.passed_over_s = now
    passed.clear()
