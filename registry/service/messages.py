"""Between the domain's values and protobuf messages, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from common.adapter_format.load_facts import BY_MANIFEST, BY_WEIGHTS, LoadFacts
from common.adapter_format.parts import FORMAT_INT4, FORMAT_INT8, FORMAT_NONE
from loraplex.errors import InvalidParameter
from loraplex.manifest import BaseManifest, TensorInfo
from loraplex.registry.v1 import adapter_pb2, api_key_pb2, base_model_pb2
from loraplex.types.v1.evaluation_pb2 import Evaluation
from registry.domain import (
    AdapterRecord,
    ApiKeyRecord,
    BaseModelRecord,
    DeletedAdapter,
    DeletedApiKey,
    Entry,
    VersionRecord,
)
from registry.evaluations import EvaluationRecord, Figures
from registry.reports import PackingReport

_BASE_CHECKS: Final = {BY_MANIFEST: adapter_pb2.BASE_CHECK_MANIFEST, BY_WEIGHTS: adapter_pb2.BASE_CHECK_WEIGHTS}
_FORMATS: Final = {
    adapter_pb2.ADAPTER_FORMAT_NONE: FORMAT_NONE,
    adapter_pb2.ADAPTER_FORMAT_INT8: FORMAT_INT8,
    adapter_pb2.ADAPTER_FORMAT_INT4: FORMAT_INT4,
}


def asked_format(value: int, *, required: bool = False) -> str:
    """Return the format a message asks for, "" where it asks for none in particular. Raises InvalidParameter."""
    if value == adapter_pb2.ADAPTER_FORMAT_UNSPECIFIED and not required:
        return ""
    form = next((form for number, form in _FORMATS.items() if number == value), None)
    if form is None:
        known = ", ".join(adapter_pb2.AdapterFormat.Name(number) for number in _FORMATS)
        raise InvalidParameter(f"format is {value}; give one of {known}", field="format")
    return form


def timestamp(time_us: int) -> Timestamp:
    """Return microseconds since the epoch as a Timestamp."""
    message = Timestamp()
    message.FromMicroseconds(time_us)
    return message


def base_message(base: BaseModelRecord) -> base_model_pb2.BaseModel:
    """Return a base model as clients see it."""
    return base_model_pb2.BaseModel(
        base_id=base.base_id,
        digest=base.digest,
        architecture=base.architecture,
        num_parameters=base.num_parameters,
        create_time=timestamp(base.create_time_us),
    )


def version_message(version: VersionRecord) -> adapter_pb2.AdapterVersion:
    """Return a version as clients see it."""
    return adapter_pb2.AdapterVersion(
        version_digest=version.version_digest,
        artifact_digest=version.artifact_digest,
        base_digest=version.base_digest,
        format=version.format,
        rank=version.rank,
        artifact_bytes=version.artifact_bytes,
        target_modules=version.target_modules,
        num_modules=version.num_modules,
        num_base_modules=version.num_base_modules,
        dtype=version.dtype,
        create_time=timestamp(version.create_time_us),
        exact_artifact_digest=version.source_digest,
    )


def adapter_message(adapter: AdapterRecord, *, old_versions: bool = True) -> adapter_pb2.Adapter:
    """Return an adapter as clients see it, with all its versions or the current one only."""
    versions = adapter.versions if old_versions else (adapter.current_version,)
    return adapter_pb2.Adapter(
        tenant=adapter.tenant,
        name=adapter.name,
        base_id=adapter.base_id,
        current=version_message(adapter.current_version),
        versions=[version_message(version) for version in versions],
        create_time=timestamp(adapter.create_time_us),
        update_time=timestamp(adapter.update_time_us),
    )


def report_message(
    version_digest: str, report: PackingReport, *, only_worst: bool = False
) -> adapter_pb2.PackingReport:
    """Return what packing made of a version, with all modules or the worst only."""
    errors = report.errors[:1] if only_worst else report.errors
    return adapter_pb2.PackingReport(
        version_digest=version_digest,
        format=report.format,
        sizes=[
            adapter_pb2.FormatSize(format=form, size_bytes=size, mean_error=report.mean_errors.get(form))
            for form, size in report.sizes.items()
        ],
        mean_error=report.mean_error,
        modules=[adapter_pb2.ModuleError(module=module, relative_error=error) for module, error in errors],
        load=_facts_message(report.facts) if report.facts is not None else None,
    )


def _facts_message(facts: LoadFacts) -> adapter_pb2.LoadFacts:
    return adapter_pb2.LoadFacts(
        num_file_tensors=facts.num_file_tensors,
        num_file_modules=facts.num_file_modules,
        equal_to_base=facts.equal_to_base,
        features=facts.features,
        base_check=_BASE_CHECKS[facts.base_check],
        trained_on=facts.trained_on,
    )


def report_messages(adapter: AdapterRecord, reports: Mapping[str, PackingReport]) -> list[adapter_pb2.PackingReport]:
    """Return what packing made of an adapter's versions: of the current one in full, of others the worst module."""
    return [report_message(digest, report, only_worst=digest != adapter.current) for digest, report in reports.items()]


