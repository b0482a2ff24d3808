"""Products of few rows with few vectors stored in any format: what adapters and attention consist of.

`dots` sums along the stored vectors, `add_scaled` adds multiples of them to rows. Both compute several rows at a time,
so that a stored number is read and widened once for all of them. Each result is one chain of sums in one order, in
whichever form it is computed: a row's results do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.kernels.cpu import vectors as v
from worker.kernels.cpu.vectors import EXACT, INDEX, LANES, WIDENED
from worker.kernels.tiles import Format

FLOAT32: Final = int(Format.FLOAT32)
BFLOAT16: Final = int(Format.BFLOAT16)
INT8: Final = int(Format.INT8)

DOTS_AT_ONCE: Final = 8
"""Stored vectors that `dots` may take at a time: it writes that many results a row, or a multiple."""

# By how many stored vectors, or vectors of eight columns, a form of so many rows is computed. Products take four cycles
# and two start in each, so it takes eight sums to keep a core busy, better twelve; more do not fit sixteen registers.
_WIDE_DOTS: Final = {1: 8, 2: 4, 3: 4, 4: 2, 6: 2}
_WIDE_ADD: Final = {1: 8, 2: 4, 3: 2, 4: 2, 6: 2}


def _each_kind(builder: Any, kind: Any, emit: Callable[[Format], None]) -> None:
    """Emit code for each format that is widened in loading, and choose by `kind`."""
    end = builder.append_basic_block("kinds.end")
    switch = builder.switch(kind, end)
    for value in WIDENED:
        block = builder.append_basic_block(f"kind.{value.name}")
        switch.add_case(INDEX(int(value)), block)
        with builder.goto_block(block):
            emit(value)
            builder.branch(end)
    builder.position_at_end(end)


def _as_intrinsic(emit: Callable[[Any, Format, tuple[Any, ...]], None], num_arguments: int) -> Any:
    """Return a function for compiled code, of a format and a tuple of int64, by what emits its code for a format."""

    @intrinsic
    def form(typingctx: Any, kind: Any, numbers: Any) -> Any:  # noqa: ARG001 - the types are the signature
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            unpacked = tuple(cgutils.unpack_tuple(builder, arguments[1], num_arguments))
            _each_kind(builder, arguments[0], lambda value: emit(builder, value, unpacked))
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.int64, num_arguments)), generate

    return form


def _make_dots(rows: int) -> Any:
    """Return the form of `dots` for `rows` rows, _WIDE_DOTS[rows] stored vectors at a time."""
    wide = _WIDE_DOTS[rows]

    def emit(builder: Any, kind: Format, arguments: tuple[Any, ...]) -> None:
        x, x_stride, w, w_stride, count, inner, out, out_stride, ahead = arguments
        x, w, out, ahead = (v.pointer(builder, address) for address in (x, w, out, ahead))
        size = WIDENED[kind][1]
        xs = [builder.gep(x, [builder.mul(x_stride, INDEX(r))]) for r in range(rows)]
        outs = [builder.gep(out, [builder.mul(out_stride, INDEX(r))]) for r in range(rows)]
        whole = builder.and_(inner, INDEX(-LANES))
        with v.loop(builder, count, step=wide) as (first, _):
            ws = []
            for j in range(wide):  # past the last one: that one again
                index, last = builder.add(first, INDEX(j)), builder.sub(count, INDEX(1))
                index = builder.select(builder.icmp_signed("<", index, last), index, last)
                ws.append(builder.gep(w, [builder.mul(w_stride, index)]))
            totals = [[v.variable(builder, v.constant(0.0)) for _ in range(wide)] for _ in range(rows)]
            ahead_of = builder.gep(ahead, [builder.mul(w_stride, first)])

            def accumulate(k: Any, load: Callable[..., Any]) -> None:
                def row(r: int) -> Any:
                    return load(builder, xs[r], builder.mul(k, INDEX(4)))

                def stored(j: int) -> Any:
                    return load(builder, ws[j], builder.mul(k, INDEX(size)), kind)

                # The fewer ones are held in registers, the others come one by one.
                held = [stored(j) for j in range(wide)] if wide < rows else [row(r) for r in range(rows)]
                for i in range(max(rows, wide)):
                    one = row(i) if wide < rows else stored(i)
                    for other, value in enumerate(held):
                        total = totals[i][other] if wide < rows else totals[other][i]
                        builder.store(v.fma(builder, one, value, builder.load(total)), total)

            with v.loop(builder, whole, step=LANES) as (k, _):
                v.prefetch(builder, ahead_of, builder.mul(k, INDEX(wide * size)), wide * LANES * size)
                accumulate(k, v.load)
            with v.loop(builder, inner, first=whole) as (k, _):
                accumulate(k, v.load_one)
            flat = [(r, j, builder.load(totals[r][j])) for r in range(rows) for j in range(wide)]
            width = min(4, wide)  # neighbours in out
            for start in range(0, len(flat), 4):
                summed = v.sums(builder, [total for _, _, total in flat[start : start + 4]])
                for lane in range(0, 4, width):
                    r, j, _ = flat[start + lane]
                    offset = builder.mul(builder.add(first, INDEX(j)), INDEX(4))
                    v.store(builder, v.part(builder, summed, lane, width), outs[r], offset)

    return _as_intrinsic(emit, 9)


def _make_add_scaled(rows: int, wide: int, *, lanes: int = LANES) -> Any:
    """Return the form of `add_scaled` for `rows` rows and wide · lanes columns at a time; lanes is 8 or 1."""

    def emit(builder: Any, kind: Format, arguments: tuple[Any, ...]) -> None:
        h, h_stride, count, w, w_stride, y, y_stride, first, end, ahead = arguments
        h, w, y, ahead = (v.pointer(builder, address) for address in (h, w, y, ahead))
        size = WIDENED[kind][1]
        load = v.load if lanes == LANES else v.load_one
        hs = [builder.gep(h, [builder.mul(h_stride, INDEX(r))]) for r in range(rows)]
        ys = [builder.gep(y, [builder.mul(y_stride, INDEX(r))]) for r in range(rows)]
        with v.loop(builder, end, first=first, step=wide * lanes) as (n, _):
            columns = [builder.add(n, INDEX(c * lanes)) for c in range(wide)]
            offsets = [builder.mul(column, INDEX(4)) for column in columns]
            totals = [[v.variable(builder, load(builder, row, offset)) for offset in offsets] for row in ys]
            ahead_of = builder.gep(ahead, [builder.mul(builder.mul(n, count), INDEX(size))])
            with v.loop(builder, count) as (j, _):
                v.prefetch(builder, ahead_of, builder.mul(j, INDEX(wide * lanes * size)), wide * lanes * size)
                stored = builder.gep(w, [builder.mul(j, w_stride)])
                at = builder.mul(j, INDEX(4))
                values = [load(builder, stored, builder.mul(column, INDEX(size)), kind) for column in columns]
                for r in range(rows):
                    factor = v.splat(builder, builder.load(v.at(builder, hs[r], at, v.FLOAT), align=4))
                    for total, value in zip(totals[r], values, strict=True):
                        builder.store(v.fma(builder, factor, value, builder.load(total)), total)
            for row, of_row in zip(ys, totals, strict=True):
                for offset, total in zip(offsets, of_row, strict=True):
                    value = builder.load(total)
                    if lanes == LANES:
                        v.store(builder, value, row, offset)
                    else:
                        one = builder.extract_element(value, ir.Constant(ir.IntType(32), 0))
                        v.store(builder, one, row, offset)

    return _as_intrinsic(emit, 10)


_dots1, _dots2, _dots3, _dots4, _dots6 = (_make_dots(rows) for rows in (1, 2, 3, 4, 6))
_add1, _add2, _add3, _add4, _add6 = (_make_add_scaled(rows, _WIDE_ADD[rows]) for rows in (1, 2, 3, 4, 6))
_add_vector, _add_one = _make_add_scaled(1, 1), _make_add_scaled(1, 1, lanes=1)
_ADD1, _ADD2, _ADD3, _ADD4, _ADD6 = (_WIDE_ADD[rows] * LANES for rows in (1, 2, 3, 4, 6))


@njit(**EXACT)
def dots(
    kind: int,
    x: int,
    x_stride: int,
    rows: int,
    w: int,
    w_stride: int,
    count: int,
    inner: int,
    out: int,
    out_stride: int,
    ahead: int,
) -> None:
    """out[r, j] = Σ_k x[r, k] · w[j, k] for `rows` rows of x and `count` of w.

    x, w, out addresses, strides in bytes; x, out float32, w of `kind`. Writes DOTS_AT_ONCE results a row, or the next
    multiple of it; those past `count` are of no use. Meanwhile memory from `ahead` on is fetched, as much as w has.
    """
    r = 0
    while r < rows:
        at, to, left = x + r * x_stride, out + r * out_stride, rows - r
        if left >= 6:
            taken = 6
            _dots6(kind, (at, x_stride, w, w_stride, count, inner, to, out_stride, ahead))
        elif left >= 4:
            taken = 4
            _dots4(kind, (at, x_stride, w, w_stride, count, inner, to, out_stride, ahead))
        elif left == 3:
            taken = 3
            _dots3(kind, (at, x_stride, w, w_stride, count, inner, to, out_stride, ahead))
        elif left == 2:
            taken = 2
            _dots2(kind, (at, x_stride, w, w_stride, count, inner, to, out_stride, ahead))
        else:
            taken = 1
            _dots1(kind, (at, x_stride, w, w_stride, count, inner, to, out_stride, ahead))
        r += taken


@njit(**EXACT)
def add_scaled(
    kind: int,
    h: int,
    h_stride: int,
    rows: int,
    count: int,
    w: int,
    w_stride: int,
    y: int,
    y_stride: int,
    columns: int,
    ahead: int,
) -> None:
    """y[r, n] += Σ_j h[r, j] · w[j, n] for `rows` rows of h and y, and `count` of w, in place.

    h, w, y addresses, strides in bytes; h, y float32, w of `kind`. Fetches as `dots` does.
    """
    r = 0
    while r < rows:
        at, to = h + r * h_stride, y + r * y_stride
        left = rows - r
        if left >= 6:
            taken, n = 6, columns // _ADD6 * _ADD6
            _add6(kind, (at, h_stride, count, w, w_stride, to, y_stride, 0, n, ahead))
        elif left >= 4:
            taken, n = 4, columns // _ADD4 * _ADD4
            _add4(kind, (at, h_stride, count, w, w_stride, to, y_stride, 0, n, ahead))
        elif left == 3:
            taken, n = 3, columns // _ADD3 * _ADD3
            _add3(kind, (at, h_stride, count, w, w_stride, to, y_stride, 0, n, ahead))
        elif left == 2:
            taken, n = 2, columns // _ADD2 * _ADD2
            _add2(kind, (at, h_stride, count, w, w_stride, to, y_stride, 0, n, ahead))
        else:
            taken, n = 1, columns // _ADD1 * _ADD1
            _add1(kind, (at, h_stride, count, w, w_stride, to, y_stride, 0, n, ahead))
        if n < columns:
            whole = columns // LANES * LANES
            for i in range(taken):
                _add_vector(kind, (at + i * h_stride, 0, count, w, w_stride, to + i * y_stride, 0, n, whole, ahead))
                _add_one(kind, (at + i * h_stride, 0, count, w, w_stride, to + i * y_stride, 0, whole, columns, ahead))
        r += taken
