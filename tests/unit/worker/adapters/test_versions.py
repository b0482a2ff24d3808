"""A worker answers with the version that a request was resolved to, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from common.adapter_format.packed import PackedAdapter, PackedModule, pack
from loraplex.errors import VersionMismatch
from worker.adapters import versions
from worker.adapters.versions import Versions
from worker.mailbox import AdapterFile

VERSION, OTHER, BASE = ("1" * 64, "2" * 64, "3" * 64)


def packed(file: Path, version: str) -> AdapterFile:
    module = PackedModule(
        "layers.0.self_attn.q_proj", 1, 1.0, "F32", np.ones((1, 2), np.float32), np.ones((2, 1), np.float32)
    )
    digest = pack(PackedAdapter(version, BASE, "none", (module,)), file)
    return AdapterFile(digest, str(file), file.stat().st_size)


async def test_the_version_in_the_header_is_the_one_a_request_must_name(tmp_path: Path) -> None:
    file = packed(tmp_path / "file", VERSION)
    known = Versions()
    await known.check(file, VERSION)
    with pytest.raises(VersionMismatch) as refused:
        await known.check(file, OTHER)
    assert refused.value.metadata["expected"] == OTHER
    assert refused.value.metadata["actual"] == VERSION
    await known.check(file, VERSION)


async def test_a_file_is_read_once(tmp_path: Path) -> None:
    file = packed(tmp_path / "file", VERSION)
    known = Versions()
    await known.check(file, VERSION)
    (tmp_path / "file").unlink()
    await known.check(file, VERSION)
    with pytest.raises(VersionMismatch):
        await known.check(file, OTHER)


async def test_what_cannot_be_read_is_left_to_the_engine(tmp_path: Path) -> None:
    known = Versions()
    for name, content in (("empty", b""), ("junk", b"junk" * 100), ("plain", _plain())):
        (tmp_path / name).write_bytes(content)
        await known.check(AdapterFile(hashlib.sha256(content).hexdigest(), str(tmp_path / name), 1), VERSION)
    await known.check(AdapterFile("4" * 64, str(tmp_path / "absent"), 1), VERSION)


async def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_KEPT", 1)
    first, second = packed(tmp_path / "first", VERSION), packed(tmp_path / "second", OTHER)
    known = Versions()
    await known.check(first, VERSION)
    await known.check(second, OTHER)
    with pytest.raises(VersionMismatch):
        await known.check(first, OTHER)
    assert len(known._known) == 1


def _plain() -> bytes:
    """A safetensors file that is no packed adapter."""
    header = b'{"__metadata__":{"loraplex":"[]"}}'
    return len(header).to_bytes(8, "little") + header
