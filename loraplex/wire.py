"""Between the client library's values and the protobuf messages: pure conversions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.credentials import Metadata
from loraplex.errors import InvalidParameter, InvalidRequest, LoraplexError
from loraplex.generation import (
    ChoiceFinished,
    Event,
    Finished,
    Message,
    PositionLogprobs,
    Sampling,
    ServingFacts,
    TextDelta,
    TokenLogprob,
    Usage,
)
from loraplex.manifest import BaseManifest
from loraplex.metadata_keys import MIN_REVISION_KEY, REQUEST_ID_KEY, TRACE_KEY
from loraplex.records import (
    Adapter,
    AdapterOutcome,
    AdapterPin,
    AdapterRegistration,
    AdapterVersion,
    Advice,
    ApiKey,
    BaseModel,
    Evaluation,
    ImportProgress,
    LoadFacts,
    Model,
    PackingReport,
    TierUse,
    Worker,
    WorkerAdapter,
)
from loraplex.registry.v1 import adapter_pb2, api_key_pb2, base_model_pb2
from loraplex.router.v1 import fleet_pb2, inference_pb2, models_pb2
from loraplex.spans import Span
from loraplex.types.v1 import generation_pb2, sampling_pb2, trace_pb2

_ADVICE_KINDS: Final = {
    fleet_pb2.ADVICE_KIND_PROMOTE: "promote",
    fleet_pb2.ADVICE_KIND_THROTTLE: "throttle",
    fleet_pb2.ADVICE_KIND_MERGE: "merge",
    fleet_pb2.ADVICE_KIND_UNMET_PIN: "unmet_pin",
}
_TIERS: Final = {
    generation_pb2.ADAPTER_TIER_UNSPECIFIED: "",
    generation_pb2.ADAPTER_TIER_DEVICE: "device",
    generation_pb2.ADAPTER_TIER_HOST: "host",
    generation_pb2.ADAPTER_TIER_DISK: "disk",
    generation_pb2.ADAPTER_TIER_SOURCE: "source",
}
_FORMATS: Final = {
    "": adapter_pb2.ADAPTER_FORMAT_UNSPECIFIED,
    "int8": adapter_pb2.ADAPTER_FORMAT_INT8,
    "int4": adapter_pb2.ADAPTER_FORMAT_INT4,
    "none": adapter_pb2.ADAPTER_FORMAT_NONE,
}
_BASE_CHECKS: Final = {adapter_pb2.BASE_CHECK_MANIFEST: "manifest", adapter_pb2.BASE_CHECK_WEIGHTS: "weights"}
_REASONS: Final = {generation_pb2.FINISH_REASON_STOP: "stop", generation_pb2.FINISH_REASON_LENGTH: "length"}


_STATUSES: Final = {trace_pb2.SPAN_STATUS_ERROR: "error", trace_pb2.SPAN_STATUS_CANCELLED: "cancelled"}


def metadata(
    min_revision: int, request_id: str | None = None, credentials: Metadata = (), *, trace: bool = False
) -> Metadata:
    """Return a call's metadata: the revision the caller has seen (0: none), request id, credentials, wish for spans."""
    pairs = list(credentials)
    if min_revision:
        pairs.append((MIN_REVISION_KEY, str(min_revision)))
    if request_id:
        pairs.append((REQUEST_ID_KEY, request_id))
    if trace:
        pairs.append((TRACE_KEY, "1"))
    return tuple(pairs)


def sampling_params(sampling: Sampling) -> sampling_pb2.SamplingParams:
    """Return the message; what is None stays unset. Raises InvalidRequest where a value does not fit its type."""
    values = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    try:
        return sampling_pb2.SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling: {error}", field="sampling") from error


