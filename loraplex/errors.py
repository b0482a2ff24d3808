"""The error tree: every refusal Loraplex gives, as a class that fixes its gRPC code and its stable reason.

    LoraplexError                      INTERNAL             INTERNAL
    ├── InvalidRequest                 INVALID_ARGUMENT     INVALID_REQUEST
    │   ├── InvalidParameter           INVALID_ARGUMENT     INVALID_PARAMETER
    │   ├── InvalidName                INVALID_ARGUMENT     INVALID_NAME
    │   ├── EmptyPrompt                INVALID_ARGUMENT     EMPTY_PROMPT
    │   ├── PromptTooLong              INVALID_ARGUMENT     PROMPT_TOO_LONG
    │   ├── InvalidAdapter             INVALID_ARGUMENT     INVALID_ADAPTER
    │   │   ├── UnsupportedAdapter     INVALID_ARGUMENT     UNSUPPORTED_ADAPTER
    │   │   ├── AdapterMismatch        INVALID_ARGUMENT     ADAPTER_MISMATCH
    │   │   └── CorruptArtifact        INVALID_ARGUMENT     CORRUPT_ARTIFACT
    │   └── InvalidBaseModel           INVALID_ARGUMENT     INVALID_BASE_MODEL
    ├── NotFound                       NOT_FOUND            NOT_FOUND
    │   ├── ModelNotFound              NOT_FOUND            MODEL_NOT_FOUND
    │   ├── AdapterNotFound            NOT_FOUND            ADAPTER_NOT_FOUND
    │   ├── BaseModelNotFound          NOT_FOUND            BASE_MODEL_NOT_FOUND
    │   ├── ArtifactNotFound           NOT_FOUND            ARTIFACT_NOT_FOUND
    │   └── SourceNotFound             NOT_FOUND            SOURCE_NOT_FOUND
    ├── AlreadyExists                  ALREADY_EXISTS       ALREADY_EXISTS
    ├── Unauthenticated                UNAUTHENTICATED      UNAUTHENTICATED
    ├── PermissionDenied               PERMISSION_DENIED    PERMISSION_DENIED
    │   └── SourceForbidden            PERMISSION_DENIED    SOURCE_FORBIDDEN
    ├── FailedPrecondition             FAILED_PRECONDITION  FAILED_PRECONDITION
    │   ├── BaseMismatch               FAILED_PRECONDITION  BASE_MISMATCH
    │   └── VersionMismatch            FAILED_PRECONDITION  VERSION_MISMATCH
    ├── ResourceExhausted              RESOURCE_EXHAUSTED   RESOURCE_EXHAUSTED
    │   ├── QueueFull                  RESOURCE_EXHAUSTED   QUEUE_FULL
    │   ├── TooLarge                   RESOURCE_EXHAUSTED   TOO_LARGE
    │   ├── NoSpace                    RESOURCE_EXHAUSTED   NO_SPACE
    │   │   └── DeviceFull             RESOURCE_EXHAUSTED   DEVICE_FULL
    │   └── DeadlineUnreachable        RESOURCE_EXHAUSTED   DEADLINE_UNREACHABLE
    ├── DeadlineExceeded               DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
    │   ├── RequestTimeout             DEADLINE_EXCEEDED    REQUEST_TIMEOUT
    │   └── SourceTimeout              DEADLINE_EXCEEDED    SOURCE_TIMEOUT
    ├── Cancelled                      CANCELLED            CANCELLED
    └── Unavailable                    UNAVAILABLE          UNAVAILABLE
        ├── NoWorker                   UNAVAILABLE          NO_WORKER
        ├── Draining                   UNAVAILABLE          DRAINING
        ├── EngineDown                 UNAVAILABLE          ENGINE_DOWN
        ├── WorkerLost                 UNAVAILABLE          WORKER_LOST
        ├── NotServedHere              UNAVAILABLE          NOT_SERVED_HERE
        ├── ArtifactUnreachable        UNAVAILABLE          ARTIFACT_UNREACHABLE
        ├── SourceUnreachable          UNAVAILABLE          SOURCE_UNREACHABLE
        ├── CatalogBehind              UNAVAILABLE          CATALOG_BEHIND
        └── RegistryUnavailable        UNAVAILABLE          REGISTRY_UNAVAILABLE

Facts travel as string metadata of `google.rpc.ErrorInfo` (domain `loraplex`); `field` names the offending request
field where there is one. Clients get the same classes back from `from_rpc_error`.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "loraplex"
_DETAILS_KEY = "grpc-status-details-bin"
# A status travels in the trailers, and gRPC drops those over 8 KiB with all they say; messages quote what clients sent.
_MAX_MESSAGE_BYTES = 1200
_MAX_FACT_BYTES = 600


class LoraplexError(Exception):
    """Root of the tree. `message` is for people, `reason` for programs, `metadata` holds the facts."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, /, *, retry_after_s: float | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def field(self) -> str | None:
        """The request field at fault, where one is."""
        return self.metadata.get("field")


