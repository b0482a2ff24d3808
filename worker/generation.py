"""One RPC's generation: its choices in the engine, the text they become, and all it must give back at the end.

The engine's tokens pile up here until the stream takes them, so that a message carries all that came since the last
one. The pile is bounded: a reader that does not read is cut off. Knows nothing of protobuf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from loraplex.errors import LoraplexError, ResourceExhausted
from worker.adapters.late_file import LateFile
from worker.admission import Ticket
from worker.engine_client import EngineClient
from worker.mailbox import Output, Position, Submit, Timing
from worker.text.choice import ChoiceText

FINISHED_BY_STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a choice gained since its last delta; one entry of `logprobs` per token where they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice ended: `reason` is "stop" or "length"; `stop` is the stop string that ended it, if one did."""

    index: int
    reason: str
    stop: str | None


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """All choices ended."""

    completion_tokens: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What a stream that is not read may pile up, and for how long, before it is cut off."""

    max_buffered_tokens: int = 32_768
    """Tokens of all choices, each logprobs alternative counting as one more."""
    stall_timeout_s: float = 60.0
    """One message not taken for so long."""


@dataclass(slots=True)
class _Choice:
    """State of one choice. `pending` is set by the engine's events, the rest by the stream."""

    index: int
    text: ChoiceText
    pending: list[Output] = field(default_factory=list)
    num_tokens: int = 0
    first_timing: Timing | None = None
    first_token_s: float = 0.0
    decode_s: float = 0.0
    ended: bool = False


