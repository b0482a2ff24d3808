"""The requests that wait: tenants by what they have had, each tenant's requests in the order in which they came.

Waiting requests hold nothing. One that was preempted stands among its tenant's others where it stood before. One whose
adapter's file has left the disk, and the adapter the engine, is parked: it stands in nobody's way until the file comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from worker.engine.fairness import TenantCounters
from worker.engine.request import Request
from worker.mailbox import AdapterFile


class WaitingQueue:
    """Requests in the order in which they shall be admitted."""

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._requests: dict[int, Request] = {}
        self._by_tenant: dict[str, dict[int, Request]] = {}
        self._parked: dict[int, Request] = {}
        self._wanted: list[int] = []
        self._last_tenant: str | None = None
        self._tokens = 0

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens that the waiting requests have to compute before they generate, those of parked ones too."""
        return self._tokens

    @property
    def parked(self) -> Collection[Request]:
        """The requests that wait for their adapter's file."""
        return self._parked.values()

    def add(self, request: Request) -> None:
        """Put a request in. A tenant that did not wait is lifted, unless its request was preempted."""
        queue = self._by_tenant.get(request.tenant)
        if queue is None:
            if not request.was_admitted:
                self._counters.lift(request.tenant, self._by_tenant, self._last_tenant)
            queue = self._by_tenant[request.tenant] = {}
        last = next(reversed(queue.values()), None)
        queue[request.request_id] = request
        if last is not None and last.sequence > request.sequence:
            ordered = sorted(queue.values(), key=lambda waiting: waiting.sequence)
            self._by_tenant[request.tenant] = {waiting.request_id: waiting for waiting in ordered}
        self._requests[request.request_id] = request
        self._tokens += len(request.token_ids)

    def remove(self, request_id: int) -> Request | None:
        """Take a request out, because it was admitted, aborted or failed; None if it is not here."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            queue = self._by_tenant[request.tenant]
            del queue[request_id]
            if not queue:
                del self._by_tenant[request.tenant]
                self._last_tenant = request.tenant
        else:
            request = self._parked.pop(request_id, None)
        if request is not None:
            self._tokens -= len(request.token_ids)
        return request

    def park(self, requests: Iterable[Request]) -> None:
        """Set requests aside that cannot go on without their adapter's file, and have it asked for."""
        for request in requests:
            self.remove(request.request_id)
            self._parked[request.request_id] = request
            self._tokens += len(request.token_ids)
            self._wanted.append(request.request_id)
            request.passed_over_s = None
            if not request.was_admitted:
                request.adapter_on_device = False

    def provide(self, request_id: int, file: AdapterFile) -> None:
        """Put a parked request back in, whose adapter's file is there; unknown ones are ignored."""
        if request_id in self._parked and (request := self.remove(request_id)) is not None:
            request.adapter = file
            self.add(request)

    def take_wanted(self) -> tuple[int, ...]:
        """Return the requests parked since the last call."""
        wanted = tuple(self._wanted)
        self._wanted.clear()
        return wanted

    def find(self, request_id: int) -> Request | None:
        """Return a request that waits for nothing but its turn."""
        return self._requests.get(request_id)

    def waiting_for(self, artifact_digest: str) -> list[Request]:
        """Return the requests that need an adapter."""
        return [
            request
            for request in self._requests.values()
            if request.adapter is not None and request.adapter.artifact_digest == artifact_digest
        ]

    def in_order(self) -> Iterator[Request]:
        """Iterate in the order of admission; the queue must not change meanwhile.

        Each request is counted as if it were admitted as it comes out, so that the order is right for all of them.
        """
        if len(self._by_tenant) < 2:
            yield from self._requests_of_one_tenant()
            return
        heap: list[tuple[float, int, Request, Iterator[Request]]] = []
        for tenant, queue in self._by_tenant.items():
            rest = iter(queue.values())
            first = next(rest)
            heap.append((self._counters.counter(tenant), first.sequence, first, rest))
        heapq.heapify(heap)
        while heap:
            counter, _, request, rest = heap[0]
            yield request
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
                continue
            if not request.was_admitted:
                counter += self._counters.cost(request.tenant, request.prompt_tokens)
            heapq.heapreplace(heap, (counter, following.sequence, following, rest))

    def tenants(self) -> Iterator[str]:
        """Iterate over the tenants that wait, those of parked requests perhaps more than once."""
        yield from self._by_tenant
        for request in self._parked.values():
            yield request.tenant

    def __len__(self) -> int:
        """Return how many wait, without those that are parked."""
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests or request_id in self._parked

    def _requests_of_one_tenant(self) -> Iterator[Request]:
        for queue in self._by_tenant.values():
            yield from queue.values()
