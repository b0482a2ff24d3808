"""Replaced artifacts leave when their last grace is over, whatever else was retired."""

from __future__ import annotations

import asyncio

import pytest

from registry.service import retirement
from registry.service.retirement import Retirement


async def test_what_is_retired_again_gets_the_whole_grace_again(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[set[str]] = []
    done = asyncio.Event()

    async def collect(_store: object, _artifacts: object, digests: frozenset[str]) -> int:
        removed.append(set(digests))
        if len(removed) == 3:
            done.set()
        return len(digests)

    monkeypatch.setattr(retirement, "collect", collect)
    waiting = Retirement(None, None, 0.05)  # type: ignore[arg-type] # `collect` alone uses them
    waiting.retire({"int8", "int4"})
    waiting.retire({"none"})
    waiting.retire({"int8"})  # it was named again in between
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(waiting.run())
        await done.wait()
        running.cancel()
    assert removed == [{"int4"}, {"none"}, {"int8"}]
