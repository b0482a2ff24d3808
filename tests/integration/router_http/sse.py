"""Server-sent events as they are, for tests that look beneath the `openai` client."""

from __future__ import annotations

from collections.abc import AsyncIterator


def events_of(text: str) -> list[str]:
    """Return the data of each server-sent event."""
    return [
        line.removeprefix("data: ")
        for block in text.split("\n\n")
        for line in block.split("\n")
        if line.startswith("data")
    ]


async def drain(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass
