"""The router behind the real registry process, with a scripted worker: registration, cutover, a killed registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.async_client import AsyncClient
from loraplex.errors import ModelNotFound
from loraplex.manifest import read_manifest
from tests.integration.router_fakes import FakeWorker, eventually, running_router
from tests.running_registry import registry_process
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


async def test_what_is_registered_is_served_and_survives_a_killed_registry(tmp_path: Path) -> None:
    base = write_tiny_base(tmp_path / "base")
    first, second = (write_adapter(tmp_path / f"adapter{seed}", base, seed=seed) for seed in (1, 2))
    manifest = read_manifest(base)
    worker = await FakeWorker(base_digest=manifest.digest()).start()
    served = worker.requests
    try:
        async with registry_process(tmp_path / "state") as registry:
            port = await registry.listening_port()
            address = f"127.0.0.1:{port}"
            async with (
                running_router(address, worker.address) as router,
                AsyncClient(router.address, address) as client,
            ):
                await client.add_base("tiny", manifest)
                old = await client.add_adapter("sql", first)

                async def ask(model: str) -> None:
                    assert [event async for event in client.generate(model, "Hi", timeout_s=60)]

                await ask("sql")  # at once: reading one's own write
                assert served[-1].base_digest == manifest.digest()
                assert served[-1].adapter.artifact_digest == old.adapter.current.artifact_digest
                new = await client.add_adapter("sql", second)
                await ask("sql")
                assert served[-1].adapter.artifact_digest == new.adapter.current.artifact_digest
                await ask("sql@" + old.adapter.current.version_digest[:12])
                assert served[-1].adapter.version_digest == old.adapter.current.version_digest
                registry.process.kill()
                await registry.process.wait()
                await ask("sql")  # the registry is not on the request path
                async with registry_process(tmp_path / "state", port=port) as again:
                    await again.listening_port()
                    before = router.router.catalog.snapshot
                    await client.remove_adapter("sql")
                    await eventually(lambda: router.router.catalog.snapshot.revision == before.revision + 1)
                    assert router.router.catalog.snapshot.store_id == before.store_id
                    with pytest.raises(ModelNotFound):
                        async for _ in client.generate("sql", "Hi"):
                            pass
    finally:
        await worker.stop()
