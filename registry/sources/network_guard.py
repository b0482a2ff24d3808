"""Which hosts the registry connects to on behalf of others: public ones, and those that its settings name.

Judged by the address that is connected to, when it is connected to: a name that resolves to another address a moment
later, or a redirect, gets nowhere else. A URL is somebody's input, and the registry stands inside the network.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Collection, Iterable
from concurrent.futures import Executor
from typing import Any, Final

import httpcore2

from loraplex.errors import SourceForbidden
from registry.sources.source import forbidden

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_CONNECT_S: Final = 10.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Tell whether an address is one of the public network, by itself and by any IPv4 address inside it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class NetworkGuard:
    """Decides on hosts; `private_hosts` are HOST or HOST:PORT that may have addresses that are not public."""

    def __init__(self, private_hosts: Collection[str] = ()) -> None:
        self._private_hosts = frozenset(host.lower() for host in private_hosts)

    def trusting(self, host: str, port: int) -> NetworkGuard:
        """Return a guard that trusts one more host."""
        return NetworkGuard({*self._private_hosts, f"{host}:{port}"})

    def allowed(self, host: str, port: int, addresses: Iterable[Address]) -> list[Address]:
        """Return the addresses of a host that may be connected to. Raises SourceForbidden where none may."""
        found = list(dict.fromkeys(addresses))
        name = host.lower()
        if name in self._private_hosts or f"{name}:{port}" in self._private_hosts:
            return found
        public = [address for address in found if is_public(address)]
        if not public:
            raise forbidden(
                f"{host}:{port}",
                "its address is not a public one; an operator can allow the host with --import-private-hosts",
            )
        return public


class GuardedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects for the HTTP client: resolves, asks the guard, and connects to the very address that was judged."""

    def __init__(self, guard: NetworkGuard, resolvers: Executor) -> None:
        """Use the guard; `resolvers` are threads that look up names, as one that hangs must hold nobody else's."""
        self._guard = guard
        self._resolvers = resolvers
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address that answers. Raises SourceForbidden and httpcore's ConnectError."""
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in self._guard.allowed(host, port, await self._resolve(host, port)):
            try:
                return await self._network.connect_tcp(
                    str(address), port, min(timeout or _CONNECT_S, _CONNECT_S), local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - httpcore's signature
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore2.AsyncNetworkStream:
        """Refuse: no source is a socket."""
        raise SourceForbidden(f"{path} is no host", field="source")

    async def _resolve(self, host: str, port: int) -> list[Address]:
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._resolvers, look_up)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that is none
            raise httpcore2.ConnectError(f"{host} cannot be resolved") from error
        return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
