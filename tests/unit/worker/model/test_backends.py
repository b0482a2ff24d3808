"""Which kernels a worker takes: the device's own where they can compute the model, else torch's with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from worker.kernels.layout import AttentionShape
from worker.kernels.placing import SiteShape
from worker.model.backends import why_not_triton

SMOLLM2 = (
    SiteShape(576, (576, 192, 192)),
    SiteShape(576, (576,)),
    SiteShape(576, (1536, 1536)),
    SiteShape(1536, (576,)),
)


@dataclass
class Model:
    head_dim: int = 64
    layers: int = 30
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] | None = (9, 0)
    sites: tuple[SiteShape, ...] = SMOLLM2

    def why_not(self) -> str | None:
        shape = AttentionShape(self.layers, 9, 3, self.head_dim)
        return why_not_triton(shape, self.sites, dtype=self.dtype, capability=self.capability)


def test_what_the_kernels_compute_they_get() -> None:
    assert Model().why_not() is None
    assert Model(capability=(8, 0), head_dim=128).why_not() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": None}, "for CUDA devices"),
        ({"capability": (7, 5)}, "compute capability is 7.5"),
        ({"dtype": torch.float32}, "give --dtype bfloat16"),
        ({"head_dim": 256}, "heads have 256 dimensions"),
        ({"head_dim": 33}, "heads have 33 dimensions"),
        ({"layers": 1}, "does not hold an adapter's tile"),
        ({"sites": (SiteShape(20480, (64,)), *SMOLLM2[1:])}, "have 20480 features"),
    ],
)
def test_what_they_do_not_compute_is_told(change: dict[str, Any], reason: str) -> None:
    why = Model(**change).why_not()
    assert why is not None
    assert reason in why
