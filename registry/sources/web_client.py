"""GET over HTTPS for sources: guarded connections, bounded redirects, credentials that go to their own host only.

Environment variables for proxies are not read: behind a proxy the guard could not see where a connection ends.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httpcore2

from registry.sources.network_guard import GuardedNetwork, NetworkGuard
from registry.sources.source import forbidden, invalid, not_found, unreachable

_MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PORTS: Final = {"http": 80, "https": 443}
_RESOLVERS: Final = 32
_FAILURES: Final = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError)
_LEGAL: Final = "!$%&'()*+,/:;=?@[]~"
_RANGE: Final = "content-range"
_MAX_DIGITS: Final = 18  # of a size; all such fit 64 bits


@dataclass(frozen=True, slots=True)
class WebResponse:
    """An answer: its status, its headers by lower-case name, and its body."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    authority: str
    """HOST[:PORT] that answered, which may be another than was asked."""

    @property
    def size_bytes(self) -> int | None:
        """Size of the whole file, where the answer tells it."""
        if self.status == 206:
            _, _, total = self.headers.get(_RANGE, "").partition("/")
            return _number(total)
        return _number(self.headers.get("content-length", ""))

    @property
    def offset(self) -> int:
        """First byte of the file that the body has."""
        if self.status != 206:
            return 0
        first, _, _ = self.headers.get(_RANGE, "").removeprefix("bytes ").partition("-")
        number = _number(first)
        return -1 if number is None else number

    @property
    def stamp(self) -> str:
        """A strong entity tag or else the time of the last change; empty where there is neither."""
        tag = self.headers.get("etag", "")
        return tag if tag and not tag.startswith("W/") else self.headers.get("last-modified", "")


class WebClient:
    """Opens URLs. One for all imports; each call has connections of its own, which end with it."""

    def __init__(self, guard: NetworkGuard, *, allows_http: bool) -> None:
        self._guard = guard
        self._schemes = ("https", "http") if allows_http else ("https",)
        self._tls = ssl.create_default_context()
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "resolve")

    def close(self) -> None:
        """Let the threads end; a look-up that hangs is not waited for."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def get(
        self, url: str, what: str, headers: Mapping[str, str] | None = None, *, trusted: str = ""
    ) -> AsyncIterator[WebResponse]:
        """Open `url`; `what` is how messages call it. Redirects are followed, whatever else comes is the caller's.

        `authorization` among the headers goes to the first host only. `trusted` is a URL of the settings: its host may
        have any address and be spoken to without TLS. Raises SourceForbidden, SourceUnreachable and InvalidParameter.
        """
        sent = {"accept-encoding": "identity", "user-agent": "loraplex", **(headers or {})}
        configured = urlsplit(trusted) if trusted else None
        guard = self._guard
        if configured:
            guard = guard.trusting(configured.hostname or "", _port(configured))
        network = GuardedNetwork(guard, self._resolvers)
        async with httpcore2.AsyncConnectionPool(ssl_context=self._tls, network_backend=network) as pool:
            for _ in range(_MAX_REDIRECTS + 1):
                parts = urlsplit(url)
                if configured is None or parts[:2] != configured[:2]:
                    self._check(parts, what)
                try:
                    headed = [("host", _host_header(parts)), *sent.items()]
                    async with pool.stream("GET", _request_url(parts), headers=headed) as response:
                        answer = _response(response, _host_header(parts))
                        location = answer.headers.get("location")
                        if answer.status not in _REDIRECTS or location is None:
                            yield answer
                            return
                except _FAILURES as error:
                    raise unreachable(what, _in_words(error)) from error
                url = _joined(url, location, what)
                if urlsplit(url)[:2] != parts[:2]:
                    sent.pop("authorization", None)
        raise unreachable(what, f"it redirects more than {_MAX_REDIRECTS} times")

    def _check(self, parts: SplitResult, what: str) -> None:
        if parts.scheme not in self._schemes:
            raise forbidden(what, f"it is, or leads to, an address of the scheme {parts.scheme or 'none'}")
        if not parts.hostname:
            raise invalid("has no host")


def check_found(answer: WebResponse, what: str) -> None:
    """Raise the typed error for an answer that is not the thing that was asked for."""
    if answer.status in (200, 206):
        return
    told = f"{answer.authority} answers {answer.status}"
    if answer.status in (404, 410):
        raise not_found(what)
    if answer.status in (401, 403):
        raise forbidden(what, told)
    raise unreachable(what, told)


def _joined(url: str, location: str, what: str) -> str:
    """Return where a redirect leads. Raises SourceUnreachable where that is no URL."""
    try:
        target = urljoin(url, location)
        urlsplit(target)
    except ValueError as error:  # of brackets that are no address
        raise unreachable(what, "it redirects to what is no URL") from error
    return target


def _number(text: str) -> int | None:
    """Return a header's number of bytes, None for what is none that a file can have."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise invalid("has a port that is none") from error


def _ascii_host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    if ":" in host:  # an IPv6 address
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError as error:
        raise invalid("has a host that is none") from error


def _host_header(parts: SplitResult) -> str:
    host = _ascii_host(parts)
    host = f"[{host}]" if ":" in host else host
    return host if _port(parts) == _PORTS.get(parts.scheme) else f"{host}:{_port(parts)}"


def _request_url(parts: SplitResult) -> httpcore2.URL:
    target = quote(parts._replace(scheme="", netloc="", fragment="").geturl() or "/", safe=_LEGAL)
    return httpcore2.URL(scheme=parts.scheme, host=_ascii_host(parts), port=_port(parts), target=target)


def _response(response: httpcore2.Response, authority: str) -> WebResponse:
    headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in response.headers}
    return WebResponse(response.status, headers, response.aiter_stream(), authority)


def _in_words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
