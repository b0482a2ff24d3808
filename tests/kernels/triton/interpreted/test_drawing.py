"""Drawing by the Triton kernel against torch, which sorts, and against the CPU's compiled drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.arena import make_arena, randn
from tests.unit.worker.model.tiny import Job, make_model, open_runner, run_jobs, save_model
from worker.kernels.cpu.drawing import PARAMETERS
from worker.kernels.cpu.drawing import draw as compiled_draw
from worker.kernels.draws import Drawing, Draws
from worker.kernels.layout import AttentionShape
from worker.kernels.reference import ReferenceBackend
from worker.kernels.triton import backend, drawing
from worker.kernels.triton.backend import TritonBackend
from worker.kernels.triton.drawing import draw
from worker.kernels.triton.staging import send
from worker.mailbox import Sampling
from worker.model import choice

ALL = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.3, 1.0, 2.5)
    for k in (0, 1, 2, 40, 130, 10**6)
    for p in (1.0, 0.999, 0.9, 0.3, 1e-6)
    for m in (0.0, 0.02, 1.0)
]
FILTERS = [Sampling(), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(min_p=0.1)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of hundreds then have many blocks, as real vocabularies have, and parts longer than a block."""
    monkeypatch.setattr(drawing, "SEGMENTS", 4)
    monkeypatch.setattr(drawing, "WIDTH", 16)


def of(samplings: Sequence[Sampling], uniforms: NDArray[np.float64]) -> Draws:
    return Draws.of(range(len(samplings)), samplings, uniforms)


def drawn_by_compiled_code(logits: Tensor, draws: Draws) -> list[int]:
    columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
    parameters = np.stack([np.asarray(one, dtype=np.float64) for one in columns], axis=1)
    assert parameters.shape[1] == PARAMETERS
    room = [np.empty(logits.shape[1], dtype=kind) for kind in (np.float32, np.float32, np.int32)]
    return [
        int(compiled_draw(logits[row].clone().numpy(), parameters[n], *room))
        for n, row in enumerate(draws.rows.tolist())
    ]


def logits_like(kind: str, rows: int, size: int) -> Tensor:
    logits = randn(rows, size, seed=size)
    if kind == "peaked":
        likely = size // 20 + 1
        logits[:, :likely] += 12 * torch.rand(rows, likely, generator=torch.Generator().manual_seed(size))
    elif kind == "tied":
        logits = (logits * 2).round()
    elif kind == "barred":
        logits[:, ::3] = -torch.inf
    return logits


def assert_drawn_alike(kind: str, size: int, rows: int) -> None:
    random = np.random.default_rng(size + len(kind))
    samplings = [ALL[n] for n in random.choice(len(ALL), rows, replace=False)]
    draws = of(samplings, random.random(rows))
    logits = logits_like(kind, rows, size)
    drawn = draw(logits.clone(), draws).tolist()
    assert drawn == choice.draw(logits.clone(), samplings, draws.uniform).tolist()
    assert drawn == drawn_by_compiled_code(logits, draws)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "barred"])
@pytest.mark.parametrize("size", [3, 64, 301])
def test_filters_and_draws_are_those_of_torch_and_of_compiled_code(size: int, kind: str) -> None:
    assert_drawn_alike(kind, size, 10)


@pytest.mark.parametrize("kind", ["flat", "tied"])
def test_blocks_as_large_as_on_a_gpu(kind: str) -> None:
    assert_drawn_alike(kind, 9001, 8)


def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_kept_token() -> None:
    logits = torch.full((4, 100), -5.0)
    logits[:, 20], logits[:, 70] = 3.0, 2.9
    samplings = [Sampling(temperature=1.0, top_k=2)] * 2 + [Sampling(temperature=1.0)] * 2
    ends = np.array([0.0, 1 - 2**-53] * 2)
    assert draw(logits, of(samplings, ends)).tolist() == [20, 70, 0, 99]


def test_all_that_is_as_likely_as_the_last_kept_is_kept() -> None:
    logits = torch.full((3, 100), -30.0)
    logits[:, [7, 30, 60, 90]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    samplings = [Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=0.3)]
    assert draw(logits, of(samplings, np.full(3, 1 - 2**-53))).tolist() == [90, 90, 90]


