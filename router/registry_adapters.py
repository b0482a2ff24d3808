"""Registers and deletes adapters at the registry, on behalf of those who ask the router for it.

Returns when the router's own catalog has the change, so that the next request finds it. Who may ask it does not decide.
"""

from __future__ import annotations

from typing import Final

import grpc
from grpc import aio

from common.rpc import open_channel
from loraplex import errors
from loraplex.credentials import Metadata
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc
from router.catalog import Catalog

_CATALOG_S: Final = 15.0
"""A change is here in milliseconds, unless the catalog's stream is just being opened anew."""
_DELETE_S: Final = 15.0


class RegistryAdapters:
    """A client of the registry at `address`; `credentials` go with every call. Connects for each."""

    def __init__(self, address: str, credentials: Metadata, catalog: Catalog) -> None:
        self._address = address
        self._credentials = credentials
        self._catalog = catalog

    async def import_adapter(
        self, name: str, source: str, base_id: str, timeout_s: float
    ) -> adapter_pb2.UploadArtifactResponse:
        """Have an adapter imported. Raises what the registry refuses with, and CatalogBehind."""
        request = adapter_pb2.ImportAdapterRequest(name=name, source=source, base_id=base_id)
        registered: adapter_pb2.UploadArtifactResponse | None = None
        try:
            async with open_channel(self._address) as channel:
                stub: adapter_pb2_grpc.AdapterServiceAsyncStub = adapter_pb2_grpc.AdapterServiceStub(channel)
                async for event in stub.ImportAdapter(request, timeout=timeout_s, metadata=self._credentials):
                    if event.HasField("registered"):
                        registered = event.registered
        except aio.AioRpcError as error:
            raise registry_error(error) from None
        if registered is None:
            raise errors.RegistryUnavailable("the registry ended the import without telling its outcome")
        await self._catalog.wait_for_revision(registered.revision, _CATALOG_S)
        return registered

    async def delete_adapter(self, name: str) -> int:
        """Delete an adapter; returns the revision without it. Raises as `import_adapter` does."""
        request = adapter_pb2.DeleteAdapterRequest(name=name)
        try:
            async with open_channel(self._address) as channel:
                stub: adapter_pb2_grpc.AdapterServiceAsyncStub = adapter_pb2_grpc.AdapterServiceStub(channel)
                deleted = await stub.DeleteAdapter(request, timeout=_DELETE_S, metadata=self._credentials)
        except aio.AioRpcError as error:
            raise registry_error(error) from None
        await self._catalog.wait_for_revision(deleted.revision, _CATALOG_S)
        return deleted.revision


def registry_error(error: aio.AioRpcError) -> errors.LoraplexError:
    """Return the typed error behind a failed call to the registry."""
    typed = errors.from_rpc_error(error)
    if isinstance(typed, errors.Unauthenticated):  # the cluster's fault, not the client's
        return errors.RegistryUnavailable("the registry refuses this router's cluster token; both need the same one")
    if errors.carries_details(error):
        return typed
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded("the request's deadline passed before the registry had finished")
    return errors.RegistryUnavailable(f"the registry cannot be reached: {error.details()}", retry_after_s=1.0)
