"""Serving facts and events as protobuf."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from loraplex.types.v1.generation_pb2 import AdapterTier, FinishReason
from worker.evaluation.outcome import Outcome, Progress
from worker.generation import ChoiceEnd, TextDelta
from worker.mailbox import Position, Timing
from worker.messages import choice_end_message, delta_message, evaluation_message, serving_facts

TIMING = Timing(queue_s=0.5, adapter_load_s=0.25, prefill_s=0.125, decode_s=2.0, adapter_on_device=False)


def facts(timing=TIMING, *, fetch_s=0.0, fetched=False, digests=("v", "a")):
    return serving_facts(
        timing,
        fetch_s=fetch_s,
        fetched=fetched,
        base_digest="b",
        base_quantization="int8",
        digests=digests,
        worker_id="w",
    )


def seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def test_time_spent_fetching_is_loading_not_queueing():
    told = facts(fetch_s=0.375, fetched=True)
    assert (seconds(told.queue_time), seconds(told.adapter_load_time)) == (0.125, 0.625)
    assert (seconds(told.prefill_time), seconds(told.decode_time)) == (0.125, 2.0)
    assert seconds(facts(fetch_s=9.0, fetched=True).queue_time) == 0


@pytest.mark.parametrize(
    ("fetched", "on_device", "tier"),
    [
        (True, False, AdapterTier.ADAPTER_TIER_SOURCE),
        (False, False, AdapterTier.ADAPTER_TIER_DISK),
        (False, True, AdapterTier.ADAPTER_TIER_DEVICE),
    ],
)
def test_the_tier_is_where_the_adapter_was(fetched, on_device, tier):
    timing = Timing(0, 0, 0, 0, adapter_on_device=on_device)
    assert facts(timing, fetched=fetched).tier_hit == tier


def test_the_base_has_no_tier_and_no_digests():
    told = facts(digests=None)
    assert (told.tier_hit, told.version_digest, told.artifact_digest) == (0, "", "")
    assert (told.base_digest, told.worker_id) == ("b", "w")


def test_a_delta_carries_text_tokens_and_logprobs_with_bytes(tiny_text):
    (a,) = tiny_text._tokenizer.encode("a").ids
    (b,) = tiny_text._tokenizer.encode("b").ids
    delta = TextDelta(2, "a", (a,), (Position(-0.5, ((a, -0.5), (b, -1.5))),))
    told = delta_message(delta, tiny_text.vocabulary).delta
    assert (told.index, told.text, list(told.token_ids)) == (2, "a", [a])
    (position,) = told.logprobs
    assert (position.chosen.token_id, position.chosen.token, position.chosen.logprob) == (a, b"a", -0.5)
    assert [(entry.token, entry.logprob) for entry in position.top] == [(b"a", -0.5), (b"b", -1.5)]


def test_ends_tell_reason_and_stop_string():
    stopped = choice_end_message(ChoiceEnd(1, "stop", "END")).choice_finished
    assert (stopped.index, stopped.reason, stopped.stop_string) == (1, FinishReason.FINISH_REASON_STOP, "END")
    full = choice_end_message(ChoiceEnd(0, "length", None)).choice_finished
    assert full.reason == FinishReason.FINISH_REASON_LENGTH
    assert not full.HasField("stop_string")


def test_an_evaluation_tells_its_progress_and_then_all_that_was_measured():
    progress = evaluation_message(Progress(3, 40))
    assert progress.WhichOneof("event") == "progress"
    assert (progress.progress.done_prompts, progress.progress.total_prompts) == (3, 40)
    outcome = Outcome("v", "a", "e", "b", 2, 40, 2000, 0.5, 0.25, 4.0, "1.0", "cpu bfloat16")
    message = evaluation_message(outcome)
    assert message.WhichOneof("event") == "evaluation"
    told = message.evaluation
    assert (told.version_digest, told.artifact_digest, told.exact_artifact_digest, told.base_digest) == tuple("vaeb")
    assert (told.prompt_set, told.num_prompts, told.num_positions) == (2, 40, 2000)
    assert (told.top1_agreement, told.mean_kl, told.max_kl) == (0.5, 0.25, 4.0)
    assert (told.worker_version, told.device) == ("1.0", "cpu bfloat16")
