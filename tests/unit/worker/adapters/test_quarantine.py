"""Quarantine: growing pauses for what fails, none for what is not the adapter's fault, and ways out."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from loraplex.errors import (
    ArtifactNotFound,
    ArtifactUnreachable,
    BaseMismatch,
    Cancelled,
    CorruptArtifact,
    DeadlineUnreachable,
    EngineDown,
    LoraplexError,
    NoSpace,
    QueueFull,
    TooLarge,
    UnsupportedAdapter,
    VersionMismatch,
)
from worker.adapters.quarantine import LASTING, MAX_ENTRIES, Quarantine, Stage


class Unhurried(random.Random):
    """Draws the longest pause."""

    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


@pytest.fixture
def changed() -> list[str]:
    return []


@pytest.fixture
def quarantine(changed: list[str]) -> Quarantine:
    return Quarantine(changed.append, Unhurried())


def test_a_failed_adapter_is_refused_with_its_own_error_and_a_time_to_wait(quarantine, changed):
    error = CorruptArtifact("the tensor x is missing", tensor="x")
    assert quarantine.failed("a", error, Stage.LOAD, 100.0) == 1.0
    with pytest.raises(CorruptArtifact, match="tensor x") as refused:
        quarantine.check("a", 100.25)
    assert refused.value.retry_after_s == 0.75
    assert refused.value.metadata == {"tensor": "x", "quarantined": "true"}
    quarantine.check("b", 100.25)
    quarantine.check("a", 101.0)
    assert changed == ["a"]


def test_pauses_double_up_to_five_minutes_and_start_anew_after_a_long_while(quarantine):
    now, pauses = 0.0, []
    for _ in range(12):
        pause = quarantine.failed("a", CorruptArtifact("no"), Stage.LOAD, now)
        pauses.append(pause)
        now += pause
    assert pauses[:3] == [1, 2, 4]
    assert all(second in (2 * first, 300) for first, second in pairwise(pauses))
    assert pauses[-1] == 300
    assert quarantine.failed("a", CorruptArtifact("no"), Stage.LOAD, now + 3 * LASTING.longest_s) == 1


def test_an_unreachable_source_is_tried_again_sooner_and_at_once_when_it_is_back(quarantine, changed):
    pauses = [quarantine.failed("a", ArtifactUnreachable("away"), Stage.FETCH, 0.0) for _ in range(8)]
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10, 10]
    quarantine.failed("b", ArtifactNotFound("gone"), Stage.FETCH, 0.0)
    changed.clear()
    quarantine.source_is_back()
    assert changed == ["a"]
    assert quarantine.find("a", 0.1) is None
    assert quarantine.find("b", 0.1) is not None


@pytest.mark.parametrize(
    "error",
    [NoSpace("full"), DeadlineUnreachable("late"), EngineDown("dead"), QueueFull("full"), Cancelled("left"),
     TooLarge("large"), VersionMismatch("of another request")],
)  # fmt: skip
def test_what_is_not_the_adapters_fault_puts_nothing_in(quarantine, changed, error):
    assert quarantine.failed("a", error, Stage.FETCH, 0.0) is None
    quarantine.check("a", 0.0)
    assert not changed


@pytest.mark.parametrize("error", [BaseMismatch("other"), UnsupportedAdapter("rank"), LoraplexError("a bug")])
def test_what_would_fail_again_is_put_in(quarantine, error):
    assert quarantine.failed("a", error, Stage.LOAD, 0.0) == 1.0
    with pytest.raises(type(error)):
        quarantine.check("a", 0.5)


def test_success_lets_out_what_failed_at_its_stage_or_before(quarantine, changed):
    quarantine.failed("a", CorruptArtifact("no"), Stage.LOAD, 0.0)
    quarantine.worked("a", Stage.FETCH)
    assert quarantine.find("a", 0.0) is not None
    quarantine.worked("a", Stage.LOAD)
    assert quarantine.find("a", 0.0) is None
    quarantine.failed("b", ArtifactNotFound("no"), Stage.FETCH, 0.0)
    quarantine.worked("b", Stage.FETCH)
    assert quarantine.find("b", 0.0) is None
    quarantine.worked("never failed", Stage.LOAD)
    assert changed == ["a", "a", "b", "b"]


def test_it_does_not_grow_without_bound(quarantine):
    for number in range(MAX_ENTRIES + 10):
        quarantine.failed(str(number), CorruptArtifact("no"), Stage.LOAD, 0.0)
    assert quarantine.find("9", 0.0) is None
    assert quarantine.find("10", 0.0) is not None


def test_pauses_are_spread():
    spread = Quarantine(rng=random.Random(1))
    pauses = [spread.failed("a", CorruptArtifact("no"), Stage.LOAD, 0.0) for _ in range(20)]
    assert len(set(pauses[10:])) > 5
    assert all(pause is not None and 150 <= pause <= 300 for pause in pauses[10:])