def figures_of(message: Evaluation) -> Figures:
    """Return the figures in a message; nothing is checked."""
    return Figures(
        exact_artifact_digest=message.exact_artifact_digest,
        prompt_set=message.prompt_set,
        num_prompts=message.num_prompts,
        num_positions=message.num_positions,
        top1_agreement=message.top1_agreement,
        mean_kl=message.mean_kl,
        max_kl=message.max_kl,
        worker_version=message.worker_version,
        device=message.device,
    )


def evaluation_message(record: EvaluationRecord, base_digest: str) -> adapter_pb2.EvaluationReport:
    """Return what was measured of an artifact as clients see it."""
    evaluation = Evaluation(
        version_digest=record.version_digest,
        artifact_digest=record.artifact_digest,
        base_digest=base_digest,
        **asdict(record.figures),
    )
    return adapter_pb2.EvaluationReport(
        format=record.format, evaluation=evaluation, create_time=timestamp(record.create_time_us)
    )


def evaluation_messages(
    adapter: AdapterRecord, records: Iterable[EvaluationRecord]
) -> list[adapter_pb2.EvaluationReport]:
    """Return what was measured of an adapter's versions."""
    bases = {version.version_digest: version.base_digest for version in adapter.versions}
    return [evaluation_message(record, bases[record.version_digest]) for record in records]


def entry_message(entry: Entry) -> adapter_pb2.CatalogEntry:
    """Return an entry of a snapshot or change."""
    match entry:
        case BaseModelRecord():
            return adapter_pb2.CatalogEntry(base_model=base_message(entry))
        case AdapterRecord():
            return adapter_pb2.CatalogEntry(adapter=adapter_message(entry))
        case DeletedAdapter():
            key = adapter_pb2.AdapterKey(tenant=entry.tenant, name=entry.name)
            return adapter_pb2.CatalogEntry(deleted_adapter=key)
        case ApiKeyRecord():
            hashed = api_key_pb2.ApiKeyHash(key_id=entry.key_id, tenant=entry.tenant, key_sha256=entry.key_sha256)
            return adapter_pb2.CatalogEntry(api_key=hashed)
        case DeletedApiKey():
            return adapter_pb2.CatalogEntry(deleted_api_key_id=entry.key_id)


def api_key_message(key: ApiKeyRecord) -> api_key_pb2.ApiKey:
    """Return what clients may see of a key."""
    return api_key_pb2.ApiKey(
        key_id=key.key_id, tenant=key.tenant, name=key.name, create_time=timestamp(key.create_time_us)
    )


def manifest_of(message: base_model_pb2.BaseModelManifest) -> BaseManifest:
    """Return the manifest in a message; nothing is checked."""
    return BaseManifest(
        config_json=message.config_json,
        tokenizer_sha256=message.tokenizer_sha256,
        chat_template_sha256=message.chat_template_sha256,
        tensors=tuple(TensorInfo(t.name, tuple(t.shape), t.dtype, t.sha256) for t in message.tensors),
    )
