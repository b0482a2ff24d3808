"""ApiKeyService: keys are made here, told once, and kept as hashes. No key is ever logged."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and passes a context

from __future__ import annotations

import time
from typing import Any

import structlog

from common.api_keys import NewKey, hash_of, id_of, make_key
from common.pages import decode_token, encode_token, page_size
from common.tenancy import DEFAULT_TENANT
from loraplex.errors import AlreadyExists, NotFound
from loraplex.registry.v1 import api_key_pb2, api_key_pb2_grpc
from registry.domain import BOOTSTRAP_KEY_NAME, ApiKeyRecord, check_key_name
from registry.reserve import SpaceReserve
from registry.service.messages import api_key_message
from registry.service.tasks import to_the_end
from registry.store import Store, WriteTransaction

log = structlog.get_logger(__name__)


class ApiKeys(api_key_pb2_grpc.ApiKeyServiceServicer):
    """Serves API keys from the store."""

    def __init__(self, store: Store, reserve: SpaceReserve) -> None:
        self._store = store
        self._reserve = reserve

    async def CreateApiKey(
        self, request: api_key_pb2.CreateApiKeyRequest, context: Any
    ) -> api_key_pb2.CreateApiKeyResponse:
        """Make a key."""
        name, key = check_key_name(request.name), make_key()
        record, revision = await to_the_end(self._create(name, key))
        return api_key_pb2.CreateApiKeyResponse(api_key=api_key_message(record), key=key.text, revision=revision)

    async def _create(self, name: str, key: NewKey) -> tuple[ApiKeyRecord, int]:
        record = _record(name, key)
        async with self._store.write() as transaction:
            known = await transaction.api_key_named(record.tenant, name)
            if known is not None:
                raise AlreadyExists(
                    f"a key named {name} exists, with id {known.key_id}; delete it first or choose another name",
                    field="name",
                )
            await transaction.put_api_key(record)
        log.info("registry.api_key_added", key_id=key.key_id, name=name, revision=transaction.revision)
        return record, transaction.revision

    async def ListApiKeys(
        self, request: api_key_pb2.ListApiKeysRequest, context: Any
    ) -> api_key_pb2.ListApiKeysResponse:
        """List keys by id."""
        size, after = page_size(request.page_size), decode_token("api_keys", request.page_token)
        async with self._store.read() as reader:
            keys = await reader.api_keys(DEFAULT_TENANT, after, size + 1)
        token = encode_token("api_keys", keys[size - 1].key_id) if len(keys) > size else ""
        return api_key_pb2.ListApiKeysResponse(
            api_keys=[api_key_message(key) for key in keys[:size]], next_page_token=token
        )

    async def DeleteApiKey(
        self, request: api_key_pb2.DeleteApiKeyRequest, context: Any
    ) -> api_key_pb2.DeleteApiKeyResponse:
        """Revoke a key."""
        return api_key_pb2.DeleteApiKeyResponse(revision=await to_the_end(self._delete(request.key_id)))

    async def _delete(self, key_id: str) -> int:
        with self._reserve.lent():  # a key must be revocable whatever the disk
            async with self._store.write() as transaction:
                await self._revoke(transaction, key_id)
        log.info("registry.api_key_deleted", key_id=key_id, revision=transaction.revision)
        return transaction.revision

    async def _revoke(self, transaction: WriteTransaction, key_id: str) -> None:
        if await transaction.api_key(key_id) is None:
            raise NotFound("no API key has this id; `loraplex key list` tells which exist", field="key_id")
        await transaction.delete_api_key(key_id)


async def ensure_bootstrap_key(store: Store, text: str) -> None:
    """Make the key of the registry's environment the one named `bootstrap`, whatever was before.

    `text` is a well-formed key. Raises AlreadyExists where its id belongs to a key of another name.
    """
    key_id = id_of(text)
    assert key_id is not None  # noqa: S101 - checked with the settings
    record = _record(BOOTSTRAP_KEY_NAME, NewKey(key_id, text))
    async with store.write() as transaction:
        same_id = await transaction.api_key(key_id)
        if same_id is not None and same_id.name != BOOTSTRAP_KEY_NAME:
            raise AlreadyExists(
                f"the id of LORAPLEX_REGISTRY_BOOTSTRAP_KEY is that of the key {same_id.name}; give it another id"
            )
        old = await transaction.api_key_named(DEFAULT_TENANT, BOOTSTRAP_KEY_NAME)
        if old is not None and (old.key_id, old.key_sha256) == (record.key_id, record.key_sha256):
            return
        if old is not None:
            await transaction.delete_api_key(old.key_id)
        await transaction.put_api_key(record)
    log.info("registry.bootstrap_key_set", key_id=key_id, replaced=old is not None, revision=transaction.revision)


def _record(name: str, key: NewKey) -> ApiKeyRecord:
    return ApiKeyRecord(key.key_id, DEFAULT_TENANT, name, hash_of(key.text), time.time_ns() // 1000)