class Generation:
    """Owner of `n` requests in the engine, until all have ended or `close` is called."""

    def __init__(
        self,
        engine: EngineClient,
        ticket: Ticket,
        choices: list[ChoiceText],
        limits: StreamLimits,
        late_file: LateFile | None = None,
    ) -> None:
        """`late_file` brings the adapter's file, where the engine was told that it is not on the disk."""
        self._engine = engine
        self._late_file = late_file
        self._ticket = ticket
        self._limits = limits
        self._choices = [_Choice(index, text) for index, text in enumerate(choices)]
        self._by_request: dict[int, _Choice] = {}
        self._buffered = 0
        self._error: LoraplexError | None = None
        self._wake = asyncio.Event()
        self._closed = False

    def submit(self, make: Callable[[int, int], Submit]) -> None:
        """Hand all choices to the engine; `make(index, request_id)` builds each. Raises EngineDown or QueueFull."""
        request_ids = self._engine.new_request_ids(len(self._choices))
        for choice, request_id in zip(self._choices, request_ids, strict=True):
            self._by_request[request_id] = choice
            self._engine.submit(make(choice.index, request_id), self)
        self._ticket.submitted()

    # RequestOwner.

    def on_output(self, output: Output) -> None:
        """Pile up an output."""
        choice = self._by_request.get(output.request_id)
        if choice is None:
            return  # given up a moment ago
        if output.finish:
            del self._by_request[output.request_id]
            self._ticket.choice_done()
        choice.pending.append(output)
        if not choice.first_token_s:
            choice.first_token_s = time.monotonic()
        self._buffered += len(output.token_ids) + sum(len(position.top) for position in output.logprobs)
        if self._buffered > self._limits.max_buffered_tokens:
            self.fail(
                ResourceExhausted(
                    f"the stream was cut off: more than {self._limits.max_buffered_tokens} tokens were waiting to be "
                    "read; read faster or ask for fewer choices or logprobs",
                    limit=self._limits.max_buffered_tokens,
                )
            )
        self._wake.set()

    def on_file_wanted(self, request_id: int) -> None:
        """Have the adapter's file brought."""
        if request_id in self._by_request and self._late_file is not None:
            self._late_file.wanted(request_id)

    def on_failure(self, request_id: int, error: LoraplexError) -> None:
        """End the stream with the engine's error; the other choices are stopped."""
        self._by_request.pop(request_id, None)
        self.fail(error)

    def fail(self, error: LoraplexError) -> None:
        """End the stream with an error, giving back at once what the engine and the buffer hold."""
        if self._error is None and not self._closed:
            self._error = error
            self._release()
            self._wake.set()

    def give_up_waiting(self, error: LoraplexError) -> None:
        """End the stream with an error if nothing has come yet."""
        if not any(choice.first_token_s for choice in self._choices):
            self.fail(error)

    def close(self) -> None:
        """Give back everything; the stream has ended or nobody reads it any more. Harmless twice."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        self._engine.abort(tuple(self._by_request))
        self._by_request.clear()
        if self._late_file is not None:
            self._late_file.close()
        for choice in self._choices:
            choice.pending.clear()
        self._ticket.close(time.monotonic())

    # The stream.

    async def events(self) -> AsyncIterator[TextDelta | ChoiceEnd | GenerationEnd]:
        """Yield what comes, as it comes. Raises the error that ended the stream.

        An error goes before what is buffered: a stream of which nothing went out can be tried elsewhere.
        """
        loop = asyncio.get_running_loop()
        open_choices = len(self._choices)
        while open_choices:
            await self._wake.wait()
            self._wake.clear()
            for choice in self._choices:
                for event in self._take(choice):
                    open_choices -= isinstance(event, ChoiceEnd)
                    stalled = loop.call_later(self._limits.stall_timeout_s, self._stall)
                    try:
                        yield event
                    finally:
                        stalled.cancel()
            if self._error is not None:
                raise self._error
        yield GenerationEnd(sum(choice.num_tokens for choice in self._choices), self._timing())

    def _take(self, choice: _Choice) -> list[TextDelta | ChoiceEnd]:
        """Turn all of a choice's buffered outputs into at most one delta and one end."""
        if self._error is not None:
            raise self._error
        outputs, choice.pending = choice.pending, []
        if not outputs or choice.ended:
            return []
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[Position] = []
        end: ChoiceEnd | None = None
        for output in outputs:
            self._buffered -= len(output.token_ids) + sum(len(position.top) for position in output.logprobs)
            if end is not None:
                continue
            piece = choice.text.push(output.token_ids)
            texts.append(piece.text)
            token_ids += output.token_ids[: piece.num_tokens]
            logprobs += output.logprobs[: piece.num_tokens]
            if output.timing is not None:
                choice.first_timing = output.timing
                choice.decode_s = output.timing.decode_s
            stop = piece.stop
            if stop is None and output.finish:
                rest = choice.text.finish()
                texts.append(rest.text)
                stop = rest.stop
            if stop is not None:
                end = ChoiceEnd(choice.index, FINISHED_BY_STOP, stop)
                self._stop_in_engine(choice)
            elif output.finish:
                end = ChoiceEnd(choice.index, output.finish, None)
        choice.num_tokens += len(token_ids)
        events: list[TextDelta | ChoiceEnd] = []
        if token_ids or any(texts):
            events.append(TextDelta(choice.index, "".join(texts), tuple(token_ids), tuple(logprobs)))
        if end is not None:
            choice.ended = True
            events.append(end)
        return events

    def _stop_in_engine(self, choice: _Choice) -> None:
        """Make the engine forget a choice that a stop string ended, unless it has finished it itself."""
        for request_id, running in list(self._by_request.items()):
            if running is choice:
                choice.decode_s = time.monotonic() - choice.first_token_s
                del self._by_request[request_id]
                self._engine.abort((request_id,))
                self._ticket.choice_done()

    def _stall(self) -> None:
        self.fail(
            ResourceExhausted(
                f"the stream was cut off: a message was not read for {self._limits.stall_timeout_s:g} s",
                limit=self._limits.stall_timeout_s,
            )
        )

    def timing_so_far(self) -> Timing | None:
        """Return where the time went until now; None before the first token."""
        if all(choice.first_timing is None for choice in self._choices):
            return None
        since_s = min(choice.first_token_s for choice in self._choices if choice.first_token_s)
        return msgspec.structs.replace(self._timing(), decode_s=time.monotonic() - since_s)

    def _timing(self) -> Timing:
        """Return where the RPC's time went: until the first token as its first choice saw it, and the longest decode.

        A choice that ended at a stop string has the engine's times of its first token only.
        """
        timings = [choice.first_timing for choice in self._choices if choice.first_timing is not None]
        decode_s = max(choice.decode_s for choice in self._choices)
        if not timings:
            return Timing(0.0, 0.0, 0.0, decode_s, adapter_on_device=False)
        first = min(timings, key=lambda timing: timing.queue_s + timing.adapter_load_s + timing.prefill_s)
        return msgspec.structs.replace(first, decode_s=decode_s)
