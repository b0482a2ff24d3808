"""One process per folder, told by name; the kernel gives the lock back when its holder dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from loraplex.errors import FailedPrecondition
from loraplex.folder_lock import FolderLock

HOLD = """
import sys, time
from pathlib import Path
from loraplex.folder_lock import FolderLock
with FolderLock(Path(sys.argv[1]), "the folder", "choose another").held():
    print("held", flush=True)
    time.sleep(60)
"""


def lock_of(folder, **options) -> FolderLock:
    return FolderLock(folder, "the state folder", "choose another with --state-dir", **options)


def test_a_second_holder_is_refused_with_the_firsts_name_and_the_remedy(tmp_path):
    lock = lock_of(tmp_path / "new" / "state", field="state_dir")
    with lock.held():
        with pytest.raises(FailedPrecondition) as refused, lock.held():
            pass
        assert f"process {os.getpid()} on host {os.uname().nodename}" in refused.value.message
        assert refused.value.message.endswith("choose another with --state-dir")
        assert refused.value.field == "state_dir"
        with lock_of(lock.folder, file_name="other.lock").held():
            pass
    with lock.held():
        pass
    assert lock.folder.stat().st_mode & 0o777 == 0o700


def test_a_killed_process_holds_nothing(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FailedPrecondition, match=f"process {holder.pid} on"), lock_of(tmp_path).held():
            pass
        holder.send_signal(signal.SIGKILL)
    with lock_of(tmp_path).held():
        pass


def test_a_disk_without_room_for_the_name_can_still_be_locked_unless_room_is_needed(tmp_path):
    (tmp_path / "lock").symlink_to("/dev/full")
    with lock_of(tmp_path).held(), pytest.raises(FailedPrecondition, match="in use by another process"):
        lock_of(tmp_path).take()
    with pytest.raises(FailedPrecondition, match=r"cannot be used.*--state-dir"):
        lock_of(tmp_path, needs_space=True).held().__enter__()


def test_what_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match=r"cannot be used: Not a directory|cannot be used: File exists"):
        lock_of(tmp_path / "file").held().__enter__()