class InvalidRequest(LoraplexError):
    """The request is malformed or asks for something impossible."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class InvalidParameter(InvalidRequest):
    """A parameter is of the wrong type or out of its range."""

    reason = "INVALID_PARAMETER"


class InvalidName(InvalidRequest):
    """A name breaks its grammar."""

    reason = "INVALID_NAME"


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""

    reason = "EMPTY_PROMPT"


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context; metadata `limit` and `length` are in tokens."""

    reason = "PROMPT_TOO_LONG"


class InvalidAdapter(InvalidRequest):
    """The uploaded folder is not a LoRA adapter that can be served."""

    reason = "INVALID_ADAPTER"


class UnsupportedAdapter(InvalidAdapter):
    """The adapter uses something that cannot be served right; metadata `field` names it."""

    reason = "UNSUPPORTED_ADAPTER"


class AdapterMismatch(InvalidAdapter):
    """A tensor does not fit the base model; metadata `tensor` names it."""

    reason = "ADAPTER_MISMATCH"


class CorruptArtifact(InvalidAdapter):
    """Bytes are truncated, damaged or not what their digest says."""

    reason = "CORRUPT_ARTIFACT"


class InvalidBaseModel(InvalidRequest):
    """The folder or manifest is not a base model that can be served."""

    reason = "INVALID_BASE_MODEL"


class NotFound(LoraplexError):
    """Something that was named does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    """No base model or adapter of this name is known to the caller."""

    reason = "MODEL_NOT_FOUND"


class AdapterNotFound(NotFound):
    """No adapter of this name exists."""

    reason = "ADAPTER_NOT_FOUND"


class BaseModelNotFound(NotFound):
    """No base model of this id is registered."""

    reason = "BASE_MODEL_NOT_FOUND"


class ArtifactNotFound(NotFound):
    """No artifact of this digest is stored."""

    reason = "ARTIFACT_NOT_FOUND"


class SourceNotFound(NotFound):
    """What an adapter was to be imported from does not exist, or hides from the registry's credentials."""

    reason = "SOURCE_NOT_FOUND"


class AlreadyExists(LoraplexError):
    """The name is taken by something else."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"


class Unauthenticated(LoraplexError):
    """The call has no credential, or one that is not valid. Neither message nor metadata repeats what was sent."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(LoraplexError):
    """The credential is valid and does not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class SourceForbidden(PermissionDenied):
    """The registry's settings do not let it read the source, or the source does not let it in."""

    reason = "SOURCE_FORBIDDEN"


class FailedPrecondition(LoraplexError):
    """The system is not in a state that allows this."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class BaseMismatch(FailedPrecondition):
    """The worker's base model is not the one the request was resolved against."""

    reason = "BASE_MISMATCH"


class VersionMismatch(FailedPrecondition):
    """The artifact does not hold the adapter version that the request was resolved to."""

    reason = "VERSION_MISMATCH"


class ResourceExhausted(LoraplexError):
    """A limit is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"


class QueueFull(ResourceExhausted):
    """The queue is full; another worker may have room."""

    reason = "QUEUE_FULL"


class TooLarge(ResourceExhausted):
    """An upload or a message is larger than its limit."""

    reason = "TOO_LARGE"


class NoSpace(ResourceExhausted):
    """The disk has no room; of a worker's device see DeviceFull."""

    reason = "NO_SPACE"


