"""What the registry knows and decides: names, base models, adapters, versions and the cutover between them.

Pure: no I/O, no clock (times are arguments, in microseconds since the epoch), no SQL, no protobuf.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from common.adapter_format.base import KINDS, BaseLinears, kind_of, layer_of, read_linears
from common.adapter_format.modules import PACKERS, PackedAdapter, PackedMatrix, PackedModule
from common.tenancy import DEFAULT_TENANT
from common.wording import shown
from loraplex.digests import is_digest
from loraplex.errors import AdapterNotFound, AlreadyExists, InvalidBaseModel, InvalidName
from loraplex.families import ARCHITECTURES, check_family
from loraplex.manifest import BaseManifest

BOOTSTRAP_KEY_NAME: Final = "bootstrap"
"""Name of the key that the registry's environment gives."""

_ADAPTER_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BASE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_MAX_PARAMETERS: Final = 10**15
_MAX_DIMENSIONS: Final = 8
_DTYPE_ORDER: Final = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class BaseModelRecord:
    """A registered base model, without its manifest."""

    base_id: str
    digest: str
    architecture: str
    num_parameters: int
    create_time_us: int


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """An immutable version and the artifact packed from it. Digests are lower-case hex SHA-256."""

    version_digest: str
    artifact_digest: str
    base_digest: str
    format: str
    rank: int
    artifact_bytes: int
    target_modules: tuple[str, ...]
    num_modules: int
    num_base_modules: int
    """Linears of the base's layers, and embedding and output head where the adapter changes them."""
    dtype: str
    create_time_us: int
    packer: int = 0
    """Which packer of its format made the artifact; 0 where that was before formats could be chosen."""
    source_digest: str = ""
    """Artifact of format none, with the exact factors, that it can be packed from again."""
    source_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """A named adapter; `versions` are newest first and hold the one that `current` (a version digest) names."""

    tenant: str
    name: str
    base_id: str
    current: str
    versions: tuple[VersionRecord, ...]
    create_time_us: int
    update_time_us: int

    @property
    def current_version(self) -> VersionRecord:
        """The version that the bare name means."""
        return next(version for version in self.versions if version.version_digest == self.current)


