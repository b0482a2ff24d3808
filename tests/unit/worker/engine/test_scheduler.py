"""What the scheduler plans and how requests end, as tables; fairness and adapters have files of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex.errors import BY_REASON
from tests.fake_runner import expected_tokens
from tests.unit.worker.engine.driver import Driver
from worker.engine.plan import SampledTokens, StepPlan, StepResult

Drive = Callable[..., Driver]


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(request, position, tokens, sample) of each sequence."""
    assert plan is not None
    return [(s.request_id, s.position, len(s.token_ids), s.sample) for s in plan.sequences]


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_sampled_once_at_its_end(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=16)
    driver.submit(prompt=40, max_tokens=2)
    assert shape(driver.step()) == [(1, 0, 16, False)]
    assert shape(driver.step()) == [(1, 16, 16, False)]
    assert shape(driver.step()) == [(1, 32, 8, True)]
    assert shape(driver.step()) == [(1, 40, 1, True)]
    assert driver.step() is None
    assert driver.tokens[1] == expected_tokens(driver.prompts[1], 2)


def test_generating_requests_come_first_and_prompts_get_a_block_at_least(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=4)
    driver.submit(prompt=2, max_tokens=9)
    driver.submit(prompt=2, max_tokens=9)
    driver.step()
    driver.submit(prompt=6, max_tokens=9)
    driver.submit(prompt=3, max_tokens=9)
    assert shape(driver.step()) == [(1, 2, 1, True), (2, 2, 1, True), (3, 0, 4, False)]
    assert shape(driver.step()) == [(1, 3, 1, True), (2, 3, 1, True), (3, 4, 2, True), (4, 0, 2, False)]
    assert shape(driver.step()) == [(1, 4, 1, True), (2, 4, 1, True), (3, 6, 1, True), (4, 2, 1, True)]


def test_a_long_prompt_never_makes_a_step_larger_than_the_budget(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=10)
    answers = [driver.submit(prompt=1, max_tokens=30) for _ in range(4)]
    driver.step()
    driver.submit(prompt=50, max_tokens=2)
    for _ in range(8):
        plan = driver.step()
        assert plan is not None
        assert sum(len(s.token_ids) for s in plan.sequences) == 10
        assert [s.request_id for s in plan.sequences][:4] == answers  # nobody's answer waits
    assert shape(driver.step())[-1] == (5, 48, 2, True)


def test_tokens_do_not_depend_on_company_or_chunks(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=5)
    ids = [driver.submit(prompt=p, max_tokens=7, adapter=a) for p in (1, 9, 17) for a in (None, "a", "b")]
    driver.run_until_idle()
    for request_id in ids:
        file = driver.adapters[request_id]
        adapter = b"" if file is None else file.artifact_digest.encode()
        assert driver.tokens[request_id] == expected_tokens(driver.prompts[request_id], 7, adapter=adapter)


def test_the_runner_hears_of_a_request_once_and_of_its_end_once(drive: Drive) -> None:
    driver = drive()
    driver.runner.keep_plans = True
    driver.submit(max_tokens=1)
    driver.step()
    driver.submit(max_tokens=3)
    driver.run_until_idle()
    new = [n.request_id for plan in driver.runner.plans for n in plan.new_requests]
    ended = [plan.ended_request_ids for plan in driver.runner.plans]
    assert new == [1, 2]
    assert ended == [(), (1,), (), ()]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "finish", "count"),
    [(3, 1, "length", 1), (3, 5, "length", 5), (60, 10, "length", 4), (63, 10, "length", 1)],
)
def test_generation_ends_at_max_tokens_or_at_the_context(
    drive: Drive, prompt: int, max_tokens: int, finish: str, count: int
) -> None:
    driver = drive(max_context_tokens=64)
    driver.submit(prompt=prompt, max_tokens=max_tokens)
    driver.run_until_idle()
    assert driver.finished[1].finish == finish
    assert len(driver.tokens[1]) == count


