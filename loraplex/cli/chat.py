"""`loraplex chat`: a conversation. Ctrl-C ends an answer, Ctrl-D the conversation."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from loraplex.cli import answers, output, sampling
from loraplex.cli.options import ROUTER, Json, Model, Router
from loraplex.client import Client, Gatherer, Message, Sampling, TextDelta
from loraplex.errors import LoraplexError, PromptTooLong

_PROMPT = "you> "


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tell on stderr how each answer was served.")] = False,
    max_tokens: sampling.MaxTokens = 512,
    temperature: sampling.Temperature = 0.7,
    top_p: sampling.TopP = 0.95,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    router: Router = ROUTER,
    as_json: Json = False,
) -> None:
    """Talk with a base model or an adapter; it remembers the conversation.

    Ctrl-C ends an answer, /reset forgets the conversation, Ctrl-D leaves. Default: temperature 0.7, top-p 0.95, at most
    512 tokens an answer. Where stdin is no terminal, every line is a turn.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        importlib.import_module("readline")  # input() then edits lines and remembers them
    chosen = sampling.make_sampling(
        stop=stop, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty,
    )  # fmt: skip
    opening = [Message("system", system)] if system is not None else []
    with Client(router) as client:
        client.get_model(model)  # a wrong name is told before the first turn is typed
        if interactive:
            output.note("Ctrl-D leaves, Ctrl-C ends an answer, /reset forgets the conversation")
        talk = _Conversation(client, model, chosen, opening, as_json=as_json, stats=stats)
        while (line := _read_line(interactive=interactive)) is not None:
            if line.strip() == "/reset":
                talk.reset()
            elif line.strip():
                try:
                    talk.turn(line)
                except LoraplexError as error:
                    if not interactive:
                        raise
                    output.print_error(error, as_json=as_json)
                    if isinstance(error, PromptTooLong):
                        output.note("/reset forgets the conversation so far")
    if interactive:
        print(file=sys.stderr)


def _read_line(*, interactive: bool) -> str | None:
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input(_PROMPT)
    except EOFError:
        return None


class _Conversation:
    """The turns so far; a turn that fails leaves no trace."""

    def __init__(
        self, client: Client, model: str, chosen: Sampling, opening: list[Message], *, as_json: bool, stats: bool
    ) -> None:
        self._client, self._model, self._sampling = client, model, chosen
        self._opening, self._as_json, self._stats = opening, as_json, stats
        self._messages = list(opening)

    def reset(self) -> None:
        """Forget all turns."""
        self._messages = list(self._opening)

    def turn(self, text: str) -> None:
        """Say `text` and print the answer as it comes; Ctrl-C ends it and keeps what has come."""
        asked = [*self._messages, Message("user", text)]
        gatherer, watch = Gatherer(), answers.Stopwatch()
        pieces: list[str] = []
        events = self._client.generate(self._model, messages=asked, sampling=self._sampling)
        try:
            for event in events:
                watch.see(event)
                gatherer.add(event)
                if isinstance(event, TextDelta):
                    pieces.append(event.text)
                    if not self._as_json:
                        output.write_text(event.text)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            output.write_text("\n")
            output.note("(interrupted)")
        else:
            if self._as_json:
                output.print_json(answers.answer_json(self._model, gatherer.completion(), watch), indent=None)
            else:
                output.write_text("\n")
                if self._stats:
                    answers.print_stats(gatherer.completion(), watch)
        if pieces:
            self._messages = [*asked, Message("assistant", "".join(pieces))]
