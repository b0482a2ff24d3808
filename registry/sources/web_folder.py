"""https://host/folder/: an adapter's two files below one URL, whose query and credentials go with both requests."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import unquote, urlsplit

from loraplex.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from registry.sources.source import Opened, invalid
from registry.sources.web_client import WebClient, WebResponse, check_found

_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


class WebFolder:
    """A folder on a web server. Parts are asked for only where an entity tag or a time can tell that it is the same."""

    def __init__(self, url: str, client: WebClient) -> None:
        """Check the URL. Raises InvalidParameter for what is no folder's URL."""
        parts = urlsplit(url)
        folder, _, last = parts.path.rpartition("/")
        if last in _FILES:  # one of the two files was named
            parts = parts._replace(path=f"{folder}/")
        elif last or not parts.path:
            raise invalid(
                f"must name a folder and end in /: {parts.scheme}://{parts.hostname}{parts.path}/, which holds "
                f"{' and '.join(_FILES)}"
            )
        if not parts.hostname:
            raise invalid("has no host")
        userinfo, _, authority = parts.netloc.rpartition("@")
        self._parts = parts._replace(netloc=authority, fragment="")
        self._shown = self._parts._replace(query="").geturl()
        self._headers = {"authorization": f"Basic {_basic(userinfo)}"} if userinfo else {}
        self._client = client

    async def locate(self) -> str:
        """Return the URL without credentials and query."""
        return self._shown

    @asynccontextmanager
    async def open(self, name: str, offset: int, stamp: str) -> AsyncIterator[Opened]:
        """Open a file, from an offset where the server can tell that it has not changed."""
        url, what = self._parts._replace(path=self._parts.path + name).geturl(), self._shown + name
        wanted = {"range": f"bytes={offset}-", "if-range": stamp} if offset and stamp else {}
        async with self._client.get(url, what, {**self._headers, **wanted}) as answer:
            yield opened(answer, what)


def opened(answer: WebResponse, what: str, sha256: str | None = None, size_bytes: int | None = None) -> Opened:
    """Return what an answer holds. Raises the typed error where it is none."""
    check_found(answer, what)
    size = answer.size_bytes if size_bytes is None else size_bytes
    return Opened(answer.chunks, answer.offset, size, answer.stamp, sha256)


def _basic(userinfo: str) -> str:
    return base64.b64encode(unquote(userinfo).encode()).decode()
