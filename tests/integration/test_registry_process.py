"""The registry as a process: its lock, its port, its signals, and what a kill in mid-upload leaves behind."""

from __future__ import annotations

import os
import signal
import sqlite3

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.errors import FailedPrecondition
from loraplex.registry.v1 import adapter_pb2 as a
from tests.file_server import Answer, file_server
from tests.running_registry import (
    Client,
    eventually,
    nothing_is_left,
    registry_here,
    registry_process,
    stored_files,
    upload_parts,
)
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter"), base_folder)


def stored_in(database_url: str | None) -> tuple[str, ...]:
    """Return the flags of a registry on this database."""
    return () if database_url is None else ("--database-url", database_url)


async def test_a_second_process_on_the_state_folder_says_who_holds_it(tmp_path):
    async with registry_here(tmp_path / "state"), registry_process(tmp_path / "state") as second:
        assert await second.end() == 1
        assert f"in use by process {os.getpid()} on host {os.uname().nodename}" in "".join(second.log)
    async with registry_here(tmp_path / "state"):
        pass  # the lock went with its holder


async def test_sigterm_drains_and_exits_with_zero(tmp_path, database_url):
    async with registry_process(tmp_path / "state", *stored_in(database_url)) as running:
        client = Client(f"127.0.0.1:{await running.listening_port()}")
        health = health_pb2_grpc.HealthStub(client.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        events = aiter(client.adapters.Watch(a.WatchRequest(), timeout=20))
        assert (await anext(events)).HasField("synced")
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError):
            await _rest(events, "heartbeat")
        assert await running.end() == 0
        assert "registry.stopped" in running.log[-1]
        await client.channel.close()


async def _rest(answers, field):
    """Read what was told before a stream's end: nothing but that field."""
    async for answer in answers:
        assert answer.HasField(field)


async def test_a_kill_in_mid_import_leaves_nothing(tmp_path, database_url, base_folder, adapter_folder):
    state = tmp_path / "state"
    flags = (*stored_in(database_url), "--import-schemes", "http", "--import-private-hosts", "127.0.0.1")
    async with file_server() as server:
        server.put_folder("/sql/", adapter_folder)
        weights = "/sql/adapter_model.safetensors"
        server.put(weights, Answer((adapter_folder / weights[5:]).read_bytes(), until=9000, stalls=True))
        async with registry_process(state, *flags) as running:
            client = Client(f"127.0.0.1:{await running.listening_port()}")
            await client.add_base(base_folder)
            request = a.ImportAdapterRequest(name="lost", source=f"{server.base}/sql/")
            call = client.adapters.ImportAdapter(request)
            await server.until_stalling(1)
            await eventually(lambda: list((state / "incoming").glob(f"*/{weights[5:]}")))
            running.process.kill()
            await running.process.wait()
            with pytest.raises(grpc.RpcError):
                await _rest(call, "progress")
            await client.channel.close()
        async with registry_here(state, database_url) as client:
            assert await nothing_is_left(client, state)


async def test_a_kill_in_mid_upload_leaves_no_partial_artifact(tmp_path, database_url, base_folder, adapter_folder):
    state = tmp_path / "state"
    async with registry_process(state, *stored_in(database_url)) as running:
        client = Client(f"127.0.0.1:{await running.listening_port()}")
        await client.add_base(base_folder)
        await client.upload(adapter_folder, "kept")
        call = client.adapters.UploadArtifact()
        for part in upload_parts(write_adapter(tmp_path / "other", base_folder, seed=9), "lost")[:4]:
            await call.write(part)
        await eventually(lambda: list((state / "incoming").glob("*/adapter_config.json")))
        running.process.kill()
        await running.process.wait()
        await client.channel.close()
    kept = stored_files(state)
    assert len(kept) == 1
    assert list((state / "incoming").iterdir())  # the kill did leave something to clean up
    # A crash between the artifact's rename and the commit leaves a file that no version names.
    orphan = state / "artifacts" / "00" / f"{'0' * 64}.safetensors"
    orphan.parent.mkdir()
    orphan.write_bytes(b"orphan")

    async with registry_here(state, database_url) as client:
        assert stored_files(state) == kept
        assert not list((state / "incoming").iterdir())
        listed = await client.adapters.ListAdapters(a.ListAdaptersRequest())
        assert [adapter.name for adapter in listed.adapters] == ["kept"]
        size, data = await client.download(listed.adapters[0].current.artifact_digest)
        assert size == len(data)
        await client.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="kept"))
        assert await nothing_is_left(client, state)


async def refused_start(state_dir, **settings) -> str:
    with pytest.raises(FailedPrecondition) as caught:
        async with registry_here(state_dir, **settings):
            pass
    return caught.value.message


async def test_a_taken_port_is_named(tmp_path):
    async with registry_here(tmp_path / "one") as first:
        port = int(first.address.rpartition(":")[2])
        assert f"127.0.0.1:{port}" in await refused_start(tmp_path / "two", port=port)
    async with registry_here(tmp_path / "two"):
        pass  # the failed start let go of its state folder


async def test_a_database_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "registry.sqlite3").write_bytes(b"this is not a database, whatever its name says" * 100)
    assert "registry.sqlite3 cannot be used: file is not a database" in await refused_start(tmp_path / "state")


async def test_a_database_server_that_is_away_is_told_without_its_password(tmp_path):
    url = "postgresql://me:secret@127.0.0.1:1/x"
    message = await refused_start(tmp_path / "state", database_url=url, database_wait_s=0.3)
    assert "cannot be used" in message
    assert "secret" not in message


async def test_a_database_of_a_newer_program_is_told(tmp_path):
    async with registry_here(tmp_path / "state"):
        pass
    connection = sqlite3.connect(tmp_path / "state" / "registry.sqlite3")
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    assert "newer version" in await refused_start(tmp_path / "state")


async def test_a_state_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert "--state-dir" in await refused_start(tmp_path / "file" / "state")
