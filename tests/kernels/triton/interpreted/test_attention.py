"""Attention over chunks of an arena whose other bytes are garbage: lengths x heads, decode, prefill, cache writes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.kernels import reference as oracle
from worker.kernels.layout import AttentionShape
from worker.kernels.triton.attention import (
    KEYS_PER_SPLIT,
    AttentionWork,
    attention,
    attention_room,
    decode_items,
    prefill_items,
    rope,
)
from worker.kernels.triton.platform import Platform

CPU = torch.device("cpu")
PLATFORM = Platform.of(CPU, torch.bfloat16)
LAYERS, LAYER = 2, 1
SHAPES = [(4, 2, 16), (3, 3, 8), (7, 1, 24)]
HEADS = pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)


# The interpreter cuts float32 off to bfloat16 where a GPU rounds, so that bfloat16 is held to less.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cache:
    """An arena of chunks; requests of `lengths` positions own some of them, and NaN lies everywhere else."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        blocks = [-(-length // 16) for length in lengths]
        order = np.random.default_rng(1).permutation(sum(blocks) + 2).astype(np.int32).tolist()
        self.chunks = torch.full(
            (len(order), LAYERS, 2, shape.num_kv_heads, 16, shape.head_dim), torch.nan, dtype=dtype
        )
        self.first = np.cumsum([0, *(count + 1 for count in blocks)])  # with one between that is never to be followed
        self.blocks = torch.full((int(self.first[-1]),), 1 << 30, dtype=torch.int32)
        for request, (count, length) in enumerate(zip(blocks, lengths, strict=True)):
            mine = [order.pop() for _ in range(count)]
            self.blocks[self.first[request] : self.first[request] + count] = torch.tensor(mine, dtype=torch.int32)
            for position in range(length):
                shape_of = self.chunks[mine[position // 16], LAYER, :, :, position % 16].shape
                self.chunks[mine[position // 16], LAYER, :, :, position % 16] = randn(
                    *shape_of, seed=1000 * request + position, dtype=dtype
                )

    @property
    def bytes(self) -> Tensor:
        return self.chunks.view(-1).view(torch.uint8)

    def seen(self, request: int, length: int) -> Tensor:
        """[2, kv_heads, length, dim] float32."""
        mine = self.blocks[self.first[request] :][: -(-length // 16)].tolist()
        return torch.cat([self.chunks[chunk, LAYER] for chunk in mine], dim=2)[:, :, :length].float()


def reference(q: Tensor, cache: Cache, rows: Sequence[tuple[int, int]]) -> Tensor:
    """Attention of each row (request, position)."""
    out = torch.zeros(q.shape)
    for row, (request, position) in enumerate(rows):
        keys, values = cache.seen(request, position + 1)
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // keys.shape[0])
            score = keys[kv] @ q[row, head].float() / math.sqrt(q.shape[2])
            out[row, head] = score.softmax(0) @ values[kv]
    return out


def attend(shape: AttentionShape, q: Tensor, cache: Cache, items: np.ndarray, rows: np.ndarray | None = None) -> Tensor:
    work = AttentionWork(torch.from_numpy(items), cache.blocks, None if rows is None else torch.from_numpy(rows))
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    room = tuple(part.fill_(torch.nan) for part in attention_room(shape, len(items), CPU))
    attention(shape, PLATFORM, q, cache.bytes, LAYER, work, (room[0], room[1]), out)
    return out


def decodes(cache: Cache, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    return decode_items(np.array([(cache.first[n], n, length - 1) for n, length in enumerate(lengths)]))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert float((actual.float() - expected).norm() / expected.norm()) < TOLERANCE[actual.dtype]


@DTYPES
@HEADS
@pytest.mark.parametrize("lengths", [[1], [16, 17, 5, 64, 65], [300, 3, KEYS_PER_SPLIT, KEYS_PER_SPLIT + 1]], ids=str)
def test_decode(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(LAYERS, heads, kv_heads, dim)
    cache = Cache(shape, lengths, dtype)
    q = randn(len(lengths), heads, dim, seed=2, dtype=dtype)
    actual = attend(shape, q, cache, *decodes(cache, lengths))
    assert_close(actual, reference(q, cache, [(n, length - 1) for n, length in enumerate(lengths)]))


@DTYPES
@HEADS
@pytest.mark.parametrize("chunks", [[(0, 5)], [(0, 40)], [(70, 20), (0, 17), (16, 33)]], ids=str)
def test_prefill(chunks: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Chunks (position of the first row, rows), side by side."""
    shape = AttentionShape(LAYERS, heads, kv_heads, dim)
    cache = Cache(shape, [position + rows for position, rows in chunks], dtype)
    starts = np.cumsum([0, *(rows for _, rows in chunks)]).tolist()
    q = randn(starts[-1], heads, dim, seed=3, dtype=dtype)
    places = [(int(cache.first[n]), starts[n], rows, position) for n, (position, rows) in enumerate(chunks)]
    actual = attend(shape, q, cache, prefill_items(shape, places))
    rows = [(n, position + row) for n, (position, count) in enumerate(chunks) for row in range(count)]
    assert_close(actual, reference(q, cache, rows))


def test_a_row_alone_and_in_a_batch_is_the_same_to_the_bit() -> None:
    shape = AttentionShape(LAYERS, 4, 2, 16)
    lengths = [300, 40, 257]
    cache = Cache(shape, lengths)
    q = randn(3, 4, 16, seed=4)
    together = attend(shape, q, cache, *decodes(cache, lengths))
    for request in range(3):
        alone = decode_items(np.array([(cache.first[request], request, lengths[request] - 1)]))
        assert torch.equal(attend(shape, q, cache, *alone)[request], together[request])


def test_more_pieces_of_keys_than_are_summed_side_by_side() -> None:
    shape = AttentionShape(LAYERS, 1, 1, 8)
    length = 17 * KEYS_PER_SPLIT + 3
    cache = Cache(shape, [length])
    q = randn(1, 1, 8, seed=4)
    items, rows = decodes(cache, [length])
    assert rows.tolist() == [[0, 0, 18]]
    assert_close(attend(shape, q, cache, items, rows), reference(q, cache, [(0, length - 1)]))


def test_what_a_captured_step_has_room_for_but_lacks() -> None:
    """Items without rows write nothing; a row without items attends to nothing; a row that is not listed is left."""
    shape = AttentionShape(LAYERS, 4, 2, 16)
    cache = Cache(shape, [20, 300])
    items, rows = decodes(cache, [20, 300])
    room = np.zeros((5, 5), dtype=np.int32)
    room[: len(items)] = items
    rows = np.concatenate((rows, np.array([[2, 0, 0]], dtype=np.int32)))
    q = randn(4, 4, 16, seed=4)
    out = attend(shape, q, cache, room, rows)
    assert_close(out[:2], reference(q[:2], cache, [(0, 19), (1, 299)]))
    assert (out[2] == 0).all()
    assert out[3].isnan().all()


@DTYPES
@HEADS
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_and_cache_write(
    heads: int, kv_heads: int, dim: int, delta: bool, norm: bool, dtype: torch.dtype
) -> None:
    shape = AttentionShape(LAYERS, heads, kv_heads, dim)
    rows, all_heads = 5, heads + 2 * kv_heads
    qkv = randn(rows, all_heads * dim, seed=5, dtype=dtype)
    added = randn(rows, all_heads * dim, seed=6, dtype=dtype)
    adapted = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    added[adapted == 0] = torch.nan
    weight = randn(heads + kv_heads, dim, seed=7, dtype=dtype)
    angles = torch.rand(50, dim // 2, generator=torch.Generator().manual_seed(8)) * 6
    positions = torch.tensor([0, 49, 7, 8, 30], dtype=torch.int32)
    slots = torch.tensor([3, 16, -1, 47, 20])
    chunks = randn(3, LAYERS, 2, kv_heads, 16, dim, seed=9, dtype=dtype)
    before = chunks.clone()
    q = torch.full((rows, heads, dim), torch.nan, dtype=dtype)
    untouched = qkv.clone()
    rope(
        shape, qkv, angles.cos(), angles.sin(), positions, slots, q, chunks.view(-1).view(torch.uint8), LAYER,
        delta=(added, adapted) if delta else None, norm=(weight, 1e-5) if norm else None,
    )  # fmt: skip
    assert torch.equal(qkv, untouched)

    x = qkv.float()
    if delta:
        x = x + torch.where(adapted[:, None] > 0, added.float(), torch.zeros(()))
    x = x.view(rows, all_heads, dim)
    turned = x[:, : heads + kv_heads]
    if norm:
        turned = oracle.rms_norm(turned, weight, 1e-5)
    at = angles[positions.long()][:, None]
    turned = oracle.rotate(turned, at.cos(), at.sin())
    assert_close(q, turned[:, :heads])
    expected = before.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            chunk, offset = divmod(slot, 16)
            assert_close(chunks[chunk, LAYER, 0, :, offset], turned[row, heads:])
            assert_close(chunks[chunk, LAYER, 1, :, offset], x[row, heads + kv_heads :])
            expected[chunk, LAYER, :, :, offset] = chunks[chunk, LAYER, :, :, offset]
    assert torch.equal(chunks, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of infinity times 0
def test_what_a_broken_row_caches_is_finite() -> None:
    shape = AttentionShape(LAYERS, 2, 1, 8)
    qkv = randn(1, 32, seed=5, dtype=torch.bfloat16)
    qkv[0, 16], qkv[0, 24], qkv[0, 25] = torch.nan, torch.inf, -torch.inf
    chunks = torch.zeros(1, LAYERS, 2, 1, 16, 8, dtype=torch.bfloat16)
    one, q = torch.ones(1, 4), torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int32)
    rope(shape, qkv, one, one * 0, zero, zero.long(), q, chunks.view(-1).view(torch.uint8), LAYER)
    assert chunks.isfinite().all()
    assert float(chunks[0, LAYER, 1, 0, 0, 0]) == torch.finfo(torch.bfloat16).max
