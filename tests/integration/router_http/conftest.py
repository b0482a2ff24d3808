"""A router with one fake worker, and clients of its OpenAI-compatible front."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from tests.integration.router_fakes import (
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    adapter_entry,
    base_entry,
    running_router,
)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


@pytest.fixture
async def router(registry: FakeRegistry, worker: FakeWorker) -> AsyncIterator[RunningRouter]:
    async with running_router(registry.address, worker.address) as running:
        yield running


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def raw(router: RunningRouter) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=router.url, timeout=30) as made:
        yield made
