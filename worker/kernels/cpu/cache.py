"""The folder in which compiled kernels are kept: where it is, who may fill it, and whether it is whole.

What is in it gets executed, and Numba believes what it finds: a file that was cut off ends the process at every start,
a changed one does worse, and two processes that fill one folder at a time can mix up the numbers of their files. So one
process at a time has the folder while it reads or compiles, and a folder is read only if the seal, written when
everything was compiled, tells that each file is as it was then. Any other is emptied.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

SEAL: Final = "seal.json"
"""{file in the folder: SHA-256} of all compiled code, when it was complete."""
_LOCK: Final = ".lock"
_NEEDED_BYTES: Final = 32 * 2**20
"""Room that a folder's disk must have for it to be filled; what is compiled takes a quarter."""

log = structlog.get_logger(__name__)


def choose_folder(name: str) -> Path:
    """Return the first folder `name` that can be used, below the places for it; a new one where none can."""
    own = Path(tempfile.gettempdir()) / f"loraplex-kernels-{os.getuid()}"
    places = (
        os.environ.get("NUMBA_CACHE_DIR"),
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "loraplex" / "kernels",
        own,
    )
    for place in places:
        if not place:
            continue
        try:
            parent = Path(place).expanduser()
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if place == own and not _is_ours(own):  # anybody can make a folder there
                continue
            folder = parent / name
            folder.mkdir(exist_ok=True, mode=0o700)
            if not _is_ours(folder) or not os.access(folder, os.W_OK | os.X_OK):
                continue
            if (folder / SEAL).exists() or shutil.disk_usage(folder).free >= _NEEDED_BYTES:
                return folder
        except (OSError, RuntimeError):  # RuntimeError: nobody's home
            continue
    return Path(tempfile.mkdtemp(prefix="loraplex-kernels-"))


def _is_ours(folder: Path) -> bool:
    """Tell whether nobody else could have put code into a folder."""
    facts = folder.lstat()
    # A group may write: some platforms see to it that theirs can.
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & stat.S_IWOTH


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Have the folder while the block compiles or reads code; yields whether it is whole. Sealed afterwards.

    A folder that is not whole is empty. Where another process compiles, this waits, and finds what that has compiled.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(lock, folder)
        before = _digests(folder)
        whole = bool(before) and _sealed(folder) == before
        if not whole:
            _empty(folder)
        yield whole
        after = _digests(folder)
        if not whole or after != before:
            _seal(folder, after)
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not (folder / SEAL).exists():  # else it only reads
            log.info("kernels.waiting", cache=str(folder), progress="waiting for a process that compiles kernels")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:  # a file system without locks: most starts meet nobody
        log.warning("kernels.cache_without_lock", cache=str(folder), error=str(error))


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.nb[ic]"))
    }


def _sealed(folder: Path) -> object:
    """Return what the seal tells; None for one that cannot be read."""
    try:
        return json.loads((folder / SEAL).read_bytes())
    except (OSError, ValueError):
        return None


def _seal(folder: Path, digests: dict[str, str]) -> None:
    fresh = folder / f"{SEAL}.new"
    fresh.write_text(json.dumps(digests))
    fresh.replace(folder / SEAL)


def _empty(folder: Path) -> None:
    (folder / SEAL).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            # The folders stay: processes that are about to compile have looked for them.
            for file in entry.iterdir():
                file.unlink()
        elif entry.name != _LOCK:
            entry.unlink()
