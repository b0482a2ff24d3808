"""Limits under which nothing could run are refused; what follows from the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.worker.engine.driver import CONFIG


@pytest.mark.parametrize(
    "limits",
    [
        {"total_blocks": 0},
        {"max_prefill_tokens": 0},
        {"max_context_tokens": 1},
        {"max_adapter_bytes": 0},
        {"mixed_batch_ratio": 0.4},
        {"mixed_batch_ratio": 1.1},
        {"kv_watermark": 1.0},
        {"adapter_floor": -0.1},
        {"chunk_bytes": 10, "adapter_chunk_bytes": 11},
    ],
)
def test_a_limit_that_makes_no_sense_is_named(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(limits)[-1]):
        replace(CONFIG, **limits)


def test_shares_are_counted_in_chunks_and_requests() -> None:
    config = replace(CONFIG, total_blocks=250, kv_watermark=0.01, adapter_floor=0.05, mixed_batch_ratio=0.5)
    assert (config.watermark_chunks, config.adapter_floor_chunks, config.max_mixed_requests) == (2, 12, 4)


@pytest.mark.parametrize(("artifact_bytes", "chunks"), [(1, 2), (9, 2), (10, 3), (900, 101)])
def test_an_adapter_needs_its_bytes_and_a_chunk_more(artifact_bytes: int, chunks: int) -> None:
    assert replace(CONFIG, chunk_bytes=10, adapter_chunk_bytes=9).chunks_for_adapter(artifact_bytes) == chunks
    assert replace(CONFIG, chunk_bytes=10, adapter_chunk_bytes=0).chunks_for_adapter(artifact_bytes) == 0
