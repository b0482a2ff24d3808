"""The front end's side of the engine: keeps a process running, speaks the mailbox, contains crashes.

Owns which engine runs and which request belongs to whom. When the process dies all requests in it fail with EngineDown,
and it is started anew after a pause that doubles with every crash. Knows nothing of gRPC or text.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import structlog

from common.backoff import Backoff
from loraplex.errors import BY_REASON, EngineDown, LoraplexError, QueueFull
from worker.engine_link import EngineLink, EngineStartError, LinkBroken, LinkClosed
from worker.mailbox import (
    Abort,
    AdapterFile,
    AdapterOnDevice,
    Compare,
    Compared,
    EngineStatus,
    FailedLoad,
    Failure,
    Load,
    Output,
    Pin,
    Provide,
    Ready,
    Shutdown,
    StartFailed,
    Steered,
    Step,
    Submit,
    Unload,
    Unpin,
)

log = structlog.get_logger(__name__)

_BACKOFF: Final = Backoff(first_s=0.5, longest_s=30.0)
_SUSPICION: Final = 0.1
"""Share of the silence time-out that a silent engine gets once more before it is killed."""
_MAX_UNREAD_BYTES: Final = 32 * 2**20
"""What may stand written and unread before the engine is held to be overrun."""


class EngineState(Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


class RequestOwner(Protocol):
    """Who hears of a request's tokens and of its end. Called on the event loop, must not block."""

    def on_output(self, output: Output) -> None:
        """Take tokens; the last output carries `finish`."""

    def on_file_wanted(self, request_id: int) -> None:
        """Learn that the request waits for its adapter's file, which was not on the disk when it was submitted."""

    def on_failure(self, request_id: int, error: LoraplexError) -> None:
        """Learn that the request ended with an error."""


class ComparisonOwner(Protocol):
    """Who hears of a comparison's end. Called on the event loop, must not block."""

    def on_compared(self, compared: Compared) -> None:
        """Take the outcome."""

    def on_failure(self, request_id: int, error: LoraplexError) -> None:
        """Learn that it ended with an error."""


class OrderOwner(Protocol):
    """Who hears that an order was carried out. Called on the event loop, must not block."""

    def on_steered(self, steered: Steered) -> None:
        """Learn that it is done."""

    def on_failure(self, request_id: int, error: LoraplexError) -> None:
        """Learn that it will not be done."""


@dataclass(frozen=True, slots=True)
class EnginePatience:
    """How patient the front end is with its engine. Times in seconds."""

    backoff: Backoff = _BACKOFF
    healthy_s: float = 60.0
    """An engine that was ready for so long is restarted as if it were the first time."""
    start_timeout_s: float = 3600.0
    """Until Ready, from a cold disk and with a large base too."""
    silence_timeout_s: float = 300.0
    """Requests in flight and no frame for so long: the engine hangs and is killed."""
    exit_timeout_s: float = 10.0
    """From Shutdown, or a closed mailbox, until the process is killed."""
    max_failed_starts: int = 5
    """Crashes before the first Ready ever that end the worker: it would never serve."""