@pytest.mark.parametrize(
    ("sampling", "finish", "count"),
    [
        ({}, "stop", 1),
        ({"min_tokens": 1}, "stop", 2),
        ({"min_tokens": 4}, "stop", 5),
        ({"ignore_eos": True}, "length", 6),
        ({"min_tokens": 6}, "length", 6),
    ],
)
def test_end_of_sequence_ends_after_min_tokens_unless_ignored(
    drive: Drive, sampling: dict[str, object], finish: str, count: int
) -> None:
    driver = drive(eos_token_ids=frozenset(range(256)))  # every token is an end of sequence
    driver.submit(max_tokens=6, **sampling)  # type: ignore[arg-type]
    driver.run_until_idle()
    assert driver.finished[1].finish == finish
    assert len(driver.tokens[1]) == count


def test_several_tokens_of_one_step_are_cut_at_the_end_of_sequence(drive: Drive) -> None:
    driver = drive()
    driver.submit(prompt=2, max_tokens=10, logprobs=0)
    plan = driver.scheduler.schedule(driver.now).plan
    assert plan is not None
    result = StepResult(plan.step, (SampledTokens(1, (7, 0, 9)),))
    (output,) = driver.scheduler.update(plan, result, 0.1, driver.now)
    assert (output.token_ids, output.finish) == ((7, 0), "stop")


