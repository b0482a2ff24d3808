"""safetensors files: what the library writes is read, what is damaged is refused, what is written is deterministic."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from common.adapter_format.tensor_file import open_tensors, write_tensors
from loraplex.errors import CorruptArtifact, UnsupportedAdapter


def raw_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_what_the_library_writes_is_read(tmp_path):
    tensors: dict[str, np.ndarray] = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones((3, 1), np.float16),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored = open_tensors(tmp_path / "x.safetensors")
    assert stored.metadata == {"format": "pt"}
    assert {name: tensor.dtype for name, tensor in stored.tensors.items()} == {"a": "F16", "b": "F32"}
    for name, tensor in stored.tensors.items():
        assert np.array_equal(tensor.array(), tensors[name])
        assert not tensor.array().flags.writeable


def test_what_is_written_the_library_reads_and_is_aligned(tmp_path):
    tensors: list[tuple[str, str, np.ndarray]] = [
        ("z", "F16", np.ones((1, 3), np.float16)),
        ("y", "F32", np.arange(4, dtype=np.float32).reshape(2, 2)),
    ]
    with (tmp_path / "x").open("wb") as stream:
        write_tensors(stream, tensors, {"loraplex": "é"})
    loaded = safetensors.numpy.load_file(tmp_path / "x")
    assert all(np.array_equal(loaded[name], array) for name, _, array in tensors)
    raw = (tmp_path / "x").read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 64 == 0
    assert all(tensor.array().flags.aligned for tensor in open_tensors(tmp_path / "x").tensors.values())


def test_the_order_of_tensors_does_not_change_the_bytes():
    tensors: list[tuple[str, str, np.ndarray]] = [
        ("z", "F16", np.ones((1, 3), np.float16)),
        ("y", "F32", np.ones((2, 2), np.float32)),
    ]
    one, other = io.BytesIO(), io.BytesIO()
    write_tensors(one, tensors, {"k": "v"})
    write_tensors(other, tensors[::-1], {"k": "v"})
    assert one.getvalue() == other.getvalue()


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = b"\0" * 8
DAMAGED = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": b"\0" * 8,
    "header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "header of an absurd length": b"\xff" * 8 + b"{}",
    "text": b"<!DOCTYPE html><html>404</html>",
    "git lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "header not JSON": raw_file(b"{not json"),
    "header not UTF-8": raw_file(b'{"\xff": 1}'),
    "header a list": raw_file([]),
    "header nested without end": raw_file(b'{"a":' + b"[" * 100_000),
    "metadata not strings": raw_file({"__metadata__": {"a": 1}, "x": ENTRY}, EIGHT),
    "metadata a list": raw_file({"__metadata__": [], "x": ENTRY}, EIGHT),
    "truncated data": raw_file({"x": ENTRY}, EIGHT[:-1]),
    "trailing data": raw_file({"x": ENTRY}, EIGHT + b"\0"),
    "gap": raw_file({"x": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12),
    "overlap": raw_file({"x": ENTRY, "y": ENTRY}, EIGHT),
    "size against shape": raw_file({"x": {**ENTRY, "shape": [3]}}, EIGHT),
    "unknown dtype": raw_file({"x": {**ENTRY, "dtype": "F99"}}, EIGHT),
    "dtype a list": raw_file({"x": {**ENTRY, "dtype": ["F32"]}}, EIGHT),
    "negative shape": raw_file({"x": {**ENTRY, "shape": [-1, -2]}}, EIGHT),
    "boolean shape": raw_file({"x": {**ENTRY, "shape": [2, True]}}, EIGHT),
    "more dimensions than a tensor has": raw_file({"x": {**ENTRY, "shape": [2] + [1] * 8}}, EIGHT),
    "size beyond 63 bits": raw_file({"x": {**ENTRY, "shape": [0, 2**63], "data_offsets": [0, 0]}}),
    "shape a number": raw_file({"x": {**ENTRY, "shape": 2}}, EIGHT),
    "offsets backwards": raw_file({"x": {**ENTRY, "data_offsets": [8, 0]}}, EIGHT),
    "one offset": raw_file({"x": {**ENTRY, "data_offsets": [8]}}, EIGHT),
    "entry a string": raw_file({"x": "F32"}, EIGHT),
    "entry with more": raw_file({"x": {**ENTRY, "path": "/etc/passwd"}}, EIGHT),
    "same name twice": raw_file(b'{"x":%s,"x":%s}' % ((json.dumps(ENTRY).encode(),) * 2), EIGHT),
    "endless name": raw_file({"x" * 1000: ENTRY}, EIGHT),
    "control characters in a name": raw_file({"x\n\u202e": ENTRY}, EIGHT),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_refused_by_file_name(tmp_path, damage):
    (tmp_path / "adapter_model.safetensors").write_bytes(DAMAGED[damage])
    with pytest.raises(CorruptArtifact, match=r"adapter_model\.safetensors") as caught:
        open_tensors(tmp_path / "adapter_model.safetensors")
    assert len(caught.value.message) < 400


def torch_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": 1}))
    return out.getvalue()


@pytest.mark.parametrize("raw", [torch_zip(), pickle.dumps({"w": [1, 2]}, 2), pickle.dumps({"w": [1, 2]}, 5)])
def test_a_pickle_under_a_safetensors_name_is_refused_unopened(tmp_path, raw):
    (tmp_path / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(UnsupportedAdapter, match=r"is a pickle.*safe_serialization=True"):
        open_tensors(tmp_path / "adapter_model.safetensors")


@given(st.data())
def test_any_truncation_and_any_extension_is_detected(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    out = io.BytesIO()
    write_tensors(out, [("a", "F32", np.ones((3, 2), np.float32)), ("b", "BF16", np.ones((2, 1), np.uint16))], {})
    whole = out.getvalue()
    cut = data.draw(st.integers(0, len(whole) - 1))
    for raw in (whole[:cut], whole + bytes(1 + cut % 7)):
        (folder / "cut").write_bytes(raw)
        with pytest.raises(CorruptArtifact):
            open_tensors(folder / "cut")
