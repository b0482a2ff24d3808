"""The narrow mailbox between a worker's front end and its engine process, and its wire form.

Knows nothing of the engine's inside: another engine can stand behind the same messages. Frames are msgpack, each
behind a 4-byte little-endian length, over a Unix stream socket pair. Times are seconds; a request id is unique within
one engine process. The front end expands `n` choices into `n` requests with distinct seeds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

MAX_FRAME_BYTES: Final = 64 * 2**20
LENGTH_BYTES: Final = 4


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a request's tokens are chosen; all values are checked and defaults filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int = -1
    """Number of alternatives, or -1 for no logprobs at all."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class AdapterFile(msgspec.Struct, frozen=True, array_like=True):
    """An adapter's verified packed file on this machine."""

    artifact_digest: str
    path: str
    artifact_bytes: int
    outside_bytes: int = 0
    """Those of the file that do not go into the arena: embedding and head."""
    vocabulary_bytes: int = 0
    """What these take on the device."""
    on_disk: bool = True
    """Whether the file is there. Where it has left, the engine uses what it has of the adapter on the device or in host
    memory; a request for which it has nothing any more waits until it is told the file, see `Step.wanted`."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the file that go into the arena."""
        return self.artifact_bytes - self.outside_bytes


# Front end to engine.


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a request. `arrival_s` is the front end's time.monotonic() when the RPC came (one clock per machine)."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    adapter: AdapterFile | None
    tenant: str
    arrival_s: float
    weight: float = 1.0
    """The tenant's share relative to others', above 0."""


class Compare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute tokens under two artifacts of an adapter and compare what they say comes next; `Compared` answers.

    It waits until no other request does. `request_id` is of the same kind as a Submit's.
    """

    request_id: int
    token_ids: tuple[int, ...]
    first_position: int
    """The distributions behind it and behind all later tokens are compared."""
    exact: AdapterFile
    measured: AdapterFile
    tenant: str


class Urgency(IntEnum):
    """Why an adapter is wanted on the device without a request: the lower goes first, and all behind requests."""

    ASKED = 0
    """Somebody waits for it to be there."""
    PINNED = 1
    REFUSED = 2
    """For a request that could not wait for it and may come again: dropped where what is in use leaves no room."""
    AHEAD = 3
    """For requests that may come: dropped where there is no room beside what is in use and what was used of late."""


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bring an adapter to the device; `Steered` or a `Failure` answers. Its id is of the same kind as a Submit's."""

    request_id: int
    adapter: AdapterFile
    urgency: Urgency = Urgency.ASKED


