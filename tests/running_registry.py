"""A real registry on a real socket, in this process or its own, and the client's side of its streams."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from common.rpc import open_channel
from loraplex import errors
from loraplex.manifest import BaseManifest, read_manifest
from loraplex.registry.v1 import adapter_pb2 as a
from loraplex.registry.v1 import base_model_pb2 as b
from loraplex.registry.v1.adapter_pb2_grpc import AdapterServiceStub
from loraplex.registry.v1.base_model_pb2_grpc import BaseModelServiceStub
from loraplex.wire import manifest_message
from registry.app import serve
from registry.settings import RegistrySettings

ROOT = Path(__file__).resolve().parent.parent


class Client:
    """Stubs of one registry."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = open_channel(address)
        self.adapters = AdapterServiceStub(self.channel)
        self.bases = BaseModelServiceStub(self.channel)

    async def add_base(self, folder: Path, base_id: str = "tiny") -> b.CreateBaseModelResponse:
        return await self.bases.CreateBaseModel(base_request(read_manifest(folder), base_id), timeout=60)

    async def upload(self, folder: Path, name: str, base_id: str = "") -> a.UploadArtifactResponse:
        return await self.send(upload_parts(folder, name, base_id))

    async def send(self, parts: list[a.UploadArtifactRequest]) -> a.UploadArtifactResponse:
        return await self.adapters.UploadArtifact(iter(parts), timeout=60)

    async def events(self, source: str, name: str = "x", **fields: Any) -> list[a.ImportAdapterResponse]:
        request = a.ImportAdapterRequest(name=name, source=source, **fields)
        return [event async for event in self.adapters.ImportAdapter(request, timeout=60)]

    async def import_(self, source: str, name: str = "x", **fields: Any) -> a.UploadArtifactResponse:
        last = (await self.events(source, name, **fields))[-1]
        assert last.HasField("registered")
        return last.registered

    async def download(self, digest: str, offset: int = 0) -> tuple[int, bytes]:
        request = a.DownloadArtifactRequest(artifact_digest=digest, offset=offset)
        size, pieces = -1, []
        async for part in self.adapters.DownloadArtifact(request, timeout=60):
            if part.HasField("info"):
                size = part.info.size_bytes
            pieces.append(part.data)
        return size, b"".join(pieces)


def base_request(manifest: BaseManifest, base_id: str) -> b.CreateBaseModelRequest:
    return b.CreateBaseModelRequest(base_id=base_id, manifest=manifest_message(manifest, manifest.digest()))


def header(name: str, base_id: str = "") -> a.UploadArtifactRequest:
    return a.UploadArtifactRequest(header=a.UploadHeader(name=name, base_id=base_id))


def file_header(name: str, raw: bytes, **changed: Any) -> a.UploadArtifactRequest:
    facts = {"name": name, "size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), **changed}
    return a.UploadArtifactRequest(file_header=a.FileHeader(**facts))


def data(raw: bytes) -> list[a.UploadArtifactRequest]:
    return [a.UploadArtifactRequest(data=raw[at : at + 2**16]) for at in range(0, len(raw), 2**16)]


def upload_parts(folder: Path, name: str, base_id: str = "") -> list[a.UploadArtifactRequest]:
    parts = [header(name, base_id)]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if (folder / file).exists():
            raw = (folder / file).read_bytes()
            parts += [file_header(file, raw), *data(raw)]
    return parts


async def refusal(call: Awaitable[Any], kind: type[errors.LoraplexError]) -> errors.LoraplexError:
    """Await a call that must fail with exactly this kind of error; returns the error."""
    try:
        await call
    except grpc.RpcError as caught:
        error = errors.from_rpc_error(caught)
        assert type(error) is kind, f"{type(error).__name__}: {error.message}"
        return error
    raise AssertionError(f"the call succeeded; expected {kind.__name__}")


def stored_files(state_dir: Path) -> list[str]:
    """Names of the stored artifacts."""
    return sorted(file.name for file in (state_dir / "artifacts").rglob("*") if file.is_file())


async def nothing_is_left(client: Client, state_dir: Path) -> bool:
    """True where no adapter, artifact or half-made upload is to be seen."""
    adapters = (await client.adapters.ListAdapters(a.ListAdaptersRequest())).adapters
    return not adapters and not stored_files(state_dir) and not list((state_dir / "incoming").iterdir())


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for what another process or task does to files; no event tells of it."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


@asynccontextmanager
async def registry_here(state_dir: Path, database_url: str | None = None, **settings: Any) -> AsyncIterator[Client]:
    """Run a registry in this process; leaving the block drains it."""
    # Factors come back as they went in, and an adapter that is large for its base may be registered.
    unless_told = {"port": 0, "drain_timeout_s": 2, "default_quantization": "none", "max_rank": 2048}
    chosen = RegistrySettings(state_dir=state_dir, database_url=database_url, **{**unless_told, **settings})
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()
    task = asyncio.create_task(serve(chosen, stopping, port.set_result))
    started: list[asyncio.Future[Any]] = [task, port]
    await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    client = Client(f"127.0.0.1:{port.result()}")
    try:
        yield client
    finally:
        await client.channel.close()
        stopping.set()
        await asyncio.wait_for(task, 60)


class RegistryProcess:
    """A registry in its own process; `log` holds its lines as they came."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []

    async def listening_port(self) -> int:
        """Read the log until it says where the registry listens."""
        async with asyncio.timeout(60):
            assert self.process.stderr
            async for line in self.process.stderr:
                self.log.append(line.decode())
                if b'"registry.listening"' in line:
                    return int(json.loads(line)["port"])
        raise AssertionError(f"the registry ended before it listened: {''.join(self.log)}")

    async def end(self) -> int:
        """Read the rest of the log and return the exit status."""
        async with asyncio.timeout(60):
            assert self.process.stderr
            self.log += [line.decode() async for line in self.process.stderr]
            return await self.process.wait()


@asynccontextmanager
async def registry_process(state_dir: Path, *flags: str, port: int = 0) -> AsyncIterator[RegistryProcess]:
    """Run `python -m registry`; a process that still runs at the end of the block is killed."""
    command = [sys.executable, "-m", "registry", "--state-dir", str(state_dir), "--port", str(port)]
    command += ["--default-quantization", "none", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, "--log-format", "json", cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield RegistryProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
