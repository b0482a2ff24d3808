"""BaseModelService: base models by their manifests."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and passes a context

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from common.pages import decode_token, encode_token, page_size
from common.tenancy import DEFAULT_TENANT
from common.wording import listing
from loraplex.errors import AlreadyExists, BaseModelNotFound
from loraplex.manifest import manifest_from_json, manifest_to_json
from loraplex.registry.v1 import base_model_pb2, base_model_pb2_grpc
from loraplex.wire import manifest_message
from registry.domain import BaseModelRecord, check_base_id, describe_base
from registry.service.messages import base_message, manifest_of
from registry.service.tasks import to_the_end
from registry.store import Store

log = structlog.get_logger(__name__)


class BaseModels(base_model_pb2_grpc.BaseModelServiceServicer):
    """Serves base models from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def CreateBaseModel(
        self, request: base_model_pb2.CreateBaseModelRequest, context: Any
    ) -> base_model_pb2.CreateBaseModelResponse:
        """Register a base; the same again changes nothing."""
        base_id = check_base_id(request.base_id)
        manifest = manifest_of(request.manifest)
        now_us = time.time_ns() // 1000
        described = await asyncio.to_thread(describe_base, base_id, manifest, request.manifest.digest, now_us)
        base, revision = await to_the_end(self._create(described, manifest_to_json(manifest)))
        return base_model_pb2.CreateBaseModelResponse(base_model=base_message(base), revision=revision)

    async def _create(self, described: BaseModelRecord, manifest: str) -> tuple[BaseModelRecord, int]:
        base_id = described.base_id
        async with self._store.write() as transaction:
            known = await transaction.base(base_id)
            if known is not None and known.digest != described.digest:
                raise AlreadyExists(
                    f"base {base_id} is registered with digest {known.digest}, which is not this model's "
                    f"{described.digest}; register it under another id",
                    field="base_id",
                )
            if known is None and await transaction.adapter(DEFAULT_TENANT, base_id) is not None:
                raise AlreadyExists(f"{base_id} is the name of an adapter; choose another id", field="base_id")
            if known is None:
                await transaction.put_base(described, manifest)
        if known is None:
            log.info("registry.base_added", base_id=base_id, digest=described.digest, revision=transaction.revision)
        return known or described, transaction.revision

    async def GetBaseModel(
        self, request: base_model_pb2.GetBaseModelRequest, context: Any
    ) -> base_model_pb2.GetBaseModelResponse:
        """Tell one base with its manifest."""
        base_id = check_base_id(request.base_id)
        async with self._store.read() as reader:
            base, manifest = await reader.base(base_id), await reader.manifest(base_id)
            if base is None or manifest is None:
                raise unknown_base(base_id, await reader.bases())
        return base_model_pb2.GetBaseModelResponse(
            base_model=base_message(base), manifest=manifest_message(manifest_from_json(manifest), base.digest)
        )

    async def ListBaseModels(
        self, request: base_model_pb2.ListBaseModelsRequest, context: Any
    ) -> base_model_pb2.ListBaseModelsResponse:
        """List bases by id."""
        size, after = page_size(request.page_size), decode_token("bases", request.page_token)
        async with self._store.read() as reader:
            bases = await reader.bases(after, size + 1)
        token = encode_token("bases", bases[size - 1].base_id) if len(bases) > size else ""
        return base_model_pb2.ListBaseModelsResponse(
            base_models=[base_message(base) for base in bases[:size]], next_page_token=token
        )


def unknown_base(base_id: str, known: list[BaseModelRecord]) -> BaseModelNotFound:
    """Return the error for a base id that is not registered; it lists those that are."""
    remedy = f"registered are {listing(base.base_id for base in known)}" if known else "none is registered yet"
    return BaseModelNotFound(f"no base model {base_id}: {remedy}", field="base_id", base_id=base_id)
