"""How many workers a traffic needs: a steady state, in closed form, from speeds that are given or assumed.

Let a worker compute `c` requests at a time, each of `p` prompt and `o` output tokens. One step of
`c` answers, which read the distinct adapters among them, takes

    step = max((base + adapters + c * context * kv) / (bandwidth * 0.6),  2 * parameters * c / (flops * 0.4))

so that it decodes c / step tokens a second; a prompt is computed at

    prefill = flops * 0.4 / (2 * parameters + 2 * p * heads * head_dim * layers)

tokens a second. A worker then finishes

    mu = 1 / (p / prefill + o / decode)

requests a second at most, and is planned to be busy for a share of the time only. Adapters beyond what all workers'
devices hold together are loaded on demand: the most popular ones are taken to stay, and an adapter that one worker
alone cannot serve is held by several.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from loraplex.errors import InvalidParameter
from loraplex.planning.adapters import Weight, num_fitting
from loraplex.planning.devices import Device, Links, load_times
from loraplex.planning.memory import MemoryAccount, WorkerPlan
from loraplex.planning.shapes import ModelShape

BANDWIDTH_SHARE: Final = 0.6
"""Of a device's peak memory bandwidth that decoding reaches."""
FLOPS_SHARE: Final = 0.4
"""Of a device's peak products."""
LOADS_SHARE: Final = 0.5
"""Of the time, that a worker's two loading threads may be busy."""
LOADER_THREADS: Final = 2
MAX_ADAPTERS: Final = 1_000_000
MAX_WORKERS: Final = 100_000
MAX_NUMBER: Final = 1e12
"""Of requests and tokens: more is a slip, and beyond what is computed with."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked of all workers together; lengths in tokens, on average."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    num_adapters: int = 1
    popularity: str = "zipf:1.0"
    """uniform, or zipf:S, by which the adapter of rank k gets a share in proportion to k^-S."""
    utilisation: float = 0.7
    """Share of the time that a worker may be busy, for queues to stay short."""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    """Of one worker, all its requests together, at the planned concurrency; None has it assumed."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The workers a traffic needs, and what each of them then sees."""

    num_workers: int
    for_tokens: int
    """Workers that computing alone needs."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    speeds_assumed: bool
    requests_per_s_per_worker: float
    """At most, all the time busy."""
    busy_share: float
    request_s: float
    """From a request's first token of prompt to its last of answer, in a full batch."""
    token_s: float
    """Between two tokens of one answer."""
    adapters_per_worker: int
    adapters_in_fleet: int
    """Distinct ones on all devices together."""
    copies_of_hottest: int
    hit_share: float
    """Of requests whose adapter is on the device."""
    loads_per_s_per_worker: float
    load_s: float
    """A load from the disk cache, mean."""


