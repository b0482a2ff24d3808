"""Tiny random models of every family, adapters for them, and a driver that runs a ModelRunner without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, PackedModule, pack, version_digest
from worker.engine.plan import BASE_SLOT, PENDING, NewRequest, SampledTokens, SequenceStep, StartedStep, StepPlan
from worker.mailbox import Sampling
from worker.model.config import ModelConfig, read_config
from worker.model.runner import ModelRunner

BASE_DIGEST = "b" * 64
VOCAB = 160
GREEDY = Sampling(temperature=0.0)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # so low that wavelengths fall below, into and above the ramp
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_untied": ("Llama", {"tie_word_embeddings": False}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_rope_llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama_rope_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama_head_dim": ("Llama", {"head_dim": 24}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "llama_no_gqa": ("Llama", {"num_key_value_heads": 4}),
    "mistral_window": ("Mistral", {"sliding_window": 96}),
    "qwen2_bias": ("Qwen2", {}),
    "qwen3_qk_norm": ("Qwen3", {"head_dim": 32}),
    "qwen3_bias_tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


def make_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random transformers model, float32, whose logits are far from ties."""
    family, settings = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **settings, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.15)
    return model.float().eval()


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Write a model as a Hugging Face folder (without a tokenizer)."""
    model.save_pretrained(folder, **options)
    return folder


def open_runner(folder: Path, **changes: Any) -> ModelRunner:
    """Open a folder in float32 on the CPU with small limits."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "arena_bytes": None,
        "max_context_tokens": None,
        "max_running_requests": 8,
        "max_resident_adapters": 4,
        "max_prefill_tokens": 64,
        "base_digest": BASE_DIGEST,
    }
    return ModelRunner.open(folder, **{**settings, **changes})


def random_adapter(
    config: ModelConfig,
    file: Path,
    *,
    ranks: Mapping[str, int],
    seed: int,
    layers: Sequence[int] | None = None,
    gain: float = 0.4,
    base_digest: str = BASE_DIGEST,
    dtype: str = "F32",
) -> Path:
    """Pack an adapter with non-zero B on the named modules, `ranks` by module name ("self_attn.q_proj")."""
    rng = np.random.default_rng(seed)
    modules = []
    for layer in range(config.num_layers) if layers is None else layers:
        for name, rank in ranks.items():
            inner, out = config.module_shapes()[name]
            a: NDArray[Any]
            b: NDArray[Any]
            a = rng.normal(0, gain / inner**0.5, (rank, inner)).astype(np.float32)
            b = rng.normal(0, gain, (out, rank)).astype(np.float32)
            if dtype == "F16":
                a, b = a.astype(np.float16), b.astype(np.float16)
            elif dtype == "BF16":
                a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
            modules.append(PackedModule(f"layers.{layer}.{name}", rank, 2.0 * gain + rank % 3, dtype, a, b))
    modules.sort(key=lambda module: module.name)
    pack(PackedAdapter(version_digest(base_digest, modules), base_digest, "none", tuple(modules)), file)
    return file


def tiny_runner(folder: Path, adapters: Path, **changes: Any) -> ModelRunner:
    """Open a folder with three unlike adapters in slots 0 to 2; their files are `adapters`/{slot}.packed."""
    runner = open_runner(folder, **changes)
    config = read_config(folder)
    ranks: list[dict[str, int]] = [
        dict.fromkeys(config.module_shapes(), 4),
        {"self_attn.q_proj": 3, "self_attn.v_proj": 9, "mlp.down_proj": 1},
        {"self_attn.k_proj": 16, "self_attn.o_proj": 2, "mlp.up_proj": 5},
    ]
    for slot, wanted in enumerate(ranks):
        layers = [1] if slot == 2 else None
        file = random_adapter(config, adapters / f"{slot}.packed", ranks=wanted, seed=slot, layers=layers)
        runner.prepare_adapter(slot, file, chunks_for(runner, slot))
    return runner


