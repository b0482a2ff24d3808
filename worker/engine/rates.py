"""Smoothed speeds of prefill and decode, measured from the steps as they come. No clock: durations are arguments."""

from __future__ import annotations

from typing import Final

HALF_LIFE_S: Final = 5.0
"""Busy seconds after which a measurement counts half."""
PRIOR_S: Final = 1.0
"""Busy seconds that the start-up calibration counts for."""


class Rate:
    """Tokens per second over recent busy time, weighted by duration, so that short odd steps hardly count."""

    def __init__(self, tokens_per_second: float) -> None:
        if not tokens_per_second > 0:
            raise ValueError(f"a calibrated speed must be above 0 tokens/s, not {tokens_per_second}")
        self._seconds = PRIOR_S
        self._tokens = tokens_per_second * PRIOR_S

    @property
    def tokens_per_second(self) -> float:
        """The smoothed speed, always above 0."""
        return self._tokens / self._seconds

    def add(self, tokens: int, seconds: float) -> None:
        """Count `tokens` that took `seconds`."""
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds


class StepRates:
    """Both speeds; a step that mixes prefill and decode is split by what each part is expected to cost."""

    def __init__(self, prefill_tokens_per_second: float, decode_tokens_per_second: float) -> None:
        self.prefill = Rate(prefill_tokens_per_second)
        self.decode = Rate(decode_tokens_per_second)

    def add_step(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Count a step that computed so many tokens of either kind in `seconds`."""
        if seconds <= 0:
            return
        prefill_cost = prefill_tokens / self.prefill.tokens_per_second
        decode_cost = decode_tokens / self.decode.tokens_per_second
        total = prefill_cost + decode_cost
        if prefill_tokens:
            self.prefill.add(prefill_tokens, seconds * prefill_cost / total)
        if decode_tokens:
            self.decode.add(decode_tokens, seconds * decode_cost / total)
