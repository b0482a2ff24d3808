"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's names for importing and deleting an adapter.

For operators: adapters are everybody's, and an import uses the registry's credentials. What differs from vLLM: the
adapter is registered for good and for all workers, a path is one below the registry's import root, and a name that is
loaded already gets a new version, with `load_inplace` or without.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import structlog
from pydantic import Field
from starlette.types import Receive, Scope, Send

from loraplex.errors import InvalidRequest, LoraplexError
from loraplex.metadata_keys import AUTHORIZATION_KEY, MIN_REVISION_KEY, REQUEST_ID_KEY
from router.access import Access
from router.http.errors import error_answer
from router.http.schema import Lenient, read_request
from router.http.wire import BodyLimits, ClientGone, header, parse_json, read_body, send_answer, until_client_leaves
from router.inference import request_id_from
from router.registry_adapters import RegistryAdapters

log = structlog.get_logger(__name__)

_Text = Annotated[str, Field(min_length=1, max_length=4096)]
_Work = Callable[[dict[str, Any]], Awaitable[tuple[str, int]]]
_PLAIN: Final = (b"content-type", b"text/plain; charset=utf-8")


class LoadRequest(Lenient):
    """POST /v1/load_lora_adapter."""

    lora_name: _Text
    lora_path: _Text
    base_model_name: str = ""
    load_inplace: bool | None = None


class UnloadRequest(Lenient):
    """POST /v1/unload_lora_adapter."""

    lora_name: _Text


class AdapterEndpoint:
    """An ASGI application for one of the two; `work` returns what to say and the revision that has it."""

    def __init__(self, work: _Work, access: Access, body: BodyLimits) -> None:
        self._work = work
        self._access = access
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A client that leaves ends an import that has not come to its end."""
        request_id = request_id_from(header(scope, REQUEST_ID_KEY))
        try:
            self._access.administrator(header(scope, AUTHORIZATION_KEY))
            _check_json(header(scope, "content-type"))
            body = parse_json(await read_body(receive, self._body))
            await until_client_leaves(receive, self._answer(body, request_id, send))
        except ClientGone:
            log.debug("http.client_gone", request_id=request_id)
        except LoraplexError as error:
            await send_answer(send, *error_answer(error, request_id))
        except Exception as error:
            log.exception("http.unexpected", request_id=request_id, exc_info=error)
            opaque = LoraplexError("internal error; the server's log has the details")
            await send_answer(send, *error_answer(opaque, request_id))

    async def _answer(self, body: dict[str, Any], request_id: str, send: Send) -> None:
        said, revision = await self._work(body)
        headers = [
            _PLAIN,
            (b"x-request-id", request_id.encode()),
            (MIN_REVISION_KEY.encode(), str(revision).encode()),  # for a request at once, by way of another router
        ]
        await send_answer(send, 200, headers, said.encode())


def load_endpoint(registry: RegistryAdapters, access: Access, body: BodyLimits, timeout_s: float) -> AdapterEndpoint:
    """Return POST /v1/load_lora_adapter."""

    async def load(fields: dict[str, Any]) -> tuple[str, int]:
        request = read_request(LoadRequest, fields)
        done = await registry.import_adapter(request.lora_name, request.lora_path, request.base_model_name, timeout_s)
        digest = done.adapter.current.version_digest[:12]
        return f"Success: adapter {request.lora_name} is loaded, version {digest}.", done.revision

    return AdapterEndpoint(load, access, body)


def unload_endpoint(registry: RegistryAdapters, access: Access, body: BodyLimits) -> AdapterEndpoint:
    """Return POST /v1/unload_lora_adapter."""

    async def unload(fields: dict[str, Any]) -> tuple[str, int]:
        request = read_request(UnloadRequest, fields)
        revision = await registry.delete_adapter(request.lora_name)
        return f"Success: adapter {request.lora_name} is unloaded.", revision

    return AdapterEndpoint(unload, access, body)


def _check_json(content_type: str | None) -> None:
    """Refuse what a page in somebody's browser may send without asking: forms and plain text."""
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("the content-type must be application/json")
