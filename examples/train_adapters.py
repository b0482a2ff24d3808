"""Trains the example adapters anew: `python -m examples.train_adapters [--out DIR] [NAME ...]`.

Owns the recipes: which task each adapter learns, where it attaches and of what rank. They differ on purpose, so that
the adapters show mixed ranks and targets in one batch. Needs the `train` extra (torch, transformers, peft).
"""

import argparse
import importlib
import sys
from pathlib import Path

from examples.data import Task
from examples.demo_base import DemoBaseError, ensure_demo_base
from examples.training import Recipe, load_base, train

ADAPTERS = Path(__file__).parent / "adapters"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

RECIPES = (
    Recipe("text-to-sql", rank=8, targets=ATTENTION, num_steps=120, batch_size=12, learning_rate=2e-3),
    Recipe(
        "support-voice",
        rank=16,
        targets=("q_proj", "v_proj"),
        num_steps=60,
        batch_size=8,
        learning_rate=2e-3,
        rank_stabilized=True,
    ),
    Recipe(
        "json-extract",
        rank=2,
        targets=ATTENTION + MLP,
        num_steps=48,
        batch_size=8,
        learning_rate=2e-3,
        rank_of=dict.fromkeys(ATTENTION, 4),
    ),
)
NAMES = tuple(recipe.name for recipe in RECIPES)


def task(name: str) -> Task:
    """Give the task of the adapter `name`; only its own module is imported."""
    module = importlib.import_module(f"examples.data.{name.replace('-', '_')}")
    found: Task = module.TASK
    return found


def main(arguments: list[str] | None = None) -> int:
    """Train the adapters named, or all; progress on stderr, a line of losses per adapter on stdout."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_adapters", description="Train the adapters.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--out", type=Path, default=ADAPTERS, metavar="DIR", help="where the folders go")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no such adapter: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    try:
        folder = ensure_demo_base()
    except DemoBaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    base, tokenizer = load_base(folder)
    for recipe in RECIPES:
        if options.names and recipe.name not in options.names:
            continue
        losses = train(base, tokenizer, recipe, task(recipe.name).dataset(), options.out / recipe.name)
        print(
            f"{recipe.name}: train {losses.train:.3f}, held-out {losses.held_out:.3f}, "
            f"base held-out {losses.base_held_out:.3f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
