"""Products of panels: every table of forms that a processor may get, whatever this one has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import types

from tests.kernels.arena import randn
from worker.kernels.cpu.linear import pack_linear, product_for
from worker.kernels.cpu.panels import FORMS, PANEL_OUTPUTS, PANELS, forms_for
from worker.kernels.linear import Linear

WIDE = forms_for(32, 16)


@pytest.mark.parametrize("forms", [forms_for(16, 8), WIDE, (1, 2)], ids=str)
def test_rows_come_out_alike_to_the_bit_in_every_form(forms: tuple[int, ...]) -> None:
    weight, bias, x = randn(90, 67), randn(90, seed=1), randn(27, 67, seed=2)
    packed = pack_linear(Linear.plain(weight, bias))
    assert packed.bias is not None
    product = product_for(types.float32, 4, forms)
    results = []
    for rows in range(1, len(x) + 1):
        y = torch.full((rows + 1, 90), torch.nan)
        for task in range(2):
            product(
                *(x.data_ptr(), rows, 67, packed.weight.data_ptr(), 90, 0, packed.bias.data_ptr(), y.data_ptr()),
                *(2 * PANELS, task),
            )
        assert y[rows].isnan().all()  # nothing past the end
        results.append(y[:rows])
    whole = results[-1]
    assert torch.allclose(whole, x @ weight.T + bias, atol=1e-4)
    assert all(torch.equal(result, whole[: len(result)]) for result in results)


def test_a_table_fits_the_registers() -> None:
    for registers, lanes in ((16, 8), (32, 16)):
        for rows, width in enumerate(forms_for(registers, lanes), start=1):
            vectors = -(-PANEL_OUTPUTS // lanes)
            assert (rows * width + 1) * vectors + 1 <= registers  # one panel's weights at a time
            assert PANELS % width == 0
    assert FORMS in (forms_for(16, 8), WIDE)
    assert np.all(np.diff(FORMS) <= 0)