@dataclass(slots=True)
class Job:
    """One request for `run_jobs`: the prompt is computed in chunks of the given sizes, the last one repeated."""

    prompt: Sequence[int]
    num_tokens: int
    sampling: Sampling = GREEDY
    slot: int = BASE_SLOT
    chunk: Sequence[int] = (10**9,)
    start_step: int = 0
    results: list[SampledTokens] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for result in self.results for token in result.token_ids]


def run_jobs(runner: ModelRunner, jobs: Sequence[Job], *, ahead: bool = False) -> list[list[int]]:
    """Run jobs together, continuous-batching style, with shuffled private blocks; returns each one's tokens.

    With `ahead` each step is started before the result of the one before is asked for.
    """
    free = list(np.random.default_rng(5).permutation(runner.total_blocks).tolist())
    blocks = {}
    for index, job in enumerate(jobs):
        count = -(-(len(job.prompt) + job.num_tokens) // runner.block_tokens)
        blocks[index], free = free[:count], free[count:]
        assert len(blocks[index]) == count, "the test's jobs do not fit the cache"
    computed = dict.fromkeys(range(len(jobs)), 0)
    announced: set[int] = set()
    ended: list[int] = []
    step = 0
    started: list[StartedStep] = []
    chosen = dict.fromkeys(range(len(jobs)), 0)  # tokens known or pending

    def answer() -> None:
        for sampled in started.pop(0).result().sampled:
            jobs[sampled.request_id].results.append(sampled)

    while any(chosen[index] < job.num_tokens for index, job in enumerate(jobs)):
        sequences, new = [], []
        for index, job in enumerate(jobs):
            if step < job.start_step or chosen[index] >= job.num_tokens:
                continue
            if index not in announced:
                announced.add(index)
                new.append(NewRequest(index, tuple(job.prompt), job.sampling))
            known = [*job.prompt, *job.tokens, *[PENDING] * (chosen[index] - len(job.results))]
            at = computed[index]
            sizes = [*job.chunk]
            limit = sizes[min(sum(1 for c in range(1, len(sizes) + 1) if sum(sizes[:c]) <= at), len(sizes) - 1)]
            end = min(len(known), at + limit)
            used = tuple(blocks[index][: -(-end // runner.block_tokens)])
            sequences.append(SequenceStep(index, tuple(known[at:end]), at, used, job.slot, sample=end == len(known)))
            computed[index] = end
        step += 1
        started.append(runner.start(StepPlan(step, tuple(new), tuple(sequences), tuple(ended))))
        sampling = [sequence.request_id for sequence in sequences if sequence.sample]
        for index in sampling:
            chosen[index] += 1
        ended = [index for index in sampling if chosen[index] >= jobs[index].num_tokens]
        while len(started) > ahead:
            answer()
    while started:
        answer()
    return [job.tokens for job in jobs]


def greedy_reference(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of a transformers (or PEFT) model with its own KV cache; end-of-sequence tokens do not end it."""
    return [int(row.argmax()) for row in greedy_logits(model, prompt, num_tokens)]


def greedy_logits(model: Any, prompt: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Logits from which each greedy token was chosen, [num_tokens, vocab]."""
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(prompt)]), use_cache=True)
        while True:
            rows.append(output.logits[0, -1])
            if len(rows) == num_tokens:
                return torch.stack(rows)
            token = rows[-1].argmax()
            output = model(input_ids=token.view(1, 1), cache=output.cache, use_cache=True)


def whole_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of a transformers (or PEFT) model at every position, [len(tokens), vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def first_logits(runner: ModelRunner, tokens: Sequence[int], slot: int = BASE_SLOT) -> torch.Tensor:
    """Logits of the token after `tokens`, [vocab], computed in one step on the first blocks."""
    blocks = tuple(range(-(-len(tokens) // runner.block_tokens)))
    with torch.inference_mode():
        _, scores = runner._forward([SequenceStep(0, tuple(tokens), 0, blocks, slot, sample=True)])
    assert scores is not None
    return scores.logits[0].clone()  # the next step has its room


def chunks_for(runner: ModelRunner, slot: int) -> tuple[int, ...]:
    """Chunks at the arena's end, the same for a slot each time; prompts use the first ones."""
    end = runner.total_blocks - 100 * slot
    return tuple(range(end - 100, end))
