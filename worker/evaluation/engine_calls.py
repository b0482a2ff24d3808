"""Single questions to the engine, awaited: an answer's tokens, a comparison. Who stops waiting ends the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loraplex.errors import LoraplexError
from worker.engine_client import EngineClient
from worker.mailbox import Compare, Compared, Output, Submit


class _Waiting:
    """Owner of one request of the engine, until it has ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended: asyncio.Future[Compared | None] = asyncio.get_running_loop().create_future()

    def on_output(self, output: Output) -> None:
        """Gather tokens."""
        self.tokens += output.token_ids
        if output.finish and not self.ended.done():
            self.ended.set_result(None)

    def on_file_wanted(self, request_id: int) -> None:
        """Expect nothing: an evaluation holds its files."""

    def on_compared(self, compared: Compared) -> None:
        """Take the outcome of a comparison."""
        if not self.ended.done():
            self.ended.set_result(compared)

    def on_failure(self, request_id: int, error: LoraplexError) -> None:
        """Pass on the engine's error."""
        del request_id
        if not self.ended.done():
            self.ended.set_exception(error)


async def answer(engine: EngineClient, make: Callable[[int], Submit]) -> tuple[int, ...]:
    """Return all tokens of an answer, with the end-of-sequence token where that ended it.

    `make(request_id)` builds the request. Raises EngineDown, QueueFull and what the engine refuses with.
    """
    waiting = _Waiting()
    (request_id,) = engine.new_request_ids(1)
    engine.submit(make(request_id), waiting)
    try:
        await waiting.ended
    finally:
        engine.abort((request_id,))
    return tuple(waiting.tokens)


async def compared(engine: EngineClient, make: Callable[[int], Compare]) -> Compared:
    """Return the outcome of a comparison; see `answer`."""
    waiting = _Waiting()
    (request_id,) = engine.new_request_ids(1)
    engine.compare(make(request_id), waiting)
    try:
        outcome = await waiting.ended
    finally:
        engine.abort((request_id,))
    if outcome is None:
        raise ValueError(f"the engine answered comparison {request_id} with tokens")
    return outcome
