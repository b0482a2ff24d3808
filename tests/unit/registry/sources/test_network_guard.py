"""Which addresses an import may reach."""

from __future__ import annotations

import ipaddress

import pytest

from loraplex.errors import SourceForbidden
from registry.sources.network_guard import NetworkGuard, is_public

PRIVATE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_of_the_public_network_is_refused(address):
    assert not is_public(ipaddress.ip_address(address))
    with pytest.raises(SourceForbidden, match="import-private-hosts") as caught:
        NetworkGuard().allowed("host.example", 443, [ipaddress.ip_address(address)])
    assert caught.value.field == "source"


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_may_be_reached(address):
    assert is_public(ipaddress.ip_address(address))


def test_of_a_host_with_both_kinds_only_the_public_address_is_used():
    both = [ipaddress.ip_address(address) for address in ("127.0.0.1", "1.1.1.1", "1.1.1.1")]
    assert NetworkGuard().allowed("host.example", 443, both) == [ipaddress.ip_address("1.1.1.1")]


def test_a_host_that_the_settings_name_may_be_private_on_its_port_or_on_any():
    inside = [ipaddress.ip_address("10.0.0.1")]
    assert NetworkGuard({"Store.Example:8443"}).allowed("store.example", 8443, inside) == inside
    assert NetworkGuard({"store.example"}).allowed("STORE.example", 1, inside) == inside
    for host, port in (("store.example", 443), ("other.example", 8443)):
        with pytest.raises(SourceForbidden):
            NetworkGuard({"store.example:8443"}).allowed(host, port, inside)
