"""What every kind of source offers, and the words that all share.

A source reads two files and nothing else. What may pass when it is tried again is raised as SourceUnreachable, all
else as what it is. Nobody waits here without the deadlines of `registry.service.fetching`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from loraplex.errors import InvalidParameter, SourceForbidden, SourceNotFound, SourceUnreachable


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that is being read."""

    chunks: AsyncIterator[bytes]
    """Its bytes from `offset` on."""
    offset: int
    """The one that was asked for, or 0 where the source cannot go on from there."""
    size_bytes: int | None
    """Of the whole file, where that is known."""
    stamp: str
    """Changes when the content does; empty where the source has nothing of the kind."""
    sha256: str | None = None
    """Of the whole file, where the source tells it."""


class Source(Protocol):
    """An adapter's folder in one place."""

    async def locate(self) -> str:
        """Return what will be stored of it: without secrets, and as exact as the place can be named."""

    def open(self, name: str, offset: int, stamp: str) -> AbstractAsyncContextManager[Opened]:
        """Open one of the adapter's files at `offset`; `stamp` is what an earlier part of it came with."""


def invalid(why: str) -> InvalidParameter:
    """Return the error for a source that is written wrongly."""
    return InvalidParameter(f"the source {why}", field="source")


def not_found(what: str) -> SourceNotFound:
    """Return the error for something that is not there."""
    return SourceNotFound(f"{what} does not exist, or the registry is not let to see it", field="source")


def forbidden(what: str, why: str) -> SourceForbidden:
    """Return the error for something that the registry may not read."""
    return SourceForbidden(f"{what} may not be read by the registry: {why}", field="source")


def unreachable(what: str, why: str) -> SourceUnreachable:
    """Return the error for something that may work when it is tried again."""
    return SourceUnreachable(f"{what} cannot be read: {why}", field="source", retry_after_s=5.0)
