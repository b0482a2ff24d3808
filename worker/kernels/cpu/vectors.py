"""Explicit vectors of eight float32 in compiled code: loads that widen, products, sums across lanes, exp.

A loop that the compiler vectorizes sums in an order that it chooses, for each form of the loop anew. What must come out
alike in several forms is written with these instead, in functions compiled as `EXACT`: then the order is ours.
Instructions of LLVM's for any CPU: one without vectors of eight gets two of four, or one with half of sixteen unused.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.kernels.tiles import Format

EXACT: Final[dict[str, Any]] = {"error_model": "numpy", "cache": True}
"""How functions are compiled whose sums keep the order in which they are written."""

LANES: Final = 8
CACHE_LINE: Final = 64
FLOAT: Final = ir.FloatType()
FLOATS: Final = ir.VectorType(FLOAT, LANES)
_INT: Final = ir.IntType(32)
INTS: Final = ir.VectorType(_INT, LANES)
INDEX: Final = ir.IntType(64)
BYTE: Final = ir.IntType(8)

WIDENED: Final[dict[Format, tuple[ir.Type, int]]] = {
    Format.FLOAT32: (FLOAT, 4),
    Format.BFLOAT16: (ir.IntType(16), 2),
    Format.INT8: (BYTE, 1),
}
"""The formats that loads widen: how an element is stored, and its bytes."""


def pointer(builder: Any, address: Any) -> Any:
    """Return an address as one of bytes."""
    return builder.inttoptr(address, BYTE.as_pointer())


def at(builder: Any, base: Any, offset_bytes: Any, kind: Any) -> Any:
    """Return base [bytes] + offset_bytes as a pointer to `kind`."""
    return builder.bitcast(builder.gep(base, [offset_bytes]), kind.as_pointer())


def splat(builder: Any, value: Any) -> Any:
    """Return a vector that holds a float32 eight times."""
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(FLOATS, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def constant(value: float) -> Any:
    """Return a constant in all lanes."""
    return ir.Constant(FLOATS, [ir.Constant(FLOAT, value)] * LANES)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a · b + c, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32"), [a, b, c])


def load(builder: Any, base: Any, offset_bytes: Any, kind: Format = Format.FLOAT32) -> Any:
    """Return eight stored numbers as float32."""
    element, size = WIDENED[kind]
    stored = builder.load(at(builder, base, offset_bytes, ir.VectorType(element, LANES)), align=size)
    return _widen(builder, stored, kind)


def load_one(builder: Any, base: Any, offset_bytes: Any, kind: Format = Format.FLOAT32) -> Any:
    """Return one stored number as float32 in the first lane, zeros in the others."""
    element, size = WIDENED[kind]
    zeros = ir.Constant(ir.VectorType(element, LANES), None)
    one = builder.load(at(builder, base, offset_bytes, element), align=size)
    return _widen(builder, builder.insert_element(zeros, one, ir.Constant(_INT, 0)), kind)


def _widen(builder: Any, stored: Any, kind: Format) -> Any:
    if kind == Format.FLOAT32:
        return stored
    if kind == Format.INT8:
        return builder.sitofp(builder.sext(stored, INTS), FLOATS)
    return builder.bitcast(builder.shl(builder.zext(stored, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)


def store(builder: Any, value: Any, base: Any, offset_bytes: Any) -> None:
    """Store a vector of float32."""
    builder.store(value, at(builder, base, offset_bytes, value.type), align=4)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(lanes)), lanes))


def sums(builder: Any, four: list[Any]) -> Any:
    """Return the sums across the lanes of four vectors as a vector of four, each taken in the same order."""

    def pairs(a: Any, b: Any) -> Any:
        even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
        return builder.fadd(_shuffle(builder, a, b, even), _shuffle(builder, a, b, odd))

    halves = pairs(pairs(four[0], four[1]), pairs(four[2], four[3]))
    return builder.fadd(
        _shuffle(builder, halves, halves, [0, 1, 2, 3]), _shuffle(builder, halves, halves, [4, 5, 6, 7])
    )


def part(builder: Any, four: Any, first: int, count: int) -> Any:
    """Return some neighbouring lanes of a vector of four."""
    return _shuffle(builder, four, four, list(range(first, first + count)))


def first(builder: Any, value: Any) -> Any:
    """Return the first lane."""
    return builder.extract_element(value, ir.Constant(_INT, 0))


def larger(builder: Any, a: Any, b: Any) -> Any:
    """Return a where a > b, else b, lane by lane."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def across(builder: Any, value: Any, combine: Any) -> Any:
    """Return all lanes of a vector combined, in all lanes."""
    for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
        value = combine(value, _shuffle(builder, value, value, lanes))
    return value


def exp_negative(builder: Any, x: Any) -> Any:
    """Return exp(x) of x ≤ 0, lane by lane, as `numbers.exp_negative` has it."""
    smallest = constant(-87.3)
    clamped = larger(builder, x, smallest)
    kind = ir.FunctionType(FLOATS, [FLOATS])
    floor = cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.v8f32")
    n = builder.call(floor, [fma(builder, clamped, constant(1.44269504088896341), constant(0.5))])
    r = fma(builder, n, constant(-0.693359375), clamped)
    r = fma(builder, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(builder, p, r, constant(coefficient))
    p = fma(builder, builder.fmul(p, r), r, builder.fadd(r, constant(1.0)))
    power = builder.add(builder.fptosi(n, INTS), ir.Constant(INTS, [127] * LANES))
    power = builder.bitcast(builder.shl(power, ir.Constant(INTS, [23] * LANES)), FLOATS)
    scaled = builder.fmul(p, power)
    # Minus itself: zero, but NaN for NaN.
    kept = builder.fadd(scaled, builder.fsub(x, x))
    return builder.select(builder.fcmp_ordered("<=", x, smallest), constant(0.0), kept)


def loop(builder: Any, count: Any, first: Any = None, step: int = 1) -> Any:
    """Return a context in which code is repeated for index first, first + step, … < count; yields (index, break)."""
    start = ir.Constant(INDEX, 0) if first is None else first
    return cgutils.for_range_slice(builder, start, count, ir.Constant(INDEX, step), intp=INDEX)


def variable(builder: Any, value: Any) -> Any:
    """Return a place for a value that changes in loops; the compiler makes a register of it."""
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


@intrinsic(prefer_literal=True)
def stack_floats(typingctx: Any, count: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Return the address of room for a constant number of float32 on the function's stack, not initialized."""
    size = count.literal_value

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.ArrayType(FLOAT, size))
        place.align = 4 * LANES
        return builder.ptrtoint(place, INDEX)

    return types.int64(count), generate


def prefetch(builder: Any, base: Any, offset_bytes: Any, count_bytes: int) -> None:
    """Let the cache lines of some bytes be fetched; does not wait, and an address where no memory is does no harm."""
    kind = ir.FunctionType(ir.VoidType(), [base.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for line in range(0, count_bytes, CACHE_LINE):
        place = builder.gep(base, [builder.add(offset_bytes, ir.Constant(INDEX, line))])
        builder.call(function, [place, *(ir.Constant(_INT, value) for value in (0, 3, 1))])
