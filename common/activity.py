"""What a service does for its callers right now: open requests and the asyncio tasks that work for them.

A leak shows here: when nobody asks anything, both are zero. A request's tasks are its own and all that are made on its
behalf, however deep; the service's standing tasks (servers, watches, heartbeats) are none of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, Final
from weakref import WeakSet

_WORKS_FOR: Final[ContextVar[Activity | None]] = ContextVar("loraplex_activity", default=None)


class Activity:
    """Counts one service's open requests and their tasks. Make it on the service's event loop."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        asyncio.get_running_loop().set_task_factory(_make_task)

    def begin(self) -> None:
        """Count a request; the running task works for it, and so does every task made from here on down."""
        self._num_requests += 1
        _WORKS_FOR.set(self)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)

    def end(self) -> None:
        """Count a request out; whatever task is left of it still counts."""
        self._num_requests -= 1

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request for as long as the block lasts, in a task that ends with it."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @property
    def num_requests(self) -> int:
        """Requests that have begun and not ended."""
        return self._num_requests

    @property
    def num_tasks(self) -> int:
        """Tasks that work for requests and are not done."""
        return sum(not task.done() for task in self._tasks)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Count a task that was made on a request's behalf."""
        self._tasks.add(task)


def _make_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    *,
    context: Context | None = None,
    **options: Any,
) -> asyncio.Task[Any]:
    """Make a task as the loop would, and let it count for the request that it is made for."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context, **options)
    activity = _WORKS_FOR.get() if context is None else context.get(_WORKS_FOR)
    if activity is not None:
        activity.adopt(task)
    return task


def num_open_files() -> int:
    """Return how many file descriptors this process holds: files, sockets, pipes."""
    return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - names suffice; minus the one that lists
