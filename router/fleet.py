"""The workers this router knows: who they are, how they are, and a channel to each.

Owns one link per address. An address that discovery proposes is added; only an ended or failed status stream takes
a worker out of the running. Identity is (worker id, epoch), not the address.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from loraplex.credentials import Metadata
from loraplex.worker.v1 import worker_pb2_grpc
from router.discovery import LOOKUP_INTERVAL_S, DnsWorkers, WorkerSource, follow_dns
from router.fleet_link import Flight, Link
from router.placement import State, WorkerView

log = structlog.get_logger(__name__)


class Fleet:
    """Follows every worker of a source while `run` runs."""

    def __init__(
        self,
        source: WorkerSource,
        *,
        credentials: Metadata = (),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        lookup_interval_s: float = LOOKUP_INTERVAL_S,
    ) -> None:
        self._source = source
        self.credentials = credentials
        """What goes with every call to a worker."""
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._lookup_interval_s = lookup_interval_s
        self._links: dict[str, Link] = {}
        self._wanted: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:

            def propose(addresses: list[str]) -> None:
                self._wanted = frozenset(addresses)
                for address in addresses:
                    if address not in self._links:
                        link = self._links[address] = Link(
                            address,
                            credentials=self.credentials,
                            clock=self._clock,
                            rng=self._rng,
                            on_change=self._tell_change,
                        )
                        tasks.create_task(self._keep(link))

            if isinstance(self._source, DnsWorkers):
                await follow_dns(self._source, propose, self._rng, self._lookup_interval_s)
            else:
                propose(list(self._source.addresses))

    async def _keep(self, link: Link) -> None:
        try:
            await link.run(lambda address: address in self._wanted)
        finally:
            del self._links[link.address]
        log.info("fleet.worker_gone", address=link.address, worker_id=link.status.worker_id)

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change of a worker's epoch, state or residency sets; take a new one afterwards."""
        return self._changed

    @property
    def is_surveyed(self) -> bool:
        """Whether every address was tried by now; before that, what is known of the workers is a part of them."""
        return bool(self._links) and all(link.was_tried for link in self._links.values())

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def views(self) -> tuple[WorkerView, ...]:
        """Return every worker as it is known now; one that is reached by two addresses comes once."""
        views: list[WorkerView] = []
        seen: set[tuple[str, str]] = set()
        for link in self._links.values():
            view = link.view()
            identity = (view.worker_id, view.epoch)
            if view.state is not State.UNREACHABLE:
                if identity in seen:
                    continue
                seen.add(identity)
            views.append(view)
        return tuple(views)

    @property
    def num_flights(self) -> int:
        """Requests that this router has at workers now."""
        return sum(link.num_flights for link in self._links.values())

    def begin(self, address: str, prompt_tokens: int, artifact_digest: str) -> Flight:
        """Note that a request goes to the worker at `address`, which a view named in this turn of the loop."""
        return self._links[address].begin(prompt_tokens, artifact_digest)

    def stub(self, address: str) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        """Return the stub of the worker at `address`, which a view named in this turn of the loop."""
        return self._links[address].stub
