"""How a step's rows are cut into tasks of attention and of adapters. Pure layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worker.kernels.cpu.attention import ROWS_AT_ONCE
from worker.kernels.cpu.lora import LORA_ROWS_AT_ONCE
from worker.kernels.layout import Rows
from worker.kernels.tiles import PlacedAdapter


def block_tables(requests: Sequence[Rows]) -> NDArray[np.int64]:
    """Return the ids of each request's blocks, [requests, most blocks of one]."""
    tables = np.zeros((len(requests), max(len(request.block_ids) for request in requests)), dtype=np.int64)
    for index, request in enumerate(requests):
        tables[index, : len(request.block_ids)] = request.block_ids
    return tables


def attention_items(requests: Sequence[Rows]) -> NDArray[np.int64]:
    """Cut requests into pieces of rows for `attend`: (request, first row, rows)."""
    items = [
        (index, first, min(ROWS_AT_ONCE, request.start + request.count - first))
        for index, request in enumerate(requests)
        for first in range(request.start, request.start + request.count, ROWS_AT_ONCE)
    ]
    return np.array(items, dtype=np.int64)


def adapter_items(requests: Sequence[Rows]) -> tuple[NDArray[np.int64], list[PlacedAdapter]]:
    """Cut the rows that have an adapter into pieces for `lora_add`: (adapter, first row, rows); and the adapters."""
    adapters: list[PlacedAdapter] = []
    ends: list[list[int]] = []  # of each adapter's rows, which are neighbours
    for request in requests:
        if request.adapter is None:
            continue
        end = request.start + request.count
        if adapters and adapters[-1] is request.adapter:
            ends[-1][1] = end
        else:
            adapters.append(request.adapter)
            ends.append([request.start, end])
    items = []
    for index, (start, end) in enumerate(ends):
        first = start
        while first < end:
            left = end - first
            # Seven or eight are better shared by two threads than split into many and few.
            count = left // 2 if left in (7, 8) else min(left, LORA_ROWS_AT_ONCE)
            items.append((index, first, count))
            first += count
    return np.array(items, dtype=np.int64), adapters