def test_thresholds_are_exact() -> None:
    """Tokens become less likely with their ids, so that just below 1 the last kept one is drawn."""
    weights = np.exp(-0.1 * np.arange(100))
    shares = np.linspace(0.03, 0.97, 8)
    samplings = [*(Sampling(top_k=k) for k in range(1, 100, 9)), *(Sampling(top_p=p) for p in shares)]
    logits = torch.from_numpy(np.tile(np.log(weights), (len(samplings), 1))).float()
    drawn = draw(logits, of(samplings, np.full(len(samplings), 1 - 2**-53))).tolist()
    last = np.searchsorted(weights.cumsum() / weights.sum(), shares)
    assert drawn == [*range(0, 99, 9), *last.tolist()]


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=1), Sampling(top_p=1e-20), Sampling(min_p=1.0), Sampling(temperature=1e-6)], ids=str
)
def test_what_leaves_one_token_draws_the_likeliest(sampling: Sampling) -> None:
    logits = randn(2, 130)
    drawn = draw(logits.clone(), of([sampling] * 2, np.array([0.0, 1 - 2**-53])))
    assert torch.equal(drawn, logits.argmax(dim=-1))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_coldest_draw_is_the_likeliest_token(top_p: float) -> None:
    logits = randn(5, 130)
    samplings = [Sampling(temperature=t, top_p=top_p) for t in (1e-45, 1e-40, 2e-39, 1e-20, 1e-60)]
    assert torch.equal(draw(logits.clone(), of(samplings, np.full(5, 0.7))), logits.argmax(dim=-1))


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_a_broken_row_ends_and_stays_its_own(sampling: Sampling) -> None:
    logits = randn(4, 200)
    logits[0, 5], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    expected = choice.draw(logits[3:].clone(), [sampling], np.array([0.4])).tolist()
    assert draw(logits, of([sampling] * 4, np.full(4, 0.4))).tolist() == [0, 0, 0, *expected]


@pytest.mark.usefixtures("small_blocks")
def test_a_row_draws_the_same_token_alone_and_among_others() -> None:
    logits, random = randn(5, 150), np.random.default_rng(1)
    samplings = [*FILTERS, Sampling(temperature=1.3, top_k=90, top_p=0.8, min_p=0.01)]
    uniforms = random.random(5)
    together = draw(logits.clone(), of(samplings, uniforms)).tolist()
    alone = [
        draw(logits[row : row + 1].clone(), of([samplings[row]], uniforms[row : row + 1])).tolist()[0]
        for row in range(5)
    ]
    turned = [4, 0, 2]
    some = draw(logits.clone(), Draws.of(turned, [samplings[row] for row in turned], uniforms[turned])).tolist()
    assert together == alone
    assert some == [alone[row] for row in turned]


def test_rows_that_are_not_drawn_are_left_alone() -> None:
    logits = randn(5, 130)
    before = logits.clone()
    draw(logits, Draws.of([1, 4], [Sampling(temperature=0.7, top_p=0.9)] * 2, np.array([0.2, 0.8])))
    assert torch.equal(logits[[0, 2, 3]], before[[0, 2, 3]])


def test_inputs_go_to_the_device_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counted(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        sent.append(len(tensors))
        return send(tensors, device)

    monkeypatch.setattr(drawing, "send", counted)
    draw(randn(3, 40), of([Sampling(top_k=2)] * 3, np.full(3, 0.5)))
    assert len(sent) == 1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, for time: the interpreter is slow."""
    return save_model(make_model("llama_tied", num_hidden_layers=1), tmp_path_factory.mktemp("base"))


def test_the_backend_draws_and_compiles_it_before_requests_come(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(1, 4, 2, 16)
    assert isinstance(TritonBackend().bind(make_arena(shape), randn(8, 8), randn(8, 8)), Drawing)
    warmed: list[tuple[int, torch.dtype]] = []

    def noted(logits: Tensor, draws: Draws) -> Tensor:
        warmed.append((logits.shape[1], logits.dtype))
        return draw(logits, draws)

    monkeypatch.setattr(backend, "draw", noted)
    runner = open_runner(base, backend=TritonBackend(), arena_bytes=4 * 2**20, cuda_graphs=False)
    runner.prepare()
    assert warmed == [(160, torch.float32)]


def test_a_whole_model_samples_what_it_does_with_torch(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows beside drawn ones, biases and penalties among them; answers by graphs, prompts without."""
    samplings = [
        Sampling(temperature=0.8, top_p=0.95, seed=1),
        Sampling(temperature=0.0),
        Sampling(temperature=1.2, top_k=20, min_p=0.01, seed=2, logit_bias=((5, 3.0), (7, -100.0))),
        Sampling(temperature=1.0, seed=3, repetition_penalty=1.3),
    ]
    drawn_rows: list[int] = []

    def noted(logits: Tensor, draws: Draws) -> Tensor:
        drawn_rows.append(len(draws.rows))
        return draw(logits, draws)

    monkeypatch.setattr(backend, "draw", noted)

    def tokens(kernels: TritonBackend | ReferenceBackend) -> list[list[int]]:
        runner = open_runner(base, backend=kernels, arena_bytes=4 * 2**20)
        if runner._graphs is not None:
            runner._graphs.capture()
        runner.total_blocks = 40
        return run_jobs(runner, [Job(range(3, 8), 4, sampling) for sampling in samplings])

    assert tokens(TritonBackend()) == tokens(ReferenceBackend())
    assert drawn_rows == [3] * 4
