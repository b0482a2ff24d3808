from __future__ import annotations

import socket

import pytest

from loraplex.cli.ports import claim_ports, connectable
from loraplex.errors import FailedPrecondition, InvalidParameter


def test_picked_ports_are_free_and_different():
    ports = claim_ports("127.0.0.1", [("x", "--x", 0)] * 8)
    assert len(set(ports)) == 8
    assert claim_ports("127.0.0.1", [("x", "--x", port) for port in ports]) == ports


def test_a_taken_port_is_named_with_its_purpose_and_the_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=f"port {port} .* the registry.*--registry-port"):
            claim_ports("127.0.0.1", [("the router", "--router-port", 0), ("the registry", "--registry-port", port)])


def test_the_same_port_twice_is_taken():
    (port,) = claim_ports("127.0.0.1", [("x", "--x", 0)])
    with pytest.raises(FailedPrecondition, match=f"port {port}"):
        claim_ports("127.0.0.1", [("x", "--x", port), ("y", "--y", port)])


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_names_the_option(port):
    with pytest.raises(InvalidParameter, match="--worker-port"):
        claim_ports("127.0.0.1", [("worker-3", "--worker-port", port)])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_named(host):
    with pytest.raises(InvalidParameter, match=host):
        claim_ports(host, [("x", "--x", 0)])


def test_ipv6_works():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    assert claim_ports("::1", [("x", "--x", 0)])[0] > 0


def test_wildcards_are_reached_through_loopback():
    assert [connectable(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]
