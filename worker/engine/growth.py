"""How many tokens each running request computes in a step, the KV blocks for them, and who gives way for them.

One budget per step: every request that generates computes its one token, prompts share the rest in order of admission,
so that a long prompt holds up nobody's answer by more than the budget. Blocks are taken as tokens grow. When none can
be had, the requests of lowest priority are preempted: their blocks are freed and their known tokens computed again
later. The oldest request has the highest priority, so it always gets on, and all others after it; the rest are in the
order in which they would be admitted. A request never takes from one above it: it pauses, keeping what it has. While a
plan is in flight nobody can be preempted, as their blocks are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.request import Request

Shares = list[tuple[Request, int]]
"""Requests and how many of their known tokens they compute next."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Who computes how much, with blocks for it; whether somebody got less than wanted or was preempted."""

    shares: Shares
    short: bool


def share_tokens(
    requests: Iterable[Request], config: EngineConfig, skip_cached: Callable[[Request], None]
) -> tuple[Shares, int]:
    """Return what each request computes, those that generate first, and what is left of the budget.

    Prompts get a block at least, however many generate, so that all get on. `skip_cached` takes what others have
    computed of a request's next tokens since it last looked. Who ends with the token that is pending gets nothing.
    """
    shares: Shares = []
    behind: list[Request] = []
    for request in requests:  # once per request and step: this loop is worth its inlined properties
        known = len(request.token_ids)
        if known - request.computed_tokens == 1 and known > request.prompt_tokens:
            if known < request.max_known_tokens:
                shares.append((request, 1))
        else:
            behind.append(request)
    budget = max(config.max_prefill_tokens - len(shares), min(config.block_tokens, config.max_prefill_tokens))
    return shares, share_prompt_tokens(behind, budget, shares, skip_cached)


def share_prompt_tokens(
    requests: Iterable[Request], budget: int, shares: Shares, skip_cached: Callable[[Request], None]
) -> int:
    """Add to `shares` what requests with tokens to catch up get of the budget; returns what is left of it."""
    for request in requests:
        if budget <= 0:
            break
        skip_cached(request)
        count = min(budget, request.left_tokens)
        budget -= count
        shares.append((request, count))
    return budget


def grow(
    shares: Shares,
    running: Collection[Request],
    memory: Memory,
    config: EngineConfig,
    priority: Callable[[Request], tuple[float, int]],
    preempt: Callable[[Request], None] | None,
) -> Growth:
    """Give every request the blocks for its share; `preempt` frees what one holds. Low `priority` values go first.

    Where nobody can be preempted and blocks are short, nobody gets anything.
    """
    tokens = config.block_tokens
    growing = [
        (request, _missing(request, count, config))
        for request, count in shares
        if request.computed_tokens + count > len(request.block_ids) * tokens
    ]
    if not growing:
        return Growth(shares, short=False)
    floor = config.adapter_floor_chunks
    if sum([missing for _, missing in growing]) <= memory.available(floor=floor):
        for request, missing in growing:
            request.block_ids += _taken(memory.take_blocks(missing, floor=floor))
        return Growth(shares, short=False)
    if preempt is None:
        return Growth([], short=True)
    return _grow_by_priority(dict(shares), running, memory, config, priority, preempt)


def _grow_by_priority(
    wanted: dict[Request, int],
    running: Collection[Request],
    memory: Memory,
    config: EngineConfig,
    priority: Callable[[Request], tuple[float, int]],
    preempt: Callable[[Request], None],
) -> Growth:
    oldest = min(running, key=lambda request: request.sequence)
    order = [oldest, *sorted((request for request in running if request is not oldest), key=priority)]
    granted: dict[Request, int] = {}
    short = False
    at = 0
    while at < len(order):
        request = order[at]
        at += 1
        if request not in wanted:
            continue
        needed = _missing(request, wanted[request], config)
        floor = config.adapter_floor_chunks
        blocks = memory.take_blocks(needed, floor=floor)
        while blocks is None and len(order) > at:
            victim = order.pop()
            preempt(victim)
            short = True
            blocks = memory.take_blocks(needed, floor=floor)
        if blocks is None and request is oldest:
            floor = 0
            blocks = memory.take_blocks(needed)
        if blocks is None:
            short = True
            blocks = _taken(memory.take_blocks(memory.available(floor=floor), floor=floor))
        request.block_ids += blocks
        count = min(wanted[request], len(request.block_ids) * config.block_tokens - request.computed_tokens)
        if count:
            granted[request] = count
    # In the order in which they were wanted, which is that of the batch.
    shares = [(request, granted[request]) for request in wanted if request in granted]
    return Growth(shares, short)


def _missing(request: Request, count: int, config: EngineConfig) -> int:
    return config.blocks_for(request.computed_tokens + count) - len(request.block_ids)


def _taken(blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    if blocks is None:
        raise ValueError("chunks that were available are not there")
    return blocks
