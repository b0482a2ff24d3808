"""hf://owner/repo[/folder][@revision]: a model repository of the Hugging Face hub, or of a mirror that speaks so.

Two of the hub's addresses are used: one tells the commit behind a revision and the files with sizes and, of large ones,
SHA-256; the other gives a file of that commit, mostly by a redirect to a store. So what is fetched is one commit's, and
resumed as long as its store can.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from loraplex.digests import is_digest
from loraplex.errors import UnsupportedAdapter
from loraplex.peft_folder import PICKLE_SUFFIXES, WEIGHTS_FILE
from registry.sources.source import Opened, forbidden, invalid, not_found, unreachable
from registry.sources.web_client import WebClient, WebResponse
from registry.sources.web_folder import opened

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,254}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
_MAX_ANSWER_BYTES: Final = 8 * 2**20
_FORM: Final = "hf://owner/repo, with /folder and @revision after it where needed"


@dataclass(frozen=True, slots=True)
class HubPlace:
    """What an hf:// source names; `folder` is empty or ends in /, `revision` is empty where none is named."""

    repo: str
    folder: str
    revision: str


@dataclass(frozen=True, slots=True)
class _Listed:
    size_bytes: int | None
    sha256: str | None


def parse_hub(text: str) -> HubPlace:
    """Return what the part after hf:// names. Raises InvalidParameter."""
    path, _, revision = text.partition("@")
    owner, *rest = path.rstrip("/").split("/")
    if (
        not rest
        or not all(_ID.fullmatch(part) for part in (owner, *rest))
        or ("@" in text and (not _REVISION.fullmatch(revision) or ".." in revision))
    ):
        raise invalid(f"is not of the form {_FORM}")
    repo, *folders = rest
    return HubPlace(f"{owner}/{repo}", "".join(f"{folder}/" for folder in folders), revision)


class HubRepository:
    """A folder of a repository at one commit. `token` is the registry's own, and goes to the endpoint only."""

    def __init__(self, place: HubPlace, endpoint: str, token: str | None, client: WebClient) -> None:
        self._place = place
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = client
        self._commit = ""
        self._listed: Mapping[str, _Listed] = {}

    async def locate(self) -> str:
        """Ask for the commit and return the source with it."""
        place = self._place
        shown = f"hf://{place.repo}" + (f"@{place.revision}" if place.revision else "")
        url = f"{self._endpoint}/api/models/{place.repo}"
        if place.revision:
            url += f"/revision/{quote(place.revision, safe='')}"
        async with self._client.get(f"{url}?blobs=true", shown, self._headers, trusted=self._endpoint) as answer:
            self._check(answer, shown)
            told = await _json(answer, shown)
        try:
            self._commit = str(told["sha"])
            self._listed = {str(file["rfilename"]): _listed(file) for file in told["siblings"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise unreachable(shown, "what answers is not a hub's API") from error
        if not _COMMIT.fullmatch(self._commit):
            raise unreachable(shown, "the hub names no commit")
        return f"hf://{place.repo}/{place.folder}".rstrip("/") + f"@{self._commit}"

    @asynccontextmanager
    async def open(self, name: str, offset: int, stamp: str) -> AsyncIterator[Opened]:
        """Open a file of the commit."""
        path = self._place.folder + name
        what = f"hf://{self._place.repo}/{path}@{self._commit[:12]}"
        listed = self._listed.get(path)
        if listed is None:
            self._refuse_pickles(name)
            raise not_found(what)
        url = f"{self._endpoint}/{self._place.repo}/resolve/{self._commit}/{quote(path)}"
        wanted = {"range": f"bytes={offset}-"} if offset and stamp else {}
        async with self._client.get(url, what, {**self._headers, **wanted}, trusted=self._endpoint) as answer:
            self._check(answer, what)
            found = opened(answer, what, listed.sha256, listed.size_bytes)
            # The commit says which bytes these are, so a store needs no tag of its own to be asked for the rest.
            yield Opened(found.chunks, found.offset, found.size_bytes, self._commit, found.sha256)

    def _check(self, answer: WebResponse, what: str) -> None:
        """Raise for the hub's refusals, which say more than their status."""
        code = answer.headers.get("x-error-code", "")
        if code == "GatedRepo":
            raise forbidden(what, "the repository is gated, and the registry's token has no access to it")
        if code in ("RepoNotFound", "RevisionNotFound", "EntryNotFound") or answer.status == 404:
            raise not_found(what)
        if answer.status in (401, 403):
            why = "the hub does not take the registry's token" if self._headers else "the registry has no token for it"
            raise forbidden(what, why)
        if answer.status not in (200, 206):
            raise unreachable(what, f"{answer.authority} answers {answer.status}")

    def _refuse_pickles(self, name: str) -> None:
        folder = self._place.folder
        pickles = [path for path in sorted(self._listed) if path.startswith(folder) and path.endswith(PICKLE_SUFFIXES)]
        if name == WEIGHTS_FILE and pickles:
            raise UnsupportedAdapter(
                f"the repository holds the adapter's weights as a pickle ({pickles[0]}), which could run code when "
                f"opened and is never read; it needs {WEIGHTS_FILE}",
                field="source",
            )


def _listed(file: Any) -> _Listed:
    lfs = file.get("lfs") or {}
    size, sha256 = lfs.get("size", file.get("size")), lfs.get("sha256")
    return _Listed(size if isinstance(size, int) else None, sha256 if is_digest(str(sha256)) else None)


async def _json(answer: WebResponse, what: str) -> Any:
    body = bytearray()
    async for chunk in answer.chunks:
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            raise unreachable(what, f"the hub's answer has more than {_MAX_ANSWER_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise unreachable(what, "what answers is not a hub's API") from error
