"""A worker for one adapter waits for its file as long as waiting may help."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from common.backoff import Backoff
from loraplex.errors import ArtifactNotFound, ArtifactUnreachable, LoraplexError, NoSpace
from worker import dedicated
from worker.adapters.store import Lease
from worker.dedicated import Dedication
from worker.mailbox import AdapterFile

DIGEST = "ab" * 32


class FakeStore:
    """Raises what it is given, then leases the file."""

    def __init__(self, *errors: LoraplexError) -> None:
        self.errors = list(errors)

    async def acquire(self, artifact_digest: str) -> Lease:
        if self.errors:
            raise self.errors.pop(0)
        return Lease(AdapterFile(artifact_digest, "/there", 100), True, True, lambda: None)


def a_dedication(*errors: LoraplexError) -> Dedication:
    return Dedication(DIGEST, cast("Any", FakeStore(*errors)))


async def test_it_waits_for_a_source_that_is_away_and_for_a_disk_that_is_full(monkeypatch):
    monkeypatch.setattr(dedicated, "_RETRY", Backoff(first_s=0.001, longest_s=0.002))
    full = NoSpace("the disk is full", retry_after_s=0.01)
    assert await a_dedication(ArtifactUnreachable("away"), full, full).fetch() == Path("/there")


@pytest.mark.parametrize("error", [NoSpace("the cache takes less than the adapter has"), ArtifactNotFound("gone")])
async def test_it_does_not_wait_for_what_waiting_does_not_change(error):
    with pytest.raises(type(error)):
        await a_dedication(error).fetch()
