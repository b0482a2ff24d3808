"""A registry's life: lock, migrate, sweep, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from common.activity import Activity
from common.admin import Admin, bind_admin, held_by, serving_admin
from common.bearer import cluster_guards
from common.call_interceptor import CallInterceptor
from common.rpc import Server
from loraplex.folder_lock import FolderLock
from loraplex.registry.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    api_key_pb2,
    api_key_pb2_grpc,
    base_model_pb2,
    base_model_pb2_grpc,
)
from registry.artifacts import ArtifactFolder
from registry.database import migrate, open_engine
from registry.database_wait import wait_for_database
from registry.head_follower import follow_head
from registry.head_signal import HeadSignal
from registry.metrics import Metrics
from registry.partials import PartialUploads
from registry.reserve import SpaceReserve
from registry.service.adapters import Adapters
from registry.service.api_keys import ApiKeys, ensure_bootstrap_key
from registry.service.base_models import BaseModels
from registry.service.garbage import collect
from registry.service.imports import Imports
from registry.service.missing import warn_of_missing
from registry.service.pinning import Pinning
from registry.service.registering import Registering
from registry.service.repacking import Repacking
from registry.service.retirement import Retirement
from registry.service.uploads import Uploads
from registry.service.watches import Watches
from registry.settings import RegistrySettings
from registry.store import Store

log = structlog.get_logger(__name__)


class _Readiness:
    """Why the registry does not take requests now, or None. The admin port asks from the first moment on."""

    def __init__(self) -> None:
        self.why_not: str | None = "starting: the state folder and the database are being opened"

    def __call__(self) -> str | None:
        return self.why_not


def _state_lock(state_dir: Path) -> FolderLock:
    return FolderLock(state_dir, "the state folder", "choose another folder with --state-dir", "state_dir")


async def serve(settings: RegistrySettings, stopping: asyncio.Event, on_listening: Callable[[int], None]) -> None:
    """Run until `stopping` is set; `on_listening` is told the port once requests are taken.

    Raises AlreadyExists for a bootstrap key with the id of another key, and FailedPrecondition where the state folder
    is held by another process, the database cannot be used or a port is taken.
    """
    with (
        contextlib.closing(bind_admin(settings.admin_address, settings.admin_port)) as admin_listener,
        _state_lock(settings.state_dir).held(),
    ):
        artifacts = ArtifactFolder(settings.state_dir)
        engine, reserve = open_engine(settings.url), SpaceReserve.beside(settings.url)
        try:
            await _serve(settings, artifacts, engine, reserve, admin_listener, stopping, on_listening)
        finally:
            await engine.dispose()


async def _serve(
    settings: RegistrySettings,
    artifacts: ArtifactFolder,
    engine: AsyncEngine,
    reserve: SpaceReserve,
    admin_listener: socket.socket,
    stopping: asyncio.Event,
    on_listening: Callable[[int], None],
) -> None:
    activity, readiness, signal = Activity(), _Readiness(), HeadSignal()
    store = Store(engine, keep_changes=settings.keep_changes, on_commit=signal.advance)
    metrics = Metrics(store, signal)
    admin = Admin(readiness, metrics.read, lambda: held_by(activity))
    async with serving_admin(admin_listener, admin, settings.http_limits):
        await wait_for_database(engine, settings.database_wait_s)
        with reserve.lent():
            await asyncio.to_thread(artifacts.open)
            await migrate(engine)
            present = set(await asyncio.to_thread(lambda: list(artifacts.digests())))
            await collect(store, artifacts, present)
            await warn_of_missing(store, artifacts, present)
            if settings.bootstrap_key is not None:
                await ensure_bootstrap_key(store, settings.bootstrap_key.get_secret_value())
            pinning = Pinning(store, settings.pins)
            await pinning.apply_list()
        retirement = Retirement(store, artifacts, settings.artifact_grace_s)
        registering = Registering(store, artifacts, retirement, settings)
        partials = PartialUploads(
            artifacts.partial, max_bytes=settings.partial_upload_bytes, keep_s=settings.partial_upload_s
        )
        artifacts.give_way = partials.clear
        uploads = Uploads(artifacts, partials, registering, settings)
        imports = Imports(artifacts, registering, settings)
        repacking = Repacking(store, artifacts, retirement, settings.default_quantization)
        watches = Watches(store, signal, heartbeat_s=settings.heartbeat_s)
        adapters = Adapters(store, artifacts, uploads, imports, repacking, pinning, watches, reserve)
        base_models, api_keys = BaseModels(store), ApiKeys(store, reserve)
        server = Server(
            [
                lambda grpc_server: adapter_pb2_grpc.add_AdapterServiceServicer_to_server(adapters, grpc_server),
                lambda grpc_server: base_model_pb2_grpc.add_BaseModelServiceServicer_to_server(
                    base_models, grpc_server
                ),
                lambda grpc_server: api_key_pb2_grpc.add_ApiKeyServiceServicer_to_server(api_keys, grpc_server),
            ],
            [
                adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"],
                base_model_pb2.DESCRIPTOR.services_by_name["BaseModelService"],
                api_key_pb2.DESCRIPTOR.services_by_name["ApiKeyService"],
            ],
            cluster_guards(settings.cluster_secret),
            outer=[CallInterceptor(metrics.calls, activity)],
            limits=settings.rpc_limits,
        )
        port = await server.start(settings.host, settings.port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow_head(store, signal, settings.url))
            background = [
                tasks.create_task(work)
                for work in (retirement.run(), repacking.update_outdated(), uploads.forget_old())
            ]
            await server.set_serving(serving=True)
            readiness.why_not = None
            on_listening(port)
            await stopping.wait()
            log.info("registry.draining")
            readiness.why_not = "shutting down"
            for task in background:
                task.cancel()
            await server.set_serving(serving=False)
            signal.close()  # ends the watches and the follower; an open stream would hold the server
            await server.stop(settings.drain_timeout_s)
            await uploads.close()
            await imports.close()
            await asyncio.to_thread(registering.close)
            await asyncio.to_thread(repacking.close)
