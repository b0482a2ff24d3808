"""Uploads that break off and go on: real connections cut in the middle, and what is kept of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loraplex import errors
from loraplex.client import AsyncClient, Client
from loraplex.peft_folder import WEIGHTS_FILE
from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import Client as Registry
from tests.running_registry import data, eventually, file_header, header, refusal, registry_here, upload_parts
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def large(tmp_path_factory, base_folder):
    """An adapter of several messages."""
    return write_adapter(tmp_path_factory.mktemp("large"), base_folder, rank=512, strength=0.1)


class Line:
    """A way to the registry that is cut after so many bytes to it, as often as `cuts` says.

    The client hears of a cut when the registry is done with what came before, as `incoming` shows: what it keeps is
    there when the client asks for it.
    """

    def __init__(self, target: str, incoming: Path) -> None:
        self.incoming = incoming
        self.host, _, port = target.partition(":")
        self.port = int(port)
        self.cuts: list[int] = []
        self.num_connections = 0
        self.sent_bytes = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self.tasks.add(task)
        self.num_connections += 1
        limit = self.cuts.pop(0) if self.cuts else None
        try:
            there, back = await asyncio.open_connection(self.host, self.port)
            try:
                async with asyncio.TaskGroup() as pipes:
                    pipes.create_task(self._pipe(there, writer, None))
                    await self._pipe(reader, back, limit)
                    back.transport.abort()
                    await eventually(lambda: not list(self.incoming.iterdir()))
                    writer.transport.abort()
            finally:
                back.transport.abort()
        except (OSError, asyncio.CancelledError):  # the registry is away; the test is over
            pass
        finally:
            writer.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
        passed = 0
        try:
            while (part := await reader.read(2**16)) and (limit is None or passed < limit):
                passed += len(part)
                self.sent_bytes += len(part) if writer.get_extra_info("peername")[1] == self.port else 0
                writer.write(part)
                await writer.drain()
        except OSError:
            pass


@asynccontextmanager
async def line_to(target: str, incoming: Path) -> AsyncIterator[tuple[str, Line]]:
    line = Line(target, incoming)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", line
    finally:
        server.close()
        for task in line.tasks:
            task.cancel()
        await asyncio.gather(*line.tasks, return_exceptions=True)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_upload_whose_line_is_cut_again_and_again_goes_on_where_it_was(tmp_path, base_folder, large, kind):
    size = (large / WEIGHTS_FILE).stat().st_size
    assert size > 3 * 2**20
    told: list[int] = []
    incoming = tmp_path / "state" / "incoming"
    async with registry_here(tmp_path / "state") as registry, line_to(registry.address, incoming) as (address, line):
        await registry.add_base(base_folder)
        line.cuts = [size // 3, size // 3, 1000, size // 4]
        if kind == "sync":
            with Client(registry=address) as client:
                done = await asyncio.to_thread(client.add_adapter, "cut", large, progress=told.append)
        else:
            async with AsyncClient(registry=address) as client:
                done = await client.add_adapter("cut", large, progress=told.append)
        whole = await registry.upload(large, "whole")
        assert done.adapter.current.version_digest == whole.adapter.current.version_digest
        assert line.num_connections >= 4
        # Lost is at most what was on its way when a line was cut: a part or two each time, not all that came before.
        assert line.sent_bytes < size + 4 * 3 * 2**20
        assert sum(told) == sum(file.stat().st_size for file in large.iterdir())
        assert not list((tmp_path / "state" / "partial").iterdir())


async def begin(registry, folder, num_parts):
    """Send that many messages of an upload and leave; returns the header of its weights."""
    parts = upload_parts(folder, "x")
    call = registry.adapters.UploadArtifact()
    for part in parts[:num_parts]:
        await call.write(part)
    raw = (folder / WEIGHTS_FILE).read_bytes()
    weights = file_header(WEIGHTS_FILE, raw).file_header
    return call, weights


async def offset_of(registry: Registry, weights: a.FileHeader) -> int:
    [offset] = (await registry.adapters.FindUpload(a.FindUploadRequest(files=[weights]))).offsets
    return offset


async def kept_offset(registry, state, weights) -> int:
    await eventually(lambda: list((state / "partial").iterdir()))
    return await offset_of(registry, weights)


async def test_a_part_is_found_by_whoever_knows_the_whole_file_and_completed_by_its_bytes_only(
    tmp_path, base_folder, large
):
    state = tmp_path / "state"
    raw, config = (large / WEIGHTS_FILE).read_bytes(), (large / "adapter_config.json").read_bytes()
    async with registry_here(state) as registry:
        await registry.add_base(base_folder)
        call, weights = await begin(registry, large, 30)
        await eventually(lambda: any(file.stat().st_size > 2**20 for file in (state / "incoming").glob("*/*.safe*")))
        assert await offset_of(registry, weights) == 0  # it is still being sent
        call.cancel()
        offset = await kept_offset(registry, state, weights)
        assert 2**20 < offset < len(raw)
        for changed in ({"size_bytes": len(raw) + 1}, {"sha256": "0" * 64}):
            assert await offset_of(registry, file_header(WEIGHTS_FILE, raw, **changed).file_header) == 0
        begun = [header("x"), file_header("adapter_config.json", config), *data(config)]
        for wrong in (offset - 1, offset + 1, len(raw)):
            parts = [*begun, file_header(WEIGHTS_FILE, raw, offset=wrong)]
            error = await refusal(registry.send(parts), errors.FailedPrecondition)
            assert error.field == "file_header.offset"
        foreign = bytes(len(raw) - offset)
        parts = [*begun, file_header(WEIGHTS_FILE, raw, offset=offset), *data(foreign)]
        await refusal(registry.send(parts), errors.CorruptArtifact)
        assert await offset_of(registry, weights) == 0  # what turned out wrong is not kept
        done = await registry.upload(large, "x")
        assert done.changed


async def test_what_is_kept_goes_with_its_time_with_the_process_and_where_space_is_short(
    tmp_path, base_folder, large, monkeypatch
):
    state = tmp_path / "state"
    async with registry_here(state, partial_upload_s=0.5) as registry:
        await registry.add_base(base_folder)
        call, weights = await begin(registry, large, 30)
        await eventually(lambda: any(file.stat().st_size > 2**20 for file in (state / "incoming").glob("*/*.safe*")))
        call.cancel()
        await eventually(lambda: list((state / "partial").iterdir()))
        await eventually(lambda: not list((state / "partial").iterdir()))
        assert await offset_of(registry, weights) == 0
    async with registry_here(state, upload_idle_timeout_s=2.5) as registry:
        call, weights = await begin(registry, large, 30)
        await refusal(call, errors.DeadlineExceeded)  # its client has fallen silent
        assert await kept_offset(registry, state, weights) > 2**20
    async with registry_here(state) as registry:
        assert await offset_of(registry, weights) == 0
        assert not list((state / "partial").iterdir())
        call, weights = await begin(registry, large, 30)
        await eventually(lambda: any(file.stat().st_size > 2**20 for file in (state / "incoming").glob("*/*.safe*")))
        call.cancel()
        await kept_offset(registry, state, weights)
        with monkeypatch.context() as short:
            short.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
            await refusal(registry.upload(large, "y"), errors.NoSpace)
        assert not list((state / "partial").iterdir())


async def test_a_registry_of_an_older_version_is_sent_everything(tmp_path, base_folder, large, monkeypatch):
    from registry.service.adapters import Adapters

    async def unknown(self, request, context):
        import grpc

        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    monkeypatch.setattr(Adapters, "FindUpload", unknown)
    async with registry_here(tmp_path / "state") as registry, AsyncClient(registry=registry.address) as client:
        await registry.add_base(base_folder)
        assert (await client.add_adapter("x", large)).changed
