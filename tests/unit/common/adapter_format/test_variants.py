"""Every kind of adapter that PEFT makes computes what PEFT computes, once it is validated and packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peft import get_peft_model

from common.adapter_format.choice import estimated_bytes
from common.adapter_format.packed import EMBEDDING, PackedAdapter, open_packed, pack, version_digest
from common.adapter_format.quantize import quantize
from loraplex.errors import AdapterMismatch, UnsupportedAdapter
from tests.packed_oracle import packed_logits, relative_error
from tests.peft_refusals import REFUSALS, make_refusal, make_xlora
from tests.peft_variants import (
    VARIANTS,
    VOCAB,
    load_base,
    make_variant,
    model_logits,
    peft_logits,
    quietly_loaded,
    train,
)
from tests.variant_bases import examined

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TOLERANCE = 1e-4


def packed(adapter: PackedAdapter, file: Path) -> PackedAdapter:
    pack(adapter, file)
    return open_packed(file)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_packed_variant_computes_what_peft_computes(tmp_path, bases, name):
    base = bases[VARIANTS[name].base]
    folder = make_variant(name, base[0], tmp_path / "adapter")
    adapter = packed(examined(folder, base).adapter, tmp_path / "packed")
    expected = peft_logits(base[0], folder)
    assert relative_error(packed_logits(base[0], adapter), expected) <= TOLERANCE
    assert relative_error(model_logits(load_base(base[0])), expected) > 0.05  # it does something
    assert version_digest(adapter.base_digest, adapter.modules, adapter.matrices) == adapter.version_digest


@pytest.mark.parametrize(("form", "allowed"), [("int8", 0.05), ("int4", 0.4)])
@pytest.mark.parametrize("name", ["embedding_and_head_tied", "embedding_dora", "saved_both", "lora_bias_biased"])
def test_a_quantized_variant_keeps_all_it_has(tmp_path, bases, name, form, allowed):
    base = bases[VARIANTS[name].base]
    exact = examined(make_variant(name, base[0], tmp_path / "adapter"), base).adapter
    served = packed(quantize(exact, form).adapter, tmp_path / "packed")
    assert relative_error(packed_logits(base[0], served), packed_logits(base[0], exact)) < allowed
    for ours, module in zip(served.modules, exact.modules, strict=True):
        kinds = {part.format for part in ours.parts}
        assert kinds <= {"int8"} if form == "int8" or module.name == EMBEDDING else "int4" in kinds
        assert (ours.affine is None) == (module.affine is None)
        if ours.affine is not None and module.affine is not None:
            assert ours.affine.magnitude is None
            np.testing.assert_array_equal(ours.affine.scale, module.affine.scale)
            np.testing.assert_array_equal(ours.affine.shift, module.affine.shift)
    for replaced, matrix in zip(served.matrices, exact.matrices, strict=True):
        assert (replaced.name, replaced.dtype) == (matrix.name, matrix.dtype)
        np.testing.assert_array_equal(replaced.weight, matrix.weight)
    for adapter, within in ((exact, 0.15), (served, 0.25)):  # tiny: headers and corrections take much
        pack(adapter, tmp_path / "sized")
        reckoned = estimated_bytes(exact.modules, adapter.format, exact.matrices)
        assert reckoned == pytest.approx((tmp_path / "sized").stat().st_size, rel=within)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_right_is_refused_by_its_field(tmp_path, bases, name):
    folder = make_refusal(name, bases["llama"][0], tmp_path / "adapter")
    with pytest.raises(UnsupportedAdapter) as caught:
        examined(folder, bases["llama"])
    assert caught.value.field == REFUSALS[name][1]


def test_an_adapter_of_a_resized_vocabulary_is_refused(tmp_path, bases):
    base = bases["llama"]
    with quietly_loaded(base[0]) as loaded:
        loaded.resize_token_embeddings(VOCAB + 16)
        model = get_peft_model(loaded, VARIANTS["plain"].lora_config())
        train(model)
        model.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterMismatch, match="resized vocabulary") as caught:
        examined(tmp_path, base)
    assert caught.value.metadata["tensor"].endswith(("embed_tokens.weight", "lm_head.weight"))


def test_an_x_lora_is_refused(tmp_path, bases):
    lora = make_variant("plain", bases["llama"][0], tmp_path / "lora")
    folder = make_xlora(bases["llama"][0], lora, tmp_path / "adapter")
    with pytest.raises(UnsupportedAdapter) as caught:
        examined(folder, bases["llama"])
    assert caught.value.field == "peft_type"
