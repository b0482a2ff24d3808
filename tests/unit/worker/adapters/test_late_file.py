"""A file that the engine asks for late comes once for all of an RPC's requests, and leaves with the RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from loraplex.errors import ArtifactUnreachable, LoraplexError
from worker.adapters.late_file import LateFile
from worker.adapters.store import Lease
from worker.mailbox import AdapterFile

FILE = AdapterFile("ab" * 32, "/cache/ab", 10)


class Rpc:
    """One RPC around a late file: what the engine was handed, and how the RPC failed."""

    def __init__(self, *outcomes: Exception) -> None:
        self.outcomes = list(outcomes)
        self.may_come = asyncio.Event()
        self.num_asked = self.num_released = 0
        self.handed: list[int] = []
        self.failed: list[LoraplexError] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.late = LateFile(self.acquire, self.begin, lambda request_id, _: self.handed.append(request_id), self.fail)

    async def acquire(self) -> Lease:
        self.num_asked += 1
        await self.may_come.wait()
        if self.outcomes:
            raise self.outcomes.pop()
        return Lease(FILE, fetched=True, waited=True, _release=self.release)

    def release(self) -> None:
        self.num_released += 1

    def begin(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def run() -> None:
            await work()

        self.tasks.append(asyncio.create_task(run()))
        return self.tasks[-1]

    def fail(self, error: LoraplexError) -> None:
        """As a generation does: who fails gives back everything."""
        self.failed.append(error)
        self.late.close()

    async def ended(self) -> list[BaseException | None]:
        self.may_come.set()
        return await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_all_requests_that_ask_get_the_file_of_one_fetch() -> None:
    rpc = Rpc()
    rpc.late.wanted(1)
    await asyncio.sleep(0)
    rpc.late.wanted(2)
    assert (rpc.handed, rpc.late.lease) == ([], None)
    await rpc.ended()
    assert rpc.handed == [1, 2]
    rpc.late.wanted(3)  # preempted since
    assert (rpc.handed, rpc.num_asked, rpc.num_released) == ([1, 2, 3], 1, 0)
    assert rpc.late.lease is not None
    assert rpc.late.lease.fetched
    assert rpc.late.fetch_s > 0
    rpc.late.close()
    rpc.late.close()
    assert rpc.num_released == 1


async def test_who_leaves_gives_up_the_fetch() -> None:
    rpc = Rpc()
    rpc.late.wanted(1)
    await asyncio.sleep(0)
    rpc.late.close()
    (end,) = await rpc.ended()
    assert isinstance(end, asyncio.CancelledError)
    assert (rpc.handed, rpc.failed) == ([], [])


@pytest.mark.parametrize("cause", [ArtifactUnreachable("away"), RuntimeError("a bug")])
async def test_a_fetch_that_fails_ends_the_rpc_and_says_why_where_a_caller_may_know(cause: Exception) -> None:
    rpc = Rpc(cause)
    rpc.late.wanted(1)
    await rpc.ended()
    (error,) = rpc.failed
    assert error is cause or (error.reason == LoraplexError.reason and "a bug" not in error.message)
    assert rpc.handed == []