class EngineClient:
    """One engine process after the other.

    `on_change` hears of every change of state and every frame, with the artifact digests of the adapters that came,
    left or changed with it; `on_load` of the end of each load: of which adapter, its bytes and seconds, and its error.
    """

    def __init__(
        self,
        on_change: Callable[[Collection[str]], None],
        patience: EnginePatience | None = None,
        on_load: Callable[[str, int, float, LoraplexError | None], None] = lambda *_: None,
    ) -> None:
        self._patience = patience or EnginePatience()
        self._on_change = on_change
        self._on_load = on_load
        self._owners: dict[int, RequestOwner] = {}
        self._comparing: dict[int, ComparisonOwner] = {}
        self._ordered: dict[int, OrderOwner] = {}
        self._link: EngineLink | None = None
        self._stopping = asyncio.Event()
        self._silence_timer: asyncio.TimerHandle | None = None
        self._suspected_frames = -1
        self._ready_s: float | None = None
        self._last_frame_s = 0.0
        self._next_request_id = 1
        self.state = EngineState.STARTING
        self.ready: Ready | None = None
        """Of the running engine, or of the last one."""
        self.status: EngineStatus | None = None
        """The last status of the running engine; None before its first."""
        self.adapters: dict[str, AdapterOnDevice] = {}
        """What the running engine holds or is loading, by artifact digest."""
        self.on_host: set[str] = set()
        """Artifact digests of what it has in page-locked host memory."""
        self.epoch = secrets.token_hex(8)
        """Another one as soon as an engine, and what it held, is lost."""
        self.step_s = 0.0
        """What the last frame's step took; 0 where it was none."""
        self.num_frames = 0
        self.num_lost = 0
        """Engine processes that ended though nobody had asked them to."""

    # Requests.

    def new_request_ids(self, count: int) -> list[int]:
        """Return ids that no request of this worker has had."""
        first = self._next_request_id
        self._next_request_id += count
        return list(range(first, first + count))

    def submit(self, request: Submit, owner: RequestOwner) -> None:
        """Hand a request to the engine. Raises EngineDown, or QueueFull where the engine does not keep up reading."""
        self._send(request)
        self._owners[request.request_id] = owner
        self._watch_silence()

    def compare(self, comparison: Compare, owner: ComparisonOwner) -> None:
        """Hand a comparison to the engine; its id is of the same kind as a request's. Raises as `submit`."""
        self._send(comparison)
        self._comparing[comparison.request_id] = owner
        self._watch_silence()

    def order(self, order: Load | Unload | Pin, owner: OrderOwner) -> None:
        """Give the engine an order; its id is of the same kind as a request's. Raises as `submit`."""
        self._send(order)
        self._ordered[order.request_id] = owner
        self._watch_silence()

    def unpin(self, artifact_digest: str) -> None:
        """Let an adapter be evicted again; without an engine nothing is pinned."""
        if self.state is EngineState.READY and self._link is not None:
            self._link.send(Unpin(artifact_digest))

    def provide(self, request_id: int, file: AdapterFile) -> None:
        """Give a request the file that it waits for; one that is unknown, as after a loss of the engine, is ignored."""
        if request_id in self._owners and self._link is not None:
            self._link.send(Provide(request_id, file))

    def _send(self, message: Submit | Compare | Load | Unload | Pin) -> None:
        if self.state is not EngineState.READY or self._link is None:
            raise self.down_error()
        if self._link.unread_bytes > _MAX_UNREAD_BYTES:
            raise QueueFull("the engine is overrun; try again later", retry_after_s=1.0)
        self._link.send(message)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Stop requests; their owners hear no more of them. Unknown ids are ignored."""
        known = tuple(request_id for request_id in request_ids if self._forget(request_id) is not None)
        if known and self._link is not None:
            self._link.send(Abort(known))

    @property
    def num_requests(self) -> int:
        """Requests, comparisons and orders handed over and not ended."""
        return len(self._owners) + len(self._comparing) + len(self._ordered)

    def _forget(self, request_id: int) -> RequestOwner | ComparisonOwner | OrderOwner | None:
        owner = self._owners.pop(request_id, None) or self._comparing.pop(request_id, None)
        return owner or self._ordered.pop(request_id, None)

    def down_error(self) -> EngineDown:
        """Return what a request is told while no engine runs."""
        if self.state is EngineState.STARTING:
            return EngineDown("the engine is loading the base model; try again soon", retry_after_s=1.0)
        return EngineDown("the engine process died and is being restarted; try again", retry_after_s=1.0)

    # The process.

    async def run(self, command: Sequence[str]) -> None:
        """Keep `command --fd N` running until `stop`. Raises EngineStartError when that cannot be done."""
        failures = failed_starts = 0
        while not self._stopping.is_set():
            end = await self._live_once(command)
            if self._stopping.is_set():
                break
            healthy_s = 0.0 if self._ready_s is None else time.monotonic() - self._ready_s
            failed_starts += self._ready_s is None
            if self.ready is None and failed_starts >= self._patience.max_failed_starts:
                raise EngineStartError(f"the engine {end} before it was ready, {failed_starts} times in a row")
            failures = 1 if healthy_s >= self._patience.healthy_s else failures + 1
            pause_s = self._patience.backoff.pause_s(failures)
            log.error("engine.down", end=end, restart_in_s=round(pause_s, 2))
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        self._set_state(EngineState.STOPPED)

    async def stop(self) -> None:
        """Make the engine leave and `run` return; what does not leave in time is killed."""
        self._stopping.set()
        link = self._link
        if link is not None and self.state is not EngineState.READY:
            link.kill()  # it is still loading and would not hear
        elif link is not None:
            link.send(Shutdown())
            if not await link.exited(self._patience.exit_timeout_s):
                log.warning("engine.killed", why="it did not stop in time")
                link.kill()

    async def _live_once(self, command: Sequence[str]) -> str:
        """Run one engine process to its end; returns how it ended, in words."""
        self._ready_s = None
        link = self._link = await EngineLink.start(command)
        log.info("engine.started", pid=link.pid, epoch=self.epoch)
        if self._stopping.is_set():
            link.kill()
        broken = ""
        try:
            await self._serve(link)
        except LinkClosed:
            pass
        except (LinkBroken, TimeoutError) as error:
            broken = f"{error}" or f"was not ready within {self._patience.start_timeout_s:g} s"
            link.kill()
        except BaseException:
            link.kill()
            raise
        finally:
            self._link = None
            self._lose_engine()
            end = await link.close(self._patience.exit_timeout_s)
        return broken or end

    async def _serve(self, link: EngineLink) -> None:
        async with asyncio.timeout(self._patience.start_timeout_s):
            first = await link.receive()
        if isinstance(first, StartFailed):
            raise EngineStartError(f"{first.message} [{first.reason}]")
        if not isinstance(first, Ready):
            raise LinkBroken("sent a step before it was ready")
        self.ready, self._ready_s = first, time.monotonic()
        log.info("engine.ready", device=first.device, dtype=first.dtype, blocks=first.total_blocks, epoch=self.epoch)
        self._set_state(EngineState.READY)
        while True:
            frame = await link.receive()
            if not isinstance(frame, Step):
                raise LinkBroken(f"sent {type(frame).__name__} after it was ready")
            self._take(frame)

    def _take(self, step: Step) -> None:
        self._last_frame_s = time.monotonic()
        self.num_frames += 1
        self.status, self.step_s = step.status, step.seconds
        for adapter in step.adapters:
            before = self.adapters.get(adapter.artifact_digest)
            self.adapters[adapter.artifact_digest] = adapter
            if not adapter.loading and (before is None or before.loading):
                self._on_load(adapter.artifact_digest, adapter.device_bytes, adapter.load_s, None)
        for digest in step.gone:
            self.adapters.pop(digest, None)
        self.on_host.update(step.host)
        self.on_host.difference_update(step.host_gone)
        for failed_load in step.failed_loads:
            self._on_load(failed_load.artifact_digest, 0, 0.0, _error_of(failed_load))
        for output in step.outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                if output.finish:
                    del self._owners[output.request_id]
                owner.on_output(output)
        for request_id in step.wanted:
            waiting = self._owners.get(request_id)
            if waiting is not None:
                waiting.on_file_wanted(request_id)
        for compared in step.compared:
            comparing = self._comparing.pop(compared.request_id, None)
            if comparing is not None:
                comparing.on_compared(compared)
        for steered in step.steered:
            ordered = self._ordered.pop(steered.request_id, None)
            if ordered is not None:
                ordered.on_steered(steered)
        for failure in step.failures:
            failed = self._forget(failure.request_id)
            if failed is not None:
                failed.on_failure(failure.request_id, _error_of(failure))
        changed = [adapter.artifact_digest for adapter in step.adapters]
        self._on_change([*changed, *step.gone, *step.host, *step.host_gone])

    def _lose_engine(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None
        self.num_lost += not self._stopping.is_set()
        owners: dict[int, RequestOwner | ComparisonOwner | OrderOwner]
        owners = {**self._owners, **self._comparing, **self._ordered}
        self._owners, self._comparing, self._ordered = {}, {}, {}
        self.status = None
        lost = {*self.adapters, *self.on_host}
        self.adapters, self.on_host = {}, set()
        self.epoch = secrets.token_hex(8)
        self._set_state(EngineState.DOWN, lost)
        for request_id, owner in owners.items():
            owner.on_failure(request_id, self.down_error())

    def _set_state(self, state: EngineState, adapters: Collection[str] = ()) -> None:
        if state is not self.state:
            self.state = state
            self._on_change(adapters)

    def _watch_silence(self) -> None:
        """Arm the watch over a silent engine, unless it is armed."""
        if self._silence_timer is None:
            self._last_frame_s = time.monotonic()
            self._silence_timer = asyncio.get_running_loop().call_later(
                self._patience.silence_timeout_s, self._check_silence
            )

    def _check_silence(self) -> None:
        self._silence_timer = None
        if not self.num_requests or self._link is None:
            self._suspected_frames = -1
            return
        timeout_s = self._patience.silence_timeout_s
        left_s = self._last_frame_s + timeout_s - time.monotonic()
        if left_s <= 0 and self._suspected_frames == self.num_frames:
            log.error("engine.hangs", silent_s=timeout_s, requests=self.num_requests)
            self._link.kill()
            return
        if left_s <= 0:
            # Perhaps it was this process that did not run: what the engine has sent meanwhile is read first.
            self._suspected_frames = self.num_frames
            left_s = timeout_s * _SUSPICION
        self._silence_timer = asyncio.get_running_loop().call_later(left_s, self._check_silence)


def _error_of(failure: Failure | FailedLoad) -> LoraplexError:
    kind = BY_REASON.get(failure.reason, LoraplexError)
    error = kind(failure.message, retry_after_s=failure.retry_after_s)
    error.metadata = dict(failure.metadata)
    return error
