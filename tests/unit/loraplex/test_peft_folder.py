from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loraplex.errors import InvalidAdapter, UnsupportedAdapter
from loraplex.peft_folder import read_adapter_folder


@pytest.fixture
def folder(tmp_path, tiny_adapter) -> Path:
    return Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))


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
