"""Keys of gRPC metadata that have a meaning here; over HTTP the same names are headers."""

from __future__ import annotations

from typing import Final

MIN_REVISION_KEY: Final = "x-loraplex-min-revision"
"""Client to router: the registry revision that the answer must know of at least."""

REQUEST_ID_KEY: Final = "x-loraplex-request-id"
"""Client to router to worker, and back: the request's id in logs."""

STATUS_SEQUENCE_KEY: Final = "x-loraplex-status-sequence"
"""Worker to router: the sequence of the worker's status that first counts this request."""

TRACE_KEY: Final = "x-loraplex-trace"
"""Client to router to worker, over gRPC: `1` asks for the request's spans in `Finished`."""

AUTHORIZATION_KEY: Final = "authorization"
"""Who calls: `Bearer ` and an API key (client to router) or the cluster token (between services, and operators)."""
