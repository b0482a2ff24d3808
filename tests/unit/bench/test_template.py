"""Adapters made from a template: whole, distinct, and of the template's scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.template import AdapterTemplate
from common.adapter_format.packed import open_packed
from tests.tiny_base import write_tiny_base


def test_every_adapter_of_a_template_is_whole_and_unlike_the_others(tmp_path: Path) -> None:
    base = write_tiny_base(tmp_path / "base")
    template = AdapterTemplate.make(base, rank=4, scratch=tmp_path)
    files = [template.write(number, tmp_path / f"{number}.packed") for number in range(40)]
    assert {file.stat().st_size for file in files} == {template.num_bytes}
    opened = [open_packed(file) for file in files]
    quantized = open_packed(tmp_path / "template.packed")
    for position, module in enumerate(quantized.modules):
        parts = [adapter.modules[position].parts[0] for adapter in opened]
        assert all(np.array_equal(part.scale, module.parts[0].scale) for part in parts)
        assert len({part.a.tobytes() for part in parts}) == 40
