"""One list of families for who registers a base and who computes it."""

from __future__ import annotations

import pytest
import transformers

from loraplex.errors import InvalidBaseModel
from loraplex.families import ARCHITECTURES, check_family
from tests.tiny_base import write_tiny_base
from worker.model.config import read_config


@pytest.mark.parametrize(("family", "architecture"), ARCHITECTURES.items())
def test_every_family_is_one_of_transformers_and_has_a_decoder(tmp_path, family, architecture):
    assert getattr(transformers, architecture).config_class.model_type == family
    assert read_config(write_tiny_base(tmp_path, architecture=architecture)).family == family
    assert check_family({"model_type": family, "architectures": [architecture]}) == family
    assert check_family({"model_type": family}) == family


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "gemma"}, "model_type"),
        ({"model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}, "architectures"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "architectures"),
        ({"model_type": "llama", "architectures": []}, "architectures"),
    ],
)
def test_what_is_not_served_is_refused_by_field(config, field):
    with pytest.raises(InvalidBaseModel) as refused:
        check_family(config)
    assert refused.value.field == field
    with pytest.raises(InvalidBaseModel) as refused:
        check_family(config, inside="manifest.config_json")
    assert refused.value.field == "manifest.config_json"
