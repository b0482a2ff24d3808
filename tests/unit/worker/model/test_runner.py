from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from loraplex.errors import BaseMismatch, CorruptArtifact, InvalidBaseModel, InvalidParameter
from tests.unit.worker.model.tiny import (
    VOCAB,
    Job,
    chunks_for,
    first_logits,
    make_model,
    open_runner,
    random_adapter,
    run_jobs,
    save_model,
    tiny_runner,
)
from worker.engine.plan import PENDING, NewRequest, SequenceStep, StepPlan
from worker.kernels.cpu.backend import CpuStep
from worker.mailbox import Sampling
from worker.model.config import read_config

ALL_SEVEN = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PROMPTS = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 3, 16, 17, 40, 100, 5, 33)
]


def test_what_it_says_of_itself(llama_folder: Path) -> None:
    runner = open_runner(llama_folder, max_running_requests=3)
    assert (runner.device, runner.dtype, runner.vocab_size) == ("cpu", "float32", VOCAB)
    assert (runner.block_tokens, runner.max_context_tokens) == (16, 256)
    assert runner.total_blocks * runner.chunk_bytes <= 2**30
    assert runner.adapter_chunk_bytes == runner.chunk_bytes * 7 // 8
    assert runner.eos_token_ids == {2}


def test_a_sliding_window_caps_the_context(tmp_path: Path) -> None:
    assert open_runner(save_model(make_model("mistral_window"), tmp_path)).max_context_tokens == 96


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"arena_bytes": 8191}, "arena_bytes"),
        ({"max_context_tokens": 257}, "max_context_tokens"),
        ({"max_context_tokens": 1}, "max_context_tokens"),
        ({"max_context_tokens": 33, "arena_bytes": 2 * 8192}, "max_context_tokens"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(limits: dict[str, object], field: str, llama_folder: Path) -> None:
    with pytest.raises(InvalidParameter) as caught:
        open_runner(llama_folder, **limits)
    assert caught.value.field == field


def test_a_small_cache_shortens_the_context(llama_folder: Path) -> None:
    runner = open_runner(llama_folder, arena_bytes=3 * 8192 + 100)
    assert (runner.total_blocks, runner.max_context_tokens) == (3, 48)


def test_no_folder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidBaseModel, match="Hugging Face folder"):
        open_runner(tmp_path / "nowhere")


def test_calibration_measures_both_phases_and_leaves_no_trace(llama_folder: Path) -> None:
    calibrated, fresh = open_runner(llama_folder), open_runner(llama_folder)
    prefill, decode = calibrated.calibrate()
    assert prefill > 0
    assert decode > 0
    assert run_jobs(calibrated, [Job(PROMPTS[4], 8)]) == run_jobs(fresh, [Job(PROMPTS[4], 8)])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(seed=9),
        Sampling(seed=9, temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
        Sampling(seed=9, top_k=20, min_p=0.01),
    ],
)
def test_tokens_do_not_depend_on_batch_neighbours_or_chunks(
    sampling: Sampling, llama_folder: Path, tmp_path: Path
) -> None:
    runner = tiny_runner(llama_folder, tmp_path)

    def jobs() -> list[Job]:
        chunks = [(10**9,), (5, 1, 20)]
        return [
            Job(prompt, 14, sampling, slot=index % 4 - 1, chunk=chunks[index % 2], start_step=index // 3)
            for index, prompt in enumerate(PROMPTS)
        ]

    together = run_jobs(runner, jobs())
    alone = []
    for job in jobs():
        job.chunk, job.start_step = (10**9,), 0
        alone += run_jobs(runner, [job])
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)


