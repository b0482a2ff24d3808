"""Every variant that PEFT writes, from its files: merged, and loaded by transformers, it answers as PEFT does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.adapter_format.base import read_linears
from common.adapter_format.base_weights import BaseWeights
from common.adapter_format.packed import open_packed, pack
from common.adapter_format.validate import validate
from common.merging.folder import write_merged
from loraplex.errors import UnsupportedAdapter
from loraplex.manifest import read_manifest
from tests.peft_variants import VARIANTS, load_base, make_variant, model_logits, peft_logits, write_base

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

UNPLACED = ("lora_bias_biased", "head_bias")
"""Those with a bias where no model of the base's family has a place for one: served, but not merged."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_merged_variant_answers_as_peft(name: str, tmp_path: Path) -> None:
    base = write_base(VARIANTS[name].base, tmp_path / "base")
    manifest, folder = read_manifest(base), make_variant(name, base, tmp_path / "adapter")
    config, weights = (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors"
    pack(validate(config, weights, read_linears(manifest), lambda _: BaseWeights.open(base)), tmp_path / "packed")
    adapter = open_packed(tmp_path / "packed")
    if name in UNPLACED:
        with pytest.raises(UnsupportedAdapter, match="no place"):
            write_merged(base, manifest, adapter, tmp_path / "merged", dtype="float32")
        return
    write_merged(base, manifest, adapter, tmp_path / "merged", dtype="float32")
    found = model_logits(load_base(tmp_path / "merged"))
    for got, expected in zip(found, peft_logits(base, folder), strict=True):
        assert np.linalg.norm(got - expected) < 1e-4 * np.linalg.norm(expected)
