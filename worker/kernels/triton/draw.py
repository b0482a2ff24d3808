"""Draws a row's token without sorting: what `worker.kernels.draws` asks for, by one program a row.

A weight is exp((logit - largest) / temperature), at most 1. Weights order as their bits do, read as whole numbers, so
what filters keep is found by cutting an interval of whole numbers in four until one is left. Sums are of weights in
fixed point: exact, hence the same in any order, and the same each time a program comes back to them.

Most of the vocabulary is no candidate: what filters imply of the least weight kept is used first, and all that follows
looks at the candidates only, which a row's logits are overwritten with.
"""

import triton
import triton.language as tl

# Kernels have many arguments: one a line would hide the code.
# fmt: off

_ONE = tl.constexpr(0x3F800000)
"""Bits of 1, the largest weight."""
_INFINITY = tl.constexpr(0x7F800000)
_SURELY = tl.constexpr(0.999)
"""Keeps roundings of a bound on the safe side."""


@triton.jit
def _order(x):
    """Bits of x as whole numbers, which order as numbers from 0 on do."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _weight(x, largest, inverse):
    """exp((x - largest) · inverse); 0 below exp(-87.3), so that no weight is subnormal."""
    y = (x - largest) * inverse
    return tl.where(y > -87.3, tl.exp(y), 0.0)


@triton.jit
def _mass(ptr, i, inside, least, largest, inverse, RAW: tl.constexpr, UNIT: tl.constexpr):
    """Weights at places i in fixed point, 0 for those whose bits are below `least`. RAW: logits lie there."""
    if RAW:
        x = tl.load(ptr + i, mask=inside, other=float("-inf"))
        weight = _weight(x, largest, inverse)
    else:
        weight = tl.load(ptr + i, mask=inside, other=0.0)
    return tl.where(_order(weight) >= least, (weight * UNIT).to(tl.int64), 0)


@triton.jit
def _segments(
    ptr, count, least, largest, inverse,
    RAW: tl.constexpr, UNIT: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Masses of SEGMENTS equal parts of the `count` places, one behind the other, and how long a part is."""
    each = tl.cdiv(count, SEGMENTS * WIDTH) * WIDTH
    at = tl.arange(0, SEGMENTS)[:, None] * each + tl.arange(0, WIDTH)[None, :]
    masses = tl.zeros((SEGMENTS, WIDTH), tl.int64)
    for done in range(0, each, WIDTH):
        masses += _mass(ptr, at + done, at + done < count, least, largest, inverse, RAW, UNIT)
    return tl.sum(masses, 1), each


