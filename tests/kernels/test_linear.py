"""A packed linear layer computes what the plain one does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from worker.kernels.linear import Linear


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 129])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "inner"), [(48, 32), (33, 65)])
def test_equals_the_plain_layer(rows: int, biased: bool, out: int, inner: int) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(out, inner), torch.randn(out) if biased else None
    x = torch.randn(rows, inner)
    torch.testing.assert_close(Linear(weight, bias)(x), functional.linear(x, weight, bias))


def test_takes_bfloat16_whatever_the_processor() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    y = Linear(weight, None)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-1)
