"""The server's side of `authorization: Bearer …`: what was sent, and the guard of services with a cluster token.

The guard compares digests in constant time. Nothing that was sent is repeated in a message or a log.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import grpc
from grpc import aio

from loraplex.errors import LoraplexError, Unauthenticated
from loraplex.metadata_keys import AUTHORIZATION_KEY

_OPEN: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Probes and tools need no token: they tell nothing that the published protos do not."""
_KINDS: Final = {False: "unary", True: "stream"}
_REMEDY: Final = "set LORAPLEX_CLUSTER_TOKEN, or LORAPLEX_CLUSTER_TOKEN_FILE, to the token the services have"


def bearer_of(authorization: str | None) -> str | None:
    """Return the secret in an authorization header: None where there is no header, "" where it is not a bearer's."""
    if authorization is None:
        return None
    scheme, _, secret = authorization.strip().partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def sent_authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the authorization of a call's metadata, or None."""
    return next((value for key, value in metadata or () if key == AUTHORIZATION_KEY and isinstance(value, str)), None)


class ClusterToken:
    """Knows the token's digest only."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def matches(self, secret: str) -> bool:
        """Tell, in constant time, whether `secret` is the token."""
        return hmac.compare_digest(hashlib.sha256(secret.encode()).digest(), self._digest)

    def why_refused(self, authorization: str | None) -> Unauthenticated | None:
        """Return the refusal of a call with this authorization, or None where it carries the token."""
        secret = bearer_of(authorization)
        if secret is None:
            return Unauthenticated(
                f"this call needs the cluster token and carries none; {_REMEDY}", credential="cluster_token"
            )
        if not secret:
            return Unauthenticated(
                f"the authorization is not `Bearer <cluster token>`; {_REMEDY}", credential="cluster_token"
            )
        if not self.matches(secret):
            return Unauthenticated(
                f"the cluster token is not the one this service has; {_REMEDY}", credential="cluster_token"
            )
        return None


class ClusterGuard(aio.ServerInterceptor):
    """Refuses every call without the cluster token, except to health and reflection. Goes inside ErrorInterceptor."""

    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the call's handler, or one of the same kind that refuses before it reads a message."""
        handler: Any = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or str(method).startswith(_OPEN):
            return handler  # type: ignore[no-any-return]  # grpc's own type, unseen through Any
        details: Any = handler_call_details
        refusal = self._token.why_refused(sent_authorization(details.invocation_metadata))
        return handler if refusal is None else _refusing(handler, refusal)


def cluster_guards(token: str | None) -> list[aio.ServerInterceptor]:
    """Return the interceptors of a service: the guard, where a token is configured."""
    return [ClusterGuard(ClusterToken(token))] if token else []


def _refusing(handler: Any, refusal: LoraplexError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, __: Any) -> None:
        raise refusal

    kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(refuse, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]
