"""Every kind of adapter that PEFT makes computes what PEFT computes, once it is validated and packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.adapter_format.base import BaseLinears, read_linears
from common.adapter_format.base_weights import BaseWeights
from common.adapter_format.packed import PackedAdapter, open_packed, pack, version_digest
from common.adapter_format.validate import WEIGHTS_FILE, Validated, examine
from loraplex.errors import UnsupportedAdapter
from loraplex.manifest import read_manifest
from tests.packed_oracle import packed_logits, relative_error
from tests.peft_refusals import REFUSALS, make_refusal, make_xlora
from tests.peft_variants import BASES, VARIANTS, load_base, make_variant, model_logits, peft_logits, write_base

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TOLERANCE = 1e-4
WITH_VOCABULARY = ["embedding_and_head_tied", "saved_both", "head_dora"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, tuple[Path, BaseLinears]]:
    folder = tmp_path_factory.mktemp("bases")
    made = {kind: write_base(kind, folder / kind) for kind in BASES}
    return {kind: (path, read_linears(read_manifest(path))) for kind, path in made.items()}


def examined(folder: Path, base: tuple[Path, BaseLinears]) -> Validated:
    config = (folder / "adapter_config.json").read_bytes()
    return examine(config, folder / WEIGHTS_FILE, base[1], lambda _: BaseWeights.open(base[0]))


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


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_right_is_refused_by_its_field(tmp_path, bases, name):
    folder = make_refusal(name, bases["llama"][0], tmp_path / "adapter")
    with pytest.raises(UnsupportedAdapter) as caught:
        examined(folder, bases["llama"])
    assert caught.value.field == REFUSALS[name][1]


def test_an_x_lora_is_refused(tmp_path, bases):
    lora = make_variant("plain", bases["llama"][0], tmp_path / "lora")
    folder = make_xlora(bases["llama"][0], lora, tmp_path / "adapter")
    with pytest.raises(UnsupportedAdapter) as caught:
        examined(folder, bases["llama"])
    assert caught.value.field == "peft_type"
