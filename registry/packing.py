"""From a validated adapter to the files of its artifact and the version that names them. Blocks; knows no SQL.

A version keeps two artifacts: the one that workers get, and the exact factors it was made from (one and the same in
format none), so that it can be packed in another format, or by a newer packer, without a new upload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import structlog

from common.adapter_format.base import BaseLinears
from common.adapter_format.choice import estimated_bytes
from common.adapter_format.packed import PACKERS, PackedAdapter, open_packed, pack, version_digest
from common.adapter_format.parts import FORMAT_NONE, FORMATS
from common.adapter_format.quantize import Quantized, quantize
from common.adapter_format.validate import Validated
from loraplex.errors import CorruptArtifact, UnsupportedAdapter
from registry.artifacts import ArtifactFolder, full_disk_is_no_space
from registry.domain import VersionRecord, describe_version
from registry.reports import PackingReport

log = structlog.get_logger(__name__)

DEFAULT_QUANTIZATION: Final[Literal["none", "int8", "int4"]] = "int8"
"""Format of adapters for which none is asked, unless the registry is told another."""
_NUM_SAMPLED: Final = 4


@dataclass(frozen=True, slots=True)
class PackedVersion:
    """A version ready to be committed: its record, its report, and synced files to publish, by digest."""

    version: VersionRecord
    report: PackingReport
    files: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The format that a version shall have. One that was asked for is kept to; a default gives way to none."""

    format: str
    asked: bool


def make_version(
    validated: Validated, wanted: Wanted, base: BaseLinears, folder: Path, artifacts: ArtifactFolder, now_us: int
) -> PackedVersion:
    """Pack a validated adapter into files below `folder`.

    Raises UnsupportedAdapter where it cannot have the format that was asked for, and NoSpace.
    """
    adapter = validated.adapter
    source, source_digest, source_bytes = _write(adapter, folder / "source", artifacts)
    exact = describe_version(adapter, source_digest, source_bytes, base, now_us)
    packed = _packed(exact, adapter, source, wanted, folder, artifacts)
    return replace(packed, report=replace(packed.report, facts=validated.facts))


def repack(version: VersionRecord, wanted: Wanted, folder: Path, artifacts: ArtifactFolder) -> PackedVersion:
    """Pack a version again from its exact factors; what became of its uploaded file is not in the report.

    Raises ArtifactUnreachable or CorruptArtifact where those are lost, and UnsupportedAdapter and NoSpace as
    `make_version` does.
    """
    source = artifacts.file(version.source_digest)
    adapter = open_packed(source)
    identity = version_digest(adapter.base_digest, adapter.modules, adapter.matrices)
    if adapter.format != FORMAT_NONE or identity != version.version_digest:
        raise CorruptArtifact(
            f"the artifact {version.source_digest} does not hold the factors of version {version.version_digest}; "
            "register the adapter again",
            file=source.name,
        )
    return _packed(version, adapter, None, wanted, folder, artifacts)


def _packed(
    version: VersionRecord,
    adapter: PackedAdapter,
    source: Path | None,
    wanted: Wanted,
    folder: Path,
    artifacts: ArtifactFolder,
) -> PackedVersion:
    quantized = _quantize(adapter, wanted)
    form = quantized.adapter.format
    files = {version.source_digest: source} if source else {}
    digest, size = version.source_digest, version.source_bytes
    if form != FORMAT_NONE:
        file, digest, size = _write(quantized.adapter, folder / "packed", artifacts)
        files[digest] = file
    sizes = {known: estimated_bytes(adapter.modules, known, adapter.matrices) for known in FORMATS}
    sizes |= {FORMAT_NONE: version.source_bytes, form: size}
    errors = zip((module.name for module in adapter.modules), quantized.errors, strict=True)
    worst_first = tuple(sorted(errors, key=lambda entry: (-entry[1], entry[0])))
    estimates = {known: error for known in FORMATS if known != form and (error := _sampled(adapter, known)) is not None}
    report = PackingReport(form, sizes, worst_first, estimates)
    record = replace(version, artifact_digest=digest, artifact_bytes=size, format=form, packer=PACKERS[form])
    return PackedVersion(record, report, files)


def _quantize(adapter: PackedAdapter, wanted: Wanted) -> Quantized:
    try:
        return quantize(adapter, wanted.format)
    except UnsupportedAdapter as error:
        if wanted.asked:
            raise
        log.info("registry.default_format_does_not_fit", version=adapter.version_digest[:12], reason=error.message)
        return quantize(adapter, FORMAT_NONE)


def _sampled(adapter: PackedAdapter, form: str) -> float | None:
    """Return the mean error of a few of the modules in another format; None where that does not fit them."""
    modules = adapter.modules[:: -(-len(adapter.modules) // _NUM_SAMPLED) or 1]
    try:
        errors = quantize(replace(adapter, modules=modules), form).errors
    except UnsupportedAdapter:
        return None
    return sum(errors) / max(1, len(errors))


def _write(adapter: PackedAdapter, file: Path, artifacts: ArtifactFolder) -> tuple[Path, str, int]:
    with full_disk_is_no_space():
        digest = pack(adapter, file)
    artifacts.sync(file)
    return file, digest, file.stat().st_size
