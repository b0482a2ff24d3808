"""The runner: computes the engine's plans on a real model.

Owns the model, the arena, the adapter slots and the sampler; decides nothing. `start` and `execute` belong to one
thread, `prepare_adapter` to any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import structlog
import torch

from common.adapter_format.packed import open_packed
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.adapters.host import HostTier
from worker.adapters.vocabulary import DEFAULT_BYTES, VocabularyMemory, VocabularyShape
from worker.engine.plan import (
    BASE_SLOT,
    AdapterLoad,
    ComparedPositions,
    ComparisonStep,
    HostChanges,
    SequenceStep,
    StepPlan,
    StepResult,
)
from worker.kernels.draws import Drawing
from worker.kernels.interface import Backend, DeviceKernels
from worker.kernels.layout import BLOCK_TOKENS, Arena, AttentionShape
from worker.kernels.linear import Linear
from worker.model.backends import choose_backend
from worker.model.base_quantization import check_base_quantization, quantize_linear
from worker.model.batch import build_step
from worker.model.calibration import tokens_per_second
from worker.model.comparison import compare_logits, comparison_rows, comparison_sequences
from worker.model.config import ModelConfig, parse_config, read_config, read_eos_token_ids
from worker.model.decoder import Decoder
from worker.model.device import DTYPES, choose_device, choose_dtype, free_bytes
from worker.model.host_memory import open_host_tier
from worker.model.memory import default_arena_bytes, plan_arena
from worker.model.merged import read_merge
from worker.model.sampler import Sample, Sampler
from worker.model.scores import Chosen, Scores
from worker.model.weights import load_weights, stores_bfloat16

log = structlog.get_logger(__name__)

NO_CHANGES: Final = HostChanges()


@dataclass(frozen=True, slots=True)
class _Started:
    """See StartedStep."""

    step: int
    sample: Sample | None
    unlike: tuple[int, ...] = ()
    """The request whose comparison found logits that are not finite."""
    compared: ComparedPositions | None = None

    def result(self) -> StepResult:
        """See StartedStep."""
        tokens, broken = ((), ()) if self.sample is None else self.sample.result()
        return StepResult(self.step, tokens, (*broken, *self.unlike), self.compared)


class ModelRunner:
    """An open model; implements `worker.engine.plan.Runner`."""

    device: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    block_tokens: int
    total_blocks: int
    chunk_bytes: int
    adapter_chunk_bytes: int
    eos_token_ids: frozenset[int]

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        sampler: Sampler,
        arena: Arena,
        adapters: DeviceAdapters,
        kernels: DeviceKernels | None = None,
        *,
        device: torch.device,
        dtype: str,
        max_context_tokens: int,
        max_running_requests: int,
        max_prefill_tokens: int,
        eos_token_ids: frozenset[int],
        cuda_graphs: bool = True,
        host: HostTier | None = None,
    ) -> None:
        """`open` is the usual way to make one. `kernels` are the decoder's, where they are of a device of its own."""
        self.device, self.dtype = device.type, dtype
        self.vocab_size = config.vocab_size
        self.max_context_tokens = max_context_tokens
        self.block_tokens, self.total_blocks, self.chunk_bytes = BLOCK_TOKENS, arena.num_chunks, arena.chunk_bytes
        self.adapter_chunk_bytes = adapters.usable_chunk_bytes
        self.eos_token_ids = eos_token_ids
        self._decoder, self._adapters, self._host = decoder, adapters, host
        self.host_budget_bytes = 0 if host is None else host.budget_bytes
        self._sampler = sampler
        self._chosen: Chosen | None = None  # by the step started last
        self._max_running_requests = max_running_requests
        self._max_prefill_tokens = max_prefill_tokens
        self._kernels = kernels
        self._graphs = None
        if kernels is not None and cuda_graphs:
            self._graphs = kernels.decode_graphs(decoder.forward, max_rows=max_running_requests)

    @classmethod
    def open(
        cls,
        base_dir: Path,
        *,
        device: str,
        dtype: str,
        arena_bytes: int | None,
        max_context_tokens: int | None,
        max_running_requests: int,
        max_resident_adapters: int,
        max_prefill_tokens: int,
        base_digest: str,
        base_quantization: str = "none",
        threads: int = 1,
        cuda_graphs: bool = True,
        max_vocabulary_bytes: int = DEFAULT_BYTES,
        merged_artifact: Path | None = None,
        host_cache_bytes: int | None = None,
        backend: Backend | None = None,
    ) -> ModelRunner:
        """Load the Hugging Face folder `base_dir` and take the arena's memory.

        `device` is auto, cpu or cuda; `dtype` auto, float32 or bfloat16; `base_quantization` none or int8; None leaves
        a size to the machine, and the backend to the device. `merged_artifact` is a packed adapter to fold into the
        weights. Raises InvalidBaseModel, CorruptArtifact or InvalidParameter, naming the field and the remedy, and what
        `read_merge` does.
        """
        merge = None if merged_artifact is None else read_merge(base_dir, base_digest, merged_artifact)
        config = read_config(base_dir) if merge is None else parse_config(merge.config)
        eos_token_ids = read_eos_token_ids(base_dir)
        torch_device = choose_device(device)
        check_base_quantization(base_quantization, torch_device)
        dtype_name = choose_dtype(dtype, torch_device, stored_bfloat16=stores_bfloat16(base_dir))
        torch_dtype = DTYPES[dtype_name]
        base = BaseShape(base_digest, config.num_layers, config.module_shapes())
        shape = AttentionShape(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
        if backend is None:
            backend = choose_backend(shape, base.sites(), device=torch_device, dtype=torch_dtype, threads=threads)
        weights = load_weights(
            base_dir,
            config,
            device=torch_device,
            dtype=torch_dtype,
            pack=_packing(backend, base_quantization),
            merge=merge,
        )
        if arena_bytes is None:
            arena_bytes = default_arena_bytes(torch_device.type, free_bytes(torch_device))
        plan = plan_arena(
            config,
            itemsize=torch_dtype.itemsize,
            arena_bytes=arena_bytes,
            max_context_tokens=max_context_tokens,
        )
        arena = Arena(shape, num_chunks=plan.num_chunks, dtype=torch_dtype, device=torch_device)
        cos, sin = (table.to(torch_device) for table in config.rope.tables(plan.max_context_tokens))
        kernels = backend.bind(arena, cos, sin)
        own = kernels if isinstance(kernels, DeviceKernels) else None
        placer = own.placer(base.sites(), num_slots=max_resident_adapters) if own else None
        vocabulary = VocabularyMemory(
            VocabularyShape(config.vocab_size, config.hidden_size),
            backend.pack,
            device=torch_device,
            dtype=torch_dtype,
            limit_bytes=max_vocabulary_bytes,
        )
        host = open_host_tier(torch_device, host_cache_bytes)
        log.info(
            "model.opened",
            family=config.family,
            device=torch_device.type,
            dtype=dtype_name,
            base_quantization=base_quantization,
            layers=config.num_layers,
            merged=merge is not None,
            chunks=plan.num_chunks,
            max_context_tokens=plan.max_context_tokens,
        )
        return cls(
            config,
            Decoder(config, weights, kernels),
            Sampler(eos_token_ids, kernels if isinstance(kernels, Drawing) else None),
            arena,
            DeviceAdapters(
                base,
                arena,
                num_slots=max_resident_adapters,
                placer=placer,
                vocabulary=vocabulary,
                open_file=open_packed if host is None else host.open,
            ),
            own,
            device=torch_device,
            dtype=dtype_name,
            max_context_tokens=plan.max_context_tokens,
            max_running_requests=max_running_requests,
            max_prefill_tokens=max_prefill_tokens,
            eos_token_ids=eos_token_ids,
            cuda_graphs=cuda_graphs,
            host=host,
        )

    def start(self, plan: StepPlan) -> _Started:
        """Start a plan; see Runner. Raises KeyError for a slot or request nobody announced (the engine's error)."""
        before, self._chosen = self._chosen, None
        self._sampler.forget(plan.ended_request_ids)
        self._sampler.add(plan.new_requests)
        if not plan.sequences and plan.comparison is None:
            return _Started(plan.step, None)
        with torch.inference_mode():
            compared: ComparedPositions | None = None
            unlike: tuple[int, ...] = ()
            if plan.comparison is None:
                sampled, scores = self._forward(plan.sequences, before)
            else:
                sampled, scores, compared = self._forward_comparing(plan.sequences, plan.comparison, before)
                if not all(map(math.isfinite, compared.kl)):
                    unlike = (plan.comparison.request_id,)
            sample = None if scores is None else self._sampler.sample(scores, sampled)
        if sample is not None:
            self._chosen = sample.chosen
        return _Started(plan.step, sample, unlike, compared)

    def execute(self, plan: StepPlan) -> StepResult:
        """Start a plan and wait for it."""
        return self.start(plan).result()

    def prepare_adapter(self, slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        """Load the packed adapter at `path` into `slot`; see Runner."""
        try:
            with torch.inference_mode():
                placed = self._adapters.load(slot, path, chunk_ids)
        except Exception:
            if self._host is not None:
                self._host.forget(path.name)
            raise
        outside = 0 if placed.vocabulary is None else placed.vocabulary.num_bytes
        return AdapterLoad(placed.device_bytes + outside, placed.chunks_used)

    def release_adapter(self, slot: int) -> None:
        """Forget the slot's adapter; see Runner."""
        self._adapters.release(slot)

    def forget_on_host(self, artifact_digest: str) -> None:
        """Drop an adapter's copy; see Runner."""
        if self._host is not None:
            self._host.forget(artifact_digest)

    def take_host_changes(self) -> HostChanges:
        """Return what has changed in the host tier; see Runner."""
        return NO_CHANGES if self._host is None else self._host.take_changes()

    def calibrate(self) -> tuple[float, float]:
        """Return measured prefill and decode speed in tokens per second, above 0.

        To be called before the first request: it writes to cache blocks as it likes.
        """
        self.prepare()
        self._run_and_wait([SequenceStep(0, (0,), 0, (0,), BASE_SLOT, sample=True)])  # the first ever is slow
        longest = min(self._max_prefill_tokens, self.max_context_tokens - 1, self.total_blocks * BLOCK_TOKENS)
        widest = min(self._max_running_requests, self.total_blocks)

        def prefill(num_tokens: int) -> None:
            blocks = tuple(range(-(-num_tokens // BLOCK_TOKENS)))
            self._run_and_wait([SequenceStep(0, (0,) * num_tokens, 0, blocks, BASE_SLOT, sample=True)])

        def decode(num_tokens: int) -> None:
            self._run_and_wait([SequenceStep(n, (0,), 15, (n,), BASE_SLOT, sample=True) for n in range(num_tokens)])

        return tokens_per_second(prefill, max(longest, 1)), tokens_per_second(decode, widest)

    def prepare(self) -> None:
        """Compile and capture what requests would otherwise wait for; before the first one, as it takes the device."""
        with torch.inference_mode():
            if self._kernels is not None:
                self._kernels.warm_up(self._decoder.forward)
            if self._graphs is not None:
                self._graphs.capture()

    def _run_and_wait(self, sequences: list[SequenceStep]) -> None:
        with torch.inference_mode():
            _, scores = self._forward(sequences)
            if scores is not None:
                scores.likeliest.tolist()  # the result on the host: nothing is left in flight

    def _forward(
        self, sequences: Sequence[SequenceStep], before: Chosen | None = None
    ) -> tuple[tuple[SequenceStep, ...], Scores | None]:
        """Return the sequences that choose a token and their scores, None when there are none."""
        step = build_step(sequences, self._adapters.get, before)
        in_graphs = len(step.sampled) == len(step.batch.token_ids) and not step.batch.changes_vocabulary
        if self._graphs is not None and in_graphs:
            logits = self._graphs.logits(step.batch)
            if logits is not None:
                return step.sampled, Scores.of(logits)
        return step.sampled, self._decoder.scores(step.batch, step.sampled_rows)

    def _forward_comparing(
        self, sequences: Sequence[SequenceStep], comparison: ComparisonStep, before: Chosen | None
    ) -> tuple[tuple[SequenceStep, ...], Scores | None, ComparedPositions]:
        """Return the same, and what the comparison in the step found."""
        step = build_step([*sequences, *comparison_sequences(comparison)], self._adapters.get, before)
        rows = np.concatenate([step.sampled_rows, comparison_rows(comparison, step)])
        scores = self._decoder.scores(step.batch, rows)
        if scores is None:
            raise ValueError("a comparison compares no position")
        count = len(step.sampled)
        return step.sampled, scores.first(count) if count else None, compare_logits(scores.logits[count:])


def _packing(backend: Backend, base_quantization: str) -> Callable[[Linear], Linear]:
    if base_quantization == "none":
        return backend.pack
    return lambda linear: backend.pack(quantize_linear(linear))
