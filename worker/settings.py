"""What a worker can be told, by flags or LORAPLEX_WORKER_<FIELD>."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.config import Address, AdminSettings, Port

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class WorkerSettings(AdminSettings):
    """Settings of one worker process pair: front end and engine."""

    model_config = SettingsConfigDict(env_prefix="LORAPLEX_WORKER_")

    port: Port = Field(50052, description="gRPC port; 0 takes a free one")
    admin_port: Port = Field(9052, description="HTTP port for probes, metrics and /debug/resources; 0 takes a free one")
    worker_id: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=128,
        description="stable name of this worker; each worker needs its own (default: the host's name)",
    )
    base_dir: Path = Field(description="Hugging Face folder of the base model")
    registry: Address = Field("127.0.0.1:50051", description="HOST:PORT of the registry")
    cache_dir: Path = Field(description="folder for cached adapters; each worker needs its own")
    cache_bytes: Count = Field(8 * 2**30, description="most bytes of adapters cached on disk")
    host_cache_bytes: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="on a GPU, bytes of page-locked host memory that keep adapters which left the device (default: a "
        "tenth of the free memory, 8 GiB at most); on a CPU the cached files are mapped, and there is no such tier",
    )
    max_fetches: Count = Field(
        8, description="adapters fetched at a time; one that stands still for 2 s gives its place to the next"
    )
    fetch_stall_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        60.0, description="seconds without a byte after which fetching an adapter is given up"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of weights and KV cache (auto: bfloat16 on GPUs, as the base is stored on CPUs, "
        "which compute in float32 anyway)",
    )
    base_quantization: Literal["none", "int8"] = Field(
        "none", description="int8 keeps the base's matrices in 8 bits an element (CPUs only); answers differ a little"
    )
    arena_bytes: Count | None = Field(
        None,
        description="bytes of the arena that KV cache and adapters share (default: a quarter of the free memory, "
        "1 GiB at most; on a GPU 80 % of it)",
    )
    max_context_tokens: Count | None = Field(None, description="prompt plus answer (default: the model's limit)")
    max_running_requests: Count = Field(64, description="requests computed at a time")
    max_waiting_requests: Annotated[int, Field(ge=0)] = Field(256, description="requests that may wait beyond those")
    max_resident_adapters: Count = Field(32, description="adapters on the device at a time")
    max_adapter_bytes: Count | None = Field(
        None, description="bytes of all adapters on the device (default: bound by number and arena)"
    )
    max_vocabulary_bytes: Count = Field(
        2**30, description="bytes of adapters' own embeddings and heads, which lie on the device beside the arena"
    )
    max_rank: Count = Field(256, description="largest rank of an adapter; requests for others are refused")
    max_adapter_wait_s: Seconds = Field(
        2.0, description="seconds a request that waits for adapter or memory may be overtaken by later ones"
    )
    max_prefill_tokens: Count | None = Field(
        None,
        description="tokens computed in one step: one of every running answer, prompts with the rest (default: what "
        "this machine computes in 0.2 s, from 64 to 2048)",
    )
    mixed_batch_ratio: Annotated[float, Field(ge=0.5, le=1)] = Field(
        1.0,
        description="share of max_running_requests that may run while they use more than one adapter; "
        "`python -m bench.mixed_batches` measures what suits a machine",
    )
    prefix_cache: bool = Field(
        True, description="reuse what was computed for equal beginnings of prompts, per tenant and adapter"
    )
    cuda_graphs: bool = Field(
        True, description="on a GPU run answers' steps as captured graphs; off saves start-up time and some memory"
    )
    async_scheduling: bool | None = Field(
        None,
        description="plan the next step while one runs (default: on a GPU; on a CPU both would share the cores)",
    )
    threads: Count | None = Field(None, description="threads that compute (default: one for each core that it may use)")
    engine_silence_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        300.0, description="seconds the engine may say nothing while it has requests before it is killed and restarted"
    )
    drain_notice_s: Seconds = Field(1.0, description="seconds between announcing a drain and refusing requests")
    drain_timeout_s: Seconds = Field(30.0, description="seconds open streams get to finish in a drain")
    stream_stall_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        60.0, description="seconds a client may leave a message unread before its stream is cut off"
    )

    def engine_command(self, base_digest: str) -> list[str]:
        """Return the command line of the engine process, without the mailbox's descriptor."""
        options: dict[str, object] = {
            "base-dir": self.base_dir,
            "base-digest": base_digest,
            "device": self.device,
            "dtype": self.dtype,
            "base-quantization": self.base_quantization,
            "arena-bytes": self.arena_bytes,
            "max-context-tokens": self.max_context_tokens,
            "max-running-requests": self.max_running_requests,
            "max-resident-adapters": self.max_resident_adapters,
            "max-adapter-bytes": self.max_adapter_bytes,
            "max-vocabulary-bytes": self.max_vocabulary_bytes,
            "host-cache-bytes": self.host_cache_bytes,
            "max-adapter-wait-s": self.max_adapter_wait_s,
            "max-prefill-tokens": self.max_prefill_tokens,
            "mixed-batch-ratio": self.mixed_batch_ratio,
            "threads": self.threads,
            "log-level": self.log_level,
            "log-format": self.log_format,
        }
        flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
        flags.append("--prefix-cache" if self.prefix_cache else "--no-prefix-cache")
        flags.append("--cuda-graphs" if self.cuda_graphs else "--no-cuda-graphs")
        if self.async_scheduling is not None:
            flags.append("--async-scheduling" if self.async_scheduling else "--no-async-scheduling")
        return [sys.executable, "-m", "worker.engine_process", *flags]
