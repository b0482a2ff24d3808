"""Space is lent where there is none, and laid by again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from registry.database import parse_url
from registry.reserve import RESERVE_BYTES, SpaceReserve


class Disk:
    """How much a disk has free besides the reserve."""

    def __init__(self, folder: Path) -> None:
        self.free = 10 * RESERVE_BYTES
        self._folder = folder

    def usage(self, _: Path) -> SimpleNamespace:
        return SimpleNamespace(free=self.free)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", made.usage)
    return made


def test_the_reserve_is_lent_only_where_space_is_short(tmp_path: Path, disk: Disk) -> None:
    reserve, file = SpaceReserve(tmp_path), tmp_path / "reserve"
    reserve.lay_by()
    assert file.stat().st_size == RESERVE_BYTES
    with reserve.lent():
        assert file.exists()
    disk.free = 0
    with reserve.lent():
        assert not file.exists()
        with reserve.lent():
            disk.free = 3 * RESERVE_BYTES
        assert not file.exists()  # the other one may still need it
    assert file.stat().st_size == RESERVE_BYTES


def test_of_little_space_half_is_laid_by_and_of_none_nothing(tmp_path: Path, disk: Disk) -> None:
    reserve, file = SpaceReserve(tmp_path), tmp_path / "reserve"
    disk.free = 1_000
    reserve.lay_by()
    assert not file.exists()
    disk.free = RESERVE_BYTES
    reserve.lay_by()
    assert file.stat().st_size == RESERVE_BYTES // 2


def test_a_failure_lays_by_all_the_same(tmp_path: Path, disk: Disk) -> None:
    reserve = SpaceReserve(tmp_path)
    with pytest.raises(KeyError), reserve.lent():
        raise KeyError
    assert (tmp_path / "reserve").exists()


def test_it_lies_beside_the_database_and_a_server_has_none(tmp_path: Path, disk: Disk) -> None:
    with SpaceReserve.beside(parse_url(f"sqlite:///{tmp_path}/registry.sqlite3")).lent():
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["reserve"]
    with SpaceReserve.beside(parse_url("postgresql://somebody@host/name")).lent():
        pass
