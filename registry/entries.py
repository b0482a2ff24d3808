"""Change-log payloads: catalog entries as JSON and back. Knows neither SQL nor protobuf."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from registry.domain import (
    AdapterRecord,
    ApiKeyRecord,
    BaseModelRecord,
    DeletedAdapter,
    DeletedApiKey,
    Entry,
    VersionRecord,
)

_KINDS: dict[str, type[Entry]] = {
    "base_model": BaseModelRecord,
    "adapter": AdapterRecord,
    "deleted_adapter": DeletedAdapter,
    "api_key": ApiKeyRecord,
    "deleted_api_key": DeletedApiKey,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


def encode_entries(entries: Iterable[Entry]) -> str:
    """Return the payload of one transaction."""
    return json.dumps([{"kind": _NAMES[type(entry)], **asdict(entry)} for entry in entries], separators=(",", ":"))


def decode_entries(payload: str) -> tuple[Entry, ...]:
    """Return what `encode_entries` wrote."""
    return tuple(_decode(fields) for fields in json.loads(payload))


def _decode(fields: dict[str, Any]) -> Entry:
    cls = _KINDS[fields.pop("kind")]
    if cls is AdapterRecord:
        versions = tuple(
            VersionRecord(**{**version, "target_modules": tuple(version["target_modules"])})
            for version in fields.pop("versions")
        )
        return AdapterRecord(versions=versions, **fields)
    return cls(**fields)
