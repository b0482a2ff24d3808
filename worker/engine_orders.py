"""Orders to the engine, awaited: load, unload or pin an adapter. Who stops waiting for a load ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loraplex.errors import LoraplexError
from worker.engine_client import EngineClient
from worker.mailbox import Load, Pin, Steered, Unload


class _Waiting:
    """Owner of one order, until it is done."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Steered] = asyncio.get_running_loop().create_future()

    def on_steered(self, steered: Steered) -> None:
        """Learn that it is done."""
        if not self.done.done():
            self.done.set_result(steered)

    def on_failure(self, request_id: int, error: LoraplexError) -> None:
        """Learn that it will not be done."""
        del request_id
        if not self.done.done():
            self.done.set_exception(error)


async def carry_out(engine: EngineClient, make: Callable[[int], Load | Unload | Pin]) -> Steered:
    """Give an order, built by `make(request_id)`, and return when it is done.

    Raises EngineDown, QueueFull, and what the engine refuses with.
    """
    waiting = _Waiting()
    (request_id,) = engine.new_request_ids(1)
    engine.order(make(request_id), waiting)
    try:
        return await waiting.done
    finally:
        engine.abort((request_id,))
