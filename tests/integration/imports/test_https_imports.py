"""https:// sources with real TLS, and the guard with nothing allowed."""

from __future__ import annotations

import ssl

import pytest
import trustme

from loraplex import errors
from tests.file_server import Answer, file_server
from tests.running_registry import refusal, registry_here

CONFIG = "adapter_config.json"


@pytest.fixture
def authority(tmp_path, monkeypatch):
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


def context(authority, name):
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(made)
    return made


async def test_only_servers_that_prove_their_name_are_read(tmp_path, base_folder, adapter_folder, authority):
    hosts = {"import_private_hosts": "localhost,127.0.0.1"}
    async with (
        file_server(context(authority, "localhost")) as good,
        file_server(context(authority, "elsewhere.example")) as other,
        file_server() as plain,
        registry_here(tmp_path / "state", **hosts) as registry,
    ):
        await registry.add_base(base_folder)
        for server in (good, other, plain):
            server.put_folder("/sql/", adapter_folder)
        url = good.base.replace("127.0.0.1", "localhost") + "/sql/"
        registered = await registry.import_(url)
        assert registered.adapter.current.source == url
        for source in (good.base + "/sql/", other.base + "/sql/"):
            error = await refusal(registry.events(source, "y"), errors.SourceUnreachable)
            assert "certificate" in error.message.lower()
        await refusal(registry.events(plain.base + "/sql/", "y"), errors.SourceForbidden)
        good.put(f"/sql/{CONFIG}", Answer(b"", 302, {"Location": f"{plain.base}/sql/{CONFIG}"}))
        error = await refusal(registry.events(url, "y"), errors.SourceForbidden)
        assert "the scheme http" in error.message
        assert not plain.requests


async def test_no_private_address_is_connected_to_unless_the_settings_name_its_host(
    tmp_path, base_folder, adapter_folder, authority
):
    async with file_server(context(authority, "localhost")) as server, registry_here(tmp_path / "state") as registry:
        await registry.add_base(base_folder)
        server.put_folder("/sql/", adapter_folder)
        for host in ("localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"):
            source = server.base.replace("127.0.0.1", host) + "/sql/"
            error = await refusal(registry.events(source), errors.SourceForbidden)
            assert "not a public one" in error.message
        assert not server.requests
