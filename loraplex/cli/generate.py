"""`loraplex generate`: one prompt, streamed to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loraplex.cli import answers, output, sampling, spans
from loraplex.cli.options import ROUTER, Json, Model, Router
from loraplex.client import Client, Completion, Gatherer, Message, TextDelta
from loraplex.errors import EmptyPrompt, InvalidRequest


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT|-", help="The prompt; - or nothing reads stdin.", show_default=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Use the model's chat template, or continue the bare text.")
    ] = True,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message (not with --raw).")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tell on stderr how it was served.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print on stderr where the time went: the request's spans as a tree.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Deadline.")] = 600.0,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = 0.0,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    min_tokens: sampling.MinTokens = None,
    ignore_eos: sampling.IgnoreEos = False,
    repetition_penalty: sampling.RepetitionPenalty = None,
    presence_penalty: sampling.PresencePenalty = None,
    frequency_penalty: sampling.FrequencyPenalty = None,
    logit_bias: sampling.LogitBias = None,
    n: sampling.Choices = None,
    logprobs: sampling.Logprobs = None,
    router: Router = ROUTER,
    as_json: Json = False,
) -> None:
    """Generate text with a base model or an adapter, streamed as it comes.

    Greedy (temperature 0) unless --temperature says otherwise, so the same command gives the same answer.
    """
    if system is not None and not chat:
        raise typer.BadParameter("--system needs the chat template; leave out --raw")
    text = _prompt(prompt)
    messages = [*([Message("system", system)] if system is not None else []), Message("user", text)]
    chosen = sampling.make_sampling(
        logit_bias=logit_bias, stop=stop, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
        min_p=min_p, seed=seed, min_tokens=min_tokens, ignore_eos=ignore_eos or None, n=n, logprobs=logprobs,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    gatherer, watch = Gatherer(), answers.Stopwatch()
    live = not as_json and (n or 1) == 1
    with Client(router) as client:
        events = client.generate(
            model,
            None if chat else text,
            messages=messages if chat else None,
            sampling=chosen,
            timeout_s=timeout_s,
            trace=trace,
        )
        for event in events:
            watch.see(event)
            gatherer.add(event)
            if live and isinstance(event, TextDelta):
                output.write_text(event.text)
    completion = gatherer.completion()
    if as_json:
        output.print_json(answers.answer_json(model, completion, watch))
    elif live:
        output.write_text("\n")
    else:
        _print_choices(completion)
    if stats and not as_json:
        answers.print_stats(completion, watch)
    if trace and not as_json:
        spans.print_spans(completion.spans)


def _prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a PROMPT, or - to type one and end it with Ctrl-D")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InvalidRequest("the prompt on stdin is not UTF-8 text", field="prompt") from error
        prompt = prompt.removesuffix("\n")
    if not prompt:
        raise EmptyPrompt("the prompt is empty; say something", field="prompt")
    return prompt


def _print_choices(completion: Completion) -> None:
    for choice in completion.choices:
        output.write_text(f"[{choice.index}] {choice.text}\n")
