"""Products of rows with panels of a weight, in vector instructions of our own choice.

A panel is 16 outputs of a weight side by side, `[in][16]`: one number of x meets 16 weights as one vector, and every
output is one chain of fused multiply-adds over the inputs, from first to last. So a result's bits do not depend on how
many rows and panels a form computes together, which the compiler's own vectorization would not promise.

Numba has no vector types; each form is written in LLVM's, which fit them to the registers that the CPU has.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Outputs of a panel."""

_UNROLLED: Final = 4
"""Inputs per turn of the loop."""

_FLOAT: Final = ir.FloatType()
_INT: Final = ir.IntType(64)
_INDEX: Final = ir.IntType(32)
_FLOATS: Final = ir.VectorType(_FLOAT, LANES)
_INTS: Final = ir.VectorType(_INDEX, LANES)
_BITS: Final = ir.VectorType(ir.IntType(1), LANES)
_STORED: Final = {
    types.float32: (_FLOATS, 4),
    types.uint16: (ir.VectorType(ir.IntType(16), LANES), 2),
    types.int8: (ir.VectorType(ir.IntType(8), LANES), 1),
}
"""Vector and bytes of a number, by how a weight is stored; uint16 holds the bits of bfloat16."""


def panel_form(num_rows: int, num_panels: int, stored: Any) -> Any:
    """Return a function for compiled code that multiplies `num_rows` rows with `num_panels` neighbouring panels.

    Its arguments, all int64: address of the first row of x, numbers between rows of x; address of the first panel;
    inputs; addresses of the panels' scales and biases, float32, scales 0 for none; address of the first row's first
    output, numbers between rows of y; and how many outputs, from there on, there are: those after are not written.
    `stored` is float32, uint16 (bits of bfloat16) or int8.
    """

    @intrinsic
    def form(
        typingctx: Any,  # noqa: ARG001 - the types are the signature
        x: Any,  # noqa: ARG001
        x_stride: Any,  # noqa: ARG001
        panels: Any,  # noqa: ARG001
        inner: Any,  # noqa: ARG001
        scales: Any,  # noqa: ARG001
        biases: Any,  # noqa: ARG001
        y: Any,  # noqa: ARG001
        y_stride: Any,  # noqa: ARG001
        outputs: Any,  # noqa: ARG001
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Form(builder, num_rows, num_panels, stored, arguments).generate()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return form


class _Form:
    """Writes one form's instructions."""

    def __init__(self, builder: Any, num_rows: int, num_panels: int, stored: Any, arguments: Any) -> None:
        self._builder, self._stored = builder, stored
        x, x_stride, panels, self._inner, self._scales, self._biases, self._y, self._y_stride, self._outputs = arguments
        self._rows, self._panels = range(num_rows), range(num_panels)
        vector, size = _STORED[stored]
        panel_bytes = builder.mul(self._inner, _INT(LANES * size))
        self._x = [self._pointer(x, _FLOAT, builder.mul(x_stride, _INT(4 * row))) for row in self._rows]
        self._w = [self._pointer(panels, vector, builder.mul(panel_bytes, _INT(p))) for p in self._panels]
        self._fma = self._function("llvm.fma.v16f32", _FLOATS, [_FLOATS] * 3)

    def generate(self) -> None:
        """Write all: the sums in turns of several inputs, the inputs that are left, the outputs."""
        zero = ir.Constant(_FLOATS, None)
        sums = [zero for _ in self._rows for _ in self._panels]
        whole = self._builder.and_(self._inner, _INT(-_UNROLLED))
        done, sums = self._loop(_INT(0), whole, _UNROLLED, sums)
        _, sums = self._loop(done, self._inner, 1, sums)
        for panel in self._panels:
            self._write(panel, [sums[row * len(self._panels) + panel] for row in self._rows])

    def _loop(self, start: Any, end: Any, step: int, sums: list[Any]) -> tuple[Any, list[Any]]:
        """Write a loop that adds the inputs of [start, end); returns where it ended and the sums."""
        builder = self._builder
        before, body, after = builder.block, builder.append_basic_block("turn"), builder.append_basic_block("end")
        builder.cbranch(builder.icmp_signed("<", start, end), body, after)
        builder.position_at_end(body)
        at = self._merge(_INT, (start, before))
        turning = [self._merge(_FLOATS, (value, before)) for value in sums]
        current: list[Any] = list(turning)
        for offset in range(step):
            current = self._add_input(builder.add(at, _INT(offset)), current)
        following = builder.add(at, _INT(step))
        for merged, value in zip([at, *turning], [following, *current], strict=True):
            merged.add_incoming(value, builder.block)
        last = builder.block
        builder.cbranch(builder.icmp_signed("<", following, end), body, after)
        builder.position_at_end(after)
        ended = self._merge(_INT, (start, before), (following, last))
        return ended, [
            self._merge(_FLOATS, (value, before), (new, last)) for value, new in zip(sums, current, strict=True)
        ]

    def _add_input(self, at: Any, sums: list[Any]) -> list[Any]:
        """Return the sums with one more input's products."""
        builder = self._builder
        weights = [self._widened(builder.gep(self._w[panel], [at])) for panel in self._panels]
        out = []
        for row in self._rows:
            value = self._everywhere(builder.load(builder.gep(self._x[row], [at])), _FLOATS)
            for panel in self._panels:
                previous = sums[row * len(self._panels) + panel]
                out.append(builder.call(self._fma, [value, weights[panel], previous]))
        return out

    def _widened(self, pointer: Any) -> Any:
        """Load 16 weights as float32."""
        builder = self._builder
        loaded = builder.load(pointer)
        loaded.align = _STORED[self._stored][1]
        if self._stored == types.uint16:
            high = builder.shl(builder.zext(loaded, _INTS), ir.Constant(_INTS, [16] * LANES))
            return builder.bitcast(high, _FLOATS)
        if self._stored == types.int8:
            return builder.sitofp(builder.sext(loaded, _INTS), _FLOATS)
        return loaded

    def _write(self, panel: int, sums: list[Any]) -> None:
        """Scale one panel's sums, add its bias, and write those of the outputs that there are."""
        builder = self._builder
        masked_store = self._function(
            "llvm.masked.store.v16f32.p0", ir.VoidType(), [_FLOATS, _FLOATS.as_pointer(), _INDEX, _BITS]
        )
        if self._stored == types.int8:
            scale = self._vector(self._scales, panel)
            sums = [builder.fmul(value, scale) for value in sums]
        bias = self._vector(self._biases, panel)
        left = builder.trunc(builder.sub(self._outputs, _INT(LANES * panel)), _INDEX)
        lanes = ir.Constant(_INTS, list(range(LANES)))
        mask = builder.icmp_signed("<", lanes, self._everywhere(left, _INTS))
        for row, value in zip(self._rows, sums, strict=True):
            offset = builder.add(builder.mul(self._y_stride, _INT(4 * row)), _INT(4 * LANES * panel))
            pointer = self._pointer(self._y, _FLOATS, offset)
            builder.call(masked_store, [builder.fadd(value, bias), pointer, _INDEX(4), mask])

    def _vector(self, address: Any, panel: int) -> Any:
        loaded = self._builder.load(self._pointer(address, _FLOATS, _INT(4 * LANES * panel)))
        loaded.align = 4
        return loaded

    def _everywhere(self, value: Any, vector: Any) -> Any:
        builder, undefined = self._builder, ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, value, _INDEX(0))
        return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, None))

    def _pointer(self, address: Any, kind: Any, offset: Any) -> Any:
        return self._builder.inttoptr(self._builder.add(address, offset), kind.as_pointer())

    def _merge(self, kind: Any, *incoming: tuple[Any, Any]) -> Any:
        merged = self._builder.phi(kind)
        for value, block in incoming:
            merged.add_incoming(value, block)
        return merged

    def _function(self, name: str, result: Any, parameters: list[Any]) -> Any:
        return cgutils.get_or_insert_function(self._builder.module, ir.FunctionType(result, parameters), name)
