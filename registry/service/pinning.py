"""PinAdapter, and the pins of the configuration's list at the registry's start."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from common.tenancy import DEFAULT_TENANT
from loraplex.pins import replicas_text
from loraplex.registry.v1 import adapter_pb2
from registry.domain import check_adapter_name, unknown_adapter
from registry.pins import with_listed_pin, with_pin
from registry.service.messages import adapter_message
from registry.service.tasks import to_the_end
from registry.store import Store

log = structlog.get_logger(__name__)


class Pinning:
    """Stores pins; `listed` are numbers of workers by name, as the configuration tells them."""

    def __init__(self, store: Store, listed: Mapping[str, int]) -> None:
        self._store = store
        self._listed = listed

    async def pin(self, request: adapter_pb2.PinAdapterRequest) -> adapter_pb2.PinAdapterResponse:
        """Serve one call."""
        name = check_adapter_name(request.name)
        replicas = request.pin_replicas if request.HasField("pin_replicas") else 1
        return await to_the_end(self._commit(name, replicas))

    async def _commit(self, name: str, replicas: int) -> adapter_pb2.PinAdapterResponse:
        async with self._store.write() as transaction:
            existing = await transaction.adapter(DEFAULT_TENANT, name)
            if existing is None:
                raise unknown_adapter(name)
            adapter = with_pin(existing, replicas, self._listed)
            if adapter is not existing:
                await transaction.put_adapter(adapter)
        log.info("registry.adapter_pinned", name=name, workers=replicas_text(replicas) or "none")
        return adapter_pb2.PinAdapterResponse(
            adapter=adapter_message(adapter), revision=transaction.revision, changed=adapter is not existing
        )

    async def apply_list(self) -> None:
        """Pin what is on the list and not pinned yet; a name that is not registered is pinned when it is."""
        if not self._listed:
            return
        missing: list[str] = []
        async with self._store.write() as transaction:
            for name in sorted(self._listed):
                existing = await transaction.adapter(DEFAULT_TENANT, name)
                if existing is None:
                    missing.append(name)
                    continue
                adapter = with_listed_pin(existing, self._listed)
                if adapter is not existing:
                    await transaction.put_adapter(adapter)
        if missing:
            log.info("registry.pinned_adapters_not_registered_yet", count=len(missing), first=missing[0])
