"""One router, put together: catalog and fleet tasks, the two fronts, readiness, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import structlog

from common.activity import Activity
from common.admin import Admin, held_by
from common.call_interceptor import CallInterceptor, CallMetrics
from common.config import is_loopback
from common.http_server import HttpServer, bind
from common.rpc import Server
from loraplex.credentials import bearer
from loraplex.errors import Draining
from loraplex.router.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc
from router.access import Access
from router.adapter_calls import AdapterCalls
from router.catalog import Catalog
from router.catalog_cache import CacheWriter, load_into
from router.catalog_watch import CatalogWatch
from router.discovery import parse_workers
from router.evaluation import Evaluations
from router.fleet import Fleet
from router.fleet_service import FleetService
from router.forward import Forwarder
from router.http.app import make_app
from router.http.errors import error_answer
from router.inference import Inference, request_id_from
from router.metrics import Metrics
from router.quota import Limits
from router.registry_adapters import RegistryAdapters
from router.service import InferenceService, ModelService
from router.settings import RouterSettings
from router.steering import Steering
from router.traffic import Traffic

log = structlog.get_logger(__name__)

_CUT_S: Final = 2.0
"""What a cut stream gets to send its last bytes."""


class Router:
    """A router's parts and their life. `run` returns after a drain."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._is_stopping = False
        self.catalog = Catalog(settings.registry)
        credentials = bearer(settings.cluster_secret)
        self._catalog_watch = CatalogWatch(self.catalog, settings.registry, credentials=credentials)
        self.fleet = Fleet(parse_workers(settings.workers), credentials=credentials)
        traffic = Traffic(settings.adapter_rate_half_life_s)
        self.access = Access(
            self.catalog,
            cluster_token=settings.cluster_secret,
            asks_always=not (settings.insecure or is_loopback(settings.host)),
        )
        self.metrics = Metrics(self.catalog, self.fleet)
        self._steering = Steering(self.catalog, self.fleet, traffic, settings.policy, on_order=self.metrics.ordered)
        self._activity = Activity()
        self.inference = Inference(
            self.catalog,
            Forwarder(self.fleet, on_retry=self.metrics.retried, traffic=traffic),
            self.metrics,
            Limits(router=settings.max_requests, tenant=settings.max_tenant_requests),
            request_timeout_s=settings.request_timeout_s,
        )
        self._evaluations = Evaluations(self.fleet)
        inference, models, fleet = (
            InferenceService(self.inference, self.access),
            ModelService(self.catalog, self.access),
            FleetService(
                self.fleet,
                self.catalog,
                self.access,
                self._evaluations,
                AdapterCalls(self.fleet),
                traffic,
                self._steering,
                promote_rate=settings.adapter_promote_rate,
            ),
        )
        self._grpc = Server(
            [
                lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server),
                lambda server: models_pb2_grpc.add_ModelServiceServicer_to_server(models, server),
                lambda server: fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server),
            ],
            [
                inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
                models_pb2.DESCRIPTOR.services_by_name["ModelService"],
                fleet_pb2.DESCRIPTOR.services_by_name["FleetService"],
            ],
            outer=[CallInterceptor(CallMetrics(self.metrics.registry), self._activity)],
            limits=settings.rpc_limits,
        )
        admin = Admin(self.why_not_ready, self.metrics.read, self._resources)
        app = make_app(
            self.inference,
            self.catalog,
            self.access,
            admin,
            self._activity,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.http_read_timeout_s,
            registry=RegistryAdapters(settings.registry, credentials, self.catalog),
            import_timeout_s=settings.request_timeout_s,
        )
        self._http = HttpServer(
            app,
            stop_timeout_s=_CUT_S,
            limits=settings.http_limits,
            answer=lambda error: error_answer(error, request_id_from(None)),
        )
        self.grpc_port = 0
        self.http_port = 0

    def why_not_ready(self) -> str | None:
        """Return why requests are not taken now, or None."""
        return "shutting down" if self._is_stopping else self.catalog.why_not_ready()

    def _resources(self) -> dict[str, int]:
        """Return what is held for requests, as each owner counts it."""
        return {
            "admitted_requests": self.inference.in_flight,
            "worker_requests": self.fleet.num_flights,
            **held_by(self._activity),
        }

    async def run(self, stop: asyncio.Event, on_bound: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set, then drain. Raises FailedPrecondition where a port cannot be had.

        `on_bound` is called once both ports are known; the router is ready when health and /readyz say so.
        """
        settings = self._settings
        with contextlib.closing(bind(settings.host, settings.http_port, "--http-port")) as listener:
            self.http_port = listener.getsockname()[1]
            self.grpc_port = await self._grpc.start(settings.host, settings.port)
            try:
                log.info("router.listening", host=settings.host, grpc_port=self.grpc_port, http_port=self.http_port)
                on_bound()
                cache = self._cache()
                async with asyncio.TaskGroup() as tasks:
                    serving = tasks.create_task(self._http.serve([listener]))
                    background = [
                        tasks.create_task(self._catalog_watch.run()),
                        tasks.create_task(self.fleet.run()),
                        tasks.create_task(self._steering.run()),
                        tasks.create_task(self._tell_ready()),
                    ]
                    if cache is not None:
                        background.append(tasks.create_task(cache.run()))
                    await stop.wait()
                    await self._drain()
                    for task in background:
                        task.cancel()
                    await serving
                if cache is not None:
                    await cache.flush()
            finally:
                await self._grpc.stop(0)
        log.info("router.stopped")

    def _cache(self) -> CacheWriter | None:
        path = self._settings.catalog_cache
        if path is None:
            return None
        load_into(self.catalog, path)
        return CacheWriter(self.catalog, path)

    async def _tell_ready(self) -> None:
        await self.catalog.ready.wait()
        if not self._is_stopping:
            await self._grpc.set_serving(serving=True)
            log.info("router.ready", grpc_port=self.grpc_port, http_port=self.http_port)

    async def _drain(self) -> None:
        """Fail readiness, go on for a while, refuse new requests, finish running ones, stop both fronts."""
        settings = self._settings
        self._is_stopping = True
        await self._grpc.set_serving(serving=False)
        log.info("router.draining", delay_s=settings.drain_delay_s, in_flight=self.inference.in_flight)
        await asyncio.sleep(settings.drain_delay_s)
        self.inference.refuse_new()
        self._evaluations.cut_all(Draining("this router is shutting down; try another", retry_after_s=1.0))
        if not await self.inference.wait_idle(settings.drain_timeout_s):
            log.warning("router.cutting_streams", in_flight=self.inference.in_flight)
            self.inference.cut_all()
            await self.inference.wait_idle(_CUT_S)  # each gets to tell its client
        self._http.stop()
        await self._grpc.stop(_CUT_S)