@dataclass(frozen=True, slots=True)
class DeletedAdapter:
    """An adapter that is gone."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class ApiKeyRecord:
    """A key of a client; `key_sha256` is lower-case hex over the whole key, which nobody but its owner has."""

    key_id: str
    tenant: str
    name: str
    key_sha256: str
    create_time_us: int


@dataclass(frozen=True, slots=True)
class DeletedApiKey:
    """A key that is revoked."""

    key_id: str


Entry = BaseModelRecord | AdapterRecord | DeletedAdapter | ApiKeyRecord | DeletedApiKey


@dataclass(frozen=True, slots=True)
class Change:
    """What one transaction changed."""

    revision: int
    entries: tuple[Entry, ...]


def check_adapter_name(name: str) -> str:
    """Return `name` if it keeps to the grammar. Raises InvalidName."""
    if not _ADAPTER_NAME.fullmatch(name):
        raise InvalidName(
            f"{shown(name)} is no adapter name: use 1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or "
            "digit",
            field="name",
        )
    return name


def check_key_name(name: str) -> str:
    """Return `name` if an API key may have it. Raises InvalidName."""
    if not _ADAPTER_NAME.fullmatch(name):
        raise InvalidName(
            f"{shown(name)} is no name of a key: use 1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or "
            "digit",
            field="name",
        )
    if name == BOOTSTRAP_KEY_NAME:
        raise InvalidName(
            f"the key {name} is what LORAPLEX_REGISTRY_BOOTSTRAP_KEY gives; choose another name", field="name"
        )
    return name


def check_base_id(base_id: str) -> str:
    """Return `base_id` if it keeps to the grammar. Raises InvalidName."""
    if not _BASE_ID.fullmatch(base_id):
        raise InvalidName(
            f"{shown(base_id)} is no base id: use 'name' or 'owner/name', each 1 to 96 of letters, digits, '.', '_' "
            "and '-', starting with a letter or digit",
            field="base_id",
        )
    return base_id


def describe_base(base_id: str, manifest: BaseManifest, claimed_digest: str, now_us: int) -> BaseModelRecord:
    """Check a manifest and describe its base. Raises InvalidBaseModel, naming the field."""
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        raise InvalidBaseModel("the manifest's tensors must be sorted by name, each once", field="manifest.tensors")
    hashes = [manifest.tokenizer_sha256, *(tensor.sha256 for tensor in manifest.tensors)]
    if manifest.chat_template_sha256:
        hashes.append(manifest.chat_template_sha256)
    if not all(is_digest(digest) for digest in hashes):
        raise InvalidBaseModel("the manifest's hashes must be lower-case hex SHA-256", field="manifest")
    # Dimensions first: a product of many large sizes would take hours to compute.
    if any(len(tensor.shape) > _MAX_DIMENSIONS for tensor in manifest.tensors) or (
        manifest.num_parameters > _MAX_PARAMETERS
    ):
        raise InvalidBaseModel("the manifest's shapes are larger than any model", field="manifest.tensors")
    config = _config(manifest)
    architecture = ARCHITECTURES[check_family(config, inside="manifest.config_json")]
    linears = read_linears(manifest)
    if linears.base_digest != claimed_digest:
        raise InvalidBaseModel(
            f"the manifest's digest is {linears.base_digest}, not {shown(claimed_digest)}; compute it again",
            field="manifest.digest",
        )
    _check_layers(linears, config.get("num_hidden_layers"))
    return BaseModelRecord(base_id, linears.base_digest, architecture, manifest.num_parameters, now_us)


def _config(manifest: BaseManifest) -> dict[str, Any]:
    try:
        config: Any = manifest.config
    except (ValueError, RecursionError) as error:
        raise InvalidBaseModel(f"config_json is not JSON: {error}", field="manifest.config_json") from error
    if not isinstance(config, dict):
        raise InvalidBaseModel("config_json is not a JSON object", field="manifest.config_json")
    return config


def _check_layers(linears: BaseLinears, num_layers: Any) -> None:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        raise InvalidBaseModel(
            f"num_hidden_layers is {shown(num_layers)}, not a positive integer", field="manifest.config_json"
        )
    num_found = len(linears.shapes)
    if num_found != num_layers * len(KINDS) or max(map(layer_of, linears.shapes)) != num_layers - 1:
        raise InvalidBaseModel(
            f"config_json tells {num_layers} layers of {len(KINDS)} linears ({', '.join(KINDS)}), but the tensors have "
            f"{num_found} linears in {linears.num_layers} layers; mixture-of-experts models are not supported",
            field="manifest.tensors",
        )


def describe_version(
    adapter: PackedAdapter, artifact_digest: str, artifact_bytes: int, base: BaseLinears, now_us: int
) -> VersionRecord:
    """Describe a validated adapter that is packed as it is, in format none."""
    parts: list[PackedModule | PackedMatrix] = [*adapter.modules, *adapter.matrices]
    changed = {part.name for part in parts}
    return VersionRecord(
        version_digest=adapter.version_digest,
        artifact_digest=artifact_digest,
        base_digest=adapter.base_digest,
        format=adapter.format,
        rank=max((module.rank for module in adapter.modules), default=0),
        artifact_bytes=artifact_bytes,
        target_modules=tuple(sorted({kind_of(name) for name in changed})),
        num_modules=len(changed),
        num_base_modules=len(base.shapes.keys() | changed),
        dtype=max((part.dtype for part in parts), key=_DTYPE_ORDER.index),
        create_time_us=now_us,
        packer=PACKERS[adapter.format],
        source_digest=artifact_digest,
        source_bytes=artifact_bytes,
    )


def unknown_adapter(name: str) -> AdapterNotFound:
    """Return the error for a name that no adapter has."""
    return AdapterNotFound(f"no adapter {name} is registered", field="name", name=name)


def check_same_base(existing: AdapterRecord, base_id: str) -> None:
    """Raise AlreadyExists where the adapter belongs to another base."""
    if existing.base_id != base_id:
        raise AlreadyExists(
            f"adapter {existing.name} belongs to base {existing.base_id}; delete it first or choose another name for "
            "this one",
            field="name",
        )


def cut_over(existing: AdapterRecord | None, name: str, base_id: str, version: VersionRecord) -> AdapterRecord:
    """Make `version` the current one of the adapter `name`; returns `existing` itself where that changes nothing.

    Content that is a version already becomes current again and keeps its place and time; another artifact of the same
    version (another format, a newer packer's) replaces the old one. Raises AlreadyExists where the name belongs to
    another base.
    """
    now_us = version.create_time_us
    if existing is None:
        return AdapterRecord(DEFAULT_TENANT, name, base_id, version.version_digest, (version,), now_us, now_us)
    check_same_base(existing, base_id)
    versions = existing.versions
    known = next((v for v in versions if v.version_digest == version.version_digest), None)
    if known is None:
        versions = (version, *versions)
    elif known != replace(version, create_time_us=known.create_time_us):
        version = replace(version, create_time_us=known.create_time_us)
        versions = tuple(version if v is known else v for v in versions)
    elif existing.current == version.version_digest:
        return existing
    return replace(existing, current=version.version_digest, versions=versions, update_time_us=now_us)


def put_repacked(existing: AdapterRecord, version: VersionRecord) -> AdapterRecord:
    """Put another artifact of a version in the place of the old; which version is current stays."""
    versions = tuple(version if v.version_digest == version.version_digest else v for v in existing.versions)
    return replace(existing, versions=versions)


def outdated(version: VersionRecord, default_format: str) -> str | None:
    """Return the format that a version is to be packed in again, None where its artifact is up to date.

    A version from before formats could be chosen gets the default.
    """
    wanted = version.format if version.packer else default_format
    return wanted if version.packer < PACKERS[wanted] else None
