"""`loraplex plan`: what a worker's memory holds and how many workers a traffic needs, before there is one."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from loraplex.cli import output
from loraplex.cli.adapters import Quantization
from loraplex.cli.options import Json
from loraplex.cli.up import Dtype
from loraplex.errors import InvalidParameter
from loraplex.planning.devices import DEVICES, Links, named_device, parse_size
from loraplex.planning.memory import MemoryAccount, WorkerPlan
from loraplex.planning.report import AdapterKind, Plan, make_plan
from loraplex.planning.shapes import SHAPES, check_targets, named_shape, shape_from_folder
from loraplex.planning.traffic import FleetPlan, Traffic

_RANKS: Final = (8, 16, 32, 64)


class AdapterDtype(StrEnum):
    """What adapters' factors are uploaded in, which format none keeps."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class BaseQuantization(StrEnum):
    """How a worker keeps the base's matrices."""

    NONE = "none"
    INT8 = "int8"


def plan(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="A known model, e.g. Llama-3.1-8B; --list tells them all."),
    ] = None,
    base_dir: Annotated[
        Path | None, typer.Option("--base-dir", metavar="DIR", help="Or a model's folder; its config.json is enough.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="What a worker runs on.")] = "H200",
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="The device's memory, e.g. 16GiB. Default: all it has."),
    ] = None,
    memory_bandwidth: Annotated[
        str | None, typer.Option("--memory-bandwidth", metavar="SIZE", help="Bytes a second, e.g. 100GB.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="What weights and KV cache are kept in.")] = Dtype.AUTO,
    base_quantization: Annotated[
        BaseQuantization, typer.Option("--base-quantization", help="How the base's matrices are kept.")
    ] = BaseQuantization.NONE,
    arena: Annotated[
        str | None,
        typer.Option("--arena", metavar="SIZE", help="KV cache and adapters. Default: what a worker takes by itself."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Requests at a time, per worker.")
    ] = 16,
    context: Annotated[
        int, typer.Option("--context", metavar="TOKENS", help="Prompt plus answer that each may have.")
    ] = 2048,
    max_running: Annotated[
        int, typer.Option("--max-running-requests", metavar="N", help="A worker's setting of that name.")
    ] = 64,
    slots: Annotated[
        int, typer.Option("--max-resident-adapters", metavar="N", help="A worker's setting of that name.")
    ] = 32,
    rank: Annotated[int, typer.Option("--rank", metavar="R", help="Of the adapters that are planned for.")] = 16,
    form: Annotated[Quantization, typer.Option("--format", help="How they are packed.")] = Quantization.INT8,
    target_modules: Annotated[
        str, typer.Option("--target-modules", metavar="NAMES", help="What they adapt, comma-separated.")
    ] = "all-linear",
    adapter_dtype: Annotated[
        AdapterDtype, typer.Option("--adapter-dtype", help="What they are uploaded in; matters to format none.")
    ] = AdapterDtype.BFLOAT16,
    network: Annotated[
        str | None, typer.Option("--network", metavar="SIZE", help="Bytes a second, e.g. 1.1GB.")
    ] = None,
    disk: Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="Bytes a second, e.g. 3GB.")] = None,
    object_store: Annotated[
        str | None, typer.Option("--object-store", metavar="SIZE", help="Of the base: bytes a second, e.g. 200MB.")
    ] = None,
    host_link: Annotated[
        str | None, typer.Option("--host-link", metavar="SIZE", help="Host memory to device (PCIe), bytes a second.")
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option("--requests-per-s", metavar="X", help="Plans workers for so many, of all adapters.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Of a request, on average.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens", metavar="N", help="Of an answer, on average.")] = 128,
    adapters: Annotated[int, typer.Option("--adapters", metavar="N", help="Adapters that are asked for.")] = 100,
    popularity: Annotated[str, typer.Option("--popularity", metavar="KIND", help="uniform, or zipf:S.")] = "zipf:1.0",
    utilisation: Annotated[
        float, typer.Option("--utilisation", metavar="SHARE", help="Of the time that workers may be busy.")
    ] = 0.7,
    prefill_rate: Annotated[
        float | None,
        typer.Option("--prefill-tokens-per-s", metavar="X", help="Of a worker, measured. Default: assumed."),
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option("--decode-tokens-per-s", metavar="X", help="The same, all its answers together.")
    ] = None,
    list_known: Annotated[bool, typer.Option("--list", help="List the models and devices that have names.")] = False,
    as_json: Json = False,
) -> None:
    """Plan capacity: memory, adapters that fit, load times, and workers for a traffic.

    Nothing runs: it is the arithmetic by which workers divide their memory, and a steady state. See docs/capacity.md.
    """
    if list_known:
        _list(as_json=as_json)
        return
    if (model is None) == (base_dir is None):
        raise InvalidParameter("give either --model NAME (see --list) or --base-dir DIR", field="model")
    shape = shape_from_folder(base_dir) if base_dir is not None else named_shape(model or "")
    chosen = named_device(device)
    chosen = replace(
        chosen,
        memory_bytes=_size(memory, "--memory", chosen.memory_bytes),
        memory_bytes_per_s=_size(memory_bandwidth, "--memory-bandwidth", chosen.memory_bytes_per_s),
        host_bytes_per_s=_size(host_link, "--host-link", chosen.host_bytes_per_s),
    )
    links = Links()
    links = replace(
        links,
        disk_bytes_per_s=_size(disk, "--disk", links.disk_bytes_per_s),
        network_bytes_per_s=_size(network, "--network", links.network_bytes_per_s),
        store_bytes_per_s=_size(object_store, "--object-store", links.store_bytes_per_s),
    )
    worker = WorkerPlan(
        concurrency=concurrency,
        context_tokens=context,
        dtype=dtype.value,
        base_quantization=base_quantization.value,
        arena_bytes=None if arena is None else parse_size(arena, "--arena"),
        max_resident_adapters=slots,
        max_running_requests=max_running,
    )
    targets = check_targets(name.strip() for name in target_modules.split(",") if name.strip())
    traffic = None
    if requests_per_s is not None:
        traffic = Traffic(
            requests_per_s,
            prompt_tokens,
            output_tokens,
            adapters,
            popularity,
            utilisation,
            prefill_rate,
            decode_rate,
        )
    kind = AdapterKind(rank, form.value, targets, adapter_dtype.value)
    made = make_plan(shape, chosen, worker, kind, _RANKS, links, traffic)
    if as_json:
        output.print_json(made)
    else:
        _print(made)


