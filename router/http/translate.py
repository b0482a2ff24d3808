"""From an OpenAI request to the router's own: one GenerateRequest per prompt, or a refusal that names the field.

Owns what each OpenAI field means here, and which features are refused because they would be served wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loraplex.errors import InvalidParameter
from loraplex.router.v1 import inference_pb2
from loraplex.types.v1 import sampling_pb2
from router.http.names import FieldNames
from router.http.schema import ChatRequest, CompletionRequest, Message, TextPart, prompts_of, read_request

COMPLETION_MAX_TOKENS: Final = 16
"""What OpenAI's completions endpoint generates where the request does not say; chat has no such default."""

_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name of the same role
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks for. Choice `i` of prompt `p` is answered under index `p * num_choices + i`."""

    model: str
    requests: tuple[inference_pb2.GenerateRequest, ...]
    num_choices: int
    has_logprobs: bool
    stream: bool
    include_usage: bool
    names: FieldNames


_Check = Callable[[Any], bool]
_REFUSED_CHAT: Final[Mapping[str, _Check]] = {
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "audio": lambda _: False,
    "prediction": lambda _: False,
    "web_search_options": lambda _: False,
}
_REFUSED_COMPLETION: Final[Mapping[str, _Check]] = {
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "response_format": lambda value: value == {"type": "text"},
}


def chat_plan(body: Mapping[str, Any]) -> Plan:
    """Translate the body of POST /v1/chat/completions. Raises InvalidRequest and its kin."""
    request = read_request(ChatRequest, body)
    _refuse_features(request.model_extra, _REFUSED_CHAT)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs to be true", field="top_logprobs")
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    elif request.max_tokens not in (None, max_tokens):
        raise InvalidParameter("max_tokens and max_completion_tokens differ; send one", field="max_completion_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    generate = inference_pb2.GenerateRequest(model=_text(request.model, "model"))
    for position, message in enumerate(request.messages):
        role, content = _turn(message, f"messages[{position}]")
        generate.chat.messages.add(role=role, content=_text(content, f"messages[{position}].content"))
    generate.sampling.CopyFrom(_sampling(request, max_tokens, logprobs))
    renamed = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    names = FieldNames(("messages",), renamed, isinstance(request.stop, str))
    return _plan(request, (generate,), names, has_logprobs=logprobs is not None)


def completion_plan(body: Mapping[str, Any]) -> Plan:
    """Translate the body of POST /v1/completions. Raises InvalidRequest and its kin."""
    request = read_request(CompletionRequest, body)
    extra = request.model_extra or {}
    _refuse_features(extra, _REFUSED_COMPLETION)
    best_of = extra.get("best_of")
    if best_of is not None and (isinstance(best_of, bool) or best_of != (request.n or 1)):
        raise InvalidParameter("best_of other than n is not supported", field="best_of")
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.max_tokens is None and (request.min_tokens or 0) > max_tokens:
        max_tokens = request.min_tokens or max_tokens
    sampling = _sampling(request, max_tokens, request.logprobs)
    generates = []
    prompts = prompts_of(request.prompt)
    for name, prompt in prompts.items():
        generate = inference_pb2.GenerateRequest(model=_text(request.model, "model"), sampling=sampling)
        if isinstance(prompt, str):
            generate.prompt = _text(prompt, name)
        else:
            generate.tokens.token_ids.extend(prompt)
        generates.append(generate)
    names = FieldNames(tuple(prompts), {}, isinstance(request.stop, str))
    return _plan(request, tuple(generates), names, has_logprobs=request.logprobs is not None)


def _plan(
    request: ChatRequest | CompletionRequest,
    generates: tuple[inference_pb2.GenerateRequest, ...],
    names: FieldNames,
    *,
    has_logprobs: bool,
) -> Plan:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise InvalidParameter("stream_options is only allowed when stream is true", field="stream_options")
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    return Plan(request.model, generates, request.n or 1, has_logprobs, stream, include_usage, names)


def _refuse_features(extra: Mapping[str, Any] | None, refused: Mapping[str, _Check]) -> None:
    for name, is_default in refused.items():
        value = (extra or {}).get(name)
        if value is not None and not is_default(value):
            raise InvalidParameter(f"{name} is not supported by this server; leave it out", field=name)


def _turn(message: Message, path: str) -> tuple[str, str]:
    """Return role and text of a message; the texts of several parts are joined by line breaks."""
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidParameter(
            f"{path}.role: {message.role!r} is not supported; use system, developer, user or assistant",
            field=f"{path}.role",
        )
    for name in ("tool_calls", "function_call", "audio"):
        if (message.model_extra or {}).get(name):
            raise InvalidParameter(f"{path}.{name} is not supported by this server", field=f"{path}.{name}")
    if message.content is None:
        raise InvalidParameter(f"{path}.content is required", field=f"{path}.content")
    if isinstance(message.content, str):
        return role, message.content
    return role, "\n".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(message.content))


def _part_text(part: TextPart, path: str) -> str:
    if part.type != "text":
        raise InvalidParameter(
            f"{path}.type: {part.type!r} parts are not supported; only 'text' is", field=f"{path}.type"
        )
    if part.text is None:
        raise InvalidParameter(f"{path}.text is required", field=f"{path}.text")
    return part.text


def _text(value: str, field: str) -> str:
    """Return a string that can be sent. Raises InvalidParameter where JSON escapes made half a character of it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(f"{field} has a lone surrogate; it is not valid Unicode text", field=field) from None
    return value


def _sampling(
    request: ChatRequest | CompletionRequest, max_tokens: int | None, logprobs: int | None
) -> sampling_pb2.SamplingParams:
    if isinstance(request.stop, str):
        stop = [_text(request.stop, "stop")]
    else:
        stop = [_text(string, f"stop[{position}]") for position, string in enumerate(request.stop or [])]
    return sampling_pb2.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),  # -1 is vLLM's way to say all
        min_p=request.min_p,
        seed=request.seed,
        stop=stop,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        n=request.n,
    )
