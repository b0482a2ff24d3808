"""Whether a call that was cut short ran out of time, or was given up: gRPC cancels its handler either way."""

from __future__ import annotations

from typing import Any, Final

_LATE_S: Final = 0.05
"""A cancellation with so little left is the deadline: the client's clock has rung a moment before ours."""


def is_past(context: Any) -> bool:
    """Tell whether the deadline of a call (its `ServicerContext`) has passed, by the client's clock or ours."""
    left_s = context.time_remaining()
    return left_s is not None and left_s <= _LATE_S