def plan_fleet(
    shape: ModelShape,
    device: Device,
    plan: WorkerPlan,
    memory: MemoryAccount,
    weight: Weight,
    links: Links,
    traffic: Traffic,
) -> FleetPlan:
    """Return the least number of workers that carries the traffic. Raises InvalidParameter, naming the flag."""
    _check(plan, traffic)
    shares = popularity_shares(traffic.popularity, traffic.num_adapters)
    per_worker = min(num_fitting(weight, memory.adapter_chunks), plan.max_resident_adapters)
    if per_worker < 1:
        raise InvalidParameter(
            f"--concurrency: beside the KV cache of {plan.concurrency} requests the arena has {memory.adapter_chunks} "
            f"chunks, an adapter's load needs {weight.granted_chunks}; lower --concurrency or --context",
            field="concurrency",
        )
    prefill, decode = _speeds(shape, device, plan, memory, weight, traffic, shares)
    request_s = traffic.prompt_tokens / prefill + traffic.output_tokens * plan.concurrency / decode
    mu = 1 / (traffic.prompt_tokens / prefill + traffic.output_tokens / decode)
    usable = mu * traffic.utilisation
    if traffic.requests_per_s > MAX_WORKERS * usable:
        raise _too_many()
    for_tokens = max(1, math.ceil(traffic.requests_per_s / usable - 1e-9))
    copies = [max(1, math.ceil(share * traffic.requests_per_s / usable - 1e-9)) for share in shares]
    extra = sum(copies) - len(copies)
    mass = [0.0, *accumulate(shares)]
    load_s = next(load.seconds for load in load_times(weight.file_bytes, device, links) if load.source == "disk")

    def held(workers: int) -> int:
        return max(1, min(traffic.num_adapters, workers * per_worker - extra))

    def loads_per_s(workers: int) -> float:
        return traffic.requests_per_s * max(0.0, 1 - mass[held(workers)]) / workers

    workers = for_tokens
    while loads_per_s(workers) * load_s > LOADER_THREADS * LOADS_SHARE:
        workers += max(1, workers // 50)  # in steps of 2 %, as no sharper answer is meant
        if workers > MAX_WORKERS:
            raise _too_many()
    return FleetPlan(
        num_workers=workers,
        for_tokens=for_tokens,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
        speeds_assumed=traffic.prefill_tokens_per_s is None or traffic.decode_tokens_per_s is None,
        requests_per_s_per_worker=mu,
        busy_share=traffic.requests_per_s / workers / mu,
        request_s=request_s,
        token_s=plan.concurrency / decode,
        adapters_per_worker=min(per_worker, traffic.num_adapters),
        adapters_in_fleet=held(workers),
        copies_of_hottest=copies[0],
        hit_share=min(1.0, mass[held(workers)]),
        loads_per_s_per_worker=loads_per_s(workers),
        load_s=load_s,
    )


def popularity_shares(popularity: str, count: int) -> list[float]:
    """Return each adapter's share of the requests, the most popular first. Raises InvalidParameter."""
    if popularity == "uniform":
        return [1 / count] * count
    match = re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", popularity)
    if match is None or not 0 <= float(match[1]) <= 10:
        raise InvalidParameter(
            f"--popularity {popularity!r} is not known; give uniform, or zipf:S with S of 0 to 10", field="popularity"
        )
    weights = [rank ** -float(match[1]) for rank in range(1, count + 1)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _speeds(
    shape: ModelShape,
    device: Device,
    plan: WorkerPlan,
    memory: MemoryAccount,
    weight: Weight,
    traffic: Traffic,
    shares: list[float],
) -> tuple[float, float]:
    """Return prefill and decode speed in tokens per second."""
    c = plan.concurrency
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size  # is only looked up
    flops_per_token = 2 * (shape.num_parameters - embedding)
    prefill, decode = traffic.prefill_tokens_per_s, traffic.decode_tokens_per_s
    if prefill is None:
        attention = 2 * traffic.prompt_tokens * shape.num_heads * shape.head_dim * shape.num_layers
        prefill = device.flops * FLOPS_SHARE / (flops_per_token + attention)
    if decode is None:
        distinct = sum(1 - (1 - share) ** c for share in shares)
        context = traffic.prompt_tokens + traffic.output_tokens / 2
        lookup = embedding * memory.base_bytes // shape.num_parameters
        read = memory.base_bytes - lookup + distinct * weight.device_bytes + c * context * memory.kv_bytes_per_token
        step_s = max(
            read / (device.memory_bytes_per_s * BANDWIDTH_SHARE), flops_per_token * c / (device.flops * FLOPS_SHARE)
        )
        decode = c / step_s
    return prefill, decode


def _too_many() -> InvalidParameter:
    return InvalidParameter(f"--requests-per-s needs more than {MAX_WORKERS} workers", field="requests_per_s")


def _check(plan: WorkerPlan, traffic: Traffic) -> None:
    positive = {
        "requests-per-s": traffic.requests_per_s,
        "prompt-tokens": traffic.prompt_tokens,
        "output-tokens": traffic.output_tokens,
        "adapters": traffic.num_adapters,
        "prefill-tokens-per-s": traffic.prefill_tokens_per_s,
        "decode-tokens-per-s": traffic.decode_tokens_per_s,
    }
    for name, value in positive.items():
        if value is not None and not 0 < value <= MAX_NUMBER:
            raise InvalidParameter(
                f"--{name} is {str(value)[:40]}; give a number above 0, {MAX_NUMBER:g} at most",
                field=name.replace("-", "_"),
            )
    if traffic.num_adapters > MAX_ADAPTERS:
        raise InvalidParameter(
            f"--adapters is {traffic.num_adapters}; this counts up to {MAX_ADAPTERS}", field="adapters"
        )
    if not 0 < traffic.utilisation <= 1:
        raise InvalidParameter(
            f"--utilisation is {traffic.utilisation:g}; give a share above 0, 1 at most", field="utilisation"
        )
    if traffic.prompt_tokens + traffic.output_tokens > plan.context_tokens:
        raise InvalidParameter(
            f"--context is {plan.context_tokens}; prompts and answers have "
            f"{traffic.prompt_tokens + traffic.output_tokens} tokens on average alone",
            field="context",
        )
