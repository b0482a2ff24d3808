"""adapter_config.json: what is used, ignored and refused."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from pathlib import Path

import pytest

from common.adapter_format import config_fields
from common.adapter_format.config import parse_config
from loraplex.errors import InvalidAdapter, UnsupportedAdapter
from tests.tiny_adapters import adapter_config

ALL_FOUR = {"0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj"}


def parse(**fields):
    return parse_config(json.dumps(adapter_config(**fields)).encode())


def test_what_peft_writes_is_read():
    config = parse(r=16, lora_alpha=32)
    assert (config.rank, config.alpha, config.rslora) == (16, 32.0, False)
    assert config.targets_module("model.layers.3.mlp.up_proj", 3)
    assert not config.targets_module("lm_head", None)


def peft_fields() -> dict[str, object]:
    """The fields of the installed PEFT's LoraConfig with their defaults; read, as importing PEFT takes seconds."""
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:
        pytest.skip("peft is not installed")
    fields: dict[str, object] = {}
    for file in ("config.py", "tuners/lora/config.py"):
        for node in ast.parse((Path(spec.origin).parent / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in ("PeftConfigMixin", "PeftConfig", "LoraConfig"):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign):
                        assert isinstance(item.value, ast.Call)
                        assert isinstance(item.target, ast.Name)
                        keywords = {k.arg: k.value for k in item.value.keywords}
                        default = keywords.get("default")
                        fields[item.target.id] = ast.literal_eval(default) if default else {}
    return fields


def test_every_field_of_the_installed_peft_is_known_and_its_default_accepted():
    fields = peft_fields()
    assert {"r", "target_modules", "use_dora", "task_type"} <= fields.keys()
    assert not fields.keys() - config_fields.IGNORED - config_fields.USED - config_fields.REFUSED.keys()
    parse_config(json.dumps({**fields, "peft_type": "LORA", "target_modules": ["q_proj"]}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("bias", "lora_only"),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["mlp.experts"]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("fan_in_fan_out", True),
        ("megatron_config", {"a": 1}),
        ("alora_invocation_tokens", [5]),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("ensure_weight_tying", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", 1),
        ("layers_pattern", "h"),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("a_field_of_next_year", "on"),
        ("target_modules", "(?=x).*"),
        ("rank_pattern", {"(": 4}),
        ("rank_pattern", {f"[{n}].*": 4 for n in range(400)}),
    ],
)  # fmt: skip
def test_what_would_be_served_wrong_is_refused_by_name(field, value):
    with pytest.raises(UnsupportedAdapter) as caught:
        parse(**{field: value})
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_dropout", 0.3),
        ("inference_mode", False),
        ("task_type", None),
        ("base_model_name_or_path", None),
        ("revision", "main"),
        ("init_lora_weights", False),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "orthogonal"),
        ("init_lora_weights", "eva"),
        ("corda_config", {"corda_method": "kpm"}),  # stays in the config of a converted export
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM"}),
        ("peft_version", "0.1"),
        ("a_field_of_next_year", False),
        ("another_one", None),
    ],
)  # fmt: skip
def test_what_does_not_change_the_answer_is_ignored(field, value):
    assert parse(**{field: value}) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", 2.5),
        ("r", True),
        ("r", "8"),
        ("r", None),
        ("r", 10**400),
        ("lora_alpha", 0),
        ("lora_alpha", 1e-300),
        ("lora_alpha", -8),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", 10**400),
        ("lora_alpha", "8"),
        ("use_rslora", "yes"),
        ("target_modules", []),
        ("target_modules", None),
        ("target_modules", [1]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", [f"m{index}" for index in range(4097)]),
        ("exclude_modules", [f"m{index}" for index in range(4097)]),
        ("exclude_modules", 3),
        ("layers_to_transform", ["0"]),
        ("layers_to_transform", -1),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {f"m{n}": 4 for n in range(5000)}),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": "x"}),
    ],
)  # fmt: skip
def test_malformed_values_are_refused_by_name(field, value):
    with pytest.raises(InvalidAdapter) as caught:
        parse(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"r": ' + b"1" * 5000 + b"}"]
)
def test_what_is_not_a_json_object_is_refused(raw):
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json"):
        parse_config(raw)


def test_long_or_odd_values_never_blow_up_the_message():
    with pytest.raises(UnsupportedAdapter) as caught:
        parse(**{"x" * 10_000: "y" * 10_000})
    assert len(caught.value.message) < 500
    with pytest.raises(UnsupportedAdapter) as caught:
        parse_config(rb'{"peft_type": "LORA", "target_modules": ["q_proj"], "\ud800": 1}')
    caught.value.message.encode()


def test_scale_is_alpha_over_rank_or_over_its_root():
    assert parse(r=16, lora_alpha=32).scale_of("model.layers.0.mlp.up_proj") == 2.0
    assert parse(r=16, lora_alpha=32, use_rslora=True).scale_of("model.layers.0.mlp.up_proj") == 8.0


def test_patterns_override_rank_and_alpha_by_the_first_match():
    config = parse(
        r=4,
        lora_alpha=8,
        rank_pattern={"layers.1.self_attn.q_proj": 2, "q_proj": 16, "^model.layers.0.mlp.up_proj": 32},
        alpha_pattern={"q_proj": 48},
    )
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 16
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.0.mlp.up_proj") == 32
    assert config.rank_of("model.layers.1.mlp.up_proj") == 4
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 3.0
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 24.0


@pytest.mark.parametrize(
    ("fields", "targeted"),
    [
        ({"target_modules": ["q_proj"]}, {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, {"1.mlp.up_proj"}),
        ({"target_modules": ["layers.0.mlp.up_proj"]}, {"0.mlp.up_proj"}),
        (
            {"target_modules": ["model.layers.0.mlp.up_proj", "q_proj"], "layers_to_transform": [1]},
            {"0.mlp.up_proj", "1.self_attn.q_proj"},
        ),
        ({"target_modules": ["roj"]}, set()),
        ({"target_modules": r".*\.0\..*_proj"}, {"0.self_attn.q_proj", "0.mlp.up_proj"}),
        ({"target_modules": r"q_proj"}, set()),
        ({"target_modules": "ALL-linear"}, ALL_FOUR),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, {"1.self_attn.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}, {"0.self_attn.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, {"0.mlp.up_proj", "1.mlp.up_proj"}),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, {"0.self_attn.q_proj"}),
    ],
)  # fmt: skip
def test_targets_are_resolved_as_peft_does(fields, targeted):
    config = parse(**fields)
    assert {name for name in ALL_FOUR if config.targets_module(f"model.layers.{name}", int(name[0]))} == targeted


def test_layers_to_transform_needs_a_list_of_names():
    with pytest.raises(InvalidAdapter) as caught:
        parse(target_modules="all-linear", layers_to_transform=[0])
    assert caught.value.field == "layers_to_transform"
