"""The ranges of sampling parameters, as loraplex/types/v1/sampling.proto tells clients. Bounds are inclusive."""

from __future__ import annotations

from typing import Final

MAX_TEMPERATURE: Final = 2.0
MAX_REPETITION_PENALTY: Final = 2.0
MAX_PENALTY: Final = 2.0
"""Of presence and frequency; the least is its negative."""
MAX_LOGIT_BIAS: Final = 100.0
"""Of one token; the least is its negative."""
MAX_LOGIT_BIASES: Final = 1024
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 16