def generate_request(
    model: str,
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    sampling: Sampling | None,
) -> inference_pb2.GenerateRequest:
    """Return the message. Raises InvalidRequest unless exactly one kind of input is given."""
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidRequest("give exactly one of prompt, messages and token_ids", field="input")
    params = sampling_params(sampling or Sampling())
    try:
        request = inference_pb2.GenerateRequest(model=model, sampling=params)
        if prompt is not None:
            request.prompt = prompt
        elif messages is not None:
            request.chat.SetInParent()
            for message in messages:
                request.chat.messages.add(role=message.role, content=message.content)
        else:
            request.tokens.SetInParent()
            request.tokens.token_ids.extend(token_ids or ())
    except (ValueError, TypeError) as error:  # a lone surrogate, a negative token
        raise InvalidRequest(f"model or input cannot be sent: {error}", field="input") from error
    return request


def event(response: inference_pb2.GenerateResponse) -> Event:
    """Return a stream's event."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return TextDelta(
            delta.index, delta.text, tuple(delta.token_ids), tuple(_position(entry) for entry in delta.logprobs)
        )
    if kind == "choice_finished":
        end = response.choice_finished
        stop = end.stop_string if end.HasField("stop_string") else None
        return ChoiceFinished(end.index, _REASONS.get(end.reason, "unknown"), stop)
    usage, facts = response.finished.usage, response.finished.facts
    return Finished(
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        ServingFacts(
            base_digest=facts.base_digest,
            version_digest=facts.version_digest,
            artifact_digest=facts.artifact_digest,
            tier_hit=_TIERS.get(facts.tier_hit, ""),
            queue_s=facts.queue_time.ToNanoseconds() / 1e9,
            adapter_load_s=facts.adapter_load_time.ToNanoseconds() / 1e9,
            prefill_s=facts.prefill_time.ToNanoseconds() / 1e9,
            decode_s=facts.decode_time.ToNanoseconds() / 1e9,
            worker_id=facts.worker_id,
            base_quantization=facts.base_quantization or "none",
        ),
        tuple(_span(span) for span in response.finished.spans),
    )


def _span(message: trace_pb2.Span) -> Span:
    return Span(
        trace_id=message.trace_id,
        span_id=message.span_id,
        parent_span_id=message.parent_span_id,
        service=message.service,
        name=message.name,
        start_time=_time(message.start_time),
        duration_s=message.duration.ToNanoseconds() / 1e9,
        status=_STATUSES.get(message.status, "ok"),
        status_reason=message.status_reason,
        attributes=dict(message.attributes),
    )


def _position(entry: generation_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_logprob(entry.chosen), tuple(_logprob(token) for token in entry.top))


def _logprob(token: generation_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.token, token.logprob)


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)


def adapter_version(message: adapter_pb2.AdapterVersion) -> AdapterVersion:
    """Return the value of the message."""
    return AdapterVersion(
        version_digest=message.version_digest,
        artifact_digest=message.artifact_digest,
        base_digest=message.base_digest,
        format=message.format,
        rank=message.rank,
        artifact_bytes=message.artifact_bytes,
        target_modules=tuple(message.target_modules),
        num_modules=message.num_modules,
        num_base_modules=message.num_base_modules,
        dtype=message.dtype,
        create_time=_time(message.create_time),
        exact_artifact_digest=message.exact_artifact_digest,
        source=message.source,
    )


def import_request(
    name: str, source: str, base_id: str, form: str, weights_sha256: str
) -> adapter_pb2.ImportAdapterRequest:
    """Return the message. Raises InvalidRequest for text that cannot be sent."""
    try:
        return adapter_pb2.ImportAdapterRequest(
            name=name, source=source, base_id=base_id, format=quantization(form), weights_sha256=weights_sha256
        )
    except ValueError as error:  # a lone surrogate
        raise InvalidRequest(f"name or source cannot be sent: {error}") from error


def import_progress(message: adapter_pb2.ImportProgress) -> ImportProgress:
    """Return the value of the message."""
    return ImportProgress(message.source, message.received_bytes, message.total_bytes)


def whole(registered: adapter_pb2.UploadArtifactResponse | None) -> adapter_pb2.UploadArtifactResponse:
    """Return the last event of an import. Raises where the stream ended without it."""
    if registered is None:
        raise LoraplexError("the registry ended the import without telling its outcome", service="registry")
    return registered


def quantization(name: str) -> adapter_pb2.AdapterFormat.ValueType:
    """Return what asks for a format; "" asks for none in particular. Raises InvalidParameter."""
    value = _FORMATS.get(name)
    if value is None:
        known = ", ".join(known for known in _FORMATS if known)
        raise InvalidParameter(f"{name!r} is no quantization; give one of {known}", field="quantization")
    return value


def packing_report(message: adapter_pb2.PackingReport) -> PackingReport:
    """Return the value of the message."""
    sizes = {size.format: size.size_bytes for size in message.sizes}
    return PackingReport(
        version_digest=message.version_digest,
        format=message.format,
        sizes=sizes,
        mean_error=message.mean_error,
        errors=tuple((entry.module, entry.relative_error) for entry in message.modules),
        estimated_sizes=tuple(form for form in sizes if form not in ("none", message.format)),
        format_errors={size.format: size.mean_error for size in message.sizes if size.HasField("mean_error")},
        load=_load_facts(message.load) if message.HasField("load") else None,
    )


def _load_facts(message: adapter_pb2.LoadFacts) -> LoadFacts:
    return LoadFacts(
        num_file_tensors=message.num_file_tensors,
        num_file_modules=message.num_file_modules,
        equal_to_base=tuple(message.equal_to_base),
        features=tuple(message.features),
        base_check=_BASE_CHECKS.get(message.base_check, ""),
        trained_on=message.trained_on,
    )


def registration(
    response: adapter_pb2.UploadArtifactResponse | adapter_pb2.UpdateAdapterResponse,
) -> AdapterRegistration:
    """Return the value of the message."""
    report = packing_report(response.report) if response.HasField("report") else None
    return AdapterRegistration(adapter(response.adapter), response.revision, response.changed, report)


def evaluation_request(version: AdapterVersion, quantization: str) -> fleet_pb2.EvaluateAdapterRequest:
    """Return what asks to measure a version's artifact of a format; "" is the one it is served in.

    Raises InvalidParameter for a format that it is not packed in.
    """
    artifacts = {"none": version.exact_artifact_digest, version.format: version.artifact_digest}
    wanted = artifacts.get(quantization or version.format)
    if wanted is None:
        raise InvalidParameter(
            f"the adapter is packed as {version.format}, so it cannot be evaluated as {quantization}; pack it so first "
            f"(loraplex adapter repack NAME --quantization {quantization})",
            field="quantization",
        )
    if not version.exact_artifact_digest:
        raise LoraplexError(
            "the registry does not tell the exact artifact's digest; it is older than this program: update it"
        )
    return fleet_pb2.EvaluateAdapterRequest(
        base_digest=version.base_digest,
        version_digest=version.version_digest,
        artifact_digest=wanted,
        exact_artifact_digest=version.exact_artifact_digest,
    )


def evaluation(report: adapter_pb2.EvaluationReport) -> Evaluation:
    """Return the value of the message."""
    figures = report.evaluation
    return Evaluation(
        version_digest=figures.version_digest,
        artifact_digest=figures.artifact_digest,
        exact_artifact_digest=figures.exact_artifact_digest,
        base_digest=figures.base_digest,
        format=report.format,
        prompt_set=figures.prompt_set,
        num_prompts=figures.num_prompts,
        num_positions=figures.num_positions,
        top1_agreement=figures.top1_agreement,
        mean_kl=figures.mean_kl,
        max_kl=figures.max_kl,
        worker_version=figures.worker_version,
        device=figures.device,
        create_time=_time(report.create_time),
    )


def adapter(
    message: adapter_pb2.Adapter,
    reports: Iterable[adapter_pb2.PackingReport] = (),
    evaluations: Iterable[adapter_pb2.EvaluationReport] = (),
) -> Adapter:
    """Return the value of the message."""
    return Adapter(
        tenant=message.tenant,
        name=message.name,
        base_id=message.base_id,
        current=adapter_version(message.current),
        versions=tuple(adapter_version(version) for version in message.versions),
        create_time=_time(message.create_time),
        update_time=_time(message.update_time),
        reports=tuple(map(packing_report, reports)),
        evaluations=tuple(map(evaluation, evaluations)),
        pin_replicas=message.pin_replicas,
    )


def adapter_pin(response: adapter_pb2.PinAdapterResponse) -> AdapterPin:
    """Return the value of the message."""
    return AdapterPin(adapter(response.adapter), response.revision, response.changed)


def base_model(message: base_model_pb2.BaseModel) -> BaseModel:
    """Return the value of the message."""
    return BaseModel(
        message.base_id, message.digest, message.architecture, message.num_parameters, _time(message.create_time)
    )


def api_key(message: api_key_pb2.ApiKey) -> ApiKey:
    """Return the value of the message."""
    return ApiKey(message.key_id, message.tenant, message.name, _time(message.create_time))


def manifest_message(manifest: BaseManifest, digest: str) -> base_model_pb2.BaseModelManifest:
    """Return the message of a manifest and its digest."""
    return base_model_pb2.BaseModelManifest(
        digest=digest,
        config_json=manifest.config_json,
        tokenizer_sha256=manifest.tokenizer_sha256,
        chat_template_sha256=manifest.chat_template_sha256,
        tensors=[
            base_model_pb2.TensorInfo(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, sha256=tensor.sha256)
            for tensor in manifest.tensors
        ],
    )


def model(message: models_pb2.Model) -> Model:
    """Return the value of the message."""
    return Model(
        name=message.name,
        parent=message.parent,
        base_digest=message.base_digest,
        version_digest=message.version_digest,
        artifact_digest=message.artifact_digest,
        rank=message.rank,
        artifact_bytes=message.artifact_bytes,
        create_time=_time(message.create_time),
    )


def worker(message: fleet_pb2.Worker) -> Worker:
    """Return the value of the message."""
    return Worker(
        worker_id=message.worker_id,
        address=message.address,
        state=message.state,
        epoch=message.epoch,
        base_digest=message.base_digest,
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_prefill_tokens=message.queued_prefill_tokens,
        prefill_tokens_per_second=message.prefill_tokens_per_second,
        decode_tokens_per_second=message.decode_tokens_per_second,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        adapters=tuple(
            WorkerAdapter(
                entry.artifact_digest,
                tuple(entry.names),
                _TIERS.get(entry.tier, ""),
                entry.loading,
                entry.in_flight,
                entry.pinned,
                entry.artifact_bytes,
                entry.quarantine_reason,
                _time(entry.quarantine_end_time) if entry.HasField("quarantine_end_time") else None,
            )
            for entry in message.adapters
        ),
        status_age_s=message.status_age.ToNanoseconds() / 1e9,
        error=message.error,
        device=message.device,
        dtype=message.dtype,
        base_quantization=message.base_quantization,
        device_tier=_tier_use(message.device_tier) if message.HasField("device_tier") else None,
        host_tier=_tier_use(message.host_tier) if message.HasField("host_tier") else None,
        disk_tier=_tier_use(message.disk_tier) if message.HasField("disk_tier") else None,
        dedicated_artifact_digest=message.dedicated_artifact_digest,
    )


def _tier_use(message: fleet_pb2.TierUse) -> TierUse:
    return TierUse(message.used_bytes, message.budget_bytes, message.num_adapters, message.max_adapters)


def adapter_outcome(message: fleet_pb2.AdapterOutcome) -> AdapterOutcome:
    """Return the value of the message."""
    return AdapterOutcome(
        worker_id=message.worker_id,
        tier=_TIERS.get(message.tier, ""),
        load_s=message.load_time.ToNanoseconds() / 1e9 if message.HasField("load_time") else None,
        error_reason=message.error_reason,
        error=message.error,
    )


def advice(message: fleet_pb2.Advice) -> Advice:
    """Return the value of the message."""
    return Advice(
        kind=_ADVICE_KINDS.get(message.kind, ""),
        tenant=message.tenant,
        adapter=message.adapter,
        worker_id=message.worker_id,
        figures={figure.name: figure.value for figure in message.figures},
        reason=message.reason,
    )
