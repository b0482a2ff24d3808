"""Quantizing a validated adapter to int8 or int4, module by module, with each module's exact error.

int8: symmetric, one scale per rank row of A and of B transposed, both and alpha/r in one number, never rotated; where
that loses too much, with rank rows that correct others (see `corrections`).
int4: per module the best of several bases of its product that costs no more than the adapter may: the factors as they
are, or turned, or turned with the leading singular components in int8 (see `_candidates`). A token embedding is int8
in int4 too. Affines and matrices stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from common.adapter_format.choice import Candidate, choose_affordable
from common.adapter_format.corrections import INT8_ERROR, Rounded, corrected
from common.adapter_format.factors import Factors, Floats, gram, mixed, principal, relative_errors
from common.adapter_format.modules import EMBEDDING, HEAD, PackedAdapter, PackedModule
from common.adapter_format.parts import (
    FORMAT_INT4,
    FORMAT_INT8,
    FORMAT_NONE,
    FORMATS,
    MULTIPLE,
    PackedPart,
    pack_int4,
    spread,
    widen,
)
from common.adapter_format.rounding import INT8_MAX, binary_exponents, round_int4, round_int8
from loraplex.errors import InvalidParameter, UnsupportedAdapter
from loraplex.ranks import MAX_GPU_RANK

_STACK_VALUES: Final = 2**22  # quantized at a time: bounds the memory, and the temporaries stay near the caches
_MAX_ROTATED_RANK: Final = 256
_F16_TOLERANCE: Final = 2.0**-9  # of a row's largest scale: far below what int4 loses
_USUAL_EXPONENTS: Final = 64  # sizes whose squares and quotients float32 can hold
_LEAST_SCALE: Final = 2.0**-600  # times float32 factors: lost in every format, and still a number in float64
_LEAST_NORMAL: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized adapter and the relative error of each module's weight, ‖ΔW - ΔŴ‖ / ‖ΔW‖, in the modules' order.

    ΔW is what the factors make, before an affine.
    """

    adapter: PackedAdapter
    errors: tuple[float, ...]


def quantize(adapter: PackedAdapter, form: str) -> Quantized:
    """Quantize an adapter of format none; `form` is none, int8 or int4.

    Raises InvalidParameter for another format and UnsupportedAdapter where the base's shapes or the values do not allow
    the format, naming the module.
    """
    if form not in FORMATS:
        raise InvalidParameter(f"{form!r} is no format; give one of {', '.join(FORMATS)}", field="format")
    if form == FORMAT_NONE:
        return Quantized(adapter, (0.0,) * len(adapter.modules))
    _check_widths(adapter, form)
    places = range(len(adapter.modules))
    as_int8 = [at for at in places if form == FORMAT_INT8 or adapter.modules[at].name == EMBEDDING]
    as_int4 = [at for at in places if at not in set(as_int8)]
    with threadpool_limits(limits=1, user_api="blas"):  # on matrices this small more threads only wait for each other
        chosen = {at: one for stack in _stacks(adapter.modules, as_int8) for at, one in _int8(stack)}
        options = {at: found for stack in _stacks(adapter.modules, as_int4) for at, found in _candidates(stack)}
        chosen |= choose_affordable(adapter.modules, options)
    found = [chosen[at] for at in places]
    modules = tuple(
        replace(one.module(module.name), affine=module.affine and module.affine.served())
        for one, module in zip(found, adapter.modules, strict=True)
    )
    packed = replace(adapter, format=form, modules=modules)
    return Quantized(packed, tuple(one.error for one in found))


def _check_widths(adapter: PackedAdapter, form: str) -> None:
    """Raise UnsupportedAdapter, naming the first module whose shape does not allow `form`."""
    for module in adapter.modules:
        # Of an embedding's A whole rank columns are gathered, so that the vocabulary's size does not matter.
        inner = module.in_features if module.name != EMBEDDING else 0
        if inner % MULTIPLE or module.out_features % MULTIPLE:
            raise UnsupportedAdapter(
                f"{module.name} maps {module.in_features} to {module.out_features} features; {form} needs multiples of "
                f"{MULTIPLE}. Register the adapter with --quantization none",
                field="quantization",
                module=module.name,
            )


@dataclass(frozen=True, slots=True)
class _Stack:
    """Modules of one shape: their places in the adapter, names, scales and factors in float32."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    scales: NDArray[np.float64]
    factors: Factors


def _stacks(modules: Sequence[PackedModule], wanted: Sequence[int]) -> Iterator[_Stack]:
    by_shape: dict[tuple[int, int, int], list[int]] = {}
    for at in wanted:
        module = modules[at]
        by_shape.setdefault((module.rank, module.in_features, module.out_features), []).append(at)
    for (rank, inner, out), places in by_shape.items():
        size = max(1, _STACK_VALUES // (rank * (inner + out)))
        for start in range(0, len(places), size):
            some = [modules[at] for at in places[start : start + size]]
            a = np.stack([widen(module.a, module.dtype) for module in some])
            b = np.stack([widen(module.b.T, module.dtype) for module in some])
            scales = _told_apart_from_zero(np.array([module.scale for module in some], np.float64))
            names = tuple(module.name for module in some)
            yield _Stack(tuple(places[start : start + size]), names, scales, Factors(a, b))


def _told_apart_from_zero(scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scales of which none but 0 makes products of float32 factors that are 0 in float64.

    What they scale cannot be stored either way, but that it is lost is told.
    """
    lifted = np.copysign(np.maximum(np.abs(scales), _LEAST_SCALE), scales)
    return np.where(scales == 0, scales, lifted)


def _int8(stack: _Stack) -> Iterator[tuple[int, Candidate]]:
    rows, off, factors = _int8_rows(stack.factors, stack.scales[:, None], stack.names)
    errors = relative_errors(factors, off, np.stack([one.weights for one in rows]))
    for index, (at, one, error) in enumerate(zip(stack.places, rows, errors.tolist(), strict=True)):
        better = one
        if error > INT8_ERROR:
            own, own_off = (Factors(some.a[index : index + 1], some.b[index : index + 1]) for some in (factors, off))
            # What is as large as the vocabulary lies beside the arena, and is of any rank on every device.
            most_rows = None if stack.names[index] in (EMBEDDING, HEAD) else MAX_GPU_RANK
            better, error = corrected(one, own, own_off, error, most_rows)  # noqa: PLW2901 - the error of what is stored
        yield at, Candidate((_int8_part(better),), error)


def _normal(rows: Floats, *, always: bool) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return float32 rows of size 1 to 2 and the powers of two that they stand for; exact.

    Rows of usual sizes are left as they are unless `always`.
    """
    exponents = binary_exponents(rows)
    if not always and (np.abs(exponents) < _USUAL_EXPONENTS).all():
        return rows.astype(np.float32, copy=False), np.zeros_like(exponents)
    return np.ldexp(rows, -exponents[..., None].astype(np.int32)).astype(np.float32), exponents


def _int8_rows(
    factors: Factors, scales: NDArray[np.float64], names: Sequence[str]
) -> tuple[list[Rounded], Factors, Factors]:
    """Round all rows; returns each module's and, for the error, what was lost and the rows it was lost from."""
    (a, a_exponents), (b, b_exponents) = _normal(factors.a, always=False), _normal(factors.b, always=False)
    a_values, a_steps = round_int8(a)
    b_values, b_steps = round_int8(b)
    weights = np.ldexp(scales, a_exponents + b_exponents)
    with np.errstate(over="ignore"):
        largest = (a_steps * b_steps * weights).astype(np.float32) * np.float32(INT8_MAX**2)
    if not np.isfinite(largest).all():
        raise _too_large(names[int(np.argmin(np.isfinite(largest).all(axis=1)))], FORMAT_INT8)
    rows = [Rounded(*each) for each in zip(a_values, b_values, a_steps, b_steps, weights, strict=True)]
    b_told = b_steps * _kept(a_steps * b_steps * weights)
    off = Factors(
        a_values * a_steps[..., None].astype(np.float32) - a, b_values * b_told[..., None].astype(np.float32) - b
    )
    return rows, off, Factors(a, b)


