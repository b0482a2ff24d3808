"""When a process of the local cluster is started again: a pure decision."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 15.0
STABLE_S: Final = 30.0
"""A process that was ready for so long starts with a clean sheet."""
MAX_EARLY_SIGNALS: Final = 3
"""A process that never was ready is given up after so many deaths by a signal."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. `code` as subprocess gives it: negative is a signal. `ready_s` is 0 where it never was ready."""

    code: int
    ready_s: float

    @property
    def reason(self) -> str:
        """What happened, for people."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


@dataclass(frozen=True, slots=True)
class History:
    """What came before: whether it ever was ready, and the ends in a row without a stable run."""

    ever_ready: bool = False
    failures: int = 0

    def after(self, ended: Ended) -> History:
        """Return the history with this end in it."""
        return History(self.ever_ready or ended.ready_s > 0, 1 if ended.ready_s >= STABLE_S else self.failures + 1)

    def delay_s(self, ended: Ended) -> float | None:
        """Return the pause before the next start, or None to give up; this history already holds `ended`.

        A process that ends by itself before it ever was ready is misconfigured: starting it again would not help.
        """
        if not self.ever_ready and (ended.code >= 0 or self.failures >= MAX_EARLY_SIGNALS):
            return None
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.failures - 1))
