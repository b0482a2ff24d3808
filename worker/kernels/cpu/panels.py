"""Products of rows with panels of a weight, in vector instructions of our own choice.

A panel is 16 outputs of a weight side by side, `[in][16]`: one number of x meets 16 weights as one vector, and every
output is one chain of fused multiply-adds over the inputs, from first to last. So a result's bits do not depend on how
many rows and panels a form computes together, which the compiler's own vectorization would not promise.

Numba has no vector types; each form is written in LLVM's, which fit them to the registers that the CPU has.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL_OUTPUTS: Final = 16
"""Outputs of a panel."""

PANELS: Final = 2
"""What the panels of a weight are a multiple of."""

_UNROLLED: Final = 4
"""Inputs per turn of the loop."""

_FLOAT: Final = ir.FloatType()
_INT: Final = ir.IntType(64)
_INDEX: Final = ir.IntType(32)
_FLOATS: Final = ir.VectorType(_FLOAT, PANEL_OUTPUTS)
_INTS: Final = ir.VectorType(_INDEX, PANEL_OUTPUTS)
_BITS: Final = ir.VectorType(ir.IntType(1), PANEL_OUTPUTS)
_STORED: Final = {
    types.float32: (_FLOATS, 4),
    types.uint16: (ir.VectorType(ir.IntType(16), PANEL_OUTPUTS), 2),
    types.int8: (ir.VectorType(ir.IntType(8), PANEL_OUTPUTS), 1),
}
"""Vector and bytes of a number, by how a weight is stored; uint16 holds the bits of bfloat16."""


def forms_for(vector_registers: int, register_lanes: int) -> tuple[int, ...]:
    """Return how many panels are computed together with 1, 2, ... rows; its length is the most rows.

    Sums fill the registers beside two vectors of weights and one of x; and there must be enough of them that a
    multiply-add need not wait for the one before it, which is why few rows take two panels.
    """
    vectors = vector_registers * register_lanes // PANEL_OUTPUTS  # that the registers hold
    if vectors >= 32:
        return (2,) * 12
    return (2, 2, 2, 1, 1, 1)


def _host_forms() -> tuple[int, ...]:
    features = get_host_cpu_features()
    return forms_for(32, 16) if features.get("avx512f") else forms_for(16, 8)


FORMS: Final = _host_forms()


def panel_product(stored: Any, forms: tuple[int, ...]) -> Any:
    """Return a function for compiled code that multiplies 1 to len(forms) rows with neighbouring panels.

    Its arguments, all int64: rows; address of the first row of x, numbers between rows of x; address of the first
    panel, how many there are, a multiple of PANELS; inputs; addresses of the panels' scales and biases, float32, scales
    0 for none; address of the first row's first output, numbers between rows of y; and how many outputs, from there on,
    there are: those after are not written. `stored` is float32, uint16 (bits of bfloat16) or int8.
    """

    @intrinsic
    def product(
        typingctx: Any,  # noqa: ARG001 - the types are the signature
        rows: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        x_stride: Any,  # noqa: ARG001
        panels: Any,  # noqa: ARG001
        num_panels: Any,  # noqa: ARG001
        inner: Any,  # noqa: ARG001
        scales: Any,  # noqa: ARG001
        biases: Any,  # noqa: ARG001
        y: Any,  # noqa: ARG001
        y_stride: Any,  # noqa: ARG001
        outputs: Any,  # noqa: ARG001
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rows, *rest = arguments
            after = builder.append_basic_block("after")
            choice = builder.switch(rows, after)
            for index, width in enumerate(forms):
                block = builder.append_basic_block(f"rows{index + 1}")
                choice.add_case(_INT(index + 1), block)
                builder.position_at_end(block)
                _Form(builder, index + 1, width, stored, rest).generate()
                builder.branch(after)
            builder.position_at_end(after)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return product


class _Form:
    """Writes the instructions for a number of rows."""

    def __init__(self, builder: Any, num_rows: int, width: int, stored: Any, arguments: Any) -> None:
        """`width` panels are computed together."""
        self._builder, self._stored, self._width = builder, stored, width
        x, x_stride, self._first, self._num_panels, self._inner, self._scales, self._biases, *y = arguments
        self._y, self._y_stride, self._outputs = y
        self._rows, self._panels = range(num_rows), range(width)
        self._panel_bytes = builder.mul(self._inner, _INT(PANEL_OUTPUTS * _STORED[stored][1]))
        self._x = [self._pointer(x, _FLOAT, builder.mul(x_stride, _INT(4 * row))) for row in self._rows]
        self._fma = self._function("llvm.fma.v16f32", _FLOATS, [_FLOATS] * 3)
        self._w: list[Any] = []

    def generate(self) -> None:
        """Write a loop over the panels."""
        builder = self._builder
        before, body, after = builder.block, builder.append_basic_block("panels"), builder.append_basic_block("end")
        builder.branch(body)
        builder.position_at_end(body)
        panel = self._merge(_INT, (_INT(0), before))
        self._compute(panel)
        following = builder.add(panel, _INT(self._width))
        panel.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self._num_panels), body, after)
        builder.position_at_end(after)

    def _compute(self, panel: Any) -> None:
        """Write one turn: the sums in turns of several inputs, the inputs that are left, the outputs."""
        builder = self._builder
        vector = _STORED[self._stored][0]
        numbers = [builder.add(panel, _INT(number)) for number in self._panels]
        self._w = [self._pointer(self._first, vector, builder.mul(self._panel_bytes, number)) for number in numbers]
        zero = ir.Constant(_FLOATS, None)
        sums = [zero for _ in self._rows for _ in self._panels]
        whole = builder.and_(self._inner, _INT(-_UNROLLED))
        done, sums = self._loop(_INT(0), whole, _UNROLLED, sums)
        _, sums = self._loop(done, self._inner, 1, sums)
        for index, number in enumerate(numbers):
            self._write(number, [sums[row * self._width + index] for row in self._rows])

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
                previous = sums[row * self._width + panel]
                out.append(builder.call(self._fma, [value, weights[panel], previous]))
        return out

    def _widened(self, pointer: Any) -> Any:
        """Load 16 weights as float32."""
        builder = self._builder
        loaded = builder.load(pointer)
        loaded.align = _STORED[self._stored][1]
        if self._stored == types.uint16:
            high = builder.shl(builder.zext(loaded, _INTS), ir.Constant(_INTS, [16] * PANEL_OUTPUTS))
            return builder.bitcast(high, _FLOATS)
        if self._stored == types.int8:
            return builder.sitofp(builder.sext(loaded, _INTS), _FLOATS)
        return loaded

    def _write(self, panel: Any, sums: list[Any]) -> None:
        """Scale one panel's sums, add its bias, and write those of the outputs that there are."""
        builder = self._builder
        masked_store = self._function(
            "llvm.masked.store.v16f32.p0", ir.VoidType(), [_FLOATS, _FLOATS.as_pointer(), _INDEX, _BITS]
        )
        if self._stored == types.int8:
            scale = self._vector(self._scales, panel)
            sums = [builder.fmul(value, scale) for value in sums]
        bias = self._vector(self._biases, panel)
        left = builder.trunc(builder.sub(self._outputs, builder.mul(panel, _INT(PANEL_OUTPUTS))), _INDEX)
        lanes = ir.Constant(_INTS, list(range(PANEL_OUTPUTS)))
        mask = builder.icmp_signed("<", lanes, self._everywhere(left, _INTS))
        for row, value in zip(self._rows, sums, strict=True):
            offset = builder.add(
                builder.mul(self._y_stride, _INT(4 * row)), builder.mul(panel, _INT(4 * PANEL_OUTPUTS))
            )
            pointer = self._pointer(self._y, _FLOATS, offset)
            builder.call(masked_store, [builder.fadd(value, bias), pointer, _INDEX(4), mask])

    def _vector(self, address: Any, panel: Any) -> Any:
        offset = self._builder.mul(panel, _INT(4 * PANEL_OUTPUTS))
        loaded = self._builder.load(self._pointer(address, _FLOATS, offset))
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