def _kept(scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what float32 keeps of `scales`, as a share of each: 0 of the smallest, some digits of the next smallest.

    1 for all others, whose rounding is far below what int8 loses.
    """
    small = np.abs(scales) < _LEAST_NORMAL
    return np.divide(scales.astype(np.float32), scales, out=np.ones_like(scales), where=small & (scales != 0))


def _int8_part(rows: Rounded) -> PackedPart:
    scale = (rows.a_steps * rows.b_steps * rows.weights).astype(np.float32)
    return PackedPart("int8", len(scale), scale, "I8", rows.a, rows.b)


def _candidates(stack: _Stack) -> Iterator[tuple[int, list[Candidate]]]:
    """Yield each module's ways to be stored as int4.

    The factors as they are; the singular components turned into each other; and such with the leading 1/16 or 1/8 of
    the components, at least one, in int8.
    """
    plain = Factors(stack.factors.a, stack.factors.b * stack.scales[:, None, None])
    rank = plain.a.shape[1]
    tried = [(plain, 0)]
    if 1 < rank <= min(_MAX_ROTATED_RANK, plain.a.shape[2], plain.b.shape[2]):  # else there is no basis of that rank
        components = principal(plain)
        tried += [(mixed(components, num), num) for num in sorted({0, max(1, rank // 16), max(1, rank // 8)})]
    found: list[list[Candidate]] = [[] for _ in stack.places]
    for factors, num_int8 in tried:
        for at, candidate in enumerate(_split(factors, num_int8, stack.names)):
            found[at].append(candidate)
    yield from zip(stack.places, found, strict=True)


def _split(factors: Factors, num_int8: int, names: Sequence[str]) -> list[Candidate]:
    """Store the first `num_int8` rank rows of each module as int8 and the others as int4."""
    parts, off, weights, rows = _int4_parts(Factors(factors.a[:, num_int8:], factors.b[:, num_int8:]), names)
    made: list[tuple[PackedPart, ...]] = [(part,) for part in parts]
    if num_int8:
        leading = Factors(factors.a[:, :num_int8], factors.b[:, :num_int8])
        ones = np.ones(leading.a.shape[:2])
        rounded, off8, rows8 = _int8_rows(leading, ones, names)
        made = [(_int8_part(first), *rest) for first, rest in zip(rounded, made, strict=True)]
        off, rows = _joined(off8, off), _joined(rows8, rows)
        weights = np.concatenate([np.stack([one.weights for one in rounded]), weights], axis=1)
    errors = relative_errors(rows, off, weights)
    return [Candidate(some, float(error)) for some, error in zip(made, errors, strict=True)]


def _joined(first: Factors, second: Factors) -> Factors:
    return Factors(np.concatenate([first.a, second.a], axis=1), np.concatenate([first.b, second.b], axis=1))


def _int4_parts(
    factors: Factors, names: Sequence[str]
) -> tuple[list[PackedPart], Factors, NDArray[np.float64], Factors]:
    """Round all rows; returns the parts and, for the error, what was lost, the rows' weights and the rows."""
    (a, a_exponents), (b, b_exponents) = _normal(factors.a, always=True), _normal(factors.b, always=True)
    exponents = a_exponents + b_exponents
    weights = np.ldexp(1.0, exponents)
    # A's error is weighed by B and the other way round; a row that the other factor ignores does not matter.
    matters = np.where(a.any(axis=2) & b.any(axis=2), weights, 0)
    matters /= np.maximum(matters.max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    both = matters[:, :, None] * matters[:, None, :]
    a_values, a_scales = round_int4(a, gram(b) * both)
    b_values, b_scales = round_int4(b, gram(a_values * spread(a_scales, a.shape[2])) * both)
    # Half of each row's power of two goes to either factor, so that the scales of both fit float16.
    a_half = exponents // 2
    a_stored, b_stored = _stored(a_scales, a_half, names), _stored(b_scales, exponents - a_half, names)
    parts = [
        PackedPart("int4", a.shape[1], 1.0, "U8", a_packed, b_packed, a_stored[at], b_stored[at])
        for at, (a_packed, b_packed) in enumerate(zip(pack_int4(a_values), pack_int4(b_values), strict=True))
    ]
    off = Factors(_lost(a, a_values, a_stored, a_half), _lost(b, b_values, b_stored, exponents - a_half))
    return parts, off, weights, Factors(a, b)


def _stored(
    scales: NDArray[np.float32], exponents: NDArray[np.int64], names: Sequence[str]
) -> list[NDArray[np.float16] | NDArray[np.float32]]:
    """Return each module's scales * 2^exponents, as float16 where that holds them."""
    wide = np.ldexp(scales.astype(np.float64), exponents[..., None])
    with np.errstate(over="ignore"):
        half, single = wide.astype(np.float16), wide.astype(np.float32)
    tolerated = wide.max(axis=2, keepdims=True) * _F16_TOLERANCE
    fits = (np.abs(half - wide) <= tolerated).all(axis=(1, 2))
    if not np.isfinite(single).all():
        raise _too_large(names[int(np.argmin(np.isfinite(single).all(axis=(1, 2))))], FORMAT_INT4)
    return [half[at] if fits[at] else single[at] for at in range(len(names))]


def _lost(
    rows: NDArray[np.float32],
    values: NDArray[np.int8],
    stored: Sequence[NDArray[np.float16] | NDArray[np.float32]],
    exponents: NDArray[np.int64],
) -> Floats:
    """Return what the stored values stand for less `rows`, in the units of `rows`."""
    wide = np.stack([scales.astype(np.float64) for scales in stored])
    scales = np.ldexp(wide, -exponents[..., None]).astype(np.float32)
    return values * spread(scales, rows.shape[2]) - rows


def _too_large(module: str, form: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"{module} has values beyond what {form} can hold; register the adapter with --quantization none",
        field="quantization",
        module=module,
    )
