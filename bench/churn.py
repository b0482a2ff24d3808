"""Adapters come and go at random, thousands of times: all memory is given back, and every answer is right.

Sixteen at a time, each at random: an answer, which is compared token by token with the one that its adapter gave alone
before; an answer that is left in the middle; a load; an unload from the device, or from the disk too; a prefetch; a pin
and its end. The device has room for a third of the adapters. The first fifth of the operations warms up; then and at
the end everything is unloaded, and the memory of the worker's two processes and the chunks of the arena are compared.

Exits 1 where an answer differs, an operation fails that should not, or memory grew by more than 2 %.

Run: python -m bench.churn [--operations 5000] [--no-record]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from grpc import StatusCode, aio

from bench.cluster import Served, resolved, serving
from bench.make_adapters import MODULES, linear_shapes, write_adapter
from bench.record import record
from loraplex.cli.base_source import Base, resolve_base
from loraplex.client import AsyncClient, Gatherer, Sampling, TextDelta
from loraplex.worker.v1 import worker_pb2, worker_pb2_grpc

_ADAPTERS: Final = 24
_PLACES: Final = 8
_AT_A_TIME: Final = 16
_TOKENS: Final = 12
_LEFT_TOKENS: Final = 200
_CONTEXT_TOKENS: Final = 512
_WARM_UP: Final = 0.2
_MOST_GROWTH: Final = 0.02
_CALL_S: Final = 60.0
_KINDS: Final = {"answer": 10, "leave": 4, "load": 4, "unload": 4, "unload from disk": 1, "prefetch": 2, "pin": 1}
"""Operations and how often each is drawn."""
_EXPECTED: Final = {
    # Everything is pinned or running; it was unloaded before it was there.
    "load": {StatusCode.RESOURCE_EXHAUSTED, StatusCode.FAILED_PRECONDITION},
    "unload": {StatusCode.FAILED_PRECONDITION},  # in use
    "unload from disk": {StatusCode.FAILED_PRECONDITION},
    "pin": {StatusCode.RESOURCE_EXHAUSTED},
}
"""Refusals that are right answers in a crowd."""


@dataclass(frozen=True, slots=True)
class Model:
    """An adapter, its prompt, and what it answers."""

    name: str
    base_digest: str
    resolved: worker_pb2.ResolvedAdapter
    prompt: tuple[int, ...]
    expected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What the worker holds with no adapter on the device and no request: bytes of its processes, chunks in use."""

    rss_bytes: int
    front_rss_bytes: int
    """Of it the front end's."""
    chunks: int