class DeviceFull(NoSpace):
    """Pinned adapters, or those in use, leave too little of a worker's device; later or elsewhere there may be room."""

    reason = "DEVICE_FULL"


class DeadlineUnreachable(ResourceExhausted):
    """The deadline would pass before the first token."""

    reason = "DEADLINE_UNREACHABLE"


class DeadlineExceeded(LoraplexError):
    """The deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class RequestTimeout(DeadlineExceeded):
    """The client did not send its whole request in time."""

    reason = "REQUEST_TIMEOUT"


class SourceTimeout(DeadlineExceeded):
    """The source of an import stood still for too long, or took too long in all."""

    reason = "SOURCE_TIMEOUT"


class Cancelled(LoraplexError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class Unavailable(LoraplexError):
    """A part of the system cannot be reached now; trying again may help."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class NoWorker(Unavailable):
    """No worker that could serve the request is reachable."""

    reason = "NO_WORKER"


class Draining(Unavailable):
    """The service finishes its streams and takes no new requests."""

    reason = "DRAINING"


class EngineDown(Unavailable):
    """The engine process died and is being restarted."""

    reason = "ENGINE_DOWN"


class WorkerLost(Unavailable):
    """The connection to the worker broke in mid-stream."""

    reason = "WORKER_LOST"


class NotServedHere(Unavailable):
    """The worker is dedicated to another adapter; another worker may serve the request."""

    reason = "NOT_SERVED_HERE"


class ArtifactUnreachable(Unavailable):
    """The artifact is cached nowhere and its source cannot be reached."""

    reason = "ARTIFACT_UNREACHABLE"


class SourceUnreachable(Unavailable):
    """The source of an import cannot be reached, or fails."""

    reason = "SOURCE_UNREACHABLE"


class CatalogBehind(Unavailable):
    """The catalog has not reached the revision the caller has seen."""

    reason = "CATALOG_BEHIND"


class RegistryUnavailable(Unavailable):
    """The registry cannot be reached."""

    reason = "REGISTRY_UNAVAILABLE"


def _subclasses(cls: type[LoraplexError]) -> list[type[LoraplexError]]:
    return [cls, *(deeper for direct in cls.__subclasses__() for deeper in _subclasses(direct))]


BY_REASON: dict[str, type[LoraplexError]] = {cls.reason: cls for cls in _subclasses(LoraplexError)}
_BY_CODE: dict[int, type[LoraplexError]] = {}
for _cls in _subclasses(LoraplexError):  # parents come first, so the most general class of a code wins
    _BY_CODE.setdefault(_cls.code.value[0], _cls)


def _cut(text: str, limit_bytes: int) -> str:
    raw = text.encode(errors="replace")
    return text if len(raw) <= limit_bytes else raw[: limit_bytes - 3].decode(errors="ignore") + "..."


def to_status(error: LoraplexError) -> status_pb2.Status:
    """Return the google.rpc.Status that carries `error` over gRPC, with one ErrorInfo and RetryInfo where known."""
    status = status_pb2.Status(code=error.code.value[0], message=_cut(error.message, _MAX_MESSAGE_BYTES))
    facts = {key: _cut(value, _MAX_FACT_BYTES) for key, value in error.metadata.items()}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> LoraplexError:
    """Return the error that `to_status` packed; foreign statuses map to the most general class of their code."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason: str | None = None
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    cls = BY_REASON.get(reason or "") or _BY_CODE.get(status.code, LoraplexError)
    error = cls(status.message, retry_after_s=retry_after_s)
    error.metadata = metadata
    return error


def carries_details(error: grpc.RpcError) -> bool:
    """Tell whether a failed call has a google.rpc.Status: the service's own words, not gRPC's."""
    return any(key == _DETAILS_KEY for key, _ in cast("Any", error).trailing_metadata() or ())


def from_rpc_error(error: grpc.RpcError) -> LoraplexError:
    """Return the typed error behind an RpcError of a sync or aio call."""
    call = cast("Any", error)  # grpc raises objects that are both RpcError and Call (or AioRpcError)
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            return from_status(status_pb2.Status.FromString(value))
    code: grpc.StatusCode = call.code()
    cls = _BY_CODE.get(code.value[0], LoraplexError)
    return cls(call.details() or code.name)
