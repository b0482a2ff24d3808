"""The device's memory as requests and adapters share it: what can be had, and what leaves for it.

Everything idle (adapters that nobody uses, computed prefixes that nobody refers to) stays until its chunks are needed.
Then it leaves in one order, see `idle`: an adapter restores in the seconds its load took, a block in those that its
tokens take to compute, and the room of both is counted in chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from worker.engine.arena import Arena, Use
from worker.engine.config import EngineConfig
from worker.engine.idle import IdleOrder, Level, worth
from worker.engine.plan import AdapterLoad
from worker.engine.prefix import PrefixCache
from worker.engine.rates import StepRates
from worker.engine.request import Request
from worker.engine.residency import Changes, Pinned, Placement, Residency, Slot
from worker.mailbox import AdapterFile


class Claimant(Protocol):
    """Who an adapter is loaded for: a request or a comparison."""

    @property
    def request_id(self) -> int:
        """Unique in this engine."""
        ...

    @property
    def tenant(self) -> str:
        """Whose counter the load is charged to."""
        ...


class Memory:
    """The arena, the adapter slots, the prefix cache and what is idle in them."""

    def __init__(self, config: EngineConfig, rates: StepRates) -> None:
        self._config = config
        self._rates = rates
        self._prefixes = PrefixCache()
        self._idle_adapters: IdleOrder[int] = IdleOrder()  # by slot
        self._arena = Arena(config.total_blocks)
        self._residency = Residency(config.max_resident_adapters)
        self._evicted: list[int] = []
        self._unloaded: list[int] = []
        self._level = Level()
        self._displaced = 0.0  # the highest priority of an adapter that left for a request or an order
        self.on_host: set[str] = set()
        """Artifact digests of what is in the host tier, which the scheduler hears of."""

    @property
    def arena(self) -> Arena:
        """Who owns which chunk; to be read only."""
        return self._arena

    @property
    def residency(self) -> Residency:
        """Which adapter is where; to be read only."""
        return self._residency

    def take_adapter_changes(self) -> Changes:
        """Return which adapters came, left or changed since the last call."""
        return self._residency.take_changes()

    def take_evicted(self) -> tuple[int, ...]:
        """Return the slots whose adapters left since the last call: the runner must forget them first of all."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def take_unloaded(self) -> list[int]:
        """Return the ids of the orders to unload that were done since the last call."""
        unloaded, self._unloaded = self._unloaded, []
        return unloaded

    # KV blocks.

    def available(self, keep: Iterable[str] = (), *, floor: int = 0) -> int:
        """Return how many chunks can be had without taking anything from a request or from the adapters in `keep`.

        Idle adapters count as long as adapters hold more than `floor` chunks.
        """
        arena, residency = self._arena, self._residency
        idle = residency.idle_chunks
        if idle:
            for digest in set(keep):
                slot = residency.find(digest)
                if slot is not None and slot.idle:
                    idle -= len(slot.chunk_ids)
            idle = max(0, min(idle, arena.count(Use.ADAPTER) - floor))
        return arena.free + arena.count(Use.IDLE_PREFIX) + idle

    def take_blocks(self, count: int, *, floor: int = 0) -> tuple[int, ...] | None:
        """Take KV blocks, evicting what is idle where that is needed; None, changing nothing, if too few are left."""
        if count > self._arena.free:
            if count > self.available(floor=floor):
                return None
            self._reclaim(count, (), floor)
        return self._arena.take(count, Use.KV)

    def drop_blocks(self, blocks: tuple[int, ...]) -> None:
        """Drop a request's references to its blocks; published ones stay while there is room, the last leave first."""
        arena, prefixes = self._arena, self._prefixes
        for block in reversed(blocks):
            published = prefixes.holds(block)
            if arena.drop(block, keep=published) and published:
                seconds = self._config.block_tokens / self._rates.prefill.tokens_per_second
                prefixes.retire(block, self._level.value + worth(seconds, prefixes.uses(block), 1))

    # Prefixes.

    def find_prefix(self, request: Request) -> tuple[int, ...]:
        """Return the computed blocks that a request can begin with. Its last known token is never among them."""
        if not self._config.prefix_cache:
            return ()
        tokens = self._config.block_tokens
        found: list[int] = []
        for index in range((len(request.token_ids) - 1) // tokens):
            block = self._prefixes.find(request.key(index, tokens))
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def num_idle(self, blocks: tuple[int, ...]) -> int:
        """Return how many published blocks count as available now and no more once they are shared."""
        return sum([self._prefixes.is_idle(block) for block in blocks])

    def share(self, blocks: tuple[int, ...]) -> None:
        """Add a reference to published blocks."""
        for block in blocks:
            self._arena.share(block)
            self._prefixes.use(block)

    def skip_prefix(self, request: Request) -> int:
        """Give a running request the computed blocks that follow what it has, if any; returns their tokens."""
        tokens = self._config.block_tokens
        skipped = 0
        while self._config.prefix_cache and request.computed_tokens == len(request.block_ids) * tokens:
            if request.left_tokens <= tokens:
                break
            block = self._prefixes.find(request.key(len(request.block_ids), tokens))
            if block is None:
                break
            self.share((block,))
            request.block_ids += (block,)
            request.computed_tokens += tokens
            request.published_blocks = len(request.block_ids)
            skipped += tokens
        return skipped

    def publish(self, request: Request, computed_tokens: int) -> None:
        """Offer the full blocks of a request's first tokens, which are computed and known, to later requests."""
        tokens = self._config.block_tokens
        full = computed_tokens // tokens
        if self._config.prefix_cache:
            for index in range(request.published_blocks, full):
                self._prefixes.publish(request.key(index, tokens), request.block_ids[index])
        request.published_blocks = full

    # Adapters.

    def place(
        self,
        file: AdapterFile,
        claimant: Claimant,
        claimed: Collection[str],
        *,
        reserve: int,
        now: float,
        ahead: bool = False,
    ) -> Placement | None:
        """Take a slot and chunks for a claimant's adapter, which has none; evict what is idle where that is needed.

        Adapters whose digest is in `claimed` stay, and `reserve` chunks can still be had afterwards. What is loaded
        `ahead` of its requests takes the place of no adapter that was used of late. Returns None, and changes nothing,
        when that cannot be.
        """
        stay = {*claimed, *self._used_of_late()} if ahead else claimed
        victims = self._victims(file, stay)
        chunks = self._config.chunks_for_adapter(file.arena_bytes)
        if victims is None or chunks + reserve > self.available(stay):
            return None
        for victim in victims:
            self._displace(victim, ahead=ahead)
        self._reclaim(chunks, stay, 0, ahead=ahead)
        slot = self._residency.take(
            file, self._arena.take(chunks, Use.ADAPTER), claimant.request_id, claimant.tenant, now
        )
        return Placement(slot.index, file, slot.chunk_ids)

    def loaded(self, index: int, load: AdapterLoad, seconds: float) -> Slot:
        """Note that an adapter is on the device; the chunks that it does not need are free."""
        slot, left_over = self._residency.loaded(index, load.device_bytes, load.chunks_used, seconds)
        self._arena.release(left_over, Use.ADAPTER)
        self._settle(slot)
        return slot

    def failed(self, index: int) -> Slot:
        """Note that a load failed or was given up: slot and chunks are free. Returns what the slot was."""
        slot = self._residency.failed(index)
        self._arena.release(slot.chunk_ids, Use.ADAPTER)
        self._unloaded += slot.unload_ids
        return slot

    def acquire(self, artifact_digest: str) -> int:
        """Add a reference to a resident adapter and return its slot."""
        index = self._residency.acquire(artifact_digest)
        self._idle_adapters.discard(index)
        return index

    def release(self, index: int) -> None:
        """Drop a reference to an adapter."""
        self._settle(self._residency.release(index))

    def pin(self, artifact_digest: str, pinned: Pinned) -> None:
        """Keep an adapter from leaving, from now on or from when it comes; whether that can be is `pins` to say."""
        self._residency.pin(artifact_digest, pinned)
        slot = self._residency.find(artifact_digest)
        if slot is not None:
            self._idle_adapters.discard(slot.index)

    def unpin(self, artifact_digest: str) -> None:
        """Let an adapter leave again."""
        slot = self._residency.find(artifact_digest)
        was_pinned = slot is not None and slot.pinned
        self._residency.unpin(artifact_digest)
        if slot is not None and was_pinned:
            self._settle(slot)

    def unload(self, slot: Slot, order_id: int) -> None:
        """Have an adapter leave as soon as nothing uses it any more: then the order is done."""
        slot.unload_ids.append(order_id)
        if slot.idle:
            self._idle_adapters.discard(slot.index)
            self._settle(slot)

    def keep(self, slot: Slot) -> list[int]:
        """Have an adapter stay after all; returns the orders to unload it that will not be done."""
        order_ids, slot.unload_ids = slot.unload_ids, []
        return order_ids

    # What leaves.

    def _settle(self, slot: Slot) -> None:
        """Queue an adapter that has become idle among what may leave, or let it leave where that was ordered."""
        if not slot.idle:
            return
        saved = worth(slot.load_s, slot.uses + 1, len(slot.chunk_ids))
        self._idle_adapters.add(slot.index, self._level.value + saved)
        if slot.unload_ids:
            self._unloaded += slot.unload_ids
            self._evict(slot, self._level.value)

    def _used_of_late(self) -> list[str]:
        """Return the idle adapters that are worth a use more than what the last one was that left for a request."""
        slots = [self._residency.slot(index) for index in self._idle_adapters.in_order()]
        return [
            slot.file.artifact_digest
            for slot in slots
            if self._idle_adapters.priority(slot.index) >= self._displaced + worth(slot.load_s, 1, len(slot.chunk_ids))
        ]

    def _victims(self, file: AdapterFile, claimed: Collection[str]) -> list[Slot] | None:
        """Return idle adapters to evict so that a slot and a new file's bytes are free under both limits, or None."""
        residency, limit, outside_limit = (
            self._residency,
            self._config.max_adapter_bytes,
            self._config.max_vocabulary_bytes,
        )
        victims: list[Slot] = []
        missing_slots = 0 if residency.free_slots else 1
        missing_bytes = 0 if limit is None else residency.used_bytes + file.artifact_bytes - limit
        missing_outside = 0
        if outside_limit is not None and file.vocabulary_bytes:
            missing_outside = residency.vocabulary_bytes + file.vocabulary_bytes - outside_limit
        if missing_slots <= 0 and missing_bytes <= 0 and missing_outside <= 0:
            return victims
        for index in self._idle_adapters.in_order():
            slot = residency.slot(index)
            helps = missing_slots > 0 or missing_bytes > 0 or slot.file.vocabulary_bytes > 0
            if helps and slot.file.artifact_digest not in claimed:
                victims.append(slot)
                missing_slots -= 1
                missing_bytes -= slot.device_bytes
                missing_outside -= slot.file.vocabulary_bytes
                if missing_slots <= 0 and missing_bytes <= 0 and missing_outside <= 0:
                    return victims
        return None

    def _reclaim(self, count: int, claimed: Iterable[str], floor: int, *, ahead: bool = False) -> None:
        """Evict what is idle until `count` chunks are free; the caller has made sure that there is enough."""
        arena, prefixes = self._arena, self._prefixes
        slots = [self._residency.find(digest) for digest in claimed]
        stay = {slot.index for slot in slots if slot is not None}
        while arena.free < count:
            adapter = self._idle_adapters.least(stay) if arena.count(Use.ADAPTER) > floor else None
            block = prefixes.least()
            if adapter is not None and (block is None or adapter[0] < block[0]):
                self._displace(self._residency.slot(adapter[1]), ahead=ahead)
            elif block is not None:
                priority, chunk = block
                self._level.rise(priority)
                prefixes.forget(chunk)
                arena.release((chunk,), Use.IDLE_PREFIX)
            else:
                raise ValueError("chunks that were available are not there")

    def _displace(self, slot: Slot, *, ahead: bool) -> None:
        """Let an idle adapter leave for what needs its room."""
        priority = self._idle_adapters.priority(slot.index)
        if not ahead:
            self._displaced = max(self._displaced, priority)
        self._evict(slot, priority)

    def _evict(self, slot: Slot, priority: float) -> None:
        self._level.rise(priority)
        self._idle_adapters.discard(slot.index)
        self._residency.evict(slot)
        self._arena.release(slot.chunk_ids, Use.ADAPTER)
        self._evicted.append(slot.index)
