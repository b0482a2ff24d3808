"""Work that must not be left half done when its caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if this task is cancelled; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # cancelled again: the work still comes first
        if not task.cancelled():
            task.exception()  # seen, so that nobody warns of it
        raise