@pytest.mark.parametrize(
    ("request_", "limits", "reason", "field"),
    [
        ({"prompt": 0}, {}, "EMPTY_PROMPT", "prompt"),
        ({"prompt": 64}, {}, "PROMPT_TOO_LONG", "prompt"),
        ({"prompt": 30}, {"total_blocks": 7}, "PROMPT_TOO_LONG", "prompt"),
        ({"prompt": 20, "max_tokens": 10}, {"total_blocks": 7}, "INVALID_PARAMETER", "max_tokens"),
        ({"prompt": (5, 256)}, {}, "INVALID_PARAMETER", "tokens"),
        ({"prompt": (5, -1)}, {}, "INVALID_PARAMETER", "tokens"),
        ({"max_tokens": 0}, {}, "INVALID_PARAMETER", "max_tokens"),
        ({"adapter": "large"}, {"max_adapter_bytes": 4}, "TOO_LARGE", None),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    drive: Drive, request_: dict[str, object], limits: dict[str, object], reason: str, field: str | None
) -> None:
    driver = drive(**limits)
    driver.submit(**request_)  # type: ignore[arg-type]
    assert driver.failed[1].reason == reason
    assert reason in BY_REASON
    assert driver.failed[1].metadata.get("field") == field
    assert driver.scheduler.status().waiting_requests == 0
    assert driver.step() is None


@pytest.mark.parametrize(("prompt", "max_tokens"), [(20, 9), (28, 1)])
def test_a_request_that_fills_all_kv_memory_exactly_runs(drive: Drive, prompt: int, max_tokens: int) -> None:
    driver = drive(total_blocks=7)
    driver.submit(prompt=prompt, max_tokens=max_tokens)
    driver.run_until_idle()
    assert len(driver.tokens[1]) == max_tokens


def test_an_id_in_use_is_a_broken_front_end(drive: Drive) -> None:
    driver = drive()
    driver.submit()
    driver.next_id = 1
    with pytest.raises(ValueError, match="already in use"):
        driver.submit()
    driver.step()
    driver.next_id = 1
    with pytest.raises(ValueError, match="already in use"):
        driver.submit()


@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_an_abort_frees_everything_whatever_the_request_was_doing(drive: Drive, steps_before: int) -> None:
    driver = drive(max_prefill_tokens=4)
    before = driver.scheduler.status()
    driver.submit(prompt=10, max_tokens=10)
    for _ in range(steps_before):
        driver.step()
    driver.abort(1, 99)
    after = driver.scheduler.status()
    assert (after.running_requests, after.waiting_requests, after.queued_prefill_tokens) == (0, 0, 0)
    assert after.free_blocks == before.free_blocks
    assert driver.step() is None
    driver.submit()  # takes the same blocks again; the runner is told of the end first
    driver.run_until_idle()


def test_the_runner_never_hears_of_a_request_that_ended_before_its_turn(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=4)
    driver.runner.keep_plans = True
    first = driver.submit(prompt=6)
    second = driver.submit(prompt=6)
    driver.step()  # both run, the budget was for one
    assert driver.scheduler.status().running_requests == 2
    driver.abort(second)
    driver.run_until_idle()
    assert {s.request_id for plan in driver.runner.plans for s in plan.sequences} == {first}
    assert not any(plan.ended_request_ids for plan in driver.runner.plans)


def test_a_failed_step_ends_its_requests_and_no_others(drive: Drive) -> None:
    driver = drive(max_running_requests=2)
    doomed = [driver.submit(), driver.submit()]
    spared = driver.submit()
    driver.fail_next_step = True
    driver.step()
    assert [driver.failed[i].reason for i in doomed] == ["INTERNAL", "INTERNAL"]
    driver.run_until_idle()
    assert driver.finished[spared].finish == "length"
    assert driver.scheduler.status().free_blocks == driver.config.total_blocks


@pytest.mark.parametrize(
    "result",
    [
        StepResult(1, ()),
        StepResult(2, (SampledTokens(1, (5,)),)),
        StepResult(1, (SampledTokens(1, ()),)),
        StepResult(1, (SampledTokens(1, (5,)), SampledTokens(1, (6,)))),
        StepResult(1, (SampledTokens(1, (5,)), SampledTokens(9, (6,)))),
    ],
)
def test_a_result_that_does_not_answer_the_plan_changes_nothing(drive: Drive, result: StepResult) -> None:
    driver = drive()
    driver.submit()
    plan = driver.scheduler.schedule(driver.now).plan
    assert plan is not None
    with pytest.raises(ValueError, match="step 1"):
        driver.scheduler.update(plan, result, 0.1, driver.now)
    good = driver.scheduler.update(plan, StepResult(1, (SampledTokens(1, (5,)),)), 0.1, driver.now)
    assert [o.token_ids for o in good] == [(5,)]


def test_status_counts_prompt_tokens_not_yet_computed(drive: Drive) -> None:
    driver = drive(max_running_requests=1, max_prefill_tokens=4)
    driver.submit(prompt=10)
    driver.submit(prompt=7)
    assert driver.scheduler.status().queued_prefill_tokens == 17
    driver.step()
    status = driver.scheduler.status()
    assert (status.running_requests, status.waiting_requests, status.queued_prefill_tokens) == (1, 1, 13)
    driver.run_until_idle()
    assert driver.scheduler.status().queued_prefill_tokens == 0


def test_timing_splits_a_request_s_life(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=4)
    driver.submit(prompt=8, max_tokens=3)
    driver.now += 0.5  # in the queue
    driver.step(seconds=0.25)
    driver.step(seconds=0.25)
    driver.step(seconds=0.125)
    driver.step(seconds=0.125)
    timing = driver.finished[1].timing
    assert timing is not None
    assert (timing.queue_s, timing.adapter_load_s, timing.prefill_s, timing.decode_s) == (0.5, 0.0, 0.5, 0.25)
    assert not timing.adapter_on_device


def test_the_first_tokens_carry_timing_too(drive: Drive) -> None:
    driver = drive()
    driver.submit(max_tokens=3)
    outputs = []
    for _ in range(3):
        plan = driver.scheduler.schedule(driver.now).plan
        assert plan is not None
        outputs += driver.scheduler.update(plan, driver.runner.execute(plan), 0.1, driver.now)
    assert [o.timing is not None for o in outputs] == [True, False, True]
    assert outputs[0].timing is not None
    assert outputs[0].timing.decode_s == 0
