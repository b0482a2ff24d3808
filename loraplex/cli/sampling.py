"""The sampling options of `generate` and `chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from loraplex.generation import Sampling

_PANEL = "Sampling (ranges and server defaults as in sampling.proto)"


def _option(name: str, text: str, metavar: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        name, help=text, metavar=metavar, rich_help_panel=_PANEL, show_default=False
    )
    return info


MaxTokens = Annotated[int | None, _option("--max-tokens", "At most so many tokens. Default: what fits.", "N")]
Temperature = Annotated[float | None, _option("--temperature", "0 takes the likeliest token, up to 2 mixes more.", "X")]
TopP = Annotated[float | None, _option("--top-p", "Keep the likeliest tokens up to this probability.", "X")]
TopK = Annotated[int | None, _option("--top-k", "Keep so many of the likeliest tokens.", "N")]
MinP = Annotated[float | None, _option("--min-p", "Keep tokens at least so likely beside the likeliest.", "X")]
Seed = Annotated[int | None, _option("--seed", "Same seed, same answer.", "N")]
Stop = Annotated[list[str] | None, _option("--stop", "End before this text; may be repeated.", "TEXT")]
MinTokens = Annotated[int | None, _option("--min-tokens", "Do not end before so many tokens.", "N")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_PANEL)
]
RepetitionPenalty = Annotated[float | None, _option("--repetition-penalty", "Above 1: repeat less.", "X")]
PresencePenalty = Annotated[float | None, _option("--presence-penalty", "Above 0: new tokens.", "X")]
FrequencyPenalty = Annotated[float | None, _option("--frequency-penalty", "Above 0: rarer tokens.", "X")]
LogitBias = Annotated[list[str] | None, _option("--logit-bias", "TOKEN_ID=BIAS; may be repeated.", "ID=X")]
Choices = Annotated[int | None, _option("--n", "So many independent answers.", "N")]
Logprobs = Annotated[int | None, _option("--logprobs", "With --json: log probabilities and N alternatives.", "N")]


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """Return `["5=-1.5"]` as {5: -1.5}. Raises typer.BadParameter for anything else."""
    bias = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise typer.BadParameter(f"--logit-bias {entry!r} is not TOKEN_ID=BIAS, for example 42=-100") from error
    return bias


def make_sampling(*, logit_bias: list[str] | None = None, stop: list[str] | None = None, **values: object) -> Sampling:
    """Return the options as a value."""
    return Sampling(stop=tuple(stop or ()), logit_bias=parse_logit_bias(logit_bias or []), **values)  # type: ignore[arg-type]
