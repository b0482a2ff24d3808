"""What surrounds a router in its tests: real gRPC servers on real sockets whose behaviour the test scripts."""

from __future__ import annotations

from tests.integration.fake_registry import (
    BASE,
    BASE_ID,
    FakeRegistry,
    adapter_entry,
    base_entry,
    deleted_entry,
    digest,
    version,
)
from tests.integration.fake_worker import (
    ROOT,
    Event,
    FakeWorker,
    Script,
    babble_forever,
    choice_finished,
    delta,
    finished,
    never_answer,
    position,
    raising,
    say_hello,
    worker_process,
)
from tests.integration.running_router import RunningRouter, code_of, eventually, running_router

__all__ = [
    "BASE",
    "BASE_ID",
    "ROOT",
    "Event",
    "FakeRegistry",
    "FakeWorker",
    "RunningRouter",
    "Script",
    "adapter_entry",
    "babble_forever",
    "base_entry",
    "choice_finished",
    "code_of",
    "deleted_entry",
    "delta",
    "digest",
    "eventually",
    "finished",
    "never_answer",
    "position",
    "raising",
    "running_router",
    "say_hello",
    "version",
    "worker_process",
]
