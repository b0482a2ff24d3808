"""The RPCs that steer a worker's adapters, as a router calls them, for tests."""

from __future__ import annotations

from typing import Any

import grpc

from loraplex.errors import (
    from_rpc_error,
)
from loraplex.types.v1.generation_pb2 import AdapterTier
from loraplex.worker.v1.worker_pb2 import (
    LoadAdapterRequest,
    PinAdapterRequest,
    PrefetchAdapterRequest,
    ResolvedAdapter,
    UnloadAdapterRequest,
)
from tests.worker_front import Front

NOWHERE = AdapterTier.ADAPTER_TIER_UNSPECIFIED
DEVICE = AdapterTier.ADAPTER_TIER_DEVICE
HOST = AdapterTier.ADAPTER_TIER_HOST
DISK = AdapterTier.ADAPTER_TIER_DISK
SOURCE = AdapterTier.ADAPTER_TIER_SOURCE


def resolved(digest: str, **fields: Any) -> ResolvedAdapter:
    return ResolvedAdapter(version_digest="ab" * 32, artifact_digest=digest, rank=4, format="none", **fields)


class Steer:
    """The RPCs as a router calls them."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def load(self, digest: str, within: float = 60) -> Any:
        request = LoadAdapterRequest(base_digest=self.front.base_digest, adapter=resolved(digest))
        return await self._call("LoadAdapter", request, within)

    async def prefetch(self, digest: str, *, to_device: bool = False, for_request: bool = False) -> int:
        request = PrefetchAdapterRequest(
            base_digest=self.front.base_digest,
            adapter=resolved(digest),
            to_device=to_device,
            for_request=for_request,
        )
        return (await self._call("PrefetchAdapter", request)).tier  # type: ignore[no-any-return]

    async def unload(self, digest: str, *, from_disk: bool = False) -> int:
        request = UnloadAdapterRequest(artifact_digest=digest, from_disk=from_disk)
        return (await self._call("UnloadAdapter", request)).tier  # type: ignore[no-any-return]

    async def pin(self, digest: str, *, pinned: bool = True, size: int = 0) -> int:
        adapter = resolved(digest, artifact_bytes=size)
        request = PinAdapterRequest(base_digest=self.front.base_digest, adapter=adapter, pinned=pinned)
        return (await self._call("PinAdapter", request)).tier  # type: ignore[no-any-return]

    async def _call(self, name: str, request: Any, within: float = 60) -> Any:
        try:
            return await getattr(self.front.stub, name)(request, timeout=within)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def is_at(digest: str, tier: int, **facts: Any) -> Any:
    def check(fields: dict[str, Any]) -> bool:
        known = fields["adapters"].get(digest)
        if known is None or known.loading:
            return False
        return bool(known.tier == tier) and all(getattr(known, name) == value for name, value in facts.items())

    return check