class Provide(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The file of a request's adapter, which `Step.wanted` asked for; no event answers it, unknown ids are ignored."""

    request_id: int
    adapter: AdapterFile


class Unload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take an adapter off the device; answered by `Steered` once it is gone, by a `Failure` where it is in use."""

    request_id: int
    artifact_digest: str
    from_host: bool = False
    """Drop its copy in host memory as well."""


class Pin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Never evict an adapter of so many bytes, there or not yet; `Steered` or a `Failure` answers. It loads nothing.

    The bytes are those of its `AdapterFile`; of a file that is not there yet all count as going into the arena.
    """

    request_id: int
    artifact_digest: str
    artifact_bytes: int
    outside_bytes: int = 0
    vocabulary_bytes: int = 0


class Unpin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let an adapter be evicted again; no event answers it, and one that is not pinned is ignored."""

    artifact_digest: str


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop requests and free what they hold within one step; unknown ids are ignored. No event answers it."""

    request_ids: tuple[int, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leave the loop and exit 0. A closed mailbox means the same."""


ToEngine = Submit | Compare | Provide | Load | Unload | Pin | Unpin | Abort | Shutdown


# Engine to front end.


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine takes requests. First message, unless StartFailed is."""

    device: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    block_tokens: int
    total_blocks: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    max_running_requests: int
    base_quantization: str = "none"
    """How the base's matrices are kept; see worker.settings."""
    chunk_bytes: int = 0
    """Bytes of a block."""
    host_budget_bytes: int = 0
    """Bytes that adapters may take in page-locked host memory; 0 where there is no such tier."""


class StartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start (bad base folder, no memory); restarting would not help."""

    reason: str
    message: str


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one generated position."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Where a finished request's time went; see loraplex.types.v1.ServingFacts."""

    queue_s: float
    adapter_load_s: float
    prefill_s: float
    decode_s: float
    adapter_on_device: bool
    """The adapter was on the device when the request came."""
    adapter_ready_s: float = 0.0
    """From arrival until a load that the request waited for was done; 0 where there was none."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed: their KV was in the prefix cache."""
    adapter_on_host: bool = False
    """The adapter was in page-locked host memory when the request came."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What a request gained in one step. `finish` is "", "stop" (end of sequence) or "length"."""

    request_id: int
    token_ids: tuple[int, ...]
    """Never empty; with `finish` "stop" the last one is the end-of-sequence token itself."""
    logprobs: tuple[Position, ...] = ()
    finish: str = ""
    timing: Timing | None = None
    """Set with `finish`, and with a request's first tokens (decode_s is 0 then): a request that ends at a stop string
    is aborted and never gets `finish`."""


class Compared(msgspec.Struct, frozen=True, array_like=True):
    """How a comparison ended: one entry per position compared."""

    request_id: int
    same_top: tuple[bool, ...]
    """Whether both artifacts find the same token likeliest."""
    kl: tuple[float, ...]
    """KL(exact || measured) in nats, 0 or more."""


class Steered(msgspec.Struct, frozen=True, array_like=True):
    """A Load, Unload or Pin is done."""

    request_id: int
    was_on_device: bool
    """The adapter was on the device when it was asked for."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A request that ends with an error of loraplex.errors, by its reason."""

    request_id: int
    reason: str
    message: str
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    """When trying again may help; None where nobody knows that it ever will."""


class FailedLoad(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that could not be brought to the device, whoever wanted it; reasons are those of a Failure."""

    artifact_digest: str
    reason: str
    message: str
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None


class AdapterOnDevice(msgspec.Struct, frozen=True, array_like=True):
    """An adapter the engine holds or is loading."""

    artifact_digest: str
    loading: bool
    in_flight: int
    device_bytes: int
    load_s: float = 0.0
    """What its load took, once it is there."""


class EngineStatus(msgspec.Struct, frozen=True, array_like=True):
    """What the engine tells of itself, but for its adapters; whole, not a difference."""

    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    free_blocks: int
    """Chunks that can be had: free, or of what is idle."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    kv_blocks: int = 0
    """Chunks that requests hold as KV blocks."""
    adapter_chunks: int = 0
    """Chunks of adapters, idle ones included."""
    prefix_blocks: int = 0
    """Chunks of computed blocks that no request holds; they leave when their room is needed."""
    num_preempted: int = 0
    """Times a running request had to stop and be recomputed, since the start."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, since the start."""
    pinned_chunks: int = 0
    """Chunks of adapters that are pinned, of `adapter_chunks`."""
    adapter_bytes: int = 0
    """Device bytes of all adapters, those being loaded included."""
    host_bytes: int = 0
    """Bytes of adapters in page-locked host memory."""


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One frame per engine step (or per change between steps): outputs, failures, and the status after it.

    Of the adapters only those that have changed since the last frame, so that a frame grows with the batch, and not
    with the number of resident adapters.
    """

    step: int
    outputs: tuple[Output, ...]
    failures: tuple[Failure, ...]
    status: EngineStatus
    adapters: tuple[AdapterOnDevice, ...] = ()
    """Adapters that came or changed, as they are now."""
    gone: tuple[str, ...] = ()
    """Artifact digests of adapters that have left."""
    seconds: float = 0.0
    """From the beginning of the schedule to the end of the update; 0 where no step was computed."""
    compared: tuple[Compared, ...] = ()
    steered: tuple[Steered, ...] = ()
    failed_loads: tuple[FailedLoad, ...] = ()
    host: tuple[str, ...] = ()
    """Artifact digests of adapters that came into page-locked host memory."""
    host_gone: tuple[str, ...] = ()
    wanted: tuple[int, ...] = ()
    """Requests that wait for their adapter's file: it was not on the disk, and the engine has the adapter no more."""


FromEngine = Ready | StartFailed | Step


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the frame of a message. Raises ValueError when it is larger than MAX_FRAME_BYTES."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"mailbox frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


_TO_ENGINE: Final = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: Final = msgspec.msgpack.Decoder(FromEngine)


def decode_to_engine(body: bytes) -> ToEngine:
    """Decode a frame's body that the front end sent."""
    return _TO_ENGINE.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Decode a frame's body that the engine sent."""
    return _FROM_ENGINE.decode(body)
