"""What the demo does with a running cluster: asks alone, asks all at once, and judges the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from loraplex.cli import output
from loraplex.cli.answers import Stopwatch, facts_line
from loraplex.cli.demo_prompts import BASE, DemoPrompt
from loraplex.client import AsyncClient, Completion, Gatherer, Message, Sampling, TextDelta
from loraplex.errors import Unavailable
from loraplex.records import AdapterRegistration

_ANSWER_S: Final = 240.0
_LOOK_EVERY_S: Final = 0.1
_LINE: Final = 72


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's answer as it came."""

    model: str
    completion: Completion
    watch: Stopwatch

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's tokens."""
        return self.completion.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Round:
    """All questions once: the answers, the wall time, and the most requests the worker reported as running."""

    answers: list[Answer]
    wall_s: float
    peak_running: int

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all answers over the wall time, prefill included."""
        return self.num_tokens / self.wall_s


class Stage:
    """Asks a cluster and shows the answers on a console."""

    def __init__(self, client: AsyncClient, base_id: str, console: Console) -> None:
        self._client, self._base_id, self._console = client, base_id, console
        self._peak = 0

    async def alone(self, questions: Sequence[DemoPrompt]) -> Round:
        """Ask one after the other, streaming every answer token by token."""
        answers = []
        start_s = time.perf_counter()
        for question in questions:
            self._console.print(Rule(f"[bold]{escape(question.model)}[/]", align="left", style="dim"))
            self._console.print(f"[dim]>[/] [cyan]{escape(question.prompt)}[/]")
            answer = await self._ask(question, live=not self._console.quiet)
            self._console.print(f"\n[dim]{escape(facts_line(answer.completion, answer.watch))}[/]")
            answers.append(answer)
        return Round(answers, time.perf_counter() - start_s, 1)

    async def mixed(self, questions: Sequence[DemoPrompt]) -> Round:
        """Ask all at once, each on a stream of its own, and tell of every answer when it is whole."""
        looking = asyncio.create_task(self._peak_running())
        start_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._ask_and_tell(question, start_s)) for question in questions]
            wall_s = time.perf_counter() - start_s
        finally:
            looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        return Round([task.result() for task in asked], wall_s, self._peak)

    async def _ask_and_tell(self, question: DemoPrompt, start_s: float) -> Answer:
        answer = await self._ask(question, live=False)
        took = output.duration(time.perf_counter() - start_s)
        words = _first_words(answer.completion.text)
        self._console.print(f"   [dim]{took:>8}[/]  [bold]{escape(answer.model):<14}[/] {escape(words)}")
        return answer

    async def _peak_running(self) -> None:
        while True:  # for show only: nothing tells a client when a batch is at its fullest
            with suppress(Unavailable):
                running = [worker.running_requests async for worker in self._client.list_workers()]
                self._peak = max(self._peak, *running, 0)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _ask(self, question: DemoPrompt, *, live: bool) -> Answer:
        model = self._base_id if question.model == BASE else question.model
        sampling = Sampling(temperature=0.0, max_tokens=question.max_tokens)
        gatherer, watch = Gatherer(), Stopwatch()
        messages = [Message("user", question.prompt)]
        async for event in self._client.generate(model, messages=messages, sampling=sampling, timeout_s=_ANSWER_S):
            watch.see(event)
            gatherer.add(event)
            if live and isinstance(event, TextDelta):
                output.write_text(output.clean(event.text))
        return Answer(question.model, gatherer.completion(), watch)


def judge(alone: Sequence[Answer], mixed: Sequence[Answer], registered: Sequence[AdapterRegistration]) -> list[str]:
    """Return what does not hold, for people: answers of another model than asked, or that mixing changed."""
    artifacts = {entry.adapter.name: entry.adapter.current.artifact_digest for entry in registered}
    problems = []
    for number, (one, other) in enumerate(zip(alone, mixed, strict=True), start=1):
        where = f"answer {number} ({one.model})"
        if not one.token_ids:
            problems.append(f"{where} is empty")
        if one.token_ids != other.token_ids:
            same = next(
                (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b),
                min(len(one.token_ids), len(other.token_ids)),
            )
            problems.append(f"{where} differs when mixed, from token {same + 1} on")
        wanted = artifacts.get(one.model, "")
        served_by = {answer.completion.facts.artifact_digest for answer in (one, other)}
        problems.extend(
            f"{where} came from artifact {output.short(found) or 'none'}, not from {output.short(wanted) or 'the base'}"
            for found in sorted(served_by - {wanted})
        )
    return problems


def _first_words(text: str) -> str:
    line = " ".join(output.clean(text).split())
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"
