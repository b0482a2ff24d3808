"""Shows what the example adapters do to the base: `python -m examples.check_adapters [--adapters DIR] [NAME ...]`.

Decodes the held-out prompts greedily, with the adapter and without, and counts the answers that their task accepts.
Runs on transformers and PEFT, so the figures tell about the adapters and not about Loraplex. Needs the `train` extra.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from examples.data import Example, Task
from examples.demo_base import DemoBaseError, ensure_demo_base
from examples.train_adapters import ADAPTERS, NAMES, task
from examples.training import chat_prompt, load_base

NUM_PROMPTS, NUM_SHOWN, MAX_TOKENS = 20, 3, 120


@dataclass(frozen=True, slots=True)
class Score:
    """Of so many answers, how many the task accepts and how many are word for word the expected one."""

    num_answers: int
    num_accepted: int
    num_exact: int

    def __str__(self) -> str:
        return f"{self.num_accepted}/{self.num_answers} accepted, {self.num_exact}/{self.num_answers} as expected"


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int = MAX_TOKENS) -> list[str]:
    """Answer each prompt as a chat of one user message, all in one batch."""
    texts = [chat_prompt(tokenizer, prompt) for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
    replies = output[:, inputs["input_ids"].shape[1] :]
    return [str(tokenizer.decode(reply, skip_special_tokens=True)) for reply in replies]


def score(judge: Task, examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Judge the answers to the examples' prompts."""
    pairs = list(zip(examples, answers, strict=True))
    return Score(
        num_answers=len(pairs),
        num_accepted=sum(judge.problem(example.prompt, answer) is None for example, answer in pairs),
        num_exact=sum(answer == example.completion for example, answer in pairs),
    )


def main(arguments: list[str] | None = None) -> int:
    """Print scores and samples; 1 if an adapter has less than 90 % of its answers accepted."""
    parser = argparse.ArgumentParser(prog="python -m examples.check_adapters", description="Judge the adapters.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, metavar="DIR", help="where the adapters are")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no such adapter: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    try:
        folder = ensure_demo_base()
    except DemoBaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    passed = True
    for name in options.names or NAMES:
        base, tokenizer = load_base(folder)
        judge = task(name)
        examples = judge.dataset().held_out[:NUM_PROMPTS]
        prompts = [example.prompt for example in examples]
        print(f"\n## {name}", flush=True)
        base_answers = greedy(base, tokenizer, prompts)
        model = PeftModel.from_pretrained(base, str(options.adapters / name)).eval()
        answers = greedy(model, tokenizer, prompts)
        reached = score(judge, examples, answers)
        print(f"adapter: {reached}\nbase:    {score(judge, examples, base_answers)}")
        for example, answer, base_answer in list(zip(examples, answers, base_answers, strict=True))[:NUM_SHOWN]:
            print(f"\n{_quote('prompt', example.prompt)}\n{_quote('base', base_answer)}\n{_quote(name, answer)}")
        for example, answer in zip(examples, answers, strict=True):
            if problem := judge.problem(example.prompt, answer):
                print(f"\nnot accepted: {problem}\n{_quote('prompt', example.prompt)}\n{_quote(name, answer)}")
        passed &= reached.num_accepted >= 0.9 * reached.num_answers
    return 0 if passed else 1


def _quote(speaker: str, text: str) -> str:
    return f"{speaker}:\n" + "\n".join(f"    {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
