"""The catalog: which bases and adapters exist, held in memory as one immutable snapshot that is swapped whole.

Owns names and how they resolve. Knows neither gRPC nor files: `catalog_watch` feeds it from the registry,
`catalog_cache` keeps a copy on disk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from loraplex.errors import CatalogBehind, InvalidParameter, ModelNotFound, RegistryUnavailable
from loraplex.metadata_keys import MIN_REVISION_KEY

MIN_PREFIX: Final = 12
MIN_REVISION_WAIT_S: Final = 2.0
_HEX = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Base:
    """A base model. `create_time_s` is Unix time."""

    base_id: str
    digest: str
    architecture: str = ""
    num_parameters: int = 0
    create_time_s: int = 0


@dataclass(frozen=True, slots=True)
class Version:
    """An immutable version of an adapter and the artifact packed from it. Digests are lower-case hex SHA-256."""

    version_digest: str
    artifact_digest: str
    base_digest: str
    format: str = "none"
    rank: int = 0
    artifact_bytes: int = 0
    create_time_s: int = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A named adapter; `versions` includes `current`."""

    tenant: str
    name: str
    base_id: str
    current: Version
    versions: tuple[Version, ...]
    pin_replicas: int = 0
    """Workers of its base that keep the current version; 0 where it is not pinned, loraplex.pins.PIN_ON_ALL for all."""


@dataclass(frozen=True, slots=True)
class DeletedAdapter:
    """An adapter that is gone."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a client's key is checked against: lower-case hex SHA-256 of the whole key."""

    key_id: str
    tenant: str
    key_sha256: str


@dataclass(frozen=True, slots=True)
class DeletedApiKey:
    """A key that is revoked."""

    key_id: str


Entry = Base | Adapter | DeletedAdapter | ApiKey | DeletedApiKey


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a model name meant at one moment; `version` is None for a base."""

    model: str
    base_id: str
    base_digest: str
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The whole catalog at one revision of one store."""

    store_id: str = ""
    revision: int = 0
    bases: Mapping[str, Base] = field(default_factory=lambda: MappingProxyType({}))
    adapters: Mapping[tuple[str, str], Adapter] = field(default_factory=lambda: MappingProxyType({}))
    api_keys: Mapping[str, ApiKey] = field(default_factory=lambda: MappingProxyType({}))

    def apply(self, entries: Iterable[Entry], *, store_id: str | None = None, revision: int) -> CatalogSnapshot:
        """Return the catalog after one transaction."""
        bases, adapters, api_keys = dict(self.bases), dict(self.adapters), dict(self.api_keys)
        for entry in entries:
            match entry:
                case Base():
                    bases[entry.base_id] = entry
                case Adapter():
                    adapters[entry.tenant, entry.name] = entry
                case DeletedAdapter():
                    adapters.pop((entry.tenant, entry.name), None)
                case ApiKey():
                    api_keys[entry.key_id] = entry
                case DeletedApiKey():
                    api_keys.pop(entry.key_id, None)
        return CatalogSnapshot(
            self.store_id if store_id is None else store_id,
            revision,
            MappingProxyType(bases),
            MappingProxyType(adapters),
            MappingProxyType(api_keys),
        )

    def resolve(self, tenant: str, model: str) -> Resolved:
        """Find what `model` names: a base id, the tenant's adapter, or `name@<hex prefix>` of one of its versions.

        Raises InvalidParameter (empty, short or ambiguous) and ModelNotFound.
        """
        if not model:
            raise InvalidParameter("model is empty; name a base model or an adapter", field="model")
        base = self.bases.get(model)
        if base is not None:
            return Resolved(model, base.base_id, base.digest)
        name, at, prefix = model.partition("@")
        adapter = self.adapters.get((tenant, name))
        if adapter is None:
            raise _model_not_found(model)
        version = _version_of(adapter, model, prefix) if at else adapter.current
        return Resolved(model, adapter.base_id, version.base_digest, version)

    def models(self, tenant: str) -> list[Base | Adapter]:
        """Return what the tenant may name: bases by id, then its adapters by name."""
        own = (adapter for (owner, _), adapter in self.adapters.items() if owner == tenant)
        return [*sorted(self.bases.values(), key=lambda b: b.base_id), *sorted(own, key=lambda a: a.name)]


