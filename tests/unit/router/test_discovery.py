"""Where workers may be: how it is written, and how DNS is followed."""

from __future__ import annotations

import asyncio
import random

import pytest

from router import discovery
from router.discovery import DnsWorkers, StaticWorkers, WorkerSource, follow_dns, look_up, parse_workers


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("a:1", StaticWorkers(("a:1",))),
        ("a:1,b:2, a:1,", StaticWorkers(("a:1", "b:2"))),
        ("[::1]:50052", StaticWorkers(("[::1]:50052",))),
        ("dns:workers.default.svc:50052", DnsWorkers("workers.default.svc", 50052)),
    ],
)
def test_sources_are_read(spec: str, source: WorkerSource) -> None:
    assert parse_workers(spec) == source


@pytest.mark.parametrize(
    "spec",
    ["", ",", "host", ":1", "host:", "host:x", "host:0", "host:65536", "::1:5", "dns:host", "dns::1", "a:1,b", "a:¹"],
)
def test_nonsense_is_refused_with_the_form_that_is_meant(spec: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        parse_workers(spec)


async def test_localhost_is_looked_up() -> None:
    assert "127.0.0.1:7" in await look_up(DnsWorkers("localhost", 7))


async def test_empty_and_failed_look_ups_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | Exception] = [["a:1"], [], OSError("no such name"), TimeoutError(), ["a:1", "b:1"]]
    reported: list[list[str]] = []
    done = asyncio.Event()

    async def scripted(_: DnsWorkers) -> list[str]:
        if not answers:
            done.set()
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(discovery, "look_up", scripted)
    following = asyncio.create_task(follow_dns(DnsWorkers("x", 1), reported.append, random.Random(1), interval_s=0.001))
    await asyncio.wait_for(done.wait(), 60)
    following.cancel()
    assert reported == [["a:1"], ["a:1", "b:1"]]
