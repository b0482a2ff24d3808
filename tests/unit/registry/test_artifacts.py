"""The artifact folder: whole files or none, and what earlier processes left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from loraplex.errors import ArtifactNotFound, InvalidParameter, NoSpace
from registry.artifacts import ArtifactFolder, full_disk_is_no_space

DIGEST = "ab" * 32


@pytest.fixture
def artifacts(tmp_path):
    folder = ArtifactFolder(tmp_path)
    folder.open()
    return folder


def put(artifacts, content: bytes, digest: str = DIGEST):
    file = artifacts.new_incoming() / "packed"
    file.write_bytes(content)
    artifacts.sync(file)
    artifacts.publish(file, digest)


def read(artifacts: ArtifactFolder, digest: str = DIGEST) -> bytes:
    stream, size = artifacts.open_artifact(digest)
    with stream:
        content = stream.read()
    assert len(content) == size
    return content


def test_what_is_published_is_read_and_walked(artifacts):
    put(artifacts, b"weights")
    assert read(artifacts) == b"weights"
    assert list(artifacts.digests()) == [DIGEST]


def test_publishing_again_replaces_the_file(artifacts):
    put(artifacts, b"damaged")
    put(artifacts, b"weights")
    assert read(artifacts) == b"weights"


def test_an_open_file_outlives_its_removal(artifacts):
    put(artifacts, b"weights")
    stream, _ = artifacts.open_artifact(DIGEST)
    artifacts.remove(DIGEST)
    artifacts.remove(DIGEST)
    with stream:
        assert stream.read() == b"weights"
    with pytest.raises(ArtifactNotFound):
        artifacts.open_artifact(DIGEST)


@pytest.mark.parametrize("digest", ["", "ab", "../" + DIGEST, DIGEST.upper(), DIGEST + "\n"])
def test_what_is_no_digest_never_becomes_a_path(artifacts, digest):
    with pytest.raises(InvalidParameter):
        artifacts.open_artifact(digest)


def test_opening_removes_what_was_half_made_and_keeps_artifacts(artifacts, tmp_path):
    put(artifacts, b"weights")
    (artifacts.new_incoming() / "half").write_bytes(b"x")
    (tmp_path / "artifacts" / "ab" / "note.txt").write_text("not an artifact")
    ArtifactFolder(tmp_path).open()
    assert list((tmp_path / "incoming").iterdir()) == []
    assert list(ArtifactFolder(tmp_path).digests()) == [DIGEST]


def test_too_little_space_is_refused_beforehand(artifacts):
    artifacts.require_space(1)
    with pytest.raises(NoSpace) as caught:
        artifacts.require_space(2**80)
    assert caught.value.metadata["needed_bytes"] == str(2**80)


def test_a_disk_that_fills_up_is_no_space():
    with pytest.raises(NoSpace), full_disk_is_no_space(), Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"x")


def test_other_failures_of_the_disk_stay_what_they_are():
    with pytest.raises(OSError, match="broken"), full_disk_is_no_space():
        raise OSError(errno.EIO, "broken")
