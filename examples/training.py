"""Trains one LoRA adapter with PEFT: batches, loss, schedule, and the folder that is written.

Knows nothing of the single tasks. The loss counts the assistant's reply only, up to and with the end-of-turn token;
what precedes it is exactly what a chat request of one plain user message becomes under the base's chat template.
"""

import json
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from examples.data import Dataset, Example
from examples.demo_base import MODEL_NAME

WINDOW_BATCHES = 4  # so many batches are sorted by length together, which saves most of the padding


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where an adapter attaches, of what rank, and how long it is trained."""

    name: str
    rank: int
    targets: tuple[str, ...]
    num_steps: int
    batch_size: int
    learning_rate: float
    rank_of: dict[str, int] = field(default_factory=dict)  # modules whose rank differs
    rank_stabilized: bool = False
    seed: int = 7

    def lora_config(self) -> LoraConfig:
        """PEFT's configuration. Alpha is twice the rank (with rsLoRA: twice its root), so that all scales are 2."""
        alpha = 2 * math.isqrt(self.rank) if self.rank_stabilized else 2 * self.rank
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=alpha,
            target_modules=list(self.targets),
            rank_pattern=dict(self.rank_of),
            alpha_pattern={module: 2 * rank for module, rank in self.rank_of.items()},
            use_rslora=self.rank_stabilized,
            lora_dropout=0.0,
            bias="none",
        )


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean cross-entropy per reply token, in nats."""

    train: float
    held_out: float
    base_held_out: float


@dataclass(frozen=True, slots=True)
class Sequences:
    """A padded batch: ids, mask and labels are all [B, T]; label -100 does not count."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def load_base(folder: Path) -> tuple[Any, Any]:
    """Load model (float32) and tokenizer of the demo base."""
    quiet: Any = transformers_logging.disable_progress_bar
    quiet()  # what is shown is shown by the command
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def chat_prompt(tokenizer: Any, message: str) -> str:
    """Render one user message up to where the assistant's reply begins."""
    messages = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def train(base: Any, tokenizer: Any, recipe: Recipe, dataset: Dataset, folder: Path) -> Losses:
    """Train on `dataset`, write the adapter to `folder` in float16, and return the losses of what was written.

    `base` comes back with the adapter removed. Seeded: the same machine and library versions give the same adapter.
    """
    torch.manual_seed(recipe.seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*base_model_name_or_path.*")  # the name is set right below
        model = get_peft_model(base, recipe.lora_config())
    model.peft_config["default"].base_model_name_or_path = MODEL_NAME  # PEFT puts the local folder's path here
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    batches = _batches(tokenizer, dataset.train, recipe)
    recent: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(recipe.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.num_steps)
        loss = _loss(model, next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-19:], loss.item()]
        if (step + 1) % 10 == 0:
            elapsed_s = time.monotonic() - started
            mean = sum(recent) / len(recent)
            _say(f"{recipe.name}: step {step + 1}/{recipe.num_steps}, loss {mean:.3f}, {elapsed_s:.0f} s")
    model.eval()
    _round_to_float16(parameters)
    _write(model, folder)
    held_out = _mean_loss(model, tokenizer, dataset.held_out)
    with model.disable_adapter():
        base_held_out = _mean_loss(model, tokenizer, dataset.held_out)
    model.unload()
    return Losses(sum(recent) / len(recent), held_out, base_held_out)


def _batches(tokenizer: Any, examples: Sequence[Example], recipe: Recipe) -> Iterator[Sequences]:
    rng = random.Random(recipe.seed)
    encoded = [_encode(tokenizer, example) for example in examples]
    window = WINDOW_BATCHES * recipe.batch_size
    while True:
        rng.shuffle(encoded)
        for start in range(0, len(encoded) - window + 1, window):
            by_length = sorted(encoded[start : start + window], key=lambda pair: len(pair[0]))
            groups = [by_length[at : at + recipe.batch_size] for at in range(0, window, recipe.batch_size)]
            rng.shuffle(groups)
            for group in groups:
                yield _pad(group)


def _encode(tokenizer: Any, example: Example) -> tuple[list[int], int]:
    prompt = tokenizer.encode(chat_prompt(tokenizer, example.prompt), add_special_tokens=False)
    reply = tokenizer.encode(example.completion, add_special_tokens=False)
    return [*prompt, *reply, tokenizer.eos_token_id], len(prompt)


def _pad(encoded: Sequence[tuple[list[int], int]]) -> Sequences:
    longest = max(len(ids) for ids, _ in encoded)
    ids = torch.zeros(len(encoded), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (tokens, num_prompt) in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, num_prompt : len(tokens)] = ids[row, num_prompt : len(tokens)]
    return Sequences(ids, mask, labels)


def _loss(model: PeftModel, batch: Sequences, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the reply tokens; the head, a fifth of all work, runs at their positions only."""
    causal: Any = model.get_base_model()
    hidden = causal.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).last_hidden_state
    targets = batch.labels[:, 1:]
    counted = targets != -100
    logits = causal.lm_head(hidden[:, :-1][counted])
    return torch.nn.functional.cross_entropy(logits, targets[counted], reduction=reduction)


@torch.inference_mode()
def _mean_loss(model: PeftModel, tokenizer: Any, examples: Sequence[Example]) -> float:
    total, num_tokens = 0.0, 0
    for start in range(0, len(examples), 10):
        batch = _pad([_encode(tokenizer, example) for example in examples[start : start + 10]])
        total += _loss(model, batch, reduction="sum").item()
        num_tokens += int((batch.labels != -100).sum())
    return total / num_tokens


def _schedule(step: int, num_steps: int, num_warmup: int = 10) -> float:
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / (num_steps - num_warmup)))


def _round_to_float16(parameters: Sequence[Tensor]) -> None:
    """float16 keeps three bits more than bfloat16, and the small weights of an adapter fit its range."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.half().float())


def _write(model: PeftModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    halves = {name: value.half() for name, value in trained.items()}
    model.save_pretrained(str(folder), state_dict=halves, save_embedding_layers=False)
    (folder / "adapter_model.safetensors").chmod(0o644)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's template of a model card; ours is examples/README.md
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"].sort()  # PEFT writes a set, in any order
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
