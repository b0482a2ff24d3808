"""What follows the start of a local cluster's processes: registering base and adapters, waiting until all can serve."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loraplex.cli import output
from loraplex.cli.base_source import Base
from loraplex.cli.cluster import Cluster, ClusterPlan
from loraplex.cli.folders import cache_dir
from loraplex.client import AsyncClient
from loraplex.errors import (
    AdapterNotFound,
    AlreadyExists,
    Cancelled,
    CatalogBehind,
    DeadlineExceeded,
    FailedPrecondition,
    Unauthenticated,
)
from loraplex.manifest import BaseManifest, read_manifest, weight_files
from loraplex.records import AdapterRegistration, Model, Worker

SERVING_WAIT_S: Final = 20.0
"""How long a router that is ready may take to hear of a worker that is ready."""
_ASK_AGAIN_S: Final = 0.1
_WORTH_TELLING_BYTES: Final = 10**9


def adapter_folders(folder: Path) -> list[Path]:
    """Return the PEFT folders directly inside `folder`, by name."""
    return sorted(config.parent for config in folder.glob("*/adapter_config.json"))


async def bring_up(
    plan: ClusterPlan,
    cluster: Cluster,
    client: AsyncClient,
    base: Base,
    adapters: list[Path],
    say: Callable[[str], None],
    *,
    timeout_s: float,
) -> tuple[list[AdapterRegistration], list[Model], list[Worker]]:
    """Make a started cluster serve `base` and `adapters`; return what was registered, all models and the workers.

    `timeout_s` bounds the wait for the processes; loading a large base takes a while.
    """
    manifest = await _while_starting(base.folder, cluster, say, timeout_s)
    try:
        registered = (await client.add_base(base.base_id, manifest)).base_model
    except AlreadyExists as error:
        raise FailedPrecondition(
            f"{error.message}; this state folder knows another model of that id: choose an id with --base-id "
            f"or another folder with --state (now {plan.state_dir})"
        ) from error
    say(f"base model {registered.base_id} registered, digest {output.short(registered.digest)}")
    done = []
    for folder in adapters:
        registration = await client.add_adapter(folder.name, folder, base_id=base.base_id)
        done.append(registration)
        version = registration.adapter.current
        say(
            f"adapter {folder.name} registered, rank {version.rank}, {version.num_modules}/{version.num_base_modules} "
            f"modules, {output.size(version.artifact_bytes)}, artifact {output.short(version.artifact_digest)}"
        )
    for worker in plan.dedicated:
        try:
            digest = (await client.get_adapter(worker.adapter)).current.artifact_digest
        except AdapterNotFound as error:
            raise AdapterNotFound(
                f"--dedicated {worker.adapter}: no adapter of this name is registered here; run this cluster without "
                "the option, register the adapter, and run it again",
                name=worker.adapter,
            ) from error
        say(f"{worker.worker_id} serves {worker.adapter} alone, artifact {output.short(digest)}, until it ends")
        cluster.add(plan.dedicated_spec(worker, digest))
    await cluster.wait_all_ready(timeout_s)
    return done, *await _serving(client, len(plan.workers))


async def _while_starting(folder: Path, cluster: Cluster, say: Callable[[str], None], timeout_s: float) -> BaseManifest:
    """Wait for the registry and identify the base meanwhile; hashing a large one takes a while, but only once."""
    given_up = threading.Event()

    def progress(_: int) -> None:
        if given_up.is_set():
            raise Cancelled("the base model is not hashed to its end: the cluster stops")

    num_bytes = sum(file.stat().st_size for file in weight_files(folder))
    if num_bytes > _WORTH_TELLING_BYTES:
        say(f"identifying the base model: {output.size(num_bytes)} are hashed, once, then remembered")
    hashing = asyncio.create_task(asyncio.to_thread(read_manifest, folder, cache_dir=cache_dir(), progress=progress))
    try:
        await cluster.wait_ready("registry", timeout_s)
        return await hashing
    finally:
        given_up.set()  # a thread cannot be cancelled, but it asks
        hashing.cancel()


async def known_models(client: AsyncClient) -> list[Model]:
    """Ask the router, or the registry where the router wants an API key that we have not got."""
    try:
        return [model async for model in client.list_models()]
    except Unauthenticated:
        models = [
            Model(base.base_id, "", base.digest, "", "", 0, 0, base.create_time) async for base in client.list_bases()
        ]
        async for adapter in client.list_adapters():
            now = adapter.current
            models.append(
                Model(
                    adapter.name,
                    adapter.base_id,
                    now.base_digest,
                    now.version_digest,
                    now.artifact_digest,
                    now.rank,
                    now.artifact_bytes,
                    now.create_time,
                )
            )
        return models


async def _serving(client: AsyncClient, num_workers: int) -> tuple[list[Model], list[Worker]]:
    """Wait until the router's catalog has our changes and every worker's status has reached it."""
    deadline = asyncio.get_running_loop().time() + SERVING_WAIT_S
    while True:
        try:
            models = await known_models(client)
            workers = [worker async for worker in client.list_workers()]
        except CatalogBehind:
            models, workers = [], []
        states = [worker.state for worker in workers]
        if models and states.count("serving") >= num_workers:
            return models, workers
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceeded(
                f"the processes are ready, but the router sees {len(models)} models and "
                f"{states.count('serving')} of {num_workers} workers serving after {SERVING_WAIT_S:g} s; see its log"
            )
        await asyncio.sleep(_ASK_AGAIN_S)  # the router has no event for "a worker serves" that a client could await
