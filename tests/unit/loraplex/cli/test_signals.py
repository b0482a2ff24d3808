from __future__ import annotations

import asyncio
import os
import signal

import pytest

from loraplex.cli.signals import StopSignals


async def work() -> int:
    await asyncio.sleep(0)
    return 7


async def test_work_that_ends_first_gives_its_result():
    signals = StopSignals()
    assert await signals.unless_asked(work()) == 7
    assert signals.first is None


async def test_works_own_error_comes_out():
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await StopSignals().unless_asked(fail())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
async def test_the_first_signal_cancels_the_work_and_the_second_forces(number, code):
    signals, cancelled, forced = StopSignals(), asyncio.Event(), asyncio.Event()
    signals.on_second = forced.set

    async def endless() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with asyncio.timeout(10):
        await signals.unless_asked(endless())
        assert cancelled.is_set()
        assert signals.exit_code == code
        assert not forced.is_set()
        os.kill(os.getpid(), number)
        await forced.wait()
