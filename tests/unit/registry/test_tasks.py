"""Work that must end runs to its end, and cancellation still arrives."""

from __future__ import annotations

import asyncio

import pytest

from registry.service.tasks import to_the_end


async def test_results_and_errors_pass_through():
    async def work():
        return 5

    async def failing():
        raise ValueError

    assert await to_the_end(work()) == 5
    with pytest.raises(ValueError):
        await to_the_end(failing())


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_work_ends_before_the_cancellation_arrives(fails):
    release, done = asyncio.Event(), []

    async def work():
        await release.wait()
        done.append(True)
        if fails:
            raise ValueError

    task = asyncio.create_task(to_the_end(work()))
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done
