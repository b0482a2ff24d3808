"""Open requests and their tasks are counted exactly, and standing tasks are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from common.activity import Activity

TREE = Path(__file__).resolve().parents[3]


async def test_a_requests_tasks_count_until_they_are_done_however_deep_they_were_made():
    activity = Activity()
    leave = asyncio.Event()
    made: list[asyncio.Task[object]] = []

    async def grandchild():
        await leave.wait()

    async def child():
        made.append(asyncio.create_task(grandchild()))

    async def request():
        with activity.request():
            await asyncio.create_task(child())

    assert (activity.num_requests, activity.num_tasks) == (0, 0)
    asking = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert activity.num_requests == 1
    await asking
    assert activity.num_requests == 0
    assert activity.num_tasks == 1  # the grandchild outlives its request: a leak, and it shows
    leave.set()
    await made[0]
    assert activity.num_tasks == 0


async def test_standing_tasks_and_other_requests_do_not_count():
    activity, other = Activity(), Activity()
    standing = asyncio.create_task(asyncio.sleep(30))

    async def request():
        with other.request():
            await asyncio.sleep(30)

    asking = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert (activity.num_requests, activity.num_tasks) == (0, 0)
    assert (other.num_requests, other.num_tasks) == (1, 1)
    for task in (standing, asking):
        task.cancel()
    await asyncio.gather(standing, asking, return_exceptions=True)
    assert (other.num_requests, other.num_tasks) == (0, 0)


async def test_a_request_that_fails_is_counted_out():
    activity = Activity()
    with pytest.raises(ValueError, match="no"), activity.request():
        raise ValueError("no")
    assert activity.num_requests == 0


COUNTED = """
import os
from common.activity import num_open_files
before = num_open_files()
ends = os.pipe()
assert num_open_files() == before + 2
for end in ends:
    os.close(end)
assert num_open_files() == before
"""


def test_open_files_are_counted():
    # In a process of its own: threads of tests before may close their connections only now.
    subprocess.run([sys.executable, "-c", COUNTED], cwd=TREE, check=True)
