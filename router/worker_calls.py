"""The wait for one answer of a worker."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import aio

from router.worker_errors import worker_error, worker_lost


async def answer_of(call: Any, worker_id: str) -> Any:
    """Wait for a worker's answer. Raises what it refuses with, and WorkerLost where its channel closes meanwhile."""
    task = asyncio.current_task()
    try:
        return await call
    except aio.AioRpcError as error:
        raise worker_error(error, worker_id, has_started=False) from None
    except asyncio.CancelledError:
        if task is not None and task.cancelling():
            raise
        raise worker_lost(worker_id, "its channel was closed", has_started=False) from None
    finally:
        call.cancel()
