"""The admin port: probes, metrics, resources; and that a taken port is named together with its flag."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from prometheus_client import Counter
from pydantic_settings import SettingsConfigDict

from common.activity import Activity
from common.admin import Admin, bind_admin, held_by, serving_admin
from common.config import AdminSettings, load_settings
from common.http_connection import HttpLimits
from common.metrics import new_registry, render
from loraplex.errors import FailedPrecondition


class Settings(AdminSettings):
    model_config = SettingsConfigDict(env_prefix="LORAPLEX_TEST_")


class Service:
    def __init__(self) -> None:
        self.why: str | None = "starting"
        self.activity = Activity()
        self.registry = new_registry()
        Counter("asked", "Asked", registry=self.registry).inc(3)
        self.admin = Admin(lambda: self.why, self.read, lambda: {"kv_blocks_in_use": 7, **held_by(self.activity)})

    async def read(self) -> bytes:
        return render(self.registry)


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        serving_admin(bind_admin("127.0.0.1", 0), service.admin, HttpLimits()) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def test_readiness_follows_the_service_and_liveness_does_not(service: Service, http: httpx2.AsyncClient) -> None:
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.text) == (503, "starting\n")
    assert (await http.get("/livez")).status_code == 200
    service.why = None
    assert (await http.get("/readyz")).status_code == 200
    service.why = "draining"
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/livez")).status_code == 200


async def test_metrics_are_prometheus_text_with_the_process_figures(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "asked_total 3.0" in answer.text
    assert "process_open_fds" in answer.text
    assert "_created" not in answer.text


async def test_resources_are_numbers_and_a_request_shows_in_them(service: Service, http: httpx2.AsyncClient) -> None:
    idle: dict[str, Any] = (await http.get("/debug/resources")).json()
    assert (idle["kv_blocks_in_use"], idle["streams"], idle["tasks"]) == (7, 0, 0)
    assert idle["open_files"] > 3
    assert idle["all_tasks"] > 0
    with service.activity.request():
        busy = (await http.get("/debug/resources")).json()
    assert busy["streams"] == 1


async def test_a_taken_port_is_named_with_the_flag_that_chooses_another() -> None:
    with bind_admin("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=f"127.0.0.1:{port}.*--admin-port"):
            bind_admin("127.0.0.1", port)


async def test_the_port_is_free_again_when_the_service_ends(service: Service) -> None:
    async with serving_admin(bind_admin("127.0.0.1", 0), service.admin, HttpLimits()) as port:
        pass
    bind_admin("127.0.0.1", port).close()


def test_the_admin_address_follows_the_host_and_must_be_loopback_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    def settings(*flags: str) -> Settings:
        return load_settings(Settings, "test", flags)

    assert settings().admin_address == "127.0.0.1"
    assert settings("--host", "::1").admin_address == "::1"
    assert settings("--admin-host", "0.0.0.0", "--insecure").admin_address == "0.0.0.0"
    with pytest.raises(SystemExit):
        settings("--admin-host", "0.0.0.0")
    assert "admin-host 0.0.0.0 is reachable by others" in capsys.readouterr().err
