"""`loraplex demo`: shows that one base model serves many adapters, alone and mixed in one batch, and checks it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from loraplex.cli import output
from loraplex.cli.answers import answer_json
from loraplex.cli.base_source import Base, resolve_base
from loraplex.cli.board import LineBoard, make_board
from loraplex.cli.bring_up import adapter_folders, bring_up
from loraplex.cli.cluster import Cluster, ClusterPlan, running
from loraplex.cli.demo_prompts import DemoPrompt, read_prompts
from loraplex.cli.demo_stage import Round, Stage, judge
from loraplex.cli.options import Json
from loraplex.cli.ports import claim_ports
from loraplex.cli.signals import StopSignals
from loraplex.cli.tree import find_tree
from loraplex.client import AsyncClient
from loraplex.errors import FailedPrecondition

_READY_S: Final = 300.0


def demo(
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR|HUB-ID", help="Another base model than the demo's.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option("--adapters", metavar="DIR", help="PEFT folders. Default: examples/adapters.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="What is asked. Default: examples/demo_prompts.json."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one base model and its adapters answer prompts: alone, then all mixed in one batch.

    Starts a private cluster on free ports and removes it afterwards. Everything is greedy and in float32, where an
    answer must not depend on what shares its batch: exits 0 only if every mixed answer equals the one given alone.
    """
    tree = find_tree()
    folders = adapter_folders(adapters or tree / "examples" / "adapters")
    if not folders:
        raise FailedPrecondition(f"{adapters or tree / 'examples' / 'adapters'} holds no adapter folder")
    file = prompts or tree / "examples" / "demo_prompts.json"
    questions = read_prompts(file, {folder.name for folder in folders})
    console = Console(quiet=True) if as_json else output.stdout()
    console.print("[bold]1.[/] The base model: fetched once, then cached")
    chosen = resolve_base(base, None, lambda text: console.print(escape(text)))
    console.print(f"   {escape(chosen.base_id)} in {escape(str(chosen.folder))}")
    console.print("\n[bold]2.[/] A private cluster: registry, worker and router, a process each")
    state_dir = Path(tempfile.mkdtemp(prefix="loraplex-demo-"))
    registry, router, http, worker = claim_ports("127.0.0.1", [("the demo", "--port", 0)] * 4)
    plan = ClusterPlan(
        tree=tree,
        state_dir=state_dir,
        base_folder=chosen.folder,
        dtype="float32",
        host="127.0.0.1",
        router_port=router,
        http_port=http,
        registry_port=registry,
        worker_ports=(worker,),
    )
    board = LineBoard() if as_json else make_board([spec.name for spec in plan.specs()], as_json=False)
    try:
        code = asyncio.run(_demo(plan, chosen, folders, questions, board, as_json=as_json))
    except BaseException:
        output.note(f"the logs of the demo's processes are kept in {plan.log_dir}")
        raise
    if code == 0:
        shutil.rmtree(state_dir, ignore_errors=True)
    else:
        output.note(f"the logs of the demo's processes are kept in {plan.log_dir}")
    raise typer.Exit(code)


async def _demo(
    plan: ClusterPlan, base: Base, folders: list[Path], questions: list[DemoPrompt], board: LineBoard, *, as_json: bool
) -> int:
    signals = StopSignals()
    with board:
        async with running(plan, board.update) as cluster:
            signals.on_second = cluster.kill
            problems = await signals.unless_asked(
                _show(plan, cluster, base, folders, questions, board, as_json=as_json)
            )
    if problems is None:
        return signals.exit_code or 1  # stopped before it had shown anything
    return 1 if problems else 0


async def _show(
    plan: ClusterPlan,
    cluster: Cluster,
    base: Base,
    folders: list[Path],
    questions: list[DemoPrompt],
    board: LineBoard,
    *,
    as_json: bool,
) -> list[str]:
    """Bring the cluster up, ask, judge; return what does not hold."""
    console = Console(quiet=True) if as_json else output.stdout()
    async with AsyncClient(plan.router, plan.registry) as client:
        registered, *_ = await bring_up(plan, cluster, client, base, folders, board.say, timeout_s=_READY_S)
        board.settle()
        stage = Stage(client, base.base_id, console)
        console.print(f"\n[bold]3.[/] {len(questions)} prompts, one after the other")
        alone = await stage.alone(questions)
        console.print(Rule(style="dim"))
        models = {question.model for question in questions}
        console.print(f"\n[bold]4.[/] The same {len(questions)} prompts at once: {len(models)} models in one batch")
        mixed = await stage.mixed(questions)
    problems = judge(alone.answers, mixed.answers, registered)
    if as_json:
        output.print_json(
            {
                "ok": not problems,
                "problems": problems,
                "alone": {
                    **_totals(alone),
                    "answers": [answer_json(each.model, each.completion, each.watch) for each in alone.answers],
                },
                "mixed": {**_totals(mixed), "peak_running_requests": mixed.peak_running},
            }
        )
        return problems
    for name, round_ in (("one by one", alone), ("at once", mixed)):
        console.print(
            f"   {name:<11}{round_.num_tokens} tokens in {output.duration(round_.wall_s)}, "
            f"{round_.tokens_per_second:.1f} tok/s in total"
        )
    console.print(f"   the worker reported up to {mixed.peak_running} requests in its batch")
    for problem in problems:
        console.print(f"   [bold red]wrong:[/] {escape(problem)}")
    if not problems:
        console.print(
            f"   [bold green]all {len(mixed.answers)} mixed answers are the ones given alone, token by token[/]"
        )
    return problems


def _totals(round_: Round) -> dict[str, object]:
    return {
        "num_tokens": round_.num_tokens,
        "wall_s": round(round_.wall_s, 6),
        "tokens_per_second": round(round_.tokens_per_second, 3),
    }
