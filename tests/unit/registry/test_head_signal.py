"""The head signal: only rises, wakes who waits, and closes."""

from __future__ import annotations

import asyncio

import pytest

from registry.head_signal import HeadSignal


async def test_a_waiter_wakes_at_the_next_revision():
    signal = HeadSignal()
    waiting = asyncio.create_task(signal.wait_beyond(0, 60))
    await asyncio.sleep(0)
    signal.advance(1)
    assert await waiting
    assert await signal.wait_beyond(0, 60)  # known already


async def test_old_news_is_ignored():
    signal = HeadSignal()
    signal.advance(5)
    signal.advance(3)
    assert signal.revision == 5
    assert not await signal.wait_beyond(5, 0.01)


async def test_closing_wakes_all_waiters():
    signal = HeadSignal()
    waiting = [asyncio.create_task(signal.wait_beyond(0, 600)) for _ in range(3)]
    await asyncio.sleep(0)
    signal.close()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [False] * 3
    assert signal.closed


@pytest.mark.parametrize("timeout_s", [0, -1])
async def test_no_time_left_is_no_error(timeout_s):
    assert not await HeadSignal().wait_beyond(0, timeout_s)
