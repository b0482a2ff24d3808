"""Pins, prefetch and unload from the registry and the router to real workers, through a restart of an engine."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from loraplex.pins import PIN_ON_ALL
from loraplex.records import Worker
from tests.e2e.fleet import Fleet
from tests.e2e.fleet_calls import ask, caught_up, workers_where


def holding(worker: Worker, name: str) -> tuple[str, bool]:
    """Where an adapter is on a worker, and whether it is pinned there; ("", False) where it is not."""
    for entry in worker.adapters:
        if name in entry.names:
            return entry.tier, entry.pinned
    return "", False


async def test_pins_reach_real_workers_and_are_told_again_after_an_engine_died(fleet: Fleet, long_adapter):
    async with fleet.client() as client:
        await client.add_adapter("kept", long_adapter(11))
        await client.pin_adapter("kept", PIN_ON_ALL)

        def on_both(all_: Mapping[str, Worker]) -> bool:
            return all(holding(worker, "kept") == ("device", True) for worker in all_.values())

        found = await workers_where(client, on_both)
        assert all(worker.device_tier and worker.device_tier.num_adapters for worker in found.values())
        name = min(found)
        engine = fleet.workers[name].engine()
        engine.kill()
        psutil.wait_procs([engine], timeout=60)
        await workers_where(client, lambda all_: all_[name].epoch != found[name].epoch and on_both(all_))
        assert (await ask(client, "kept")).facts.tier_hit == "device"
        newer = (await client.add_adapter("kept", long_adapter(12))).adapter.current.artifact_digest

        def has_newer(worker: Worker) -> bool:
            return any(e.artifact_digest == newer and e.pinned and e.tier == "device" for e in worker.adapters)

        await workers_where(client, lambda all_: all(map(has_newer, all_.values())))
        await client.pin_adapter("kept", 0)
        await workers_where(
            client, lambda all_: not any(entry.pinned for worker in all_.values() for entry in worker.adapters)
        )
        assert {outcome.error_reason for outcome in await client.unload_adapter("kept", from_disk=True)} == {""}
        await workers_where(client, lambda all_: all(holding(w, "kept")[0] == "" for w in all_.values()))
        await caught_up(client)
        (outcome,) = await client.load_adapter("kept")
        assert (outcome.tier, outcome.load_s is not None and outcome.load_s > 0) == ("source", True)
        await client.remove_adapter("kept")
