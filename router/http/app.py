"""The HTTP front's routes: OpenAI-compatible endpoints, probes, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from loraplex.errors import InvalidRequest, LoraplexError, NotFound
from loraplex.metadata_keys import AUTHORIZATION_KEY, MIN_REVISION_KEY
from router.access import Access
from router.catalog import Adapter, Base, Catalog, parse_min_revision
from router.http.answers import ChatAnswer, CompletionAnswer
from router.http.errors import error_answer, error_object
from router.http.generation import GenerationEndpoint
from router.http.translate import chat_plan, completion_plan
from router.inference import Inference, request_id_from
from router.metrics import Metrics

_OWNER = "loraplex"


def model_object(item: Base | Adapter, name: str | None = None) -> dict[str, Any]:
    """Return OpenAI's model object; an adapter's `parent` is its base."""
    if isinstance(item, Base):
        return {
            "id": item.base_id,
            "object": "model",
            "created": item.create_time_s,
            "owned_by": _OWNER,
            "parent": None,
            "loraplex": {"base_digest": item.digest},
        }
    version = item.current
    return {
        "id": name or item.name,
        "object": "model",
        "created": version.create_time_s,
        "owned_by": _OWNER,
        "parent": item.base_id,
        "loraplex": {
            "base_digest": version.base_digest,
            "version_digest": version.version_digest,
            "artifact_digest": version.artifact_digest,
            "rank": version.rank,
            "artifact_bytes": version.artifact_bytes,
        },
    }


class Probes:
    """What /readyz and /metrics tell. `why_not_ready` returns a reason, or None when requests are taken."""

    def __init__(self, why_not_ready: Callable[[], str | None], metrics: Metrics) -> None:
        self._why_not_ready = why_not_ready
        self._metrics = metrics

    async def livez(self, _: Request) -> Response:
        """Tell that the process runs."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """Tell whether requests are taken, and if not, why."""
        why = self._why_not_ready()
        return PlainTextResponse("ok\n") if why is None else PlainTextResponse(f"{why}\n", status_code=503)

    async def metrics(self, _: Request) -> Response:
        """Tell the metrics in Prometheus' text format."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


class Models:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, catalog: Catalog, access: Access) -> None:
        self._catalog = catalog
        self._access = access

    async def all(self, request: Request) -> Response:
        """List the models a request may name."""
        tenant = self._access.reader(request.headers.get(AUTHORIZATION_KEY))
        snapshot = await self._catalog.at_least(parse_min_revision(request.headers.get(MIN_REVISION_KEY)))
        data = [model_object(item) for item in snapshot.models(tenant)]
        return JSONResponse({"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        """Tell one model; `name@prefix` tells the version it means."""
        tenant = self._access.reader(request.headers.get(AUTHORIZATION_KEY))
        snapshot = await self._catalog.at_least(parse_min_revision(request.headers.get(MIN_REVISION_KEY)))
        resolved = snapshot.resolve(tenant, request.path_params["model"])
        if resolved.version is None:
            return JSONResponse(model_object(snapshot.bases[resolved.base_id]))
        adapter = Adapter(tenant, resolved.model, resolved.base_id, resolved.version, (resolved.version,))
        return JSONResponse(model_object(adapter))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, LoraplexError)  # noqa: S101 - registered for this class only
    status, headers, body = error_answer(error, request_id_from(None))
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


async def _unexpected(request: Request, _: Exception) -> Response:
    """Answer opaquely; Starlette raises the error again and the server logs it."""
    return await _refused(request, LoraplexError("internal error; the server's log has the details"))


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        told: LoraplexError = NotFound(f"there is no {where}; the API is under /v1", url=request.url.path)
    else:
        told = InvalidRequest(f"{where}: {error.detail}")
    return JSONResponse(error_object(told), error.status_code, error.headers)


def make_app(
    inference: Inference,
    catalog: Catalog,
    access: Access,
    metrics: Metrics,
    why_not_ready: Callable[[], str | None],
    *,
    max_body_bytes: int,
) -> Starlette:
    """Return the ASGI application."""
    models = Models(catalog, access)
    probes = Probes(why_not_ready, metrics)
    chat = GenerationEndpoint(inference, access, chat_plan, ChatAnswer, max_body_bytes=max_body_bytes)
    completions = GenerationEndpoint(
        inference, access, completion_plan, CompletionAnswer, max_body_bytes=max_body_bytes
    )
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models.all),
            Route("/v1/models/{model:path}", models.one),
            Route("/livez", probes.livez),
            Route("/readyz", probes.readyz),
            Route("/metrics", probes.metrics),
        ],
        exception_handlers={Exception: _unexpected, LoraplexError: _refused, HTTPException: _no_such_route},
    )
