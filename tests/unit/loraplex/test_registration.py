from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from loraplex.errors import InvalidName
from loraplex.peft_folder import read_adapter_folder
from loraplex.registration import PART_BYTES, upload_parts


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


def test_a_name_that_is_no_text_is_refused(folder):
    with pytest.raises(InvalidName):
        list(upload_parts(read_adapter_folder(folder), "\udc80"))
