"""Formats that loads do not widen, written out as float32."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker.kernels.cpu import vectors as v
from worker.kernels.cpu.vectors import BYTE, FLOATS, INDEX, INTS, LANES

_HALF: Final = ir.IntType(16)


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _by_lanes(builder: Any, count: Any, element: Any, base: Any, each: Any) -> None:
    """Emit each(index, eight stored numbers as int32, store) for `count` numbers, the last ones one by one."""
    size = element.width // 8
    whole = builder.and_(count, INDEX(-LANES))
    with v.loop(builder, whole, step=LANES) as (k, _):
        place = v.at(builder, base, builder.mul(k, INDEX(size)), ir.VectorType(element, LANES))
        stored = builder.zext(builder.load(place, align=size), INTS)
        each(k, stored, lambda value, out, offset: v.store(builder, value, out, offset))
    with v.loop(builder, count, first=whole) as (k, _):
        one = builder.zext(
            builder.load(v.at(builder, base, builder.mul(k, INDEX(size)), element), align=size), INTS.element
        )
        stored = builder.insert_element(_ints(0), one, INTS.element(0))
        each(k, stored, lambda value, out, offset: v.store(builder, v.first(builder, value), out, offset))


@intrinsic
def unpack_nibbles(typingctx: Any, stored: Any, half: Any, scale: Any, out: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Write scale · (nibble - 8) of `half` bytes at an address: the low nibbles to out, the high ones behind them."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, half, scale, out = arguments
        base, out, factor = v.pointer(builder, base), v.pointer(builder, out), v.splat(builder, scale)

        def each(k: Any, both: Any, store: Any) -> None:
            low, high = builder.and_(both, _ints(15)), builder.lshr(both, _ints(4))
            for nibbles, index in ((low, k), (high, builder.add(k, half))):
                value = builder.sitofp(builder.sub(nibbles, _ints(8)), FLOATS)
                store(builder.fmul(factor, value), out, builder.mul(index, INDEX(4)))

        _by_lanes(builder, half, BYTE, base, each)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def unpack_halves(typingctx: Any, stored: Any, count: Any, out: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Write `count` float16 at an address as float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, count, out = arguments
        base, out = v.pointer(builder, base), v.pointer(builder, out)

        def each(k: Any, bits: Any, store: Any) -> None:
            size, sign = builder.and_(bits, _ints(0x7FFF)), builder.and_(bits, _ints(0x8000))
            moved = builder.shl(size, _ints(13))
            # The exponent's bias is made up for by a product, which is exact, but not for the infinite and NaN.
            scaled = builder.bitcast(builder.fmul(builder.bitcast(moved, FLOATS), v.constant(2.0**112)), INTS)
            special = builder.icmp_unsigned(">=", size, _ints(0x7C00))
            value = builder.select(special, builder.or_(moved, _ints(0x7F800000)), scaled)
            value = builder.or_(value, builder.shl(sign, _ints(16)))
            store(builder.bitcast(value, FLOATS), out, builder.mul(k, INDEX(4)))

        _by_lanes(builder, count, _HALF, base, each)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
