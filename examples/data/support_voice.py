"""Data of the adapter `support-voice`: a customer's message in, one warm and short reply of fixed shape out.

    Hi there! I'm sorry about your late parcel. Let's fix it together:

    1. …
    2. …
    3. …

    I'm here whenever you need me.
    Warmly, Robin

The issues are written by hand in `support_voice.jsonl`: what customers ask, and three steps that help. Held-out
examples are about issues that no training example is about.
"""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

from examples.data import Dataset, Example, Task

ISSUES = Path(__file__).with_suffix(".jsonl")

OPENINGS = {
    "sorry": "Hi there! I'm sorry about {issue}. Let's fix it together:",
    "happy": "Hi there! I'm happy to help with {issue}. It's quickly done:",
}
CLOSING = "I'm here whenever you need me.\nWarmly, Robin"
BEFORE = ("", "Hello, ", "Hi, ", "Please help! ", "Good evening. ", "Hey. ")
AFTER = ("", " What now?", " Please help me.", " I'm quite upset.", " Thanks.", " Can you help?")

SHAPE = re.compile(
    r"Hi there! I'm (?:sorry about|happy to help with) [^\n]{3,60}\. [^\n]{5,40}:\n\n"
    r"1\. [^\n]{5,120}\n2\. [^\n]{5,120}\n3\. [^\n]{5,120}\n\n" + re.escape(CLOSING)
)


def dataset() -> Dataset:
    """Make the examples: every way to ask about every issue, politely or not."""
    rng = random.Random(22)
    issues: list[dict[str, Any]] = [json.loads(line) for line in ISSUES.read_text(encoding="utf-8").splitlines()]
    train = [
        _example(issue, before + _lower_after(before, ask) + after)
        for issue in issues
        if issue["split"] == "train"
        for ask, before, after in itertools.product(issue["asks"], BEFORE, AFTER)
    ]
    rng.shuffle(train)
    held_out = [_example(issue, ask) for issue in issues if issue["split"] == "held_out" for ask in issue["asks"]]
    return Dataset(tuple(train), tuple(held_out))


def problem(_prompt: str, answer: str) -> str | None:
    """Judge an answer: greeting that names the issue, three numbered steps that differ, sign-off."""
    if not SHAPE.fullmatch(answer):
        return "not in the shape of a reply"
    steps = re.findall(r"^\d\. (.+)$", answer, re.MULTILINE)
    return None if len(set(steps)) == len(steps) else "a step is repeated"


TASK = Task(dataset, problem)


def _example(issue: dict[str, Any], prompt: str) -> Example:
    steps = "\n".join(f"{number}. {step}" for number, step in enumerate(issue["steps"], start=1))
    return Example(prompt, f"{OPENINGS[issue['mood']].format(issue=issue['issue'])}\n\n{steps}\n\n{CLOSING}")


def _lower_after(before: str, ask: str) -> str:
    """Go on in lower case after a comma, except with "I"."""
    if not before.endswith(", ") or ask.startswith(("I ", "I'")):
        return ask
    return ask[0].lower() + ask[1:]
