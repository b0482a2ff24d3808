"""The largest rank that workers on GPUs compute: their kernels, who packs adapters and who plans for them go by it."""

from __future__ import annotations

from typing import Final

MAX_GPU_RANK: Final = 256
"""Of a module's rank rows, those that correct others included; workers on CPUs compute any rank."""
