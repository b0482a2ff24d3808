"""All that a plan tells, as one value: for tables and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex.errors import InvalidParameter
from loraplex.planning.adapters import FORMATS, Weight, adapter_shape, num_fitting, weigh
from loraplex.planning.devices import Device, Links, LoadTime, load_times
from loraplex.planning.memory import MemoryAccount, WorkerPlan, account
from loraplex.planning.shapes import ModelShape
from loraplex.planning.traffic import BANDWIDTH_SHARE, FLOPS_SHARE, LOADS_SHARE, FleetPlan, Traffic, plan_fleet


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """The adapters that are planned for; `dtype` is that of their uploaded factors."""

    rank: int
    format: str
    targets: tuple[str, ...]
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Fit:
    """How many adapters of one rank and format a device holds; `why_not` says where it holds none at all."""

    rank: int
    format: str
    weight: Weight | None
    beside_kv: int
    """Beside the KV cache that was asked for."""
    alone: int
    """With the whole arena."""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole answer."""

    model: ModelShape
    num_parameters: int
    device: Device
    worker: WorkerPlan
    adapter: AdapterKind
    memory: MemoryAccount
    fits: tuple[Fit, ...]
    adapter_loads: tuple[LoadTime, ...]
    base_loads: tuple[LoadTime, ...]
    traffic: Traffic | None
    fleet: FleetPlan | None
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def make_plan(
    shape: ModelShape,
    device: Device,
    worker: WorkerPlan,
    adapter: AdapterKind,
    ranks: Sequence[int],
    links: Links,
    traffic: Traffic | None,
) -> Plan:
    """Compute everything. Raises InvalidParameter, naming the flag at fault."""
    memory = account(shape, device, worker)
    if adapter.rank not in ranks:
        ranks = sorted({*ranks, adapter.rank})
    wanted = weigh(
        shape,
        adapter_shape(shape, rank=adapter.rank, form=adapter.format, targets=adapter.targets, dtype=adapter.dtype),
        memory.layout,
        memory.chunk_bytes,
    )
    fits = tuple(_fit(shape, memory, replace(adapter, rank=rank, format=form)) for rank in ranks for form in FORMATS)
    fleet = None if traffic is None else plan_fleet(shape, device, worker, memory, wanted, links, traffic)
    return Plan(
        model=shape,
        num_parameters=shape.num_parameters,
        device=device,
        worker=worker,
        adapter=adapter,
        memory=memory,
        fits=fits,
        # Adapters come to a worker from its registry alone, over the network; a base is not kept in host memory.
        adapter_loads=_from_all_but("object store", load_times(wanted.file_bytes, device, links)),
        base_loads=_from_all_but("host memory", load_times(memory.base_bytes, device, links)),
        traffic=traffic,
        fleet=fleet,
        assumptions=tuple(_assumptions(device, worker, adapter, links, fleet)),
        warnings=tuple(_warnings(worker, memory, adapter, fits)),
    )


def _from_all_but(source: str, loads: Sequence[LoadTime]) -> tuple[LoadTime, ...]:
    return tuple(load for load in loads if load.source != source)


def _fit(shape: ModelShape, memory: MemoryAccount, kind: AdapterKind) -> Fit:
    try:
        adapter = adapter_shape(shape, rank=kind.rank, form=kind.format, targets=kind.targets, dtype=kind.dtype)
        weight = weigh(shape, adapter, memory.layout, memory.chunk_bytes)
    except InvalidParameter as error:  # one row of a table; what was asked for itself has been refused before
        return Fit(kind.rank, kind.format, None, 0, 0, error.message)
    return Fit(
        kind.rank,
        kind.format,
        weight,
        num_fitting(weight, memory.adapter_chunks),
        num_fitting(weight, memory.num_chunks),
    )


def _assumptions(
    device: Device, worker: WorkerPlan, adapter: AdapterKind, links: Links, fleet: FleetPlan | None
) -> list[str]:
    def gb(bytes_per_s: float) -> str:
        return f"{bytes_per_s / 1e9:.3g} GB/s"

    said = [
        f"{device.name}: {device.memory_bytes_per_s / 1e9:.0f} GB/s of memory bandwidth, {device.flops / 1e12:.3g} "
        f"TFLOP/s, {device.host_bytes_per_s / 1e9:.0f} GB/s from host memory"
        + (", which is what two cores of a server do" if device.kind == "cpu" else ", peaks by its maker"),
        (
            f"links: disk {gb(links.disk_bytes_per_s)}, network {gb(links.network_bytes_per_s)}, object store "
            f"{gb(links.store_bytes_per_s)} after {links.store_latency_s * 1e3:.0f} ms, checking "
            f"{gb(links.hash_bytes_per_s)}"
        ),
        f"KV cache: {worker.concurrency} requests with all of their {worker.context_tokens} tokens, no shared prefixes",
    ]
    if adapter.format == "int4":
        said.append("int4 adapters spend what they may, 0.3 of their 16-bit bytes; many need less")
    if fleet is not None:
        if fleet.speeds_assumed:
            said.append(
                f"speeds: {BANDWIDTH_SHARE:.0%} of the memory bandwidth when decoding, {FLOPS_SHARE:.0%} of the "
                "products; `loraplex worker list --json` tells a worker's measured ones, to be given as "
                "--prefill-tokens-per-s and --decode-tokens-per-s"
            )
        said.append(
            "adapters: the most popular stay on the devices, requests go to where their adapter is, loads keep a "
            f"worker's two loading threads busy for {LOADS_SHARE:.0%} of the time at most"
        )
    return said


def _warnings(worker: WorkerPlan, memory: MemoryAccount, adapter: AdapterKind, fits: Sequence[Fit]) -> list[str]:
    said = []
    if memory.spare_bytes < 0:
        said.append(
            f"intermediate results may want {-memory.spare_bytes / 1e9:.2f} GB more than the arena leaves; set a "
            "smaller --arena (LORAPLEX_WORKER_ARENA_BYTES)"
        )
    beside = next(fit.beside_kv for fit in fits if (fit.rank, fit.format) == (adapter.rank, adapter.format))
    if beside > worker.max_resident_adapters:
        said.append(
            f"{beside} such adapters fit beside the KV cache, a worker has slots for --max-resident-adapters "
            f"{worker.max_resident_adapters} (LORAPLEX_WORKER_MAX_RESIDENT_ADAPTERS)"
        )
    return said
