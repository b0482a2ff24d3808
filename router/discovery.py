"""Where workers may be: a static list, or a DNS name asked again and again.

Discovery only proposes addresses; whether a worker is there is for its status stream to say.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from common.config import split_list
from loraplex.address import parse_address

log = structlog.get_logger(__name__)

DNS_PREFIX: Final = "dns:"
LOOKUP_INTERVAL_S: Final = 5.0
LOOKUP_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class StaticWorkers:
    """Addresses (host:port) that are always worth trying."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DnsWorkers:
    """A name whose A and AAAA records are the workers."""

    name: str
    port: int


WorkerSource = StaticWorkers | DnsWorkers


def parse_workers(spec: str) -> WorkerSource:
    """Read `HOST:PORT[,HOST:PORT...]` or `dns:NAME:PORT`. Raises ValueError that says what is wrong with it."""
    if spec.startswith(DNS_PREFIX):
        return DnsWorkers(*parse_address(spec.removeprefix(DNS_PREFIX)))
    parts = split_list(spec)
    if not parts:
        raise ValueError("names no worker; give HOST:PORT[,HOST:PORT...] or dns:NAME:PORT")
    for part in parts:
        parse_address(part)
    return StaticWorkers(tuple(dict.fromkeys(parts)))


async def look_up(source: DnsWorkers) -> list[str]:
    """Return the addresses of the name now, sorted. Raises OSError and TimeoutError."""
    async with asyncio.timeout(LOOKUP_TIMEOUT_S):
        found = await asyncio.get_running_loop().getaddrinfo(source.name, source.port, type=socket.SOCK_STREAM)
    addresses = set()
    for family, _, _, _, where in found:
        host, port = str(where[0]), int(where[1])
        addresses.add(f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}")
    return sorted(addresses)


async def follow_dns(
    source: DnsWorkers,
    on_addresses: Callable[[list[str]], None],
    rng: random.Random,
    interval_s: float = LOOKUP_INTERVAL_S,
) -> None:
    """Ask every `interval_s` (with jitter, until cancelled) and report; an empty or failed look-up reports nothing."""
    failing = False
    while True:
        try:
            addresses = await look_up(source)
        except (OSError, TimeoutError) as error:
            if not failing:
                log.warning("fleet.lookup_failed", name=source.name, error=str(error) or "timeout")
            failing = True
        else:
            if addresses:
                failing = False
                on_addresses(addresses)
        await asyncio.sleep(interval_s * rng.uniform(0.8, 1.2))
