"""A catalog as a router keeps it, fed by Watch."""

from __future__ import annotations

from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import Client


class Catalog:
    """A client's copy of the catalog, kept as a router keeps it; refuses any gap."""

    def __init__(self) -> None:
        self.store_id, self.revision = "", 0
        self.adapters: dict[str, a.Adapter] = {}
        self.bases: set[str] = set()
        self.seen: list[str] = []
        self._fresh: list[a.CatalogEntry] = []

    def watch(self, client: Client):
        request = a.WatchRequest(store_id=self.store_id, revision=self.revision)
        return client.adapters.Watch(request, timeout=60)

    async def follow(self, client: Client, until) -> None:
        call = self.watch(client)
        async for event in call:
            self.apply(event)
            if until(self):
                break
        call.cancel()

    async def sync(self, client: Client) -> None:
        await self.follow(client, lambda catalog: catalog.seen[-1] in ("synced", "resumed"))

    def apply(self, event: a.WatchResponse) -> None:
        kind = event.WhichOneof("event")
        assert kind is not None
        self.seen.append(kind)
        match kind:
            case "snapshot":
                self._fresh += event.snapshot.entries
            case "synced":
                self.adapters, self.bases = {}, set()
                self._apply(self._fresh)
                self._fresh = []
                self.store_id, self.revision = event.synced.store_id, event.synced.revision
            case "resumed":
                assert event.resumed.revision == self.revision
            case "change":
                assert event.change.revision == self.revision + 1
                self.revision = event.change.revision
                self._apply(event.change.entries)
            case "heartbeat":
                assert event.heartbeat.head_revision >= self.revision

    def _apply(self, entries) -> None:
        for entry in entries:
            match entry.WhichOneof("entry"):
                case "base_model":
                    self.bases.add(entry.base_model.base_id)
                case "adapter":
                    self.adapters[entry.adapter.name] = entry.adapter
                case "deleted_adapter":
                    del self.adapters[entry.deleted_adapter.name]
