"""`loraplex adapter`: add, list, show, evaluate, repack, rm. More of its commands are in `steering` and `merge`."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.markup import escape

from loraplex.cli import evaluations as evaluated
from loraplex.cli import load_report, output, registering
from loraplex.cli.app import new_group
from loraplex.cli.options import REGISTRY, ROUTER, Json, Registry, Router, Wait
from loraplex.client import Client, Timeouts
from loraplex.errors import CatalogBehind, ModelNotFound, Unauthenticated, Unavailable
from loraplex.pins import replicas_text
from loraplex.records import AdapterVersion, Evaluation, PackingReport

app = new_group("Register adapters and look at them.")

WAIT_S: Final = 15.0
EVALUATE_S: Final = Timeouts().evaluate_s
Name = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name, which clients ask for as their model.")]
_NUM_WORST: Final = 3  # modules named in text; --json has all


class Quantization(StrEnum):
    """Formats that an adapter can be packed in."""

    INT8 = "int8"
    INT4 = "int4"
    NONE = "none"


@app.command()
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A PEFT folder on this machine, or what the registry fetches itself: "
            "hf://owner/repo/folder@revision (the last two may be left out), s3://, gs:// or az://bucket/prefix, "
            "https://host/folder/, or file:PATH below the registry's import root.",
            show_default=False,
        ),
    ],
    base_id: Annotated[
        str, typer.Option("--base-id", metavar="ID", help="Its base model; needed where several are registered.")
    ] = "",
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            "--quantization",
            help="How its numbers are stored and served; none is exact. Default: what a version that is known already "
            "has, else what the registry is set to.",
            show_default=False,
        ),
    ] = None,
    sha256: Annotated[
        str,
        typer.Option(
            "--sha256",
            metavar="HEX",
            help="What adapter_model.safetensors must have; another file is refused.",
            show_default=False,
        ),
    ] = "",
    wait: Wait = None,
    router: Router = ROUTER,
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Register an adapter, or a new version of a known one.

    SOURCE holds adapter_config.json and adapter_model.safetensors. A folder is uploaded, and goes on where it was if
    that breaks off. Requests in flight finish on the old version, new ones take the new one.
    """
    with Client(router, registry) as client:
        done = registering.register(client, name, source, base_id, quantization or "", sha256, quiet=as_json)
        visible = _wait_for_router(client, name, done.adapter.current.artifact_digest, wait=wait)
    if as_json:
        output.print_json({**output.jsonable(done), "router_knows": visible})
        return
    what = "registered" if done.changed else "is this version already:"
    output.stdout().print(f"[bold]{escape(name)}[/] {what} for base {escape(done.adapter.base_id)}")
    _print_version(done.adapter.current, done.report)
    if visible:
        output.stdout().print(f'try: loraplex generate {escape(name)} "…"')


@app.command("list")
def list_(registry: Registry = REGISTRY, as_json: Json = False) -> None:
    """List the registered adapters."""
    with Client(registry=registry) as client:
        adapters = list(client.list_adapters())
    if as_json:
        output.print_json({"adapters": adapters})
        return
    output.print_table(
        ["name", "base", "#rank", "#modules", "format", "#size", "version", "artifact", "updated", "pinned"],
        [
            (
                entry.name,
                entry.base_id,
                str(entry.current.rank),
                f"{entry.current.num_modules}/{entry.current.num_base_modules}",
                entry.current.format,
                output.size(entry.current.artifact_bytes),
                output.short(entry.current.version_digest),
                output.short(entry.current.artifact_digest),
                output.when(entry.update_time),
                replicas_text(entry.pin_replicas),
            )
            for entry in adapters
        ],
        empty="no adapter is registered; add one with: loraplex adapter add NAME SOURCE",
    )


@app.command()
def show(name: Name, registry: Registry = REGISTRY, as_json: Json = False) -> None:
    """Show an adapter with all its versions."""
    with Client(registry=registry) as client:
        adapter = client.get_adapter(name)
    if as_json:
        output.print_json(adapter)
        return
    output.stdout().print(f"[bold]{escape(adapter.name)}[/] for base {escape(adapter.base_id)}")
    if adapter.pin_replicas:
        output.stdout().print(f"  pinned   to {replicas_text(adapter.pin_replicas)} of the base's workers")
    reports = {report.version_digest: report for report in adapter.reports}
    _print_version(
        adapter.current,
        reports.get(adapter.current.version_digest),
        evaluated.of_artifact(adapter.evaluations, adapter.current),
    )
    output.stdout().print()
    output.print_table(
        ["version", "artifact", "#rank", "format", "#size", "#as exact", "#KL", "registered", ""],
        [
            (
                output.short(version.version_digest),
                output.short(version.artifact_digest),
                str(version.rank),
                version.format,
                output.size(version.artifact_bytes),
                *evaluated.in_columns(evaluated.of_artifact(adapter.evaluations, version)),
                output.when(version.create_time),
                "current" if version.version_digest == adapter.current.version_digest else "",
            )
            for version in adapter.versions
        ],
        empty="no versions",
    )


