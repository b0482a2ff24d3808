"""What a failed call to a worker means for whoever asked the router. Pure."""

from __future__ import annotations

import grpc
from grpc import aio

from loraplex import errors


def worker_error(error: aio.AioRpcError, worker_id: str, *, has_started: bool) -> errors.LoraplexError:
    """Return the typed error behind a failed call: the worker's own, or what its connection's end means."""
    typed = errors.from_rpc_error(error)
    if isinstance(typed, errors.Unauthenticated):  # the cluster's fault, not the client's
        return errors.Unavailable(
            f"worker {worker_id} refuses this router's cluster token; both need the same one", worker_id=worker_id
        )
    if errors.carries_details(error):  # the worker itself said so
        if isinstance(typed, errors.CorruptArtifact):
            typed.metadata.setdefault("worker_id", worker_id)  # what it fetched, not what the client sent
        return typed
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return worker_lost(worker_id, error.details() or error.code().name, has_started=has_started)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded("the request's deadline passed before the answer was complete")
    return typed


def worker_lost(worker_id: str, why: str, *, has_started: bool) -> errors.WorkerLost:
    """Return the error for a worker that went away, in mid-stream or before it answered."""
    when = "in mid-stream" if has_started else "before it answered"
    return errors.WorkerLost(f"worker {worker_id} was lost {when}: {why}", worker_id=worker_id)
