"""A worker's front end as a whole: its parts, how they hear of each other, and its life from start to drain.

STARTING (the port is bound, the base is read, the engine loads) → SERVING → DRAINING → gone; NOT_SERVING while a
crashed engine is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence

import structlog

from common.activity import Activity
from common.admin import Admin, bind_admin, held_by, serving_admin
from common.bearer import cluster_guards
from common.call_interceptor import CallInterceptor
from common.rpc import Server
from loraplex.credentials import bearer
from loraplex.errors import LoraplexError
from loraplex.manifest import read_manifest
from loraplex.worker.v1 import worker_pb2
from loraplex.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from worker.adapters.access import AdapterAccess
from worker.adapters.download import RetryPolicy
from worker.adapters.places import Places
from worker.adapters.source import RegistrySource
from worker.adapters.steering import Steering
from worker.adapters.store import AdapterStore
from worker.adapters.versions import Versions
from worker.admission import Admission
from worker.dedicated import Dedication
from worker.engine_client import EngineClient, EnginePatience, EngineState
from worker.generation import StreamLimits
from worker.mailbox import AdapterOnDevice
from worker.metrics import Metrics, Snapshot
from worker.requests import CheckedAdapter
from worker.service import Parts, ServedBase, WorkerService
from worker.settings import WorkerSettings
from worker.status import (
    AdapterStatus,
    AdapterTable,
    State,
    StatusBoard,
    Tier,
    TierUse,
    WorkerStatus,
    adapter_status,
    assemble,
)
from worker.text.model import TextModel

log = structlog.get_logger(__name__)

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_STOP_GRACE_S = 2.0
"""For calls that end anyway: status streams after their last message."""


class WorkerApp:
    """Owns all parts of a front end. Make it on a running event loop; `run` it once."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        engine_command: Sequence[str] | None = None,
        engine_patience: EnginePatience | None = None,
        limits: StreamLimits | None = None,
        on_listening: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`engine_command` stands in for the real engine process; `on_listening` hears the bound port."""
        self._settings = settings
        self._engine_command = engine_command
        self._on_listening = on_listening
        self._draining = False
        self._base_digest = ""
        self._clock_offset_s = time.time() - time.monotonic()
        self._seen_frames = 0
        self._seen: object = None
        self._health_due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        patience = engine_patience or EnginePatience(silence_timeout_s=settings.engine_silence_s)
        self._engine = EngineClient(self._engine_changed, patience, self._load_ended)
        self._admission = Admission(settings.max_waiting_requests, self._admission_changed)
        self._board = StatusBoard(self._assemble)
        self._adapters = AdapterTable(self._look_up)
        self._source = RegistrySource(
            settings.registry,
            credentials=bearer(settings.cluster_secret),
            on_reachable=self._source_is_back,
        )
        self._store = AdapterStore(
            settings.cache_dir / "artifacts",
            self._source,
            budget_bytes=settings.cache_bytes,
            on_change=self._adapter_changed,
            is_on_device=lambda digest: digest in self._engine.adapters,
            on_fetched=self._fetched,
            retry=RetryPolicy(stall_s=settings.fetch_stall_s),
            places=Places(settings.max_fetches),
        )
        versions = Versions()
        self._access = AdapterAccess(self._store, versions, self._adapter_changed, self._bring)
        self._steering = Steering(
            self._engine,
            self._store,
            self._access,
            where=self._where,
            num_users=self._admission.in_flight,
            on_change=self._adapter_changed,
        )
        self._dedication = None if settings.dedicated is None else Dedication(settings.dedicated, self._store)
        self._activity = Activity()
        self._metrics = Metrics(self._snapshot)
        self._service = WorkerService(
            Parts(
                worker_id=settings.worker_id,
                engine=self._engine,
                admission=self._admission,
                store=self._store,
                versions=versions,
                access=self._access,
                steering=self._steering,
                board=self._board,
                limits=limits or StreamLimits(stall_timeout_s=settings.stream_stall_s),
                metrics=self._metrics,
                max_rank=settings.max_rank,
                dedication=self._dedication,
            )
        )
        calls = CallInterceptor(self._metrics.calls, self._activity)
        self._server = Server(
            [self._register],
            [_SERVICE],
            cluster_guards(settings.cluster_secret),
            outer=[calls],
            limits=settings.rpc_limits,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain.

        Raises FailedPrecondition (port or cache folder taken), InvalidBaseModel, CorruptArtifact, or EngineStartError.
        """
        settings = self._settings
        with contextlib.closing(bind_admin(settings.admin_address, settings.admin_port)) as admin_listener:
            admin = Admin(self._why_not_ready, self._metrics.read, self._resources)
            async with serving_admin(admin_listener, admin, settings.http_limits):
                await self._serve(stop)

    async def _serve(self, stop: asyncio.Event) -> None:
        settings = self._settings
        port = await self._server.start(settings.host, settings.port)
        log.info("worker.listening", host=settings.host, port=port, worker_id=settings.worker_id)
        self._on_listening(port)
        try:
            async with self._source, self._store, self._steering:
                await self._live(stop)
        finally:
            self._board.end()  # an open status stream would hold the server for the whole grace
            await self._server.stop(_STOP_GRACE_S)
            log.info("worker.stopped")

    async def _live(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            followers = [
                tasks.create_task(self._source.follow_connection()),
                tasks.create_task(self._follow_health()),
            ]
            engine = tasks.create_task(self._open_and_run())
            await stop.wait()
            await self._drain()
            if self._base_digest and (self._dedication is None or self._dedication.is_fetched):
                await self._engine.stop()
                await engine
            for task in (engine, *followers):
                task.cancel()

    async def _open_and_run(self) -> None:
        """Read the base model, then keep its engine running."""
        settings = self._settings
        started_s = time.monotonic()
        log.info("base.reading", folder=str(settings.base_dir))
        cancelled = threading.Event()

        def on_progress(_: int) -> None:
            if cancelled.is_set():
                raise InterruptedError("the worker stops")

        try:
            manifest = await asyncio.to_thread(
                read_manifest, settings.base_dir, cache_dir=settings.cache_dir, progress=on_progress
            )
            text = await asyncio.to_thread(TextModel.load, settings.base_dir)
        finally:
            cancelled.set()
        self._base_digest = manifest.digest()
        log.info("base.identified", digest=self._base_digest, seconds=round(time.monotonic() - started_s, 2))
        self._service.open(ServedBase(self._base_digest, text))
        self._changed()
        merged = None if self._dedication is None else await self._dedication.fetch()
        await self._engine.run(self._engine_command or settings.engine_command(self._base_digest, merged))

    async def _drain(self) -> None:
        """Announce, refuse what is new, finish what is open."""
        settings = self._settings
        was_serving = self._state() is State.SERVING
        self._draining = True
        self._changed()
        self._health_due.set()
        if was_serving:
            log.info("worker.draining", streams=self._admission.num_tickets, timeout_s=settings.drain_timeout_s)
            await asyncio.sleep(settings.drain_notice_s)  # so that routers send nothing more before it is refused
        self._service.refuse()
        try:
            async with asyncio.timeout(settings.drain_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("worker.drain_cut_off", streams=self._admission.num_tickets)
            self._service.cut_all()

    async def _follow_health(self) -> None:
        serving: bool | None = None
        while True:
            now_serving = self._state() is State.SERVING
            if now_serving is not serving:
                serving = now_serving
                await self._server.set_serving(serving=serving)
                log.info("worker.health", serving=serving, state=self._state().value)
            await self._health_due.wait()
            self._health_due.clear()

    def _register(self, server: object) -> None:
        add_WorkerServiceServicer_to_server(self._service, server)  # type: ignore[arg-type]

    # Changes.

    def _changed(self) -> None:
        if self._admission.num_tickets:
            self._idle.clear()
        else:
            self._idle.set()
        self._board.changed()

    def _admission_changed(self, artifact_digest: str | None) -> None:
        if artifact_digest is not None:
            self._adapters.touch((artifact_digest,))
        self._changed()

    def _adapter_changed(self, artifact_digest: str) -> None:
        self._adapters.touch((artifact_digest,))
        self._changed()

    def _engine_changed(self, artifact_digests: Collection[str]) -> None:
        engine = self._engine
        self._adapters.touch(artifact_digests)
        if engine.state is not EngineState.READY:
            self._steering.forget_pins()
        if engine.ready is not None:
            self._admission.engine_ready(engine.ready.max_running_requests)
        if engine.num_frames != self._seen_frames:
            self._seen_frames = engine.num_frames
            self._admission.engine_frame()
            if engine.step_s:
                self._metrics.step(engine.step_s)
        seen = (engine.state, engine.epoch, engine.status, self._admission.unseen_tokens)
        if artifact_digests or seen != self._seen:
            self._seen = seen
            if self._settings.dedicated is not None:
                self._adapters.touch((self._settings.dedicated,))
            self._health_due.set()
            self._board.changed()

    def _fetched(self, artifact_digest: str, error: LoraplexError | None) -> None:
        self._access.fetched(artifact_digest, error)

    def _bring(self, adapter: CheckedAdapter) -> bool:
        return self._steering.bring(adapter)

    def _source_is_back(self) -> None:
        self._access.quarantine.source_is_back()

    def _load_ended(self, artifact_digest: str, num_bytes: int, seconds: float, error: LoraplexError | None) -> None:
        if error is None:
            self._access.loaded(artifact_digest, num_bytes, seconds)
        else:
            self._steering.load_failed(artifact_digest, error)

    # Status.

    def _state(self) -> State:
        if self._draining:
            return State.DRAINING
        if self._engine.state is EngineState.READY:
            return State.SERVING
        return State.STARTING if self._engine.ready is None else State.NOT_SERVING

    # What operators are told.

    def _why_not_ready(self) -> str | None:
        match self._state():
            case State.SERVING:
                return None
            case State.STARTING:
                return "starting: the base model is being read and loaded"
            case State.DRAINING:
                return "draining"
            case State.NOT_SERVING:
                return "the engine process died and is being restarted"

    def _resources(self) -> dict[str, int]:
        """Return what is held for requests, as each owner counts it."""
        status = self._board.now()
        in_engine = sum(adapter.in_flight for adapter in self._engine.adapters.values())
        return {
            "kv_blocks_in_use": status.kv_blocks,
            "adapter_chunks": status.adapter_chunks,
            "idle_prefix_blocks": status.prefix_blocks,
            "adapter_references": in_engine + self._store.num_references - self._steering.num_leases,
            "pinned_adapters": self._steering.num_pinned,
            "waiting_requests": status.waiting_requests,
            "running_requests": status.running_requests,
            **held_by(self._activity),
        }

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            status=self._board.now(),
            engine_restarts=self._engine.num_lost,
            cached_bytes=self._store.cached_bytes,
            resident_bytes=sum(adapter.device_bytes for adapter in self._engine.adapters.values()),
            max_resident_adapters=self._settings.max_resident_adapters,
        )

    def _look_up(self, artifact_digest: str) -> AdapterStatus | None:
        sentence = self._access.quarantine.find(artifact_digest, time.monotonic())
        return adapter_status(
            artifact_digest,
            cached_bytes=self._store.size_bytes(artifact_digest),
            fetching=self._store.is_fetching(artifact_digest),
            in_flight=self._admission.in_flight(artifact_digest),
            held=self._held_on_device(artifact_digest),
            on_host=artifact_digest in self._engine.on_host,
            pinned=self._steering.is_pinned(artifact_digest),
            quarantine=None if sentence is None else (sentence.reason, sentence.end_s + self._clock_offset_s),
        )

    def _where(self, artifact_digest: str) -> Tier | None:
        """Tell the tier that holds an adapter, None for none."""
        status = self._look_up(artifact_digest)
        return None if status is None or status.tier is Tier.SOURCE else status.tier

    def _held_on_device(self, artifact_digest: str) -> AdapterOnDevice | None:
        size = self._store.size_bytes(artifact_digest)
        if artifact_digest == self._settings.dedicated and self._engine.state is EngineState.READY and size is not None:
            return AdapterOnDevice(artifact_digest, False, self._admission.in_flight(artifact_digest), size)
        return self._engine.adapters.get(artifact_digest)

    def _assemble(self, sequence: int) -> WorkerStatus:
        engine, admission = self._engine, self._admission
        return assemble(
            worker_id=self._settings.worker_id,
            epoch=engine.epoch,
            sequence=sequence,
            state=self._state(),
            base_digest=self._base_digest,
            ready=engine.ready,
            engine=engine.status,
            active_choices=admission.active_choices,
            unseen_tokens=admission.unseen_tokens,
            adapters=self._adapters.view(),
            tiers=self._tiers(),
            dedicated_artifact_digest=self._settings.dedicated or "",
        )

    def _tiers(self) -> dict[Tier, TierUse]:
        engine, store, ready = self._engine, self._store, self._engine.ready
        arena_bytes = 0 if ready is None else ready.total_blocks * ready.chunk_bytes
        on_device = 0 if engine.status is None else engine.status.adapter_bytes
        tiers = {
            Tier.DEVICE: TierUse(
                on_device,
                self._settings.max_adapter_bytes or arena_bytes,
                len(engine.adapters),
                self._settings.max_resident_adapters,
            ),
            Tier.DISK: TierUse(store.cached_bytes, self._settings.cache_bytes, store.num_cached),
        }
        if ready is not None and ready.host_budget_bytes:
            on_host = 0 if engine.status is None else engine.status.host_bytes
            tiers[Tier.HOST] = TierUse(on_host, ready.host_budget_bytes, len(engine.on_host))
        return tiers