@app.command()
def evaluate(
    name: Name,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            "--quantization",
            help="What to measure: the format that it is packed in, which is the default, or none, which compares the "
            "exact artifact with itself.",
            show_default=False,
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, max=86_400, help="Give up after so long.")
    ] = EVALUATE_S,
    router: Router = ROUTER,
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Measure what quantizing an adapter cost its answers, on a worker, and record it.

    Fixed prompts are answered by the exact adapter; at every token of these answers the packed one is asked what comes
    next, and compared. Clients' requests go first.
    """
    with Client(router, registry) as client, evaluated.progress(name, quiet=as_json) as progress:
        evaluation = client.evaluate_adapter(
            name, quantization=quantization or "", progress=progress, timeout_s=timeout_s
        )
    if as_json:
        output.print_json(evaluation)
        return
    output.stdout().print(f"[bold]{escape(name)}[/] in {evaluation.format}: {escape(evaluated.in_words(evaluation))}")


@app.command()
def repack(
    name: Name,
    quantization: Annotated[
        Quantization, typer.Option("--quantization", help="How its numbers are stored and served; none is exact.")
    ],
    wait: Wait = None,
    router: Router = ROUTER,
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Pack an adapter's current version in another format, from the factors it was registered with.

    Requests in flight finish on the old artifact, new ones take the new one.
    """
    with Client(router, registry) as client:
        done = client.repack_adapter(name, quantization)
        visible = _wait_for_router(client, name, done.adapter.current.artifact_digest, wait=wait)
    if as_json:
        output.print_json({**output.jsonable(done), "router_knows": visible})
        return
    what = "is packed as" if done.changed else "is packed already as"
    output.stdout().print(f"[bold]{escape(name)}[/] {what} {quantization}")
    _print_version(done.adapter.current, done.report)


@app.command()
def rm(
    name: Name, wait: Wait = None, router: Router = ROUTER, registry: Registry = REGISTRY, as_json: Json = False
) -> None:
    """Delete an adapter with its versions. Requests in flight finish."""
    with Client(router, registry) as client:
        revision = client.remove_adapter(name)
        forgotten = _wait_for_router(client, name, None, wait=wait)
    if as_json:
        output.print_json({"name": name, "revision": revision, "router_knows": forgotten})
    else:
        output.stdout().print(f"[bold]{escape(name)}[/] is deleted")


def _print_version(version: AdapterVersion, report: PackingReport | None, evaluation: Evaluation | None = None) -> None:
    kinds = ", ".join(version.target_modules)
    lines = [
        ("version", version.version_digest),
        ("artifact", version.artifact_digest),
        ("rank", f"{version.rank}, {version.dtype}, {output.size(version.artifact_bytes)}, format {version.format}"),
        ("modules", f"{version.num_modules} of {version.num_base_modules} changed ({kinds})"),
    ]
    if version.source:
        lines.append(("source", version.source))
    if report and report.load:
        lines += load_report.in_lines(report.load)
    if report and report.errors and version.format != "none":
        worst = ", ".join(f"{module} {error:.2%}" for module, error in report.errors[:_NUM_WORST])
        lines.append(("error", f"{report.mean_error:.2%} mean over the modules; worst {worst}"))
    if evaluation:
        lines.append(("answers", evaluated.in_words(evaluation)))
    if report:
        lines.append(("sizes", ", ".join(_size(form, report) for form in report.sizes)))
    for label, value in lines:
        output.stdout().print(f"  {label:<9}{escape(value)}")


def _size(form: str, report: PackingReport) -> str:
    about = "~" if form in report.estimated_sizes else ""
    error = f" (error {about}{report.format_errors[form]:.2%})" if report.format_errors.get(form) else ""
    return f"{form} {about}{output.size(report.sizes[form])}{error}"


def _wait_for_router(client: Client, name: str, artifact_digest: str | None, *, wait: bool | None) -> bool:
    """Wait until the router serves `name` with this artifact (None: not at all); return whether it is known to.

    Each question carries the client's revision, so the router itself waits for its catalog; it is asked again where
    that took longer than the router waits.
    """
    if wait is False:
        return False
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            model = client.get_model(name)
        except ModelNotFound:
            return artifact_digest is None  # somebody else deleted it meanwhile
        except CatalogBehind:
            if time.monotonic() < deadline:
                continue
            if wait:
                raise
        except Unauthenticated:
            if wait:
                raise
            output.note("note: the router asks for an API key, so whether it serves this already is not known")
        except Unavailable as error:
            if wait or error.metadata.get("service") != "router":
                raise
            output.note("note: no router can be reached, so whether it serves this already is not known")
        else:
            return model.artifact_digest == artifact_digest
        return False
