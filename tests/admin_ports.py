"""Which admin ports services take that are started in this process with port 0, so that none is lost before its use."""

from __future__ import annotations

import socket

import pytest

from common.admin import bind_admin


def taken_admin_ports(monkeypatch: pytest.MonkeyPatch, service: str) -> list[int]:
    """Return the list that gets the admin port of each registry or worker that is started from now on."""
    ports: list[int] = []

    def bound(host: str, port: int) -> socket.socket:
        listener = bind_admin(host, port)
        ports.append(listener.getsockname()[1])
        return listener

    monkeypatch.setattr(f"{service}.app.bind_admin", bound)
    return ports
