"""A folder on the registry's own machine, if it lies below the configured import root.

The path is resolved first, links included, and must then lie below the root. What is opened are the folders and the
file of the resolved path, one by one and following no link: a link that is put there in between leads nowhere.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from registry.sources.source import Opened, forbidden, invalid, not_found, unreachable

T = TypeVar("T")

_CHUNK_BYTES: Final = 2**20
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not be waited for


class LocalFolder:
    """A folder below the root. Reads in threads of its own, as a network file system may hang."""

    def __init__(self, path: str, root: Path, readers: Executor) -> None:
        """`path` is absolute, or relative to the root. Raises InvalidParameter for what is no path."""
        if not path or not path.isprintable():
            raise invalid("is no path")
        self._path = path
        self._root = root
        self._readers = readers

    async def locate(self) -> str:
        """Return the path relative to the root."""
        _, relative = await self._in_reader(lambda: self._resolve(""))
        return f"file:{relative.as_posix()}"

    @asynccontextmanager
    async def open(self, name: str, offset: int, stamp: str) -> AsyncIterator[Opened]:
        """Open a file of the folder; an offset only where it has not changed since `stamp`."""
        opening = self._readers.submit(self._open, name)
        try:
            stream = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        try:
            facts = os.fstat(stream.fileno())
            now = f"{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_size}"
            begin = offset if stamp == now else 0
            yield Opened(self._chunks(stream, begin), begin, facts.st_size, now)
        finally:
            self._readers.submit(stream.close)  # after a read that hangs, and by no thread of others

    async def _chunks(self, stream: BinaryIO, offset: int) -> AsyncIterator[bytes]:
        stream.seek(offset)
        while chunk := await self._in_reader(lambda: stream.read(_CHUNK_BYTES)):
            yield chunk

    def _resolve(self, name: str) -> tuple[Path, Path]:
        try:
            root = self._root.resolve()
            relative = (self._root / self._path / name).resolve()
        except RuntimeError as error:  # pathlib's word for it
            raise invalid("has links that lead in a circle") from error
        if not relative.is_relative_to(root):
            raise forbidden(f"the path {self._path}", "it does not lie below the registry's import root")
        return root, relative.relative_to(root)

    def _open(self, name: str) -> BinaryIO:
        root, relative = self._resolve(name)
        what = f"file:{relative.as_posix()}"
        folder = -1
        try:
            folder = os.open(root, _FOLDER_FLAGS)
            *folders, last = relative.parts or (".",)
            for part in folders:
                folder, left = os.open(part, _FOLDER_FLAGS, dir_fd=folder), folder
                os.close(left)
            stream = os.fdopen(os.open(last, _FILE_FLAGS, dir_fd=folder), "rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise not_found(what) from error
        except PermissionError as error:
            raise forbidden(what, "the registry's user may not read it") from error
        except OSError as error:
            raise unreachable(what, error.strerror or "it cannot be opened") from error
        finally:
            if folder >= 0:
                os.close(folder)
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.close()
            raise invalid(f"names {what}, which is no plain file")
        return stream

    async def _in_reader(self, work: Callable[[], T]) -> T:
        def typed() -> T:
            try:
                return work()
            except OSError as error:
                raise unreachable(f"the path {self._path}", error.strerror or "it cannot be read") from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, typed)


def _close_opened(opening: Future[BinaryIO]) -> None:
    """Close a file that was opened for somebody who has left."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
