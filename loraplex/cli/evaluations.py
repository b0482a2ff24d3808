"""How evaluations are shown: while they run, in a line for the current version, and in columns for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from loraplex.cli import output
from loraplex.records import AdapterVersion, Evaluation

_LINES: Final = 10
"""Of progress, where there is no terminal to draw a bar on."""


@contextmanager
def progress(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield what is to be told (prompts done, of how many); it is shown on stderr.

    On a terminal as a bar. Elsewhere a line says what begins, and others follow it, at most ten; none where `quiet`.
    """
    console = output.stderr()
    if console.is_terminal:
        columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("evaluate", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    elif quiet:
        yield lambda done, total: None  # noqa: ARG005 - it is told all the same
    else:
        output.note(
            f"evaluating {name} on a worker: fixed prompts are answered and compared, behind clients' requests; "
            "this takes minutes on few cores"
        )
        yield _Lines().tell


class _Lines:
    """A line whenever another tenth of the prompts is done; the end is told by the result."""

    def __init__(self) -> None:
        self._told = 0

    def tell(self, done: int, total: int) -> None:
        """Take note of progress."""
        tenths = done * _LINES // total if total else 0
        if tenths > self._told:
            self._told = tenths
            output.note(f"{done} of {total} prompts are compared")


def of_artifact(evaluations: Sequence[Evaluation], version: AdapterVersion) -> Evaluation | None:
    """Return what was measured of the artifact that a version is served in."""
    return next((entry for entry in evaluations if entry.artifact_digest == version.artifact_digest), None)


def in_words(evaluation: Evaluation) -> str:
    """Return an evaluation as a line for people."""
    return (
        f"{evaluation.top1_agreement:.2%} of {evaluation.num_positions} tokens as exact; KL {evaluation.mean_kl:.2g} "
        f"mean, {evaluation.max_kl:.2g} at most; {evaluation.num_prompts} prompts of set {evaluation.prompt_set}, "
        f"{evaluation.device}, {output.when(evaluation.create_time)}"
    )


def in_columns(evaluation: Evaluation | None) -> tuple[str, str]:
    """Return an evaluation's cells in a table of versions: agreement and mean divergence."""
    if evaluation is None:
        return "", ""
    return f"{evaluation.top1_agreement:.2%}", f"{evaluation.mean_kl:.2g}"
