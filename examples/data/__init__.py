"""Training data of the example adapters, written for this project (Apache-2.0): one module per adapter.

Each module owns its examples and knows what a right answer looks like: `dataset()` gives training and held-out examples
that share no subject, `problem(prompt, answer)` says in a few words what is wrong with an answer, or None.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One user message and the assistant's reply that is wanted."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples to train on and examples to judge by; the same ones on every call."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What an adapter is to learn: its examples, and how an answer is judged."""

    dataset: Callable[[], Dataset]
    problem: Callable[[str, str], str | None]
