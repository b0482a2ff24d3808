"""One process per state folder: an advisory lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.errors import FailedPrecondition


@contextmanager
def hold_state(state_dir: Path) -> Iterator[None]:
    """Hold the folder (made if absent, private to the user) while the block runs.

    Raises FailedPrecondition, naming the holder's pid and host, where another process holds it, or the reason where
    the folder cannot be used.
    """
    file = state_dir / "lock"
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FailedPrecondition(
            f"the state folder {state_dir} cannot be used: {error.strerror}; choose another with --state-dir",
            field="state_dir",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FailedPrecondition(
                f"the state folder {state_dir} is in use by {_holder(descriptor)}; stop that process or choose another "
                "folder with --state-dir",
                field="state_dir",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
