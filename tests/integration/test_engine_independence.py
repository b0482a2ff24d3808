"""Same request, same seed, same tokens: whatever was preempted, chunked, batched or found in the prefix cache.

A real engine on a tiny random model in float32, against each request alone in ample memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.golden import EngineSession
from tests.unit.worker.model.tiny import make_model, open_runner, random_adapter, save_model
from worker.mailbox import AdapterFile, Sampling
from worker.model.config import read_config

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, 2 layers, 2 heads of 16, 16 tokens, float32
SAMPLINGS = (
    Sampling(temperature=0.0, max_tokens=40, ignore_eos=True),
    Sampling(temperature=0.9, top_p=0.95, seed=7, max_tokens=40, ignore_eos=True),
    Sampling(temperature=0.7, seed=8, max_tokens=40, frequency_penalty=0.8, presence_penalty=0.3, ignore_eos=True),
    Sampling(temperature=1.1, top_k=20, seed=9, max_tokens=40, repetition_penalty=1.3, min_tokens=30),
)

Job = tuple[tuple[int, ...], AdapterFile | None, Sampling]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield save_model(make_model("llama_tied", max_position_embeddings=128), tmp_path_factory.mktemp("base"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def jobs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    folder, config = tmp_path_factory.mktemp("adapters"), read_config(base)
    files: list[AdapterFile | None] = [None]
    for seed, rank in enumerate((4, 9)):
        ranks = dict.fromkeys(config.module_shapes(), rank)
        path = random_adapter(config, folder / f"{rank}.packed", ranks=ranks, seed=seed)
        files.append(AdapterFile(f"{rank}" * 64, str(path), path.stat().st_size))
    beginning = tuple(range(20, 55))  # equal for all: two full blocks
    return [((*beginning, 60 + number), files[number % 3], sampling) for number, sampling in enumerate(SAMPLINGS * 3)]


@pytest.fixture(scope="module")
def alone(base: Path, jobs: list[Job]) -> list[list[int]]:
    session = EngineSession(open_runner(base), max_prefill_tokens=512, max_resident_adapters=3, prefix_cache=False)
    try:
        answers = [session.generate([job])[0] for job in jobs]
        assert session.status is not None
        assert (session.status.num_preempted, session.status.num_cached_tokens) == (0, 0)
    finally:
        session.close()
    assert len({tuple(answer) for answer in answers}) == len(jobs)
    return answers


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_prefill_tokens", [7, 64])
def test_a_request_answers_as_if_it_were_alone(
    base: Path, jobs: list[Job], alone: list[list[int]], max_prefill_tokens: int, prefix_cache: bool
) -> None:
    runner = open_runner(base, arena_bytes=20 * BLOCK_BYTES, max_running_requests=32)
    assert runner.total_blocks == 20
    session = EngineSession(
        runner, max_prefill_tokens=max_prefill_tokens, max_resident_adapters=2, prefix_cache=prefix_cache
    )
    try:
        together = session.generate(jobs)
        again = session.generate(jobs[:3])
        status = session.status
    finally:
        session.close()
    assert together == alone
    assert again == alone[:3]
    assert status is not None
    assert status.num_preempted > 0
    assert bool(status.num_cached_tokens) == prefix_cache
