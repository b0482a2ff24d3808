"""A registry on a disk that is full, in a mount namespace of its own: python -m tests.full_disk_registry FOLDER.

FOLDER holds `base` and `adapter`; a small file system is mounted on its `disk`. Exits 0 where all went as it should.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from loraplex.registry.v1 import api_key_pb2 as k
from loraplex.registry.v1.api_key_pb2_grpc import ApiKeyServiceStub
from registry.reserve import RESERVE_BYTES
from tests.running_registry import Client, refusal, registry_here


def fill(disk: Path) -> None:
    """Leave not a byte on the disk."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    assert os.statvfs(disk).f_bavail == 0


async def names(client: Client) -> list[str]:
    return [adapter.name for adapter in (await client.adapters.ListAdapters(a.ListAdaptersRequest())).adapters]


async def main(folder: Path) -> None:
    disk = folder / "disk"
    state = disk / "state"
    async with registry_here(state) as client:
        await client.add_base(folder / "base")
        for name in ("first", "second"):
            await client.upload(folder / "adapter", name)
        keys = ApiKeyServiceStub(client.channel)
        made = await keys.CreateApiKey(k.CreateApiKeyRequest(name="acme"), timeout=20)
        assert (state / "reserve").stat().st_size == RESERVE_BYTES
    fill(disk)
    async with registry_here(state, import_root=folder) as client:  # it starts
        assert await names(client) == ["first", "second"]
        fill(disk)
        told = await refusal(client.upload(folder / "adapter", "third"), errors.NoSpace)
        assert "delete adapters" in told.message, told.message
        told = await refusal(client.events("adapter", "third"), errors.NoSpace)
        for name in ("first", "second"):  # what frees space works
            await client.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name), timeout=20)
        keys = ApiKeyServiceStub(client.channel)
        await keys.DeleteApiKey(k.DeleteApiKeyRequest(key_id=made.api_key.key_id), timeout=20)
        assert await names(client) == []
        assert (state / "reserve").exists()
        (disk / "filler").unlink()
        await client.upload(folder / "adapter", "third")
        await client.import_("adapter", "fourth")
    (state / "reserve").unlink()
    fill(disk)
    (state / "registry.sqlite3-wal").unlink(missing_ok=True)
    with pytest.raises(errors.FailedPrecondition, match="free some space"):  # no reserve, and nothing to be done
        async with registry_here(state):
            pass


if __name__ == "__main__":
    at = Path(sys.argv[1])
    (at / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(at / "disk")], check=True)
    asyncio.run(main(at))
