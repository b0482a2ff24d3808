"""The figures of an evaluation, gathered over its positions. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts positions; divergences are in nats."""

    num_prompts: int = 0
    num_same_top: int = 0
    _kl: list[float] = field(default_factory=list)

    def add(self, same_top: Sequence[bool], kl: Sequence[float]) -> None:
        """Count the positions of one prompt's answer, at least one. Raises ValueError where the lengths differ."""
        if len(same_top) != len(kl) or not kl:
            raise ValueError(f"{len(same_top)} positions with {len(kl)} divergences")
        self.num_prompts += 1
        self.num_same_top += sum(same_top)
        self._kl += kl

    @property
    def num_positions(self) -> int:
        """Positions counted."""
        return len(self._kl)

    @property
    def top1_agreement(self) -> float:
        """Share of the positions where both find the same token likeliest, once there is any."""
        return self.num_same_top / len(self._kl)

    @property
    def mean_kl(self) -> float:
        """Mean over the positions, the same in whatever order they came."""
        return math.fsum(self._kl) / len(self._kl)

    @property
    def max_kl(self) -> float:
        """The largest."""
        return max(self._kl)