class Churn:
    """Drives one cluster."""

    def __init__(self, served: Served, client: AsyncClient, worker: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        self._served, self._client, self._worker = served, client, worker
        self._pins = asyncio.Lock()
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def learn(self, rng: random.Random) -> list[Model]:
        """Ask every adapter alone, so that what it answers is known. Raises RuntimeError where two answer alike."""
        models = []
        async for adapter in self._client.list_adapters():
            prompt = tuple(rng.randrange(1000, 20_000) for _ in range(rng.randrange(8, 40)))
            answer = await self._answer(adapter.name, prompt)
            models.append(Model(adapter.name, adapter.current.base_digest, resolved(adapter.current), prompt, answer))
        if len({model.expected for model in models}) != len(models):
            raise RuntimeError("two adapters answer alike, so their answers would prove nothing")
        return models

    async def run(self, models: Sequence[Model], operations: int, rng: random.Random) -> None:
        """Do so many operations."""
        kinds = rng.choices(list(_KINDS), list(_KINDS.values()), k=operations)
        work: Iterator[tuple[str, Model, float]] = iter(
            [(kind, rng.choice(models), rng.uniform(0.0, 0.5)) for kind in kinds]
        )

        async def one_after_the_other() -> None:
            for kind, model, patience_s in work:
                await self._do(kind, model, patience_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_A_TIME):
                group.create_task(one_after_the_other())

    async def held(self, models: Sequence[Model]) -> Held:
        """Take every adapter off the device and return what is still held."""
        for model in models:
            await self._pin(model, pinned=False)
            request = worker_pb2.UnloadAdapterRequest(artifact_digest=model.resolved.artifact_digest)
            await self._worker.UnloadAdapter(request, timeout=_CALL_S)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._served.worker_admin}/debug/resources") as got,
        ):
            resources = await got.json()
        parent = psutil.Process(self._served.worker_pid)
        rss = {process.pid: process.memory_info().rss for process in [parent, *parent.children(recursive=True)]}
        chunks = resources["kv_blocks_in_use"] + resources["adapter_chunks"]
        return Held(sum(rss.values()), rss[self._served.worker_pid], chunks)

    async def _do(self, kind: str, model: Model, patience_s: float) -> None:
        digest = model.resolved.artifact_digest
        self.done[kind] += 1
        try:
            match kind:
                case "answer":
                    got = await self._answer(model.name, model.prompt)
                    if got != model.expected:
                        self.wrong.append(f"{model.name}: {got} instead of {model.expected}")
                case "leave":
                    await self._leave(model, patience_s)
                case "load":
                    load = worker_pb2.LoadAdapterRequest(base_digest=model.base_digest, adapter=model.resolved)
                    await self._worker.LoadAdapter(load, timeout=_CALL_S)
                case "unload" | "unload from disk":
                    unload = worker_pb2.UnloadAdapterRequest(artifact_digest=digest, from_disk="disk" in kind)
                    await self._worker.UnloadAdapter(unload, timeout=_CALL_S)
                case "prefetch":
                    prefetch = worker_pb2.PrefetchAdapterRequest(
                        base_digest=model.base_digest, adapter=model.resolved, to_device=True
                    )
                    await self._worker.PrefetchAdapter(prefetch, timeout=_CALL_S)
                case _:
                    async with self._pins:  # one at a time, so that pins leave room for requests
                        await self._pin(model, pinned=True)
                        await asyncio.sleep(patience_s)
                        await self._pin(model, pinned=False)
        except aio.AioRpcError as error:
            if error.code() not in _EXPECTED.get(kind, set()):
                self.wrong.append(f"{kind} of {model.name}: {error.code().name}: {error.details()}")
            self.refused[kind] += 1

    async def _answer(self, name: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
        gatherer = Gatherer()
        sampling = Sampling(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
        async for event in self._client.generate(name, token_ids=prompt, sampling=sampling, timeout_s=_CALL_S):
            gatherer.add(event)
        return gatherer.completion().choices[0].token_ids

    async def _leave(self, model: Model, patience_s: float) -> None:
        """Leave an answer after its first tokens, or before them; check those that came."""
        sampling = Sampling(temperature=0.0, max_tokens=_LEFT_TOKENS, ignore_eos=True)
        got: list[int] = []
        try:
            async with (
                asyncio.timeout(patience_s),
                aclosing(self._client.generate(model.name, token_ids=model.prompt, sampling=sampling)) as events,
            ):
                async for event in events:
                    got += event.token_ids if isinstance(event, TextDelta) else ()
        except TimeoutError:
            pass
        if tuple(got[:_TOKENS]) != model.expected[: len(got)]:
            self.wrong.append(f"{model.name}, left: {got[:_TOKENS]} instead of {model.expected}")

    async def _pin(self, model: Model, *, pinned: bool) -> None:
        request = worker_pb2.PinAdapterRequest(base_digest=model.base_digest, adapter=model.resolved, pinned=pinned)
        await self._worker.PinAdapter(request, timeout=_CALL_S)


async def _measure(args: argparse.Namespace, base: Base, scratch: Path) -> dict[str, object]:
    shapes = linear_shapes(base.folder, MODULES)
    folders = [
        write_adapter(scratch / "adapters" / f"a{index}", shapes, rank=rank, dtype="bfloat16", seed=index)
        for index, rank in enumerate([4, 8, 16] * (_ADAPTERS // 3))
    ]
    # A small arena, so that the warm-up writes all of it: pages count only once they are written.
    options = (
        *("--max-resident-adapters", str(_PLACES)),
        *("--arena-bytes", str(args.arena_bytes)),
        *("--max-context-tokens", str(_CONTEXT_TOKENS)),  # so that pins leave room for the longest request
    )
    rng = random.Random(args.seed)
    async with (
        serving(base, folders, scratch / "state", dtype="float32", worker_options=options) as served,
        AsyncClient(served.router, served.registry) as client,
        aio.insecure_channel(served.worker) as channel,
    ):
        churn = Churn(served, client, worker_pb2_grpc.WorkerServiceStub(channel))
        models = await churn.learn(rng)
        warm_up = int(args.operations * _WARM_UP)
        await churn.run(models, warm_up, rng)
        before = await churn.held(models)
        await churn.run(models, args.operations - warm_up, rng)
        gc.collect()
        after = await churn.held(models)
    grown = after.rss_bytes / before.rss_bytes - 1
    row: dict[str, object] = {
        "operations": args.operations,
        "done": dict(churn.done),
        "refused": dict(churn.refused),
        "wrong": len(churn.wrong),
        "rss_before_mib": round(before.rss_bytes / 2**20, 1),
        "rss_after_mib": round(after.rss_bytes / 2**20, 1),
        "rss_growth": round(grown, 4),
        "front_rss_before_mib": round(before.front_rss_bytes / 2**20, 1),
        "front_rss_after_mib": round(after.front_rss_bytes / 2**20, 1),
        "chunks_before": before.chunks,
        "chunks_after": after.chunks,
        "ok": not churn.wrong and grown <= _MOST_GROWTH and after.chunks == before.chunks == 0,
    }
    for wrong in churn.wrong[:5]:
        print(wrong, file=sys.stderr)
    print(
        f"{args.operations} operations: {len(churn.wrong)} wrong; {row['rss_before_mib']} MiB resident after the "
        f"warm-up, {row['rss_after_mib']} MiB at the end ({grown:+.2%}); chunks in use {before.chunks}, {after.chunks}"
    )
    return row


def main() -> int:
    """Run it; exits 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--operations", type=int, default=5000)
    parser.add_argument("--arena-bytes", type=int, default=2**27)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        row = asyncio.run(_measure(args, base, Path(scratch)))
    record("churn", [row], write=not args.no_record)
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
