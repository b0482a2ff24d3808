"""Packing: the same adapter gives the same bytes, and what was packed is read back exactly."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.adapter_format.packed import PackedAdapter, PackedModule, open_packed, pack, version_digest
from common.adapter_format.tensor_file import write_tensors
from common.adapter_format.validate import validate
from loraplex.errors import CorruptArtifact
from tests.tiny_adapters import adapter_config, adapter_tensors, write_adapter
from tests.tiny_base import write_safetensors

BASE = hashlib.sha256(b"base").hexdigest()
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@st.composite
def modules(draw) -> PackedModule:
    name = f"layers.{draw(st.integers(0, 30))}.{draw(st.sampled_from(['self_attn.q_proj', 'mlp.down_proj']))}"
    rank, inner, out = (draw(st.integers(1, 9)) for _ in range(3))
    dtype = draw(st.sampled_from(list(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    a, b = (
        np.frombuffer(rng.bytes(rows * columns * DTYPES[dtype].itemsize), DTYPES[dtype]).reshape(rows, columns)
        for rows, columns in ((rank, inner), (out, rank))
    )
    return PackedModule(name, rank, draw(st.floats(1e-6, 1e6)), dtype, a, b)


adapters = st.lists(modules(), min_size=1, max_size=5, unique_by=lambda module: module.name).map(
    lambda some: PackedAdapter(version_digest(BASE, some), BASE, "none", tuple(some))
)


@given(adapters)
def test_what_was_packed_is_read_back_exactly(tmp_path_factory, adapter):
    file = tmp_path_factory.getbasetemp() / "round-trip"
    digest = pack(adapter, file)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    opened = open_packed(file)
    assert (opened.version_digest, opened.base_digest, opened.format) == (adapter.version_digest, BASE, "none")
    assert [module.name for module in opened.modules] == sorted(module.name for module in adapter.modules)
    by_name = {module.name: module for module in adapter.modules}
    for module in opened.modules:
        packed = by_name[module.name]
        assert (module.rank, module.scale, module.dtype) == (packed.rank, packed.scale, packed.dtype)
        assert module.a.tobytes() == packed.a.tobytes()
        assert module.b.tobytes() == packed.b.tobytes()
        assert module.a.shape == packed.a.shape
        assert module.a.flags.aligned
        assert not module.a.flags.writeable
    assert version_digest(BASE, opened.modules) == adapter.version_digest


@given(adapters, st.randoms())
def test_the_order_of_modules_changes_neither_digest(tmp_path_factory, adapter, shuffle):
    folder = tmp_path_factory.getbasetemp()
    shuffled = list(adapter.modules)
    shuffle.shuffle(shuffled)
    again = PackedAdapter(version_digest(BASE, shuffled), BASE, "none", tuple(shuffled))
    assert again.version_digest == adapter.version_digest
    assert pack(again, folder / "one") == pack(adapter, folder / "other")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=25)
@given(
    st.randoms(),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
    st.sampled_from([8, 64, 512]),
    st.booleans(),
)
def test_version_digest_ignores_header_order_metadata_padding_and_prefix(
    tmp_path, base_folder, base, shuffle, metadata, padding, bare
):
    tensors = adapter_tensors(base_folder, dtype="BF16")
    config = json.dumps(adapter_config()).encode()
    plain = validate(config, write_safetensors(tmp_path / "plain", tensors), base)
    items = [(name.removeprefix("base_model.model.") if bare else name, tensor) for name, tensor in tensors.items()]
    shuffle.shuffle(items)
    file = write_safetensors(tmp_path / "odd", dict(items), metadata=metadata, pad_header_to=padding)
    odd = validate(config, file, base)
    assert odd.version_digest == plain.version_digest
    assert pack(odd, tmp_path / "p1") == pack(plain, tmp_path / "p2")


def test_any_truncation_is_detected(tmp_path, base_folder, base):
    folder = write_adapter(tmp_path / "a", base_folder, targets=("q_proj",), layers=[0], rank=1)
    adapter = validate((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", base)
    pack(adapter, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    cut_file = tmp_path / "cut"
    for cut in range(len(whole)):
        cut_file.write_bytes(whole[:cut])
        with pytest.raises(CorruptArtifact):
            open_packed(cut_file)


def packed_bytes(file: Path, header: dict | str, tensors) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    with file.open("wb") as stream:
        write_tensors(stream, tensors, {"loraplex": text})
    return file


GOOD = {
    "packer": 1,
    "format": "none",
    "version_digest": "v",
    "base_digest": "b",
    "modules": {"layers.0.mlp.up_proj": {"rank": 2, "scale": 1.5}},
}
PAIR = [
    ("layers.0.mlp.up_proj.A", "F32", np.ones((2, 3), np.float32)),
    ("layers.0.mlp.up_proj.B", "F32", np.ones((4, 2), np.float32)),
]


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        ("{", PAIR),
        ("[]", PAIR),
        ({**GOOD, "packer": 2}, PAIR),
        ({**GOOD, "packer": 0}, PAIR),
        ({**GOOD, "packer": "1"}, PAIR),
        ({**GOOD, "format": "int8"}, PAIR),
        ({key: value for key, value in GOOD.items() if key != "base_digest"}, PAIR),
        ({**GOOD, "modules": {}}, PAIR),
        ({**GOOD, "modules": []}, PAIR),
        ({**GOOD, "modules": {"layers.0.mlp.up_proj": {"rank": 3, "scale": 1}}}, PAIR),
        ({**GOOD, "modules": {"layers.0.mlp.up_proj": {"rank": 2}}}, PAIR),
        ({**GOOD, "modules": {"layers.0.mlp.up_proj": {"rank": 2, "scale": float("nan")}}}, PAIR),
        (GOOD, PAIR[:1]),
        (GOOD, [*PAIR, ("more", "F32", np.ones(1, np.float32))]),
        (GOOD, [PAIR[0], (PAIR[1][0], "F16", np.ones((4, 2), np.float16))]),
        (GOOD, [(PAIR[0][0], "I32", np.ones((2, 3), np.int32)), (PAIR[1][0], "I32", np.ones((4, 2), np.int32))]),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, header, tensors):
    open_packed(packed_bytes(tmp_path / "good", GOOD, PAIR))
    with pytest.raises(CorruptArtifact):
        open_packed(packed_bytes(tmp_path / "bad", header, tensors))


NAME = "layers.0.mlp.up_proj"
MIXED = {**GOOD, "format": "int4", "modules": {NAME: {"rank": 3}}}
PARTS: dict[str, tuple[str, np.ndarray]] = {
    f"{NAME}.A.q8": ("I8", np.ones((1, 80), np.int8)),
    f"{NAME}.B.q8": ("I8", np.ones((1, 32), np.int8)),
    f"{NAME}.scale.q8": ("F32", np.ones(1, np.float32)),
    f"{NAME}.A.q4": ("U8", np.ones((2, 40), np.uint8)),
    f"{NAME}.B.q4": ("U8", np.ones((2, 16), np.uint8)),
    f"{NAME}.A_scale.q4": ("F16", np.ones((2, 2), np.float16)),
    f"{NAME}.B_scale.q4": ("F32", np.ones((2, 1), np.float32)),
}


def stored(parts: dict[str, tuple[str, np.ndarray]]) -> list[tuple[str, str, np.ndarray]]:
    return [(name, dtype, array) for name, (dtype, array) in parts.items()]


def test_a_module_of_two_parts_is_read_back(tmp_path):
    (module,) = open_packed(packed_bytes(tmp_path / "good", MIXED, stored(PARTS))).modules
    first, second = module.parts
    assert (module.rank, module.in_features, module.out_features, module.a.size, module.b.size) == (3, 80, 32, 0, 0)
    assert (first.format, first.rank, first.dtype, np.asarray(first.scale).tolist()) == ("int8", 1, "I8", [1.0])
    assert (second.format, second.rank, second.dtype, second.scale) == ("int4", 2, "U8", 1.0)
    assert second.a_scale is not None
    assert second.b_scale is not None
    assert (second.a_scale.dtype.name, second.b_scale.dtype.name) == ("float16", "float32")
    assert not second.a.flags.writeable


@pytest.mark.parametrize("packer", [1, 2])
def test_what_an_older_packer_wrote_is_read_until_it_is_packed_again(tmp_path, packer):
    header = {**MIXED, "format": "int8", "packer": packer, "modules": {NAME: {"rank": 1}}}
    parts = {name: part for name, part in PARTS.items() if ".q8" in name}
    assert open_packed(packed_bytes(tmp_path / "old", header, stored(parts))).modules[0].rank == 1


@pytest.mark.parametrize(
    ("tensor", "stored_as", "array"),
    [
        ("A.q8", "U8", np.ones((1, 80), np.uint8)),
        ("A.q8", "I8", np.ones(80, np.int8)),
        ("A.q8", "I8", np.ones((1, 81), np.int8)),
        ("A.q8", "I8", np.ones((0, 80), np.int8)),
        ("B.q8", "I8", np.ones((2, 32), np.int8)),
        ("scale.q8", "F16", np.ones(1, np.float16)),
        ("scale.q8", "F32", np.ones(2, np.float32)),
        ("scale.q8", "F32", np.array([np.nan], np.float32)),
        ("scale.q8", "F32", np.array([-1], np.float32)),
        ("A.q4", "I8", np.ones((2, 40), np.int8)),
        ("B.q4", "U8", np.ones((2, 15), np.uint8)),
        ("B.q4", "U8", np.ones((1, 16), np.uint8)),
        ("A_scale.q4", "F16", np.ones((2, 1), np.float16)),
        ("A_scale.q4", "BF16", np.ones((2, 2), np.uint16)),
        ("B_scale.q4", "F32", np.full((2, 1), np.inf, np.float32)),
        ("B_scale.q4", None, None),
        ("B.q8", None, None),
    ],
)
def test_a_damaged_quantized_tensor_is_named(tmp_path, tensor, stored_as, array):
    parts = {**PARTS, f"{NAME}.{tensor}": (stored_as, array)}
    if array is None:
        del parts[f"{NAME}.{tensor}"]
    with pytest.raises(CorruptArtifact, match=tensor) as caught:
        open_packed(packed_bytes(tmp_path / "bad", MIXED, stored(parts)))
    assert caught.value.metadata["tensor"] == f"{NAME}.{tensor}"


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ({**MIXED, "format": "int8"}, PARTS),  # int4 tensors that no int8 module has
        ({**MIXED, "format": "none"}, PARTS),
        ({**MIXED, "packer": 2}, PARTS),
        ({**MIXED, "modules": {NAME: {"rank": 2}}}, PARTS),
        (MIXED, [name for name in PARTS if ".q8" in name]),
        (MIXED, []),
    ],
)
def test_parts_that_do_not_make_the_module_are_refused(tmp_path, header, names):
    with pytest.raises(CorruptArtifact):
        open_packed(packed_bytes(tmp_path / "bad", header, stored({name: PARTS[name] for name in names})))


def test_parts_of_different_widths_are_refused(tmp_path):
    parts = {**PARTS, f"{NAME}.A.q4": ("U8", np.ones((2, 48), np.uint8))}
    with pytest.raises(CorruptArtifact, match="one shape"):
        open_packed(packed_bytes(tmp_path / "bad", MIXED, stored(parts)))


def test_a_safetensors_file_that_is_no_packed_adapter_is_refused(tmp_path, base_folder):
    folder = write_adapter(tmp_path / "a", base_folder)
    with pytest.raises(CorruptArtifact, match="not a packed adapter"):
        open_packed(folder / "adapter_model.safetensors")


def test_digests_do_not_change_from_release_to_release(tmp_path):
    # Workers' caches and clients' pins outlive a release: changing this means a new packer version.
    rng = random.Random(7)
    values = np.array([rng.uniform(-1, 1) for _ in range(14)], np.float32)
    module = PackedModule("layers.0.mlp.up_proj", 2, 0.75, "F32", values[:6].reshape(2, 3), values[6:].reshape(4, 2))
    adapter = PackedAdapter(version_digest(BASE, [module]), BASE, "none", (module,))
    assert adapter.version_digest == "167ced864039dfd4b43f21454f9c13889db1bcb30163ff3e7d87451060d99c51"
    assert pack(adapter, tmp_path / "golden") == "bc9de6fd6b1e7c5e418f3c720b51e93fc46f4f71b755d14d340e840bf05d8f20"
