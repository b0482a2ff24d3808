"""Ports of a local cluster: checked before anything starts, so that the one that is taken can be named."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from contextlib import ExitStack

from loraplex.errors import FailedPrecondition, InvalidParameter


def connectable(host: str) -> str:
    """Return an address at which this machine reaches a service that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "[::1]"}.get(host, host)  # noqa: S104 - not bound here


def claim_ports(host: str, wanted: Iterable[tuple[str, str, int]]) -> list[int]:
    """Return a free port for each (owner, option, port); 0 is replaced by one the system picks.

    All are held at once while this looks, so no two are the same; they are free again on return. Raises
    FailedPrecondition naming the port that is taken, its owner-to-be and the option, or InvalidParameter.
    """
    with ExitStack() as stack:
        return [_claim(stack, host, owner, option, port) for owner, option, port in wanted]


def _claim(stack: ExitStack, host: str, owner: str, option: str, port: int) -> int:
    if not 0 <= port <= 65535:
        raise InvalidParameter(f"{owner} would get port {port}, which does not exist; lower {option}", field=option)
    bare = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InvalidParameter(f"--host {host} is not an address: {error.strerror}", field="--host") from error
    probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger after an exit do not count
    try:
        probe.bind(address)
        probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FailedPrecondition(
                f"port {port} on {host}, meant for {owner}, is taken; stop the process that holds it, "
                f"or choose another with {option} (0 picks a free one)",
                field=option,
                port=port,
            ) from error
        if error.errno == errno.EACCES:
            raise FailedPrecondition(
                f"port {port}, meant for {owner}, needs privileges; choose one above 1023 with {option}", field=option
            ) from error
        raise InvalidParameter(f"cannot listen on {host}:{port}: {error.strerror}", field="--host") from error
    bound: int = probe.getsockname()[1]
    return bound