def test_a_step_started_before_the_last_is_answered_gives_the_same(llama_folder: Path, tmp_path: Path) -> None:
    runner = tiny_runner(llama_folder, tmp_path)
    samplings = (
        Sampling(temperature=0.0, logprobs=3),
        Sampling(seed=9, temperature=0.8, top_p=0.9),
        Sampling(seed=3, repetition_penalty=1.3, presence_penalty=0.4),
    )

    def jobs() -> list[Job]:
        return [
            Job(prompt, 9 + index % 3, samplings[index % 3], slot=index % 4 - 1, chunk=(5, 30), start_step=index // 2)
            for index, prompt in enumerate(PROMPTS)
        ]

    answered, ahead = jobs(), jobs()
    assert run_jobs(runner, ahead, ahead=True) == run_jobs(runner, answered)
    assert [job.results for job in ahead] == [job.results for job in answered]


def test_after_a_step_that_failed_no_token_is_pending(llama_folder: Path) -> None:
    runner = open_runner(llama_folder)
    new = (NewRequest(1, (5, 6), Sampling(temperature=0.0)),)
    runner.start(StepPlan(1, new, (SequenceStep(1, (5, 6), 0, (3,), -1, sample=True),), ()))
    with pytest.raises(KeyError):
        runner.start(StepPlan(2, (), (SequenceStep(99, (PENDING,), 2, (3,), -1, sample=True),), ()))
    with pytest.raises(KeyError, match="no token for request 1"):
        runner.start(StepPlan(3, (), (SequenceStep(1, (PENDING,), 2, (3,), -1, sample=True),), ()))


def test_requests_recomputed_from_the_start_go_on_as_before(llama_folder: Path) -> None:
    """What a preemption will do: known tokens are computed again in one chunk, under the same request id."""
    runner = open_runner(llama_folder)
    sampling = Sampling(seed=4, frequency_penalty=0.5)
    (expected,) = run_jobs(runner, [Job(PROMPTS[4], 12, sampling)])
    known, computed = list(PROMPTS[4]), 0
    new: tuple[NewRequest, ...] = (NewRequest(7, tuple(known), sampling),)
    for step in range(6):
        blocks = (1, 2, 3) if step < 5 else (9, 4, 7)
        computed = computed if step < 5 else 0
        part = SequenceStep(7, tuple(known[computed:]), computed, blocks, -1, sample=True)
        (sampled,) = runner.execute(StepPlan(step, new, (part,), ())).sampled
        new, computed = (), len(known)
        known += sampled.token_ids
    assert known[len(PROMPTS[4]) :] == expected[:6]


def test_results_come_once_for_each_request_and_only_where_asked(llama_folder: Path, tmp_path: Path) -> None:
    runner = tiny_runner(llama_folder, tmp_path)
    news = tuple(NewRequest(index, (1, 2, 3), Sampling(temperature=0.0)) for index in range(4))
    slots, sample = (2, -1, 0, 1), (True, True, False, True)
    steps = tuple(SequenceStep(index, (1, 2, 3), 0, (index,), slots[index], sample=sample[index]) for index in range(4))
    result = runner.execute(StepPlan(5, news, steps, ()))
    assert result.step == 5
    assert sorted(entry.request_id for entry in result.sampled) == [0, 1, 3]
    for entry in result.sampled:
        expected = first_logits(runner, (1, 2, 3), slots[entry.request_id]).argmax()
        assert entry.token_ids == (int(expected),)
    nothing = runner.execute(StepPlan(6, (), (steps[2],), (0, 1)))
    assert nothing.sampled == ()


def test_an_adapter_that_overflows_breaks_nobody_else(llama_folder: Path, tmp_path: Path) -> None:
    runner = tiny_runner(llama_folder, tmp_path)
    config = read_config(llama_folder)
    huge = random_adapter(config, tmp_path / "huge", ranks=dict.fromkeys(ALL_SEVEN, 4), seed=1, gain=1e30)
    runner.prepare_adapter(3, huge, chunks_for(runner, 3))
    expected = run_jobs(runner, [Job(PROMPTS[4], 10, slot=0)])
    poisoned = [Job(PROMPTS[5], 10, slot=3), Job(PROMPTS[4], 10, slot=0), Job(PROMPTS[1], 10, slot=3)]
    assert run_jobs(runner, poisoned)[1] == expected[0]
    assert not torch.isfinite(first_logits(runner, PROMPTS[5], 3)).all()
    prompt, sampling = tuple(PROMPTS[1]), Sampling(max_tokens=1)
    new = tuple(NewRequest(request_id, prompt, sampling) for request_id in (90, 91))
    steps = (SequenceStep(90, prompt, 0, (0,), 3, sample=True), SequenceStep(91, prompt, 0, (1,), 0, sample=True))
    assert runner.execute(StepPlan(99, new, steps, ())).broken_request_ids == (90,)
    # Blocks that held the broken request's keys serve others afterwards.
    assert run_jobs(runner, [Job(PROMPTS[4], 10, slot=0), Job(PROMPTS[0], 10)])[0] == expected[0]


def test_a_slot_filled_anew_serves_the_new_adapter_only(llama_folder: Path, tmp_path: Path) -> None:
    runner = tiny_runner(llama_folder, tmp_path)
    before = first_logits(runner, PROMPTS[3], 0)
    runner.release_adapter(0)
    with pytest.raises(KeyError):
        first_logits(runner, PROMPTS[3], 0)
    size = runner.prepare_adapter(0, tmp_path / "1.packed", chunks_for(runner, 0)).device_bytes
    assert torch.equal(first_logits(runner, PROMPTS[3], 0), first_logits(runner, PROMPTS[3], 1))
    assert not torch.allclose(before, first_logits(runner, PROMPTS[3], 0), atol=1e-2)
    assert size == runner.prepare_adapter(3, tmp_path / "1.packed", chunks_for(runner, 3)).device_bytes


def test_an_adapter_of_another_base_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    runner = open_runner(llama_folder)
    config = read_config(llama_folder)
    file = random_adapter(config, tmp_path / "a", ranks={"self_attn.q_proj": 4}, seed=0, base_digest="c" * 64)
    with pytest.raises(BaseMismatch) as caught:
        runner.prepare_adapter(0, file, chunks_for(runner, 0))
    assert caught.value.metadata["actual"] == "c" * 64
    with pytest.raises(KeyError):
        first_logits(runner, [1], 0)


def test_a_damaged_adapter_is_refused_and_leaves_the_slot_empty(llama_folder: Path, tmp_path: Path) -> None:
    runner = tiny_runner(llama_folder, tmp_path)
    damaged = tmp_path / "damaged"
    damaged.write_bytes((tmp_path / "0.packed").read_bytes()[:-10])
    with pytest.raises(CorruptArtifact):
        runner.prepare_adapter(3, damaged, chunks_for(runner, 3))
    with pytest.raises(KeyError):
        first_logits(runner, [1], 3)


def test_loading_beside_steps_disturbs_neither(llama_folder: Path, tmp_path: Path) -> None:
    runner = tiny_runner(llama_folder, tmp_path)
    expected = run_jobs(runner, [Job(PROMPTS[4], 30, slot=0)])
    wanted = first_logits(runner, PROMPTS[2], 2)
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            for _ in range(40):
                runner.prepare_adapter(3, tmp_path / "2.packed", chunks_for(runner, 3))
                runner.release_adapter(3)
            runner.prepare_adapter(3, tmp_path / "2.packed", chunks_for(runner, 3))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test tells
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    while thread.is_alive():
        assert run_jobs(runner, [Job(PROMPTS[4], 30, slot=0)]) == expected
    thread.join(timeout=10)
    assert not failures
    assert torch.equal(first_logits(runner, PROMPTS[2], 3), wanted)


def test_steps_of_answers_are_replayed_whatever_calibration_computed_before(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(llama_folder)
    runner.calibrate()
    replayed: list[bool] = []
    replay = CpuStep.replay

    def noted(self: CpuStep, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        known = replay(self, token_ids)
        replayed.append(known is not None)
        return known

    monkeypatch.setattr(CpuStep, "replay", noted)
    news = tuple(NewRequest(index, (1,), Sampling(temperature=0.0)) for index in range(4))
    for step in range(3):
        rows = tuple(SequenceStep(index, (5 + step,), step, (index,), -1, sample=True) for index in range(4))
        runner.execute(StepPlan(step, news if step == 0 else (), rows, ()))
    assert replayed[-1]
