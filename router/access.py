"""Who may call what: clients by API key, operators by the cluster token. Decides; knows neither gRPC nor HTTP.

A key is asked for where any exists, and where `asks_always` (others can reach this router) says so. A key is found by
its id and compared by hash, in constant time; what was sent is never repeated.
"""

from __future__ import annotations

from typing import Final

from common.api_keys import EXAMPLE, id_of, is_key
from common.bearer import ClusterToken, bearer_of
from common.tenancy import DEFAULT_TENANT
from loraplex.errors import PermissionDenied, RegistryUnavailable, Unauthenticated
from router.catalog import Catalog

_MAKE_ONE: Final = "an operator makes one with: loraplex key add NAME"


class Access:
    """Judges `authorization` headers by the catalog as it is now, so that a revoked key is refused at once."""

    def __init__(self, catalog: Catalog, *, cluster_token: str | None = None, asks_always: bool = False) -> None:
        self._catalog = catalog
        self._cluster_token = ClusterToken(cluster_token) if cluster_token else None
        self._asks_always = asks_always

    def client(self, authorization: str | None) -> str:
        """Return the tenant of a request. Raises Unauthenticated, and RegistryUnavailable before the first catalog."""
        if (why := self._catalog.why_not_ready()) is not None:
            raise RegistryUnavailable(why, retry_after_s=1.0)
        keys = self._catalog.snapshot.api_keys
        if not keys and not self._asks_always:
            return DEFAULT_TENANT
        if not keys:
            raise Unauthenticated(f"no API key exists yet, so nobody is let in; {_MAKE_ONE}", credential="api_key")
        secret = bearer_of(authorization)
        if secret is None:
            raise Unauthenticated(
                f"an API key is needed: send `Authorization: Bearer {EXAMPLE}`; {_MAKE_ONE}", credential="api_key"
            )
        key_id = id_of(secret)
        if key_id is None:
            raise Unauthenticated(f"the authorization is not `Bearer {EXAMPLE}`; {_MAKE_ONE}", credential="api_key")
        key = keys.get(key_id)
        if not is_key(secret, key.key_sha256 if key else None) or key is None:
            raise Unauthenticated(f"the API key is not valid: mistyped, or revoked; {_MAKE_ONE}", credential="api_key")
        return key.tenant

    def reader(self, authorization: str | None) -> str:
        """Return the tenant whose models are asked for; operators see the default one's. Raises as `client` does."""
        if self._is_operator(authorization):
            return DEFAULT_TENANT
        return self.client(authorization)

    def operator(self, authorization: str | None) -> None:
        """Let operators pass: all, where no cluster token is configured.

        Raises Unauthenticated, and PermissionDenied for clients' keys.
        """
        if self._cluster_token is None:
            return
        refusal = self._cluster_token.why_refused(authorization)
        if refusal is None:
            return
        secret = bearer_of(authorization) or ""
        key = self._catalog.snapshot.api_keys.get(id_of(secret) or "")
        if key is not None and is_key(secret, key.key_sha256):
            raise PermissionDenied(
                "an API key does not let in here: this call is for operators and needs the cluster token"
            )
        raise refusal

    def administrator(self, authorization: str | None) -> None:
        """Let operators pass by the clients' front: with the cluster token, or where no secret is asked for at all.

        Raises as `operator` does, and RegistryUnavailable before the first catalog; an API key is never enough.
        """
        if self._cluster_token is None and (why := self._catalog.why_not_ready()) is not None:
            raise RegistryUnavailable(why, retry_after_s=1.0)  # whether there are keys is not known yet
        if self._cluster_token is None and (self._catalog.snapshot.api_keys or self._asks_always):
            raise PermissionDenied(
                "this call is for operators and needs the cluster token, but this router has none; give the services "
                "one with LORAPLEX_CLUSTER_TOKEN"
            )
        self.operator(authorization)

    def _is_operator(self, authorization: str | None) -> bool:
        return self._cluster_token is not None and self._cluster_token.matches(bearer_of(authorization) or "")