def _size(text: str | None, flag: str, default: float) -> int:
    return int(default) if text is None else parse_size(text, flag)


def _print(plan: Plan) -> None:
    shape, memory, worker = plan.model, plan.memory, plan.worker
    out = output.stdout()
    out.print(
        f"{shape.name}: {plan.num_parameters / 1e9:.2f} G parameters, {memory.dtype}, on {plan.device.name} with "
        f"{memory.device_bytes / 1e9:.1f} GB\n"
    )
    output.print_table(["memory", "#bytes", "#share", ""], _memory_rows(memory), empty="")
    out.print(
        f"\nA chunk has {memory.chunk_bytes} bytes, 16 tokens of KV cache or a part of adapters; the arena has "
        f"{memory.num_chunks}, and {memory.adapter_chunks} of them for adapters. A token's KV takes "
        f"{memory.kv_bytes_per_token} bytes.\n"
    )
    output.print_table(
        ["rank", "format", "#file", "#on the device", "#chunks", "#fit beside the KV", "#fit alone"],
        [
            (
                str(fit.rank),
                fit.format,
                output.size(fit.weight.file_bytes),
                output.size(fit.weight.device_bytes),
                str(fit.weight.chunks),
                str(fit.beside_kv),
                str(fit.alone),
            )
            if fit.weight is not None
            else (str(fit.rank), fit.format, "", "", "", "none", "none")
            for fit in plan.fits
        ],
        empty="",
    )
    out.print("")
    adapter, base = ({load.source: load.seconds for load in loads} for loads in (plan.adapter_loads, plan.base_loads))
    output.print_table(
        ["from", f"#an adapter, r={plan.adapter.rank} {plan.adapter.format}", "#the base"],
        [
            (source, *(output.duration(some[source]) if source in some else "" for some in (adapter, base)))
            for source in {**adapter, **base}
        ],
        empty="",
    )
    if plan.fleet is not None and plan.traffic is not None:
        out.print("")
        output.print_table(["traffic", "#"], _fleet_rows(plan.fleet, plan.traffic, worker), empty="")
    out.print("")
    for line in plan.assumptions:
        out.print(f"assumed: {line}", style="dim", markup=False)
    for line in plan.warnings:
        output.stderr().print(f"warning: {line}", style="yellow", markup=False)


