"""What compiled code needs to share memory between threads: atomic access, yielding, and arrays at an address.

Numba has none of it for CPUs; each is one instruction or call of LLVM's.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

yield_core: Final = types.ExternalFunction("sched_yield", types.int32())
"""Let another runnable thread have this core; returns at once where there is none."""


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index], wraparound=False)


@intrinsic
def atomic_load(typingctx: Any, array: Any, index: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Return array[index] of an int64 array, not before it and after later reads (acquire)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(array, types.int64), generate


@intrinsic
def atomic_store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Set array[index] of an int64 array after all earlier writes (release)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Add to array[index] of an int64 array; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", pointer, arguments[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def compare_and_set(typingctx: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Set array[index] of an int64 array if it is `expected`; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], *arguments[:2])
        result = builder.cmpxchg(pointer, arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(array, types.int64, types.int64, types.int64), generate


@intrinsic
def address(typingctx: Any, value: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Turn an int64 into a pointer that `numba.carray` takes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate
