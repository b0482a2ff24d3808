"""Who gets on: a few downloads at a time, the most urgent first."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from worker.adapters.places import Places
from worker.engine.residency import FOR_REQUEST
from worker.mailbox import Urgency


class Download:
    """One that waits for its place, and has it until it is told to end."""

    def __init__(self, places: Places, urgency: int) -> None:
        self.places = places
        self.urgency = urgency
        self.has_place = False
        self.end = asyncio.Event()

    async def run(self) -> None:
        async with self.places.take(lambda: self.urgency):
            self.has_place = True
            await self.end.wait()
        self.has_place = False


@asynccontextmanager
async def downloads(places, *urgencies):
    made = [Download(places, urgency) for urgency in urgencies]
    tasks = [asyncio.create_task(download.run()) for download in made]
    await settle()
    yield made, tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def with_place(made) -> list[int]:
    return [number for number, download in enumerate(made) if download.has_place]


async def test_requests_go_before_loads_pins_and_prefetches_whoever_came_first():
    order = (Urgency.AHEAD, Urgency.PINNED, Urgency.ASKED, FOR_REQUEST, FOR_REQUEST)
    async with downloads(Places(1, patience_s=30), FOR_REQUEST, *order) as (made, _):
        for expected in (0, 4, 5, 3, 2, 1):
            assert with_place(made) == [expected]
            made[expected].end.set()
            await settle()


async def test_the_last_free_place_is_for_who_is_waited_for():
    places = Places(3, patience_s=30)
    async with downloads(places, *[Urgency.AHEAD] * 4) as (made, _):
        assert with_place(made) == [0, 1]
        made[3].urgency = FOR_REQUEST
        places.serve()
        await settle()
        assert with_place(made) == [0, 1, 3]
        made[0].end.set()
        made[1].end.set()
        await settle()
        assert with_place(made) == [2, 3]
    assert places.num_free == 3


@pytest.mark.parametrize("granted", [True, False])
async def test_who_is_cancelled_leaves_its_turn_or_its_place_to_the_next(granted):
    places = Places(1, patience_s=30)
    async with downloads(places, FOR_REQUEST, FOR_REQUEST, FOR_REQUEST) as (made, tasks):
        if granted:  # and not yet told so
            made[0].end.set()
            await asyncio.sleep(0)
            assert (len(places._turns), made[1].has_place) == (1, False)
            tasks[1].cancel()
        else:
            tasks[1].cancel()
            await settle()
            made[0].end.set()
        await settle()
        assert with_place(made) == [2]
    assert places.num_free == 1
