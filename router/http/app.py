"""The HTTP front's routes: OpenAI-compatible endpoints, probes, metrics."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.activity import Activity
from common.admin import Admin, admin_routes
from loraplex.errors import InvalidRequest, LoraplexError, NotFound
from loraplex.metadata_keys import AUTHORIZATION_KEY, MIN_REVISION_KEY
from router.access import Access
from router.catalog import Adapter, Base, Catalog, parse_min_revision
from router.http.adapters import load_endpoint, unload_endpoint
from router.http.answers import ChatAnswer, CompletionAnswer
from router.http.errors import error_answer, error_object
from router.http.generation import GenerationEndpoint
from router.http.translate import chat_plan, completion_plan
from router.http.wire import BodyLimits
from router.inference import Inference, request_id_from
from router.registry_adapters import RegistryAdapters

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


class Counted:
    """An ASGI application whose requests count as open, with the tasks that work for them."""

    def __init__(self, app: ASGIApp, activity: Activity) -> None:
        self._app = app
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with self._activity.request():
            await self._app(scope, receive, send)


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
    admin: Admin,
    activity: Activity,
    *,
    max_body_bytes: int,
    body_timeout_s: float,
    registry: RegistryAdapters,
    import_timeout_s: float,
) -> Starlette:
    """Return the ASGI application."""
    models = Models(catalog, access)
    body = BodyLimits(max_body_bytes, body_timeout_s)
    chat = GenerationEndpoint(inference, access, chat_plan, ChatAnswer, body)
    completions = GenerationEndpoint(inference, access, completion_plan, CompletionAnswer, body)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", Counted(chat, activity), methods=["POST"]),
            Route("/v1/completions", Counted(completions, activity), methods=["POST"]),
            Route(
                "/v1/load_lora_adapter",
                Counted(load_endpoint(registry, access, body, import_timeout_s), activity),
                methods=["POST"],
            ),
            Route(
                "/v1/unload_lora_adapter", Counted(unload_endpoint(registry, access, body), activity), methods=["POST"]
            ),
            Route("/v1/models", models.all),
            Route("/v1/models/{model:path}", models.one),
            *admin_routes(admin),
        ],
        exception_handlers={Exception: _unexpected, LoraplexError: _refused, HTTPException: _no_such_route},
    )