@triton.jit
def _walk(
    ptr, count, least, largest, inverse, uniform,
    RAW: tl.constexpr, UNIT: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Place at which the running mass passes uniform · the total: the segment first, then the place in it."""
    masses, each = _segments(ptr, count, least, largest, inverse, RAW, UNIT, SEGMENTS, WIDTH)
    total = tl.sum(masses, 0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    ends = tl.cumsum(masses, 0)
    low = tl.sum((ends <= target).to(tl.int32), 0) * each
    passed = tl.max(tl.where(ends <= target, ends, 0), 0)
    high = tl.minimum(low + each, count)
    lane = tl.arange(0, SEGMENTS * WIDTH)
    place = low
    for done in range(low, high, SEGMENTS * WIDTH):
        i = done + lane
        running = passed + tl.cumsum(_mass(ptr, i, i < high, least, largest, inverse, RAW, UNIT), 0)
        place += tl.sum((running <= target).to(tl.int32), 0)
        passed = tl.max(running, 0)
    return place


@triton.jit
def _cutoff(
    ptr, count, low, target,
    BY_COUNT: tl.constexpr, UNIT: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Bits of the smallest weight, of those from `low` on, such that all greater ones number or weigh below `target`.

    They are 1's where there is none.
    """
    lane = tl.arange(0, SEGMENTS * WIDTH // 2)
    high = tl.full((), _ONE, tl.int32)
    while low < high:
        half = low + (high - low) // 2
        quarter = low + (half - low) // 2
        rest = half + (high - half) // 2
        above_quarter = tl.zeros((SEGMENTS * WIDTH // 2,), tl.int64)
        above_half = tl.zeros((SEGMENTS * WIDTH // 2,), tl.int64)
        above_rest = tl.zeros((SEGMENTS * WIDTH // 2,), tl.int64)
        for done in range(0, count, SEGMENTS * WIDTH // 2):
            weight = tl.load(ptr + done + lane, mask=done + lane < count, other=0.0)
            bits = _order(weight)
            if BY_COUNT:
                counted = (bits > 0).to(tl.int64)
            else:
                counted = (weight * UNIT).to(tl.int64)
            above_quarter += tl.where(bits > quarter, counted, 0)
            above_half += tl.where(bits > half, counted, 0)
            above_rest += tl.where(bits > rest, counted, 0)
        if tl.sum(above_half, 0) < target:
            if tl.sum(above_quarter, 0) < target:
                high = quarter
            else:
                low = quarter + 1
                high = half
        elif tl.sum(above_rest, 0) < target:
            low = half + 1
            high = rest
        else:
            low = rest + 1
    return low


@triton.jit
def _reached(weights, top_k):
    """Bits, coarsely, of a weight that at least `top_k` of some weights reach; 0 where they are too few."""
    low = tl.zeros((), tl.int32)
    for step in range(13):
        higher = low + (1 << (29 - step))
        enough = tl.sum((_order(weights) >= higher).to(tl.int64), 0) >= top_k
        low = tl.where(enough, higher, low)
    return low


@triton.jit
def _gather(
    row_ptr, ids_ptr, least, largest, inverse,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):
    """Overwrite a row with its weights from `least` on, in the order of their ids, which go to ids; how many."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((), tl.int32)
    for done in range(0, VOCAB, BLOCK):
        i = done + lane
        weight = _weight(tl.load(row_ptr + i, mask=i < VOCAB, other=float("-inf")), largest, inverse)
        kept = _order(weight) >= least
        one = kept.to(tl.int32)
        place = count + tl.cumsum(one, 0) - one
        tl.debug_barrier()  # the block is read, before parts of it are written
        tl.store(row_ptr + place, weight, mask=kept)
        tl.store(ids_ptr + place, i, mask=kept)
        count += tl.sum(one, 0)
    tl.debug_barrier()  # written, before other threads read
    return count


@triton.jit
def draw_kernel(
    logits_ptr, ids_ptr, wholes_ptr, numbers_ptr, tokens_ptr,
    VOCAB: tl.constexpr, UNIT: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Draw tokens[r] of row wholes[r, 0] of logits.   Grid (R).

    logits float32 [S, VOCAB], rows with filters are overwritten. wholes int64 [R, 3]: row, top_k, bits of min_p as
    float32. numbers float64 [R, 3]: 1 / temperature, top_p, uniform. ids int32 [R, VOCAB] is room, needed where any
    row has filters. tokens int64 [R]; 0 for a row with NaN, infinity, or nothing above -infinity. UNIT · VOCAB ≤ 2⁶².
    """
    r = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(wholes_ptr + 3 * r) * VOCAB
    ids_ptr += r * VOCAB
    top_k = tl.load(wholes_ptr + 3 * r + 1)
    least = tl.load(wholes_ptr + 3 * r + 2).to(tl.int32)
    inverse = tl.load(numbers_ptr + 3 * r).to(tl.float32)
    top_p = tl.load(numbers_ptr + 3 * r + 1)
    uniform = tl.load(numbers_ptr + 3 * r + 2)
    BLOCK: tl.constexpr = SEGMENTS * WIDTH
    lane = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    sizes = tl.zeros((BLOCK,), tl.int32)
    for done in range(0, VOCAB, BLOCK):
        x = tl.load(row_ptr + done + lane, mask=done + lane < VOCAB, other=float("-inf"))
        tops = tl.maximum(tops, x)
        sizes = tl.maximum(sizes, _order(x) & 0x7FFFFFFF)  # NaN is above infinity
    largest = tl.max(tops, 0)
    if (tl.max(sizes, 0) <= _INFINITY) & (_order(largest) & 0x7FFFFFFF < _INFINITY):
        has_top_k = (top_k > 0) & (top_k < VOCAB)
        bounded = has_top_k | (least > 0)
        if bounded | (top_p < 1.0):
            if has_top_k:
                # Each lane's largest is a weight of its own.
                least = tl.maximum(least, _reached(_weight(tops, largest, inverse), top_k))
            total = tl.zeros((), tl.int64)
            if not bounded:
                masses, _ = _segments(row_ptr, VOCAB, 0, largest, inverse, True, UNIT, SEGMENTS, WIDTH)
                total = tl.sum(masses, 0)
                # All that is lighter weighs less than the share that top-p drops.
                dropped = (1.0 - top_p) * total.to(tl.float64) * (_SURELY / UNIT / VOCAB)
                least = tl.maximum(least, _order(dropped.to(tl.float32)))
            least = tl.maximum(least, 1)
            count = _gather(row_ptr, ids_ptr, least, largest, inverse, VOCAB, BLOCK)
            if has_top_k & (top_k < count):
                least = _cutoff(row_ptr, count, least, top_k, True, UNIT, SEGMENTS, WIDTH)
            if top_p < 1.0:
                if bounded:
                    masses, _ = _segments(row_ptr, count, least, largest, inverse, False, UNIT, SEGMENTS, WIDTH)
                    total = tl.sum(masses, 0)
                share = top_p * total.to(tl.float64)
                target = share.to(tl.int64)
                target += (target.to(tl.float64) < share).to(tl.int64)  # rounded up
                least = _cutoff(row_ptr, count, least, target, False, UNIT, SEGMENTS, WIDTH)
            place = _walk(row_ptr, count, least, largest, inverse, uniform, False, UNIT, SEGMENTS, WIDTH)
            tl.store(tokens_ptr + r, tl.load(ids_ptr + place).to(tl.int64))
        else:
            place = _walk(row_ptr, VOCAB, 0, largest, inverse, uniform, True, UNIT, SEGMENTS, WIDTH)
            tl.store(tokens_ptr + r, place.to(tl.int64))
    else:
        tl.store(tokens_ptr + r, 0)