def parse_min_revision(value: str | None) -> int:
    """Return the revision a client wants to see at least; 0 where it does not say. Raises InvalidParameter."""
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise InvalidParameter(f"{MIN_REVISION_KEY} must be a revision number", field=MIN_REVISION_KEY)
    return int(value)


def _model_not_found(model: str) -> ModelNotFound:
    shown = model if len(model) <= 128 else model[:125] + "..."
    return ModelNotFound(
        f"the model {shown!r} does not exist; GET /v1/models, ModelService.ListModels or `loraplex adapter list` "
        "tell which do",
        field="model",
        model=shown,
    )


def _version_of(adapter: Adapter, model: str, prefix: str) -> Version:
    if not _HEX.fullmatch(prefix):
        raise _model_not_found(model)
    if len(prefix) < MIN_PREFIX:
        raise InvalidParameter(
            f"the digest prefix {prefix!r} has {len(prefix)} characters; at least {MIN_PREFIX} are needed",
            field="model",
        )
    found = [
        version
        for version in adapter.versions
        if version.version_digest.startswith(prefix) or version.artifact_digest.startswith(prefix)
    ]
    if len(found) > 1:
        raise InvalidParameter(
            f"the digest prefix {prefix!r} fits {len(found)} versions of {adapter.name!r}; give more of it",
            field="model",
        )
    if not found:
        raise _model_not_found(model)
    return found[0]


class Catalog:
    """Holds the current snapshot and wakes those who wait for a newer one."""

    def __init__(self, registry_address: str = "") -> None:
        self._snapshot = CatalogSnapshot()
        self._changed = asyncio.Event()
        self._registry_address = registry_address
        self.ready = asyncio.Event()
        """Set once a whole catalog is held, from the registry or from a valid cache."""
        self._in_step = False

    @property
    def snapshot(self) -> CatalogSnapshot:
        """The catalog now."""
        return self._snapshot

    @property
    def in_step(self) -> bool:
        """Whether the registry is followed now; else what is held may be old."""
        return self._in_step

    @in_step.setter
    def in_step(self, value: bool) -> None:
        if value is not self._in_step:
            self._in_step = value
            self._tell_change()

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next swap sets, or the registry's coming or going; take a new one afterwards."""
        return self._changed

    def swap(self, snapshot: CatalogSnapshot) -> None:
        """Put a new snapshot in place of the old one."""
        self._snapshot = snapshot
        self.ready.set()
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def why_not_ready(self) -> str | None:
        """Return why requests cannot be resolved yet, or None."""
        if self.ready.is_set():
            return None
        return f"waiting for the registry at {self._registry_address}: no catalog has come yet"

    async def at_least(self, revision: int = 0) -> CatalogSnapshot:
        """Return a catalog that has `revision`.

        Raises RegistryUnavailable before the first catalog, and CatalogBehind after 2 s.
        """
        if (why := self.why_not_ready()) is not None:
            raise RegistryUnavailable(why, retry_after_s=1.0)
        if self._snapshot.revision < revision:
            await self.wait_for_revision(revision)
        return self._snapshot

    async def wait_for_revision(self, revision: int, timeout_s: float = MIN_REVISION_WAIT_S) -> None:
        """Wait until the catalog has `revision`. Raises CatalogBehind when it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._snapshot.revision < revision:
                    await self._changed.wait()
        except TimeoutError:
            held = self._snapshot.revision
            raise CatalogBehind(
                f"the catalog is at revision {held} and did not reach {revision} within {timeout_s:g} s; try again",
                retry_after_s=1.0,
                revision=held,
                wanted=revision,
            ) from None
