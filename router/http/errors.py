"""Errors in the shape OpenAI clients expect: `{"error": {message, type, param, code}}` and a real HTTP status."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import grpc

from loraplex.errors import CorruptArtifact, LoraplexError, ModelNotFound, RequestTimeout, TooLarge

_HTTP_STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def http_status(error: LoraplexError) -> int:
    """Return the HTTP status of an error; 500 where its code has none of its own."""
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, RequestTimeout):
        return 408
    if isinstance(error, CorruptArtifact) and "worker_id" in error.metadata:
        return 503  # a worker's file, not the client's
    return _HTTP_STATUS.get(error.code, 500)


def error_object(error: LoraplexError) -> dict[str, Any]:
    """Return the body of an error answer, also sent as the `error` event of a stream."""
    status = http_status(error)
    if status == 429:
        kind = "rate_limit_error"
    elif status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFound) else error.reason.lower()
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}


def error_answer(error: LoraplexError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body that tell of `error`."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return http_status(error), headers, json.dumps(error_object(error)).encode()
