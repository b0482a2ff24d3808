"""A whole model through the Triton backend, with and without its graphs' fixed steps, against the float32 oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.adapter_format.packed import (
    EMBEDDING,
    HEAD,
    PackedAdapter,
    PackedAffine,
    PackedMatrix,
    PackedModule,
    open_packed,
    pack,
)
from common.adapter_format.quantize import quantize
from loraplex.errors import ResourceExhausted, UnsupportedAdapter
from tests.unit.worker.model.tiny import (
    BASE_DIGEST,
    Job,
    chunks_for,
    first_logits,
    make_model,
    open_runner,
    random_adapter,
    relative_error,
    run_jobs,
    save_model,
)
from worker.engine.plan import SequenceStep
from worker.kernels.layout import Batch
from worker.kernels.reference import ReferenceBackend
from worker.kernels.triton import graphs
from worker.kernels.triton.backend import TritonBackend
from worker.model.config import read_config
from worker.model.runner import ModelRunner
from worker.model.scores import Scores

ALL = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
Q_V = ("self_attn.q_proj", "self_attn.v_proj")
ADAPTERS: list[tuple[str, int, tuple[str, ...]]] = [
    ("int8", 8, ALL),
    ("int4", 13, ALL),
    ("BF16", 3, Q_V),
    ("int8", 65, ("mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")),
]
INT4 = (1,)
EXACT = 2e-5
ROUNDED = 2e-2
"""Scales of int4 are bfloat16 in tiles, as are factors that were stored in more bits."""


def tokens(count: int) -> list[int]:
    return torch.randint(0, 160, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def adapter_file(folder: Path, base: Path, number: int) -> Path:
    kind, rank, modules = ADAPTERS[number]
    file = folder / f"{number}.packed"
    if file.exists():
        return file
    stored = "BF16" if kind == "BF16" else "F32"
    made = random_adapter(
        read_config(base), folder / f"{number}.none", ranks=dict.fromkeys(modules, rank), seed=number, dtype=stored
    )
    if kind == "BF16":
        return made.rename(file)
    pack(quantize(open_packed(made), kind).adapter, file)
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, for time: the interpreter is slow."""
    return save_model(make_model("llama_tied", num_hidden_layers=1), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, QK-norm, and heads that are no power of two."""
    return save_model(make_model("qwen3_bias_tied", head_dim=24), tmp_path_factory.mktemp("base"))


def opened(base: Path, adapters: Path, backend: Any, *, loaded: Sequence[int] = (), **changes: Any) -> ModelRunner:
    """Adapters lie at the arena's end; `run_jobs` is told of the first chunks only."""
    runner = open_runner(base, backend=backend, arena_bytes=4 * 2**20, max_running_requests=6, **changes)
    for slot in loaded:
        runner.prepare_adapter(slot, adapter_file(adapters, base, slot), chunks_for(runner, slot))
    if runner._graphs is not None:
        runner._graphs.capture()
    runner.total_blocks = 40
    return runner


AFFINE, AFFINE_HERE_AND_THERE, VOCABULARY = 10, 11, 12


def affine_file(folder: Path, base: Path, number: int) -> Path:
    """Adapters with affines of all modules, or of some; or with an embedding, a head, and affines of both."""
    config, rng = read_config(base), np.random.default_rng(number)
    like = {AFFINE: 0, AFFINE_HERE_AND_THERE: 3, VOCABULARY: 2}[number]
    modules = list(open_packed(adapter_file(folder, base, like)).modules)

    def affine(count: int) -> PackedAffine:
        return PackedAffine(*rng.normal((1, 0), 0.3, (count, 2)).astype(np.float32).T.copy())

    for index, module in enumerate(modules):
        if number == AFFINE or (number == AFFINE_HERE_AND_THERE and module.name == "layers.0.mlp.up_proj"):
            modules[index] = replace(module, affine=affine(module.parts[0].out_features))
    matrices: tuple[PackedMatrix, ...] = ()
    if number == VOCABULARY:
        vocab, hidden = config.vocab_size, config.hidden_size
        a, b = rng.normal(0, 0.3, (vocab, 4)).astype(np.float32), rng.normal(0, 0.3, (hidden, 4)).astype(np.float32)
        modules.append(PackedModule(EMBEDDING, 4, 1.0, "F32", a.T, b, (), affine(hidden)))
        matrices = (PackedMatrix(HEAD, "F32", rng.normal(0, 0.15, (vocab, hidden)).astype(np.float32)),)
        modules.sort(key=lambda module: module.name)
    file = folder / f"{number}.packed"
    form = "none" if number == VOCABULARY else "int8"
    pack(PackedAdapter("e" * 64, BASE_DIGEST, form, tuple(modules), matrices), file)
    return file


def record(runner: ModelRunner) -> list[tuple[int, Tensor]]:
    """Keep (request, logits) of all that is sampled from now on."""
    seen: list[tuple[int, Tensor]] = []
    sample = runner._sampler.sample

    def kept(scores: Scores, sequences: Sequence[SequenceStep]) -> Any:
        seen.extend((s.request_id, row.clone()) for s, row in zip(sequences, scores.logits, strict=True))
        return sample(scores, sequences)

    runner._sampler.sample = kept  # type: ignore[method-assign]
    return seen


def count_graphed(runner: ModelRunner) -> list[bool]:
    """Note of each step that could be a graph's whether one was used."""
    used: list[bool] = []
    captured = runner._graphs
    if captured is not None:
        compute = captured.logits

        def noted(batch: Batch) -> Tensor | None:
            logits = compute(batch)
            used.append(logits is not None)
            return logits

        captured.logits = noted  # type: ignore[method-assign]
    return used


GRAPHS = pytest.mark.parametrize("graphed", [True, False], ids=["graphs", "no graphs"])


def assert_like_the_oracle(base: Path, adapters: Path, jobs: Callable[[], list[Job]], *, graphed: bool) -> None:
    slots = [job.slot for job in jobs()]
    loaded = sorted({slot for slot in slots if slot >= 0})
    oracle = opened(base, adapters, ReferenceBackend(), loaded=loaded)
    runner = opened(base, adapters, TritonBackend(), loaded=loaded, cuda_graphs=graphed)
    used = count_graphed(runner)
    wanted, seen = record(oracle), record(runner)
    assert run_jobs(runner, jobs()) == run_jobs(oracle, jobs())
    assert len(seen) == len(wanted)
    for request, slot in enumerate(slots):
        of_wanted, of_seen = (torch.stack([row for r, row in rows if r == request]) for rows in (wanted, seen))
        assert relative_error(of_seen, of_wanted) < (ROUNDED if slot in INT4 else EXACT)
    assert any(used) == graphed
    assert all(used)  # steps of decodes alone are what there are graphs for


@GRAPHS
def test_base_and_an_adapter_on_q_and_v(graphed: bool, two_layers: Path, tmp_path: Path) -> None:
    """Three rows in a graph of four, of which one has an adapter; prompts and decodes share steps."""
    assert_like_the_oracle(
        two_layers,
        tmp_path,
        lambda: [Job(tokens(3), 3), Job(tokens(18), 2, slot=2, chunk=(15, 3)), Job(tokens(1), 3)],
        graphed=graphed,
    )


def test_adapters_of_all_formats_and_ranks_in_one_step(base: Path, tmp_path: Path) -> None:
    """Five decodes in a graph of six rows; before it prompts, and prompts beside decodes, kernel by kernel."""
    assert_like_the_oracle(
        base,
        tmp_path,
        lambda: [
            Job(tokens(2), 3, slot=3),
            Job(tokens(3), 3, slot=1),
            Job(tokens(17), 2, slot=0, start_step=1),
            Job(tokens(1), 2, slot=2, start_step=1),
            Job(tokens(4), 2, start_step=1),
        ],
        graphed=True,
    )


@GRAPHS
def test_a_step_started_before_the_last_is_answered(graphed: bool, two_layers: Path, tmp_path: Path) -> None:
    """Its tokens are put into the graph's inputs, or the step's, on the device."""
    runner = opened(two_layers, tmp_path, TritonBackend(), loaded=[2], cuda_graphs=graphed)

    def jobs() -> list[Job]:
        return [Job(tokens(3), 4), Job(tokens(18), 2, slot=2, chunk=(15, 3)), Job(tokens(1), 3)]

    assert run_jobs(runner, jobs(), ahead=True) == run_jobs(runner, jobs())


def test_affines_and_parts_of_the_vocabulary_beside_ordinary_rows(base: Path, tmp_path: Path) -> None:
    """Prompts and decodes; steps with such adapters run kernel by kernel, and leave ordinary rows as they are."""
    numbers = (AFFINE, AFFINE_HERE_AND_THERE, VOCABULARY)
    runners = [opened(base, tmp_path, backend) for backend in (ReferenceBackend(), TritonBackend())]
    for runner in runners:
        for slot, number in enumerate(numbers):
            chunks = tuple(range(100 + 200 * slot, 300 + 200 * slot))
            runner.prepare_adapter(slot, affine_file(tmp_path, base, number), chunks)
        runner.prepare_adapter(3, adapter_file(tmp_path, base, 0), tuple(range(50, 80)))
    oracle, runner = runners
    used = count_graphed(runner)
    wanted, seen = record(oracle), record(runner)

    def jobs() -> list[Job]:
        return [Job(tokens(2 + slot), 2, slot=slot, start_step=slot % 2) for slot in (0, 1, 2, 3, -1)]

    assert run_jobs(runner, jobs()) == run_jobs(oracle, jobs())
    for request in range(5):
        of_wanted, of_seen = (torch.stack([row for r, row in rows if r == request]) for rows in (wanted, seen))
        assert relative_error(of_seen, of_wanted) < (ROUNDED if request == 2 else EXACT)
    assert used[0] is False

    def last(slots: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            steps = [SequenceStep(n, (5,), 0, (n,), slot, sample=True) for n, slot in enumerate(slots)]
            _, scores = runner._forward(steps)
        assert scores is not None
        return scores.logits[list(slots).index(3)].clone()

    used.clear()
    plain, beside = last([3]), last([0, 1, 3])
    assert used == [True, False]
    assert relative_error(beside, plain) < 1e-6  # the base's products are the library's


def second_logits(runner: ModelRunner, slot: int) -> Tensor:
    """Logits of a decode behind `first_logits` of three tokens: one that there is a graph for."""
    with torch.inference_mode():
        _, scores = runner._forward([SequenceStep(0, (5,), 3, (0,), slot, sample=True)])
    assert scores is not None
    return scores.logits[0].clone()


def test_sizes_whose_capture_fails_run_without_a_graph(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []

    def capture(graph: object) -> None:
        captured.append(1)
        if len(captured) > 2:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(graphs._Graph, "capture", capture)
    runner, oracle = (opened(base, tmp_path, backend) for backend in (TritonBackend(), ReferenceBackend()))
    assert isinstance(runner._graphs, graphs.DecodeGraphs)
    assert [(shape.rows, shape.rank_tiles) for shape in runner._graphs.shapes] == [(6, 17), (6, 4)]
    used = count_graphed(runner)
    for each in (runner, oracle):
        first_logits(each, tokens(3))
    assert relative_error(second_logits(runner, -1), second_logits(oracle, -1)) < EXACT
    assert used == [False]


def test_a_slot_and_its_chunks_are_used_again(base: Path, tmp_path: Path) -> None:
    """An adapter of all modules leaves; one of q and v comes into the same slot and chunks, in the graph's plan too."""
    runner, oracle = (opened(base, tmp_path, backend) for backend in (TritonBackend(), ReferenceBackend()))
    prompt = tokens(3)
    for number in (0, 2):
        for each in (runner, oracle):
            each.prepare_adapter(1, adapter_file(tmp_path, base, number), tuple(range(50, 80)))
        assert relative_error(first_logits(runner, prompt, 1), first_logits(oracle, prompt, 1)) < EXACT
        assert relative_error(second_logits(runner, 1), second_logits(oracle, 1)) < EXACT
        for each in (runner, oracle):
            each.release_adapter(1)
        table = runner._kernels._model.table  # type: ignore[union-attr]
        assert not table.entries.any()
        assert not table.summary.any()
        with pytest.raises(KeyError):
            first_logits(runner, prompt, 1)


@pytest.mark.parametrize("stored", ["F32", "F16"])
def test_factors_of_more_bits_are_served_as_bfloat16(stored: str, base: Path, tmp_path: Path) -> None:
    file = random_adapter(read_config(base), tmp_path / "a", ranks={"self_attn.q_proj": 5}, seed=1, dtype=stored)
    runner, oracle = (opened(base, tmp_path, backend) for backend in (TritonBackend(), ReferenceBackend()))
    for each in (runner, oracle):
        each.prepare_adapter(0, file, (50, 51))
    plain = first_logits(runner, tokens(3))
    served, wanted = first_logits(runner, tokens(3), 0), first_logits(oracle, tokens(3), 0)
    assert relative_error(served, wanted) < ROUNDED / 4 < ROUNDED < relative_error(plain, wanted)


def test_an_adapter_that_does_not_fit_leaves_nothing_behind(base: Path, tmp_path: Path) -> None:
    runner = opened(base, tmp_path, TritonBackend())
    before = runner._adapters._arena.memory.clone()
    config = read_config(base)
    with pytest.raises(ResourceExhausted, match="needs 3 chunks"):
        runner.prepare_adapter(0, adapter_file(tmp_path, base, 0), (50,))
    steep = random_adapter(config, tmp_path / "a", ranks={"mlp.up_proj": 257}, seed=1)
    with pytest.raises(UnsupportedAdapter, match="rank above 256"):
        runner.prepare_adapter(0, steep, tuple(range(50, 100)))
    assert torch.equal(runner._adapters._arena.memory, before)
    assert not runner._kernels._model.table.entries.any()  # type: ignore[union-attr]


def test_what_requests_would_wait_for_is_compiled_before(base: Path, tmp_path: Path) -> None:
    """The warm-up is a step of its own, with LoRA of decodes and prompts, and leaves the arena as it is."""
    runner = opened(base, tmp_path, TritonBackend(), loaded=[2])
    before = runner._adapters._arena.memory.clone()
    with torch.inference_mode():
        runner._kernels.warm_up(runner._decoder.forward)  # type: ignore[union-attr]
    assert torch.equal(runner._adapters._arena.memory, before)