def _memory_rows(memory: MemoryAccount) -> list[tuple[str, str, str, str]]:
    def row(name: str, num_bytes: int, note: str = "") -> tuple[str, str, str, str]:
        return name, output.size(num_bytes), f"{num_bytes / memory.device_bytes:.1%}", note

    def estimate(is_one: bool) -> str:
        return "estimate" if is_one else ""

    kv = memory.kv_chunks * memory.chunk_bytes
    adapters = memory.adapter_chunks * memory.chunk_bytes
    return [
        *(row(item.name, item.num_bytes, estimate(item.estimate)) for item in memory.fixed),
        row("base weights", memory.base_bytes),
        row("arena", memory.arena_bytes),
        row("  KV cache asked for", kv),
        row("  reserve to grow", memory.reserve_chunks * memory.chunk_bytes),
        row("  adapters, and more KV", adapters),
        *(row(item.name, item.num_bytes, estimate(item.estimate)) for item in memory.workspace),
        row("spare", memory.spare_bytes),
    ]


def _fleet_rows(fleet: FleetPlan, traffic: Traffic, worker: WorkerPlan) -> list[tuple[str, str]]:
    assumed = ", assumed" if fleet.speeds_assumed else ""
    return [
        (f"workers for {traffic.requests_per_s:g} requests/s", str(fleet.num_workers)),
        ("  of these for their tokens alone", str(fleet.for_tokens)),
        (f"prefill of a worker, tokens/s{assumed}", f"{fleet.prefill_tokens_per_s:,.0f}"),
        (f"decode of a worker at {worker.concurrency}, tokens/s{assumed}", f"{fleet.decode_tokens_per_s:,.0f}"),
        ("requests/s of a busy worker", f"{fleet.requests_per_s_per_worker:.2f}"),
        ("busy share of the time", f"{fleet.busy_share:.0%}"),
        ("time of a request in a full batch", output.duration(fleet.request_s)),
        ("time between its tokens", output.duration(fleet.token_s)),
        ("adapters on a device", f"{fleet.adapters_per_worker}"),
        (f"distinct adapters on all, of {traffic.num_adapters} ({traffic.popularity})", str(fleet.adapters_in_fleet)),
        ("workers that hold the hottest", str(fleet.copies_of_hottest)),
        ("requests whose adapter is on the device", f"{fleet.hit_share:.1%}"),
        ("loads/s of a worker", f"{fleet.loads_per_s_per_worker:.2f}"),
        ("time of a load from its disk", output.duration(fleet.load_s)),
    ]


def _list(*, as_json: bool) -> None:
    if as_json:
        output.print_json({"models": list(SHAPES.values()), "devices": list(DEVICES.values())})
        return
    output.print_table(
        ["model", "#parameters", "#layers", "#KV bytes a token (16 bits)"],
        [
            (
                shape.name,
                f"{shape.num_parameters / 1e9:.2f} G",
                str(shape.num_layers),
                str(4 * shape.num_layers * shape.num_kv_heads * shape.head_dim),
            )
            for shape in SHAPES.values()
        ],
        empty="",
    )
    output.stdout().print("")
    output.print_table(
        ["device", "#memory", "#GB/s", "#TFLOP/s"],
        [
            (
                device.name,
                output.size(device.memory_bytes) if device.memory_bytes else "--memory",
                f"{device.memory_bytes_per_s / 1e9:.0f}",
                f"{device.flops / 1e12:.3g}",
            )
            for device in DEVICES.values()
        ],
        empty="",
    )
