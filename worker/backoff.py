"""How long to wait before trying again: doubling pauses that a time of health resets. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Backoff:
    """The next pause and its bounds, in seconds."""

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_s: float = 60.0
    """Running for so long forgets earlier failures."""
    failures: int = 0

    def after(self, ran_s: float) -> tuple[Backoff, float]:
        """Return the state and the pause after a failure that ended `ran_s` seconds of health."""
        failures = 0 if ran_s >= self.healthy_s else self.failures
        pause_s = min(self.longest_s, self.first_s * 2.0 ** min(failures, 30))
        return replace(self, failures=failures + 1), pause_s
