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
    """An adapter on a worker. `tier` is device, host, disk or source; `names` are those whose current version it is."""

    artifact_digest: str
    names: tuple[str, ...]
    tier: str
    loading: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the router sees it. `state` is starting, serving, not-serving, draining or unreachable.

    `device`, `dtype` (of weights and KV cache) and `base_quantization` (none or int8) are empty where it has not said.
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
