"""Whether an adapter does anything: one that is the base in disguise is refused, as nobody registers it on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.adapter_format.dora import UNCHANGED
from common.adapter_format.modules import PackedMatrix, PackedModule


def has_effect(modules: Sequence[PackedModule], matrices: Sequence[PackedMatrix]) -> bool:
    """Tell whether any exact module or matrix changes the base; `matrices` are those that differ from the base's.

    A DoRA whose factors do nothing has trained magnitudes where one is farther from its norm than rounding explains.
    """
    if matrices or any(module.a.any() and module.b.any() for module in modules):
        return True
    return any(
        module.affine.shift.any()
        if module.affine.magnitude is None
        else bool((np.abs(module.affine.scale - 1) > UNCHANGED).any())
        for module in modules
        if module.affine is not None
    )
