"""What broken uploads leave behind: found by its whole key, bounded in time and bytes, never twice."""

from __future__ import annotations

import hashlib

import pytest

from registry.incoming import IncomingFile
from registry.partials import FileKey, PartialUploads

SIZE = 2**17


def key(content: bytes, **changed) -> FileKey:
    facts = {"tenant": "default", "name": "f", "size_bytes": 2**20, "sha256": hashlib.sha256(content).hexdigest()}
    return FileKey(**{**facts, **changed})


class Kept:
    """Partial uploads with a clock that the test turns."""

    def __init__(self, tmp_path) -> None:
        (tmp_path / "kept").mkdir()
        self.folder = tmp_path / "kept"
        self.incoming = tmp_path
        self.now_s = 100.0
        self.partials = PartialUploads(self.folder, max_bytes=3 * SIZE, keep_s=60, clock=lambda: self.now_s)

    def keep(self, name: bytes, size: int = SIZE, **changed) -> FileKey:
        file = IncomingFile(self.incoming / "file")
        file.append(name[:1] * size)
        file.close()
        self.partials.keep(key(name, **changed), file)
        file.path.unlink(missing_ok=True) if file.path == self.incoming / "file" else None
        return key(name, **changed)

    @property
    def num_files(self) -> int:
        return len(list(self.folder.iterdir()))


@pytest.fixture
def kept(tmp_path) -> Kept:
    return Kept(tmp_path)


def test_a_file_goes_on_with_its_bytes_and_its_hash(kept):
    found = kept.keep(b"a")
    assert kept.partials.size_bytes(found) == SIZE
    file = kept.partials.take(found, kept.incoming / "again")
    file.append(b"rest")
    file.close()
    assert (kept.incoming / "again").read_bytes() == b"a" * SIZE + b"rest"
    assert file.sha256 == hashlib.sha256(b"a" * SIZE + b"rest").hexdigest()
    assert kept.partials.take(found, kept.incoming / "twice") is None
    assert kept.num_files == 0


@pytest.mark.parametrize("changed", [{"tenant": "other"}, {"name": "g"}, {"size_bytes": 5}, {"sha256": "0" * 64}])
def test_nobody_finds_a_file_by_less_than_its_whole_key(kept, changed):
    kept.keep(b"a")
    other = key(b"a", **changed)
    assert kept.partials.size_bytes(other) == 0
    assert kept.partials.take(other, kept.incoming / "stolen") is None
    assert kept.num_files == 1


def test_files_go_when_their_time_is_up(kept):
    first = kept.keep(b"a")
    assert kept.partials.drop_old() == 60
    kept.now_s += 59
    second = kept.keep(b"b")
    assert kept.partials.drop_old() == 1
    kept.now_s += 1
    assert kept.partials.size_bytes(first) == 0
    assert kept.partials.size_bytes(second) == SIZE
    assert kept.num_files == 1


def test_the_oldest_gives_way_and_what_fits_never_is_not_kept(kept):
    keys = [kept.keep(name) for name in (b"a", b"b", b"c", b"d")]
    assert [kept.partials.size_bytes(key) for key in keys] == [0, SIZE, SIZE, SIZE]
    assert kept.partials.size_bytes(kept.keep(b"e", 4 * SIZE)) == 0
    assert kept.partials.size_bytes(kept.keep(b"f", 100)) == 0
    assert kept.num_files == 3
    kept.partials.clear()
    assert kept.num_files == 0


def test_of_two_parts_of_a_file_the_longer_is_kept(kept):
    kept.keep(b"a", 2 * SIZE)
    assert kept.partials.size_bytes(kept.keep(b"a", SIZE)) == 2 * SIZE
    assert kept.partials.size_bytes(kept.keep(b"a", 3 * SIZE)) == 3 * SIZE
    assert kept.num_files == 1
