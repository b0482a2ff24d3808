"""From what a client writes to the source that it means, by what the registry's settings allow."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from loraplex.errors import InvalidParameter
from registry.sources.hub import HubRepository, parse_hub
from registry.sources.import_root import LocalFolder
from registry.sources.network_guard import NetworkGuard
from registry.sources.object_store import SCHEMES as STORES
from registry.sources.object_store import ObjectFolder
from registry.sources.source import Source, forbidden, invalid
from registry.sources.web_client import WebClient
from registry.sources.web_folder import WebFolder

SCHEMES: Final = ("hf", "https", *STORES, "http")
"""What settings may allow; paths are allowed by an import root."""
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):(//)?", re.IGNORECASE)
_MAX_CHARACTERS: Final = 4096


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What may be imported and from where; endpoints by scheme, none where the usual one is meant."""

    schemes: frozenset[str]
    import_root: Path | None
    private_hosts: frozenset[str]
    hub_endpoint: str
    hub_token: str | None = field(repr=False)
    endpoints: dict[str, str | None]


class Places:
    """Makes sources; owns what they share. `num_readers` is how many may read local files at a time."""

    def __init__(self, rules: SourceRules, num_readers: int) -> None:
        self._rules = rules
        self._web = WebClient(NetworkGuard(rules.private_hosts), allows_http="http" in rules.schemes)
        self._readers = ThreadPoolExecutor(num_readers, "import-root")

    def close(self) -> None:
        """Let the threads go; one that hangs in a read is not waited for."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._web.close()

    def source(self, text: str) -> Source:
        """Return the source. Raises InvalidParameter, and SourceForbidden for what the settings do not allow."""
        if len(text) > _MAX_CHARACTERS or not text.isprintable():
            raise invalid(f"is longer than {_MAX_CHARACTERS} characters, or not printable")
        match = _SCHEME.match(text)
        scheme, rest = (match[1].lower(), text[match.end() :]) if match else ("file", text)
        if scheme == "file":
            return self._local(_file_path(rest) if match else rest)
        if match and not match[2]:
            raise invalid(f"is neither a path nor of the form {scheme}://…")
        if scheme not in SCHEMES:
            raise invalid(f"has the scheme {scheme}; known are {', '.join(SCHEMES)}, file and plain paths")
        if scheme not in self._rules.schemes:
            raise forbidden(f"the source {scheme}://…", "its --import-schemes leave it out")
        if scheme == "hf":
            return HubRepository(parse_hub(rest), self._rules.hub_endpoint, self._rules.hub_token, self._web)
        if scheme in STORES:
            return ObjectFolder(scheme, rest, self._rules.endpoints.get(scheme))
        try:
            return WebFolder(text, self._web)
        except ValueError as error:  # urlsplit's, of brackets that are no address
            raise invalid("is no URL") from error

    def _local(self, path: str) -> LocalFolder:
        root = self._rules.import_root
        if root is None:
            raise forbidden("a path", "it has no import root; an operator can set one with --import-root")
        return LocalFolder(path, root, self._readers)


def _file_path(rest: str) -> str:
    """Return the path of file:path, file:///path or file://localhost/path; `rest` is what follows file: or file://."""
    if rest.startswith("localhost/"):
        rest = rest.removeprefix("localhost")
    return unquote(rest)


def check_endpoint(url: str) -> str:
    """Return an endpoint's URL as it is. Raises ValueError for anything else."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and not parts.query and "@" not in parts.netloc
    except (ValueError, InvalidParameter):
        usable = False
    if not usable:
        raise ValueError(f"{url!r} is no endpoint; give https://HOST or http://HOST:PORT")
    return url
