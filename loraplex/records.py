"""What the registry and the router tell of models, adapters and workers, as plain frozen values.

The client library returns these; nothing here knows protobuf or gRPC. Digests are lower-case hex SHA-256, times are
aware UTC datetimes, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """An immutable version of an adapter and the artifact packed from it."""

    version_digest: str
    artifact_digest: str
    base_digest: str
    format: str
    rank: int
    artifact_bytes: int
    target_modules: tuple[str, ...]
    num_modules: int
    num_base_modules: int
    dtype: str
    create_time: datetime
    exact_artifact_digest: str = ""
    """Its artifact of format none, with the factors it was registered with."""
    source: str = ""
    """Where the registry fetched it from, as exactly as the place can be named; empty where it was uploaded."""


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """What became of an adapter's uploaded file; all that is not in `equal_to_base`, and so dropped, is served.

    `num_file_modules` are modules of the base that the file has tensors for. `features` is what the adapter has beside
    plain LoRA: DoRA, rsLoRA, ... `base_check` tells what the base was known by: "manifest" (shapes of all modules,
    SHA-256 of what the file has of the base) or "weights" (read besides, from a folder with the base's digest).
    `trained_on` is the base's name in adapter_config.json, which is not checked.
    """

    num_file_tensors: int
    num_file_modules: int
    equal_to_base: tuple[str, ...]
    features: tuple[str, ...]
    base_check: str
    trained_on: str


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What packing a version made of it.

    `sizes` are bytes of the file by format: of the version's own and of none measured, of those in `estimated_sizes`
    reckoned from shapes.
    `errors` are (module, relative error of its weight change), worst first; of old versions the worst only.
    """

    version_digest: str
    format: str
    sizes: dict[str, int]
    mean_error: float
    errors: tuple[tuple[str, float], ...]
    estimated_sizes: tuple[str, ...] = ()
    """Formats in `sizes` that the version is not packed in."""
    format_errors: dict[str, float] = field(default_factory=dict)
    """Mean relative error by format: of those in `estimated_sizes` estimated from a few modules."""
    load: LoadFacts | None = None
    """What became of the uploaded file; None where that was before registries told it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How near an artifact's answers are to those of its version's exact factors, as a worker measured it.

    Both were compared at every position of the exact artifact's own greedy answers to `num_prompts` fixed prompts,
    those of set `prompt_set`: `top1_agreement` is the share where both find the same token likeliest, the divergences
    are KL(exact || measured) in nats. `format` is the artifact's; `create_time` is when the registry recorded it.
    """

    version_digest: str
    artifact_digest: str
    exact_artifact_digest: str
    base_digest: str
    format: str
    prompt_set: int
    num_prompts: int
    num_positions: int
    top1_agreement: float
    mean_kl: float
    max_kl: float
    worker_version: str
    device: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Adapter:
    """A named adapter. `versions` is newest first and empty in lists.

    `reports` and `evaluations` come with a single adapter that is asked for, and do not count where adapters are
    compared.
    """

    tenant: str
    name: str
    base_id: str
    current: AdapterVersion
    versions: tuple[AdapterVersion, ...]
    create_time: datetime
    update_time: datetime
    reports: tuple[PackingReport, ...] = field(default=(), compare=False)
    evaluations: tuple[Evaluation, ...] = field(default=(), compare=False)
    """Newest first, one per artifact; those of replaced artifacts included."""
    pin_replicas: int = 0
    """Workers of its base that keep it whatever the demand; 0: it is not pinned, `loraplex.pins.PIN_ON_ALL`: all do."""


@dataclass(frozen=True, slots=True)
class AdapterPin:
    """The outcome of pinning or unpinning; `changed` is False where it was so already."""

    adapter: Adapter
    revision: int
    changed: bool


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A registered base model."""

    base_id: str
    digest: str
    architecture: str
    num_parameters: int
    create_time: datetime


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a client's key; the key itself is not."""

    key_id: str
    tenant: str
    name: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key that was just made. `key` is the secret, which nobody will tell again."""

    api_key: ApiKey
    revision: int
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Model:
    """Something a request may name: a base (`parent` is empty, rank 0) or an adapter."""

    name: str
    parent: str
    base_digest: str
    version_digest: str
    artifact_digest: str
    rank: int
    artifact_bytes: int
    create_time: datetime


@dataclass(frozen=True, slots=True)
class WorkerAdapter:
    """An adapter on a worker. `tier` is device, host, disk or source; `names` are those whose current version it is.

    Where `quarantine_reason` is not empty, requests for it are refused until `quarantine_end_time`.
    """

    artifact_digest: str
    names: tuple[str, ...]
    tier: str
    loading: bool
    in_flight: int
    pinned: bool = False
    artifact_bytes: int = 0
    quarantine_reason: str = ""
    quarantine_end_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier of a worker is. `max_adapters` is 0 where only bytes bound it."""

    used_bytes: int
    budget_bytes: int
    num_adapters: int
    max_adapters: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the router sees it. `state` is starting, serving, not-serving, draining or unreachable.

    `device`, `dtype` (of weights and KV cache) and `base_quantization` (none or int8) are empty where it has not said.
    `dedicated_artifact_digest` is of the one adapter that it serves, merged into the base; empty where it serves any.
    """

    worker_id: str
    address: str
    state: str
    epoch: str
    base_digest: str
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    free_blocks: int
    total_blocks: int
    adapters: tuple[WorkerAdapter, ...]
    status_age_s: float
    error: str
    device: str = ""
    dtype: str = ""
    base_quantization: str = ""
    device_tier: TierUse | None = None
    host_tier: TierUse | None = None
    disk_tier: TierUse | None = None
    dedicated_artifact_digest: str = ""


@dataclass(frozen=True, slots=True)
class AdapterOutcome:
    """What became of a call about an adapter at one worker.

    `tier` is where the adapter is now, for loads and unloads where it was; empty where it was nowhere. `load_s` is for
    loads only. `error_reason` and `error` are empty where the worker did it.
    """

    worker_id: str
    tier: str
    load_s: float | None = None
    error_reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """What an operator might do about what a router sees. `kind` is promote, throttle, merge or unmet_pin.

    `adapter` is empty where it is about a whole tenant, `worker_id` where it is about no worker in particular. Names of
    `figures` end in what they count: `_per_second`, `_ratio` or `_s`.
    """

    kind: str
    tenant: str
    adapter: str
    worker_id: str
    figures: dict[str, float]
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterRegistration:
    """The outcome of registering an adapter or of changing its format.

    `changed` is False where the content was the current version already, in that format.
    """

    adapter: Adapter
    revision: int
    changed: bool
    report: PackingReport | None = None


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """How far the registry is with fetching an adapter; `total_bytes` is 0 until a size is known."""

    source: str
    received_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class BaseRegistration:
    """The outcome of registering a base model."""

    base_model: BaseModel
    revision: int
