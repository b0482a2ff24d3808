from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from loraplex.errors import InvalidAdapter, InvalidName, UnsupportedAdapter
from loraplex.registration import PART_BYTES, read_adapter_folder, upload_parts


@pytest.fixture
def folder(tmp_path, tiny_adapter) -> Path:
    return Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))


def test_the_stream_is_header_then_each_file_with_its_data(folder):
    (folder / "README.md").write_text("not uploaded")
    (folder / "adapter_model.safetensors").write_bytes(b"w" * (2 * PART_BYTES + 3))
    sent: list[int] = []
    parts = list(upload_parts(read_adapter_folder(folder), "sql", "tiny", sent.append))
    assert [part.WhichOneof("part") for part in parts] == [
        "header", "file_header", "data", "file_header", "data", "data", "data",
    ]  # fmt: skip
    assert (parts[0].header.name, parts[0].header.base_id) == ("sql", "tiny")
    weights = parts[3].file_header
    assert (weights.name, weights.size_bytes) == ("adapter_model.safetensors", 2 * PART_BYTES + 3)
    assert weights.sha256 == hashlib.sha256(b"w" * (2 * PART_BYTES + 3)).hexdigest()
    assert [len(part.data) for part in parts[4:]] == [PART_BYTES, PART_BYTES, 3]
    assert sum(sent) == read_adapter_folder(folder).size_bytes


def test_what_does_not_exist_is_said(tmp_path):
    with pytest.raises(InvalidAdapter, match="does not exist"):
        read_adapter_folder(tmp_path / "absent")


def test_a_file_is_not_a_folder_and_the_folder_is_suggested(folder):
    with pytest.raises(InvalidAdapter) as refused:
        read_adapter_folder(folder / "adapter_model.safetensors")
    assert str(folder) in refused.value.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_the_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(InvalidAdapter, match=name) as refused:
        read_adapter_folder(folder)
    assert type(refused.value) is InvalidAdapter


@pytest.mark.parametrize("pickle", ["adapter_model.bin", "weights.pt"])
def test_pickles_are_refused_with_the_way_out(folder, pickle):
    (folder / "adapter_model.safetensors").rename(folder / pickle)
    with pytest.raises(UnsupportedAdapter, match="safetensors") as refused:
        read_adapter_folder(folder)
    assert refused.value.metadata["file"] == pickle


def test_a_pickle_beside_safetensors_is_simply_not_uploaded(folder):
    (folder / "optimizer.pt").write_bytes(b"pickle")
    assert [file.name for file in read_adapter_folder(folder).files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_name_that_is_no_text_is_refused(folder):
    with pytest.raises(InvalidName):
        list(upload_parts(read_adapter_folder(folder), "\udc80"))
