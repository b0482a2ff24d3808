"""The cluster token on every call between services: each RPC refuses without it, and a cluster with it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc import aio

from loraplex import errors
from loraplex.cli.bring_up import known_models
from loraplex.client import AsyncClient, Credentials
from loraplex.credentials import bearer
from loraplex.errors import from_rpc_error
from loraplex.manifest import read_manifest
from loraplex.registry.v1 import adapter_pb2, api_key_pb2, base_model_pb2
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import FakeWorker, eventually, raising, running_router
from tests.running_registry import registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base
from tests.worker_front import running_front

TOKEN, WRONG = "the-cluster-token-of-this-test", "another-token-of-another-cluster"
REGISTRY_SERVICES = [
    adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"],
    base_model_pb2.DESCRIPTOR.services_by_name["BaseModelService"],
    api_key_pb2.DESCRIPTOR.services_by_name["ApiKeyService"],
]
WORKER_SERVICES = [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


async def answer_to(channel: aio.Channel, method: MethodDescriptor, metadata: Any) -> errors.LoraplexError | None:
    """Call a method with an empty message; returns how it failed, or None where it answered."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(path)(iter([b""]) if method.client_streaming else b"", metadata=metadata, timeout=10)
    try:
        if method.server_streaming:
            async for _ in call:
                call.cancel()
                return None
        else:
            await call
    except aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def assert_guarded(channel: aio.Channel, services: Sequence[ServiceDescriptor]) -> None:
    """Every method of the services refuses without the token, and does not with it."""
    methods = [method for service in services for method in service.methods]
    assert methods
    for method in methods:
        for metadata in ((), bearer(WRONG), (("authorization", TOKEN),)):
            error = await answer_to(channel, method, metadata)
            assert type(error) is errors.Unauthenticated, f"{method.full_name} with {metadata}: {error!r}"
            assert TOKEN not in f"{error.message} {error.metadata}"
            assert WRONG not in f"{error.message} {error.metadata}"
        assert not isinstance(await answer_to(channel, method, bearer(TOKEN)), errors.Unauthenticated), method.full_name


async def test_every_method_of_the_registry_wants_the_token(tmp_path):
    async with registry_here(tmp_path, cluster_token=TOKEN) as client:
        await assert_guarded(client.channel, REGISTRY_SERVICES)


async def test_every_method_of_a_worker_wants_the_token(tmp_path, base_folder):
    async with running_front(base_folder, tmp_path, wait_ready=False, cluster_token=TOKEN) as front:
        await assert_guarded(front.channel, WORKER_SERVICES)


@pytest.fixture
async def cluster(tmp_path: Path, base_folder: Path) -> AsyncIterator[Any]:
    """A registry, a worker (without a model) and a router that share a token; yields the router and the registry."""
    async with registry_here(tmp_path / "state", cluster_token=TOKEN) as registry:
        port = int(registry.address.rpartition(":")[2])
        async with (
            running_front(
                base_folder, tmp_path / "cache", registry_port=port, wait_ready=False, cluster_token=TOKEN
            ) as front,
            running_router(registry.address, f"127.0.0.1:{front.port}", cluster_token=TOKEN) as router,
        ):
            await eventually(lambda: [view.state.value for view in router.router.fleet.views()] == ["serving"], 20)
            yield router, registry, front


async def test_a_cluster_with_one_token_registers_fetches_and_serves(cluster, tmp_path, base_folder):
    router, registry, _ = cluster
    adapter = write_adapter(tmp_path / "adapter", base_folder)
    async with AsyncClient(router.address, registry.address, credentials=Credentials(None, TOKEN)) as client:
        await client.add_base("tiny", read_manifest(base_folder))
        await client.add_adapter("sql", adapter)
        assert [event async for event in client.generate("sql", "hello", timeout_s=20)]
        made = await client.add_key("acme")
        assert [key.name async for key in client.list_keys()] == ["acme"]
        await router.router.catalog.wait_for_revision(made.revision)
        with pytest.raises(errors.Unauthenticated, match="API key"):
            assert [event async for event in client.generate("sql", "hello", timeout_s=20)]
    credentials = Credentials(made.key, TOKEN)
    async with AsyncClient(router.address, registry.address, credentials=credentials) as client:
        assert [event async for event in client.generate("sql", "hello", timeout_s=20)]
        await router.router.catalog.wait_for_revision(await client.remove_key(made.api_key.key_id))
        assert [event async for event in client.generate("sql", "hello", timeout_s=20)]  # no key is left on loopback
    async with AsyncClient(router.address, registry.address, credentials=Credentials()) as client:
        for call in (client.add_key("x"), client.add_adapter("sql", adapter), client.remove_adapter("sql")):
            with pytest.raises(errors.Unauthenticated, match="cluster token"):
                await call


async def test_a_router_with_another_token_is_not_ready_and_says_why(cluster):
    _, registry, front = cluster
    address = f"127.0.0.1:{front.port}"
    async with running_router(registry.address, address, ready=False, cluster_token=WRONG) as stranger:
        await eventually(lambda: any("cluster token" in view.error for view in stranger.router.fleet.views()))
        assert [view.state.value for view in stranger.router.fleet.views()] == ["unreachable"]
        assert stranger.router.why_not_ready() is not None


async def test_a_worker_that_the_registry_refuses_says_so_to_the_router_not_as_the_clients_fault(tmp_path, base_folder):
    async with registry_here(tmp_path / "state", cluster_token=WRONG) as registry:
        port = int(registry.address.rpartition(":")[2])
        async with running_front(base_folder, tmp_path / "cache", registry_port=port) as front:
            answer = await front.generate(front.request(artifact="ab" * 32))
    assert type(answer.error) is errors.ArtifactUnreachable
    assert "refuses this worker's cluster token" in answer.error.message


async def test_a_worker_that_refuses_its_router_is_not_the_clients_fault(tmp_path, base_folder):
    async with registry_here(tmp_path) as registry:
        await registry.add_base(base_folder)
        worker = await FakeWorker(base_digest=read_manifest(base_folder).digest()).start()
        worker.script = raising(errors.Unauthenticated("the cluster token is not the one this service has"))
        try:
            async with running_router(registry.address, worker.address) as router:
                with pytest.raises(aio.AioRpcError) as caught:
                    await router.generate("tiny")
        finally:
            await worker.stop()
    error = from_rpc_error(caught.value)
    assert type(error) is errors.Unavailable
    assert "refuses this router's cluster token" in error.message


async def test_loraplex_up_starts_again_where_keys_exist_and_it_has_none(tmp_path, base_folder):
    async with registry_here(tmp_path) as registry, running_router(registry.address) as router:
        async with AsyncClient(router.address, registry.address, credentials=Credentials()) as client:
            await client.add_base("tiny", read_manifest(base_folder))
            await client.add_adapter("sql", write_adapter(tmp_path / "adapter", base_folder))
            made = await client.add_key("acme")
            await router.router.catalog.wait_for_revision(made.revision)
            with pytest.raises(errors.Unauthenticated):
                assert [model async for model in client.list_models()]
            known = await known_models(client)
        async with AsyncClient(router.address, credentials=Credentials(made.key)) as client:
            asked = [model async for model in client.list_models()]
    assert [(model.name, model.parent, model.artifact_digest) for model in known] == [
        (model.name, model.parent, model.artifact_digest) for model in asked
    ]
