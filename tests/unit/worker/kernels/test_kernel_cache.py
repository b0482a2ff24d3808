"""The folder of compiled kernels: only whole ones are read, by one process at a time, and one is always found."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.kernels.cpu.cache import SEAL, choose_folder, exclusive


def compile_into(folder: Path) -> bool:
    """Do as a start does; returns whether it found the folder whole."""
    with exclusive(folder) as whole:
        if not whole:
            assert not list(folder.rglob("*.nb[ic]"))
            (folder / "cpu").mkdir(exist_ok=True)
            (folder / "cpu" / "linear.nbi").write_bytes(b"index")
            (folder / "cpu" / "linear.1.nbc").write_bytes(b"code" * 100)
    return whole


def cut_off(folder: Path) -> None:
    (folder / "cpu" / "linear.1.nbc").write_bytes(b"code")


def empty_index(folder: Path) -> None:
    (folder / "cpu" / "linear.nbi").write_bytes(b"")


def turn_a_bit(folder: Path) -> None:
    (folder / "cpu" / "linear.1.nbc").write_bytes(b"codf" + b"code" * 99)


def lose_a_file(folder: Path) -> None:
    (folder / "cpu" / "linear.1.nbc").unlink()


def add_a_file(folder: Path) -> None:
    (folder / "cpu" / "linear.2.nbc").write_bytes(b"of a process that was killed")


def break_the_seal(folder: Path) -> None:
    (folder / SEAL).write_text('{"cpu/linear')


def lose_the_seal(folder: Path) -> None:
    (folder / SEAL).unlink()


def test_what_was_compiled_is_found_again(tmp_path: Path) -> None:
    assert [compile_into(tmp_path) for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    "harm", [cut_off, empty_index, turn_a_bit, lose_a_file, add_a_file, break_the_seal, lose_the_seal]
)
def test_a_folder_that_is_not_as_it_was_sealed_is_compiled_anew(tmp_path: Path, harm: object) -> None:
    compile_into(tmp_path)
    harm(tmp_path)  # type: ignore[operator]
    assert [compile_into(tmp_path) for _ in range(2)] == [False, True]


def test_a_start_that_broke_off_leaves_no_seal(tmp_path: Path) -> None:
    def break_off() -> None:
        with exclusive(tmp_path):
            (tmp_path / "half.nbi").write_bytes(b"in")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        break_off()
    assert compile_into(tmp_path) is False


def test_more_that_was_compiled_later_is_sealed_too(tmp_path: Path) -> None:
    compile_into(tmp_path)
    with exclusive(tmp_path) as whole:
        assert whole
        add_a_file(tmp_path)  # for another processor, or another version of the compiler
    assert compile_into(tmp_path) is True


def test_a_second_process_waits_and_finds_what_the_first_compiled(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from worker.kernels.cpu.cache import exclusive\n"
        f"with exclusive(Path({str(tmp_path)!r})) as whole: print(whole)"
    )
    told: list[str] = []
    with exclusive(tmp_path) as whole:
        assert not whole
        second = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        reader = threading.Thread(target=lambda: told.append(second.communicate()[0].decode()))
        reader.start()
        reader.join(2)
        assert second.poll() is None  # it has had the time to start, and waits
        (tmp_path / "linear.nbi").write_bytes(b"index")
    reader.join(60)
    assert "True" in told[0]
    assert second.returncode == 0


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The three places where the folder is looked for, each in a home of its own."""
    found = SimpleNamespace(told=tmp_path / "told", home=tmp_path / "home", tmp=tmp_path / "tmp")
    found.tmp.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(found.told))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.home))
    monkeypatch.setattr(tempfile, "tempdir", str(found.tmp))
    return found


def test_the_places_are_tried_in_order(places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_folder("digest") == places.told / "digest"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert choose_folder("digest") == places.home / "loraplex" / "kernels" / "digest"
    places.home.rename(places.tmp / "elsewhere")
    places.home.write_text("no folder can be made here")
    folder = choose_folder("digest")
    assert folder.is_relative_to(places.tmp)
    assert choose_folder("digest") == folder  # again the same: nothing is compiled twice, nothing piles up


def test_a_folder_that_others_could_have_filled_is_left_alone(places: SimpleNamespace) -> None:
    choose_folder("digest").chmod(0o777)
    assert choose_folder("digest").is_relative_to(places.home)


def test_a_folder_of_ours_behind_a_link_of_others_is_left_alone(places: SimpleNamespace) -> None:
    ours = choose_folder("digest").rename(places.tmp / "ours")
    (places.told / "digest").symlink_to(ours)
    assert choose_folder("digest").is_relative_to(places.home)


def test_a_full_disk_is_no_place_to_compile_to_but_one_to_read_from(
    places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=4096) if Path(path).is_relative_to(places.told) else usage(path),
    )
    assert choose_folder("digest").is_relative_to(places.home)
    (places.told / "digest" / SEAL).write_text("{}")
    assert choose_folder("digest") == places.told / "digest"
