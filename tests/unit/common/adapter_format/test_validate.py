"""An upload fits its base or is refused with the tensor named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.adapter_format.base import read_linears
from common.adapter_format.packed import pack
from common.adapter_format.validate import validate
from loraplex.errors import AdapterMismatch, CorruptArtifact, InvalidAdapter, UnsupportedAdapter
from loraplex.manifest import read_manifest
from tests.tiny_adapters import adapter_config, adapter_tensors, write_adapter
from tests.tiny_base import write_safetensors, write_tiny_base

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def check(folder, base):
    return validate((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", base)


@pytest.fixture
def upload(tmp_path, base_folder, base):
    """Validate an adapter on q_proj and up_proj whose tensors or config were changed first."""

    def run(change=lambda tensors: None, **config):
        tensors = adapter_tensors(base_folder, targets=("q_proj", "up_proj"), seed=1)
        change(tensors)
        write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
        fields = adapter_config(**{"target_modules": ["q_proj", "up_proj"], **config})
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
        return check(tmp_path, base)

    return run


def test_a_base_offers_the_seven_linears_of_each_layer(base):
    assert len(base.shapes) == 14
    assert base.num_layers == 2
    assert base.shapes["layers.1.self_attn.k_proj"] == (32, 64)
    assert base.shapes["layers.0.mlp.down_proj"] == (64, 128)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_good_adapter_keeps_its_values_and_dtype(tmp_path, base_folder, base, dtype):
    adapter = check(write_adapter(tmp_path, base_folder, dtype=dtype), base)
    tensors = adapter_tensors(base_folder, dtype=dtype)
    assert len(adapter.modules) == 14
    for module in adapter.modules:
        assert (module.rank, module.scale, module.dtype) == (4, 2.0, dtype)
        assert np.array_equal(module.a, tensors[f"base_model.model.model.{module.name}.lora_A.weight"][1])
        assert np.array_equal(module.b, tensors[f"base_model.model.model.{module.name}.lora_B.weight"][1])


def test_ranks_and_scales_follow_the_patterns(tmp_path, base_folder, base):
    folder = write_adapter(
        tmp_path,
        base_folder,
        rank=4,
        alpha=16,
        rslora=True,
        layers=[1],
        targets=("q_proj", "down_proj"),
        rank_pattern={"q_proj": 16},
        alpha_pattern={"down_proj": 2},
    )
    adapter = check(folder, base)
    assert {module.name: (module.rank, module.scale) for module in adapter.modules} == {
        "layers.1.self_attn.q_proj": (16, 4.0),
        "layers.1.mlp.down_proj": (4, 1.0),
    }


def renamed(style):
    def change(tensors):
        for name in list(tensors):
            tensors[style(name)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    "style",
    [
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
    ],
    ids=["adapter name", "no wrapper", "inner model"],
)
def test_the_style_of_names_does_not_change_the_version(upload, style):
    assert upload(renamed(style)).version_digest == upload().version_digest


def test_version_depends_on_what_changes_the_answer_only(upload, tmp_path, base_folder, base):
    version = upload().version_digest
    assert upload(lora_dropout=0.5, base_model_name_or_path="x").version_digest == version
    assert upload(target_modules=r".*(q|up)_proj").version_digest == version
    assert upload(r=9, rank_pattern={".*": 4}, alpha_pattern={".*": 8}, lora_alpha=1).version_digest == version
    assert upload(lora_alpha=9).version_digest != version
    assert upload(use_rslora=True).version_digest != version

    def nudge(tensors):
        dtype, values = tensors[f"{Q0}.lora_A.weight"]
        values = values.copy()
        values[0, 0] += 1
        tensors[f"{Q0}.lora_A.weight"] = (dtype, values)

    assert upload(nudge).version_digest != version
    other = read_linears(read_manifest(write_tiny_base(tmp_path / "other", seed=9)))
    write_adapter(tmp_path / "a", base_folder)
    assert check(tmp_path / "a", other).version_digest != check(tmp_path / "a", base).version_digest


def setting(name, dtype, values):
    return lambda tensors: tensors.__setitem__(name, (dtype, values))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_that_are_not_finite_are_refused(upload, dtype, bad):
    from tests.tiny_base import float_bits

    a, b = np.ones((4, 64), np.float32), np.ones((64, 4), np.float32)
    b[63, 3] = bad
    with np.errstate(over="ignore", invalid="ignore"):
        pair = {
            f"{Q0}.lora_A.weight": (dtype, float_bits(a, dtype)),
            f"{Q0}.lora_B.weight": (dtype, float_bits(b, dtype)),
        }
    with pytest.raises(CorruptArtifact, match="NaN or infinity") as caught:
        upload(lambda tensors: tensors.update(pair))
    assert caught.value.metadata["tensor"] == f"{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (setting(f"{Q0}.lora_A.weight", "F32", np.ones((4, 63), np.float32)), f"{Q0}.lora_A.weight"),
        (setting(f"{Q0}.lora_B.weight", "F32", np.ones((65, 4), np.float32)), f"{Q0}.lora_B.weight"),
        (setting(f"{Q0}.lora_A.weight", "F32", np.ones((8, 64), np.float32)), f"{Q0}.lora_A.weight"),
        (setting(f"{Q0}.lora_B.weight", "F32", np.ones((4, 64), np.float32)), f"{Q0}.lora_B.weight"),
        (setting(f"{Q0}.lora_A.weight", "F32", np.ones(256, np.float32)), f"{Q0}.lora_A.weight"),
        (setting(f"{Q0}.lora_A.weight", "F32", np.ones((0, 64), np.float32)), f"{Q0}.lora_A.weight"),
        (setting(f"{Q0}.lora_A.weight", "F16", np.ones((4, 64), np.float16)), f"{Q0}.lora_B.weight"),
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), f"{Q0}.lora_B.weight"),
        (lambda t: t.pop(f"{Q0}.lora_A.weight"), f"{Q0}.lora_A.weight"),
        (lambda t: [t.pop(f"{Q0}.lora_{f}.weight") for f in "AB"], f"{Q0}.lora_A.weight"),
        (setting(Q0.replace(".0.", ".2.") + ".lora_A.weight", "F32", np.ones((4, 64), np.float32)), None),
        (setting(Q0.replace("q_proj", "qkv_proj") + ".lora_A.weight", "F32", np.ones((4, 64), np.float32)), None),
        (setting(Q0.replace("q_proj", "k_proj") + ".lora_A.weight", "F32", np.ones((4, 64), np.float32)), None),
        (setting("model.layers.0.self_attn.q_proj.lora_A.weight", "F32", np.ones((4, 64), np.float32)), None),
        (setting("something.else", "F32", np.ones(3, np.float32)), "something.else"),
        (setting("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "F32", np.ones(3)), None),
    ],
    ids=[
        *("width", "height", "rank of A", "B transposed", "one dimension", "rank zero", "two dtypes"),
        *("no B", "no A", "no pair", "no such layer", "no such module", "not targeted", "same factor twice"),
        *("foreign tensor", "experts"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(upload, change, tensor):
    with pytest.raises(InvalidAdapter) as caught:
        upload(change)
    assert type(caught.value) in (AdapterMismatch, CorruptArtifact)
    assert caught.value.metadata["tensor"] in caught.value.message
    if tensor:
        assert caught.value.metadata["tensor"] == tensor


def test_a_shape_mismatch_tells_expected_and_actual(upload):
    with pytest.raises(AdapterMismatch, match=r"shape \[4, 64\], expected \[16, 64\]") as caught:
        upload(r=16)
    assert (caught.value.metadata["expected"], caught.value.metadata["actual"]) == ("[16, 64]", "[4, 64]")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (f"{Q0}.lora_magnitude_vector", "use_dora"),
        (f"{Q0}.lora_magnitude_vector.weight", "use_dora"),
        (f"{Q0}.lora_B.bias", "lora_bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "target_modules"),
        ("base_model.model.lm_head.lora_A.weight", "target_modules"),
        ("base_model.model.lm_head.base_layer.weight", "modules_to_save"),
        ("base_model.model.model.embed_tokens.weight", "modules_to_save"),
    ],
)
def test_tensors_that_the_config_does_not_ask_for_name_the_field(upload, name, field):
    with pytest.raises(AdapterMismatch) as caught:
        upload(setting(name, "F32", np.ones(4, np.float32)))
    assert (caught.value.field, caught.value.metadata["tensor"]) == (field, name)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "bias"),
        ("base_model.model.model.norm.modules_to_save.default.weight", "modules_to_save"),
        ("base_model.model.model.embed_tokens.trainable_tokens_delta", "trainable_token_indices"),
    ],
)
def test_tensors_of_what_is_not_served_name_the_field(upload, name, field):
    with pytest.raises(UnsupportedAdapter) as caught:
        upload(setting(name, "F32", np.ones(4, np.float32)))
    assert (caught.value.field, caught.value.metadata["tensor"]) == (field, name)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        (f"{Q0}.lora_embedding_A", "layers.0.self_attn.q_proj"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "embed_tokens"),
        ("base_model.model.lm_head.lora_embedding_B", "lm_head"),
    ],
)
def test_factors_of_the_wrong_kind_are_refused(upload, name, of):
    with pytest.raises(AdapterMismatch, match=of) as caught:
        upload(setting(name, "F32", np.ones((4, 4), np.float32)))
    assert caught.value.metadata["tensor"] == name


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["q_proj", "up_proj", "lm_head"], "base_model.model.lm_head.lora_A.weight"),
        (["embed_tokens", "q_proj", "up_proj"], "base_model.model.model.embed_tokens.lora_embedding_A"),
        (".*(q_proj|up_proj|lm_head)", "base_model.model.lm_head.lora_A.weight"),
    ],
)
def test_a_head_or_an_embedding_that_the_config_targets_must_be_there(upload, targets, missing):
    with pytest.raises(AdapterMismatch) as caught:
        upload(target_modules=targets)
    assert (caught.value.field, caught.value.metadata["tensor"]) == ("target_modules", missing)


def test_what_an_adapter_without_variants_is_known_by_never_changes(tmp_path, base_folder, base):
    folder = write_adapter(tmp_path, base_folder, rank=4, rslora=True, rank_pattern={"q_proj": 8})
    adapter = check(folder, base)
    assert adapter.version_digest == "a2de87724aa1b8bf7704feccf39c2047d60f28d2e5aa77341d30483cbcd9d937"
    artifact = pack(adapter, tmp_path / "packed")
    assert artifact == "c943ced3c5a4edf02c1c50c6e3edbc4c02ccfe3ec72ef8564dde096594c2d409"


def test_a_name_in_target_modules_that_the_base_lacks_is_harmless(upload):
    assert upload(target_modules=["q_proj", "up_proj", "w1"]).version_digest == upload().version_digest


def test_other_dtypes_are_refused(upload):
    with pytest.raises(UnsupportedAdapter, match="F64") as caught:
        upload(setting(f"{Q0}.lora_A.weight", "F64", np.ones((4, 64))))
    assert caught.value.metadata["tensor"] == f"{Q0}.lora_A.weight"


@pytest.mark.parametrize("factor", ["A", "B"])
def test_an_adapter_without_effect_is_refused(upload, factor):
    def zero(tensors):
        for name, (dtype, values) in list(tensors.items()):
            if f"lora_{factor}" in name:
                tensors[name] = (dtype, np.zeros_like(values))

    with pytest.raises(InvalidAdapter, match="changes nothing"):
        upload(zero)


def test_several_adapters_in_one_file_are_refused(upload):
    def change(tensors):
        for name in list(tensors):
            adapter = "one" if "q_proj" in name else "two"
            tensors[name.replace(".weight", f".{adapter}.weight")] = tensors.pop(name)

    with pytest.raises(InvalidAdapter, match="several adapters"):
        upload(change)


def test_a_file_without_tensors_is_refused(upload):
    with pytest.raises(InvalidAdapter, match="no tensors"):
        upload(lambda tensors: tensors.clear())


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300, deadline=None
)
@given(st.data())
def test_whatever_happens_to_the_bytes_the_answer_is_an_adapter_or_a_typed_refusal(tmp_path, base_folder, base, data):
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        write_adapter(folder, base_folder, targets=("q_proj",), rank=1)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / f"{name}.whole").write_bytes((folder / name).read_bytes())
    name = data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    raw = bytearray((folder / f"{name}.whole").read_bytes())
    header_end = min(len(raw), 700)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_end - 1))
        new = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"[", b"{", b'"', b"-1", b"null", b"1e400", b",", b"}"])
        )
        raw[at : at + data.draw(st.integers(0, 4))] = new
    (folder / name).write_bytes(raw)
    try:
        check(folder, base)
    except InvalidAdapter as error:
        error.message.encode()
    finally:
        (folder / name).write_bytes((folder / f"{name}.whole").read_bytes())
