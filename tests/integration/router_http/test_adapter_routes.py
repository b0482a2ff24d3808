"""vLLM's routes for adapters, on a router with a real registry."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest

from loraplex.client import AsyncClient, Credentials
from loraplex.manifest import read_manifest
from tests.file_server import Answer, file_server
from tests.integration.router_fakes import FakeWorker, running_router
from tests.running_registry import eventually, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

TOKEN = "the-cluster-token-of-this-test"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def root(tmp_path_factory, base_folder):
    """An import root with two adapters."""
    made = tmp_path_factory.mktemp("root")
    write_adapter(made / "sql", base_folder, seed=1)
    write_adapter(made / "new" / "sql", base_folder, seed=2)
    return made


async def post(http: httpx2.AsyncClient, route: str, headers: dict[str, str] | None = None, /, **body: object):
    return await http.post(f"/v1/{route}_lora_adapter", json=body, headers=headers or {})


def told(answer: httpx2.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]


async def test_an_adapter_is_loaded_replaced_and_unloaded_and_the_next_request_knows(tmp_path, base_folder, root):
    worker = await FakeWorker(base_digest=read_manifest(base_folder).digest()).start()
    async with registry_here(tmp_path / "state", import_root=root) as registry:
        await registry.add_base(base_folder)
        async with (
            running_router(registry.address, worker.address) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=30) as http,
            openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client,
        ):
            digests = []
            for path in ("sql", str(root / "new" / "sql")):
                answer = await post(http, "load", lora_name="sql", lora_path=path, load_inplace=True)
                assert answer.status_code == 200, answer.text
                assert answer.text.startswith("Success")
                model = await client.models.retrieve("sql")
                digests.append((model.model_extra or {})["loraplex"]["version_digest"])
                assert digests[-1][:12] in answer.text
                revision = str(router.router.catalog.snapshot.revision)
                assert answer.headers["x-loraplex-min-revision"] == revision
                await client.completions.create(model="sql", prompt="x", max_tokens=1)
            assert len(set(digests)) == 2
            assert (await post(http, "unload", lora_name="sql")).status_code == 200
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("sql")
            assert told(await post(http, "unload", lora_name="sql")) == (404, "adapter_not_found", "name")
    await worker.stop()


async def test_refusals_have_the_shape_of_openai_and_name_the_field(tmp_path, base_folder, root):
    async with registry_here(tmp_path / "state", import_root=root) as registry:
        await registry.add_base(base_folder)
        async with (
            running_router(registry.address) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=30) as http,
        ):
            load = {"lora_name": "sql", "lora_path": "sql"}
            for changed, expected in (
                ({"lora_path": "nothing"}, (404, "source_not_found", "source")),
                ({"lora_path": "/etc"}, (403, "source_forbidden", "source")),
                ({"lora_path": "https://127.0.0.1/x/"}, (403, "source_forbidden", "source")),
                ({"lora_path": "ftp://host/x"}, (400, "invalid_parameter", "source")),
                ({"lora_name": "SQL"}, (400, "invalid_name", "name")),
                ({"lora_name": ""}, (400, "invalid_parameter", "lora_name")),
                ({"lora_name": 7}, (400, "invalid_parameter", "lora_name")),
                ({"lora_path": None}, (400, "invalid_parameter", "lora_path")),
                ({"base_model_name": "other"}, (404, "base_model_not_found", "base_id")),
            ):
                assert told(await post(http, "load", **{**load, **changed})) == expected
            form = await http.post("/v1/load_lora_adapter", content=b'{"lora_name": "a", "lora_path": "sql"}')
            assert told(form)[:2] == (400, "invalid_request")
            plain = {"content-type": "text/plain"}
            assert told(await post(http, "load", plain, **load))[:2] == (400, "invalid_request")
            assert not (await http.get("/v1/models")).json()["data"][1:]
        async with (
            running_router("127.0.0.1:1", ready=False) as lonely,
            httpx2.AsyncClient(base_url=lonely.url, timeout=30) as http,
        ):
            assert told(await post(http, "load", **load))[:2] == (503, "registry_unavailable")


async def test_only_the_cluster_token_lets_adapters_be_changed(tmp_path, base_folder, root):
    async with registry_here(tmp_path / "state", import_root=root, cluster_token=TOKEN) as registry:
        operator = Credentials(cluster_token=TOKEN)
        async with AsyncClient(registry=registry.address, credentials=operator) as client:
            await client.add_base("tiny", read_manifest(base_folder))
            key = (await client.add_key("acme")).key
        async with (
            running_router(registry.address, cluster_token=TOKEN) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=30) as http,
        ):
            await asyncio.wait_for(router.router.catalog.wait_for_revision(2), 5)
            load = {"lora_name": "sql", "lora_path": "sql"}
            assert told(await post(http, "load", **load))[:2] == (401, "unauthenticated")
            for route in ("load", "unload"):
                client_only = await post(http, route, {"authorization": f"Bearer {key}"}, **load)
                assert told(client_only)[:2] == (403, "permission_denied")
            with_token = {"authorization": f"Bearer {TOKEN}"}
            assert (await post(http, "load", with_token, **load)).status_code == 200
            assert (await post(http, "unload", with_token, **load)).status_code == 200
        async with (  # a router with another token than the registry's: not the client's fault
            running_router(registry.address, cluster_token="another-token-than-the-others", ready=False) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=30) as http,
        ):
            other = {"authorization": "Bearer another-token-than-the-others"}
            assert told(await post(http, "load", other, **load))[:2] == (503, "registry_unavailable")


async def test_a_client_that_leaves_takes_its_import_along(tmp_path, base_folder, root):
    state = tmp_path / "state"
    rules = {"import_schemes": "http", "import_private_hosts": "127.0.0.1"}
    async with file_server() as server, registry_here(state, **rules) as registry:
        await registry.add_base(base_folder)
        server.put("/sql/adapter_config.json", Answer(b"{", announced=9, until=1, stalls=True))
        async with running_router(registry.address) as router:
            async with httpx2.AsyncClient(base_url=router.url, timeout=30) as http:
                asked = asyncio.create_task(post(http, "load", lora_name="sql", lora_path=f"{server.base}/sql/"))
                await server.until_stalling(1)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            await eventually(lambda: not list((state / "incoming").iterdir()))
