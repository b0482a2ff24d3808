"""What OpenAI clients may send: lenient about unknown fields, strict about types and ranges of known ones.

Owns the field names and limits of the HTTP front. What a field does is for `translate` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common import sampling_limits as limits
from loraplex.errors import EmptyPrompt, InvalidParameter

MAX_PROMPTS: Final = 128
_INT64_MAX: Final = 2**63 - 1
_UINT32_MAX: Final = 2**32 - 1
_PROMPT_KINDS: Final = "a string, an array of strings, an array of token ids, or an array of such arrays"

_Penalty = Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
_TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-limits.MAX_LOGIT_BIAS, le=limits.MAX_LOGIT_BIAS)]
StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]


class Lenient(BaseModel):
    """Strict types, no coercion; unknown fields are kept for `translate` to look for features it must refuse."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


class StreamOptions(Lenient):
    """How a stream ends."""

    include_usage: bool | None = None


class _Common(Lenient):
    """The fields that both endpoints share. None is the same as absent."""

    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_UINT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_UINT32_MAX)] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[_TokenKey, _Bias], Field(max_length=limits.MAX_LOGIT_BIASES)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class TextPart(Lenient):
    """A part of a message; any type but text is refused by `translate`, by name."""

    type: str
    text: str | None = None


class Message(Lenient):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None


class ChatRequest(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)] | None = None


class CompletionRequest(_Common):
    """POST /v1/completions."""

    prompt: Any  # text, texts, tokens or lists of tokens: `prompts_of` checks it, with better words
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)] | None = None


R = TypeVar("R", bound=Lenient)


def read_request(kind: type[R], body: Mapping[str, Any]) -> R:
    """Check a JSON body. Raises InvalidParameter that names the first field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> InvalidParameter:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    root = problems[0]["loc"][0] if problems[0]["loc"] else "body"
    of_root = [problem for problem in problems if problem["loc"] and problem["loc"][0] == root]
    # Every alternative of a union reports; the one that got deepest into the value is the one that was meant.
    deepest = max((len(_path(problem["loc"])) for problem in of_root), default=0)
    meant = [problem for problem in of_root if len(_path(problem["loc"])) == deepest] or problems[:1]
    # Where one alternative fits the value's type and only its content is wrong, the others are beside the point.
    meant = [problem for problem in meant if not problem["type"].endswith("_type")] or meant
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _path(meant[0]["loc"])).lstrip(".")
    if meant[0]["type"] == "missing":
        return InvalidParameter(f"{path or root} is required", field=path or str(root))
    said = " or ".join(dict.fromkeys(problem["msg"][:1].lower() + problem["msg"][1:] for problem in meant))
    return InvalidParameter(f"{path or root}: {said}", field=path or str(root))


def prompts_of(prompt: object) -> dict[str, str | list[int]]:
    """Return the prompts of a completion request, texts or lists of token ids, by the names the client has for them.

    Raises InvalidParameter, EmptyPrompt.
    """
    if isinstance(prompt, str):
        return {"prompt": _prompt_of(prompt, "prompt")}
    if not isinstance(prompt, list):
        raise InvalidParameter(f"prompt must be {_PROMPT_KINDS}", field="prompt")
    if not prompt:
        raise EmptyPrompt("prompt is an empty array", field="prompt")
    if all(type(item) is int for item in prompt):
        return {"prompt": _prompt_of(prompt, "prompt")}
    if len(prompt) > MAX_PROMPTS:
        raise InvalidParameter(f"prompt has {len(prompt)} items; at most {MAX_PROMPTS} are taken", field="prompt")
    prompts = {(path := f"prompt[{position}]"): _prompt_of(item, path) for position, item in enumerate(prompt)}
    if len({type(item) for item in prompts.values()}) > 1:
        raise InvalidParameter("prompt mixes strings and token ids; send one kind", field="prompt")
    return prompts


def _prompt_of(value: object, path: str) -> str | list[int]:
    """Return one prompt: not empty, its tokens in range."""
    if value in ("", []):
        raise EmptyPrompt(f"{path} is empty", field=path)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidParameter(f"{path} is {value!r:.40}; prompt must be {_PROMPT_KINDS}", field=path)
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _UINT32_MAX:
            raise InvalidParameter(
                f"{path}[{position}] must be a token id, 0 to {_UINT32_MAX}", field=f"{path}[{position}]"
            )
    return value


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    """Return the field names and indices of a location, without pydantic's names of union members."""
    return [part for part in loc if isinstance(part, int) or part in FIELDS]


FIELDS: Final = frozenset(
    name for kind in (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions) for name in kind.model_fields
)
"""Every field that a client may send and that is read."""
