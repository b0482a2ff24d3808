"""Generation requests as they come over the wire, checked: everything that can be refused without tokenizing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.adapter_format.parts import FORMATS
from common.tenancy import DEFAULT_TENANT
from loraplex.digests import is_digest
from loraplex.errors import BaseMismatch, EmptyPrompt, InvalidParameter, InvalidRequest, UnsupportedAdapter
from loraplex.worker.v1.worker_pb2 import GenerateRequest, ResolvedAdapter
from worker.sampling import CheckedSampling, check_sampling
from worker.text.chat import Message

ROLES: Final = ("system", "user", "assistant")
MAX_ID_CHARS: Final = 128


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """The adapter of a request: digests in lower-case hex."""

    version_digest: str
    artifact_digest: str
    artifact_bytes: int = 0
    """As far as the router knows."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a conversation, at least one."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request in which every field is in range. `prompt` is text, a conversation, or token ids."""

    request_id: str
    tenant: str
    adapter: CheckedAdapter | None
    prompt: str | Conversation | tuple[int, ...]
    sampling: CheckedSampling


def check_request(
    request: GenerateRequest, *, base_digest: str, vocab_size: int, max_rank: int | None = None
) -> CheckedRequest:
    """Check a request. Raises InvalidRequest and its kinds, naming the field, or BaseMismatch."""
    for field, value in (("request_id", request.request_id), ("tenant", request.tenant)):
        if len(value) > MAX_ID_CHARS:
            raise InvalidRequest(f"{field} has {len(value)} characters; give at most {MAX_ID_CHARS}", field=field)
    check_base(request.base_digest, base_digest)
    adapter = check_adapter(request.adapter, max_rank) if request.HasField("adapter") else None
    return CheckedRequest(
        request_id=request.request_id,
        tenant=request.tenant or DEFAULT_TENANT,
        adapter=adapter,
        prompt=_check_input(request, vocab_size),
        sampling=check_sampling(request.sampling, vocab_size=vocab_size),
    )


def check_base(asked: str, served: str) -> None:
    """Check the base digest of a request. Raises InvalidRequest or BaseMismatch."""
    check_digest("base_digest", asked)
    if asked != served:
        raise BaseMismatch(
            f"the request was resolved against base model {asked[:12]}, this worker serves {served[:12]}; register the "
            "base that the workers serve, or start workers for this one",
            field="base_digest",
            expected=served,
            got=asked,
        )


def check_digest(field: str, digest: str) -> None:
    """Check the form of a digest. Raises InvalidRequest, naming the field."""
    if not is_digest(digest):
        raise InvalidRequest(f"{field} is no digest; give 64 lower-case hex digits (SHA-256)", field=field)


def check_adapter(adapter: ResolvedAdapter, max_rank: int | None = None) -> CheckedAdapter:
    """Check the adapter of a request. Raises InvalidRequest or UnsupportedAdapter, naming the field."""
    check_digest("adapter.version_digest", adapter.version_digest)
    check_digest("adapter.artifact_digest", adapter.artifact_digest)
    if adapter.format not in FORMATS:
        raise UnsupportedAdapter(
            f"adapter.format is {adapter.format!r}; this worker reads {', '.join(FORMATS)}", field="adapter.format"
        )
    if max_rank is not None and adapter.rank > max_rank:
        raise UnsupportedAdapter(
            f"the adapter has rank {adapter.rank}, this worker takes at most {max_rank}; register it with a lower "
            "rank, or raise max_rank",
            field="adapter.rank",
            limit=max_rank,
        )
    return CheckedAdapter(adapter.version_digest, adapter.artifact_digest, adapter.artifact_bytes)


def _check_input(request: GenerateRequest, vocab_size: int) -> str | Conversation | tuple[int, ...]:
    match request.WhichOneof("input"):
        case "prompt":
            if not request.prompt:
                raise EmptyPrompt("the prompt is empty; give at least one character", field="prompt")
            return request.prompt
        case "chat":
            if not request.chat.messages:
                raise EmptyPrompt("the conversation has no messages; give at least one", field="messages")
            for at, message in enumerate(request.chat.messages):
                if message.role not in ROLES:
                    field = f"messages[{at}].role"
                    raise InvalidParameter(f"{field} is {message.role!r}; give one of {', '.join(ROLES)}", field=field)
            return Conversation(tuple(Message(turn.role, turn.content) for turn in request.chat.messages))
        case "tokens":
            token_ids = tuple(request.tokens.token_ids)
            if not token_ids:
                raise EmptyPrompt("the prompt has no tokens; give at least one", field="token_ids")
            if max(token_ids) >= vocab_size:
                at = next(at for at, token_id in enumerate(token_ids) if token_id >= vocab_size)
                field = f"token_ids[{at}]"
                raise InvalidParameter(
                    f"{field} is {token_ids[at]}; the vocabulary has ids 0 to {vocab_size - 1}", field=field
                )
            return token_ids
        case _:
            raise EmptyPrompt("the request has no prompt, messages or tokens; give one of them", field="prompt")
