"""Adapters that failed, and for how long requests for them are refused at once. Pure: time is an argument.

Each failure in a row makes the pause longer; then the adapter is tried again, by the first who asks. Success ends it.
What the source's state explains is tried again sooner, and at once when the source is back; what is wrong with the
artifact itself later. Full disks, deadlines and a lost engine are no fault of an adapter.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from common.backoff import Backoff
from loraplex.errors import (
    BY_REASON,
    ArtifactUnreachable,
    BaseMismatch,
    InvalidAdapter,
    LoraplexError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)

LASTING: Final = Backoff(first_s=1.0, longest_s=300.0)
PASSING: Final = Backoff(first_s=0.5, longest_s=10.0)
MAX_ENTRIES: Final = 4096
_RNG: Final = random.Random()  # noqa: S311 - spreads load, no secret
_OF_THE_ADAPTER: Final = (InvalidAdapter, NotFound, BaseMismatch, PermissionDenied, Unauthenticated)


class Stage(Enum):
    """Where an adapter failed."""

    FETCH = "fetch"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Sentence:
    """Why an adapter is refused, and until when by the clock that was told."""

    reason: str
    message: str
    metadata: dict[str, str]
    stage: Stage
    failures: int
    end_s: float
    pause_s: float
    passing: bool


class Quarantine:
    """The adapters that failed last. `on_change` hears of one that was put in, or let out before its time."""

    def __init__(self, on_change: Callable[[str], None] = lambda _: None, rng: random.Random = _RNG) -> None:
        self._on_change = on_change
        self._rng = rng
        self._sentences: OrderedDict[str, Sentence] = OrderedDict()  # the one that failed longest ago first

    def failed(self, artifact_digest: str, error: LoraplexError, stage: Stage, now: float) -> float | None:
        """Note a failure; returns for how many seconds the adapter is refused, None where it is not its fault."""
        passing = isinstance(error, ArtifactUnreachable)
        if not (passing or isinstance(error, _OF_THE_ADAPTER) or error.reason == LoraplexError.reason):
            return None
        before = self._sentences.pop(artifact_digest, None)
        failures = 1
        if before is not None and now < before.end_s + 2 * LASTING.longest_s:
            failures += before.failures
        pause_s = (PASSING if passing else LASTING).jittered_s(failures, self._rng)
        self._sentences[artifact_digest] = Sentence(
            error.reason, error.message, error.metadata, stage, failures, now + pause_s, pause_s, passing
        )
        while len(self._sentences) > MAX_ENTRIES:
            self._on_change(self._sentences.popitem(last=False)[0])
        self._on_change(artifact_digest)
        return pause_s

    def find(self, artifact_digest: str, now: float) -> Sentence | None:
        """Return why an adapter is refused now, None where it is not."""
        sentence = self._sentences.get(artifact_digest)
        return sentence if sentence is not None and now < sentence.end_s else None

    def check(self, artifact_digest: str, now: float) -> None:
        """Refuse an adapter that is in quarantine: with the error that it failed with, and when to try again."""
        sentence = self.find(artifact_digest, now)
        if sentence is not None:
            kind = BY_REASON.get(sentence.reason, LoraplexError)
            error = kind(sentence.message, retry_after_s=max(0.1, sentence.end_s - now))
            error.metadata = {**sentence.metadata, "quarantined": "true"}
            raise error

    def worked(self, artifact_digest: str, stage: Stage) -> None:
        """Note a success, which makes good what failed at its stage and before."""
        sentence = self._sentences.get(artifact_digest)
        if sentence is not None and (stage is Stage.LOAD or sentence.stage is stage):
            del self._sentences[artifact_digest]
            self._on_change(artifact_digest)

    def pardon(self, artifact_digest: str) -> None:
        """Forget what an adapter failed with, its earlier failures too."""
        if self._sentences.pop(artifact_digest, None) is not None:
            self._on_change(artifact_digest)

    def source_is_back(self) -> None:
        """Let out all whose source could not be reached."""
        for digest in [digest for digest, sentence in self._sentences.items() if sentence.passing]:
            del self._sentences[digest]
            self._on_change(digest)
