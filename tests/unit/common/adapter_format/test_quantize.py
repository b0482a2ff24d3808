"""Quantizing: errors within bounds and told exactly, whatever the ranks, widths and values."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.quantization import read_folder
from common.adapter_format.choice import INT4_BYTES, estimated_bytes
from common.adapter_format.corrections import INT8_ERROR, max_corrections
from common.adapter_format.packed import PackedAdapter, PackedModule, module_tensors, open_packed, pack, version_digest
from common.adapter_format.parts import dequantize
from common.adapter_format.quantize import Quantized, quantize
from loraplex.errors import InvalidParameter, UnsupportedAdapter

BASE = hashlib.sha256(b"base").hexdigest()
EXAMPLES = Path(__file__).parents[4] / "examples" / "adapters"
WIDTHS = st.integers(1, 13).map(lambda n: 16 * n)


def weight(module: PackedModule) -> np.ndarray:
    """The whole delta, in float64."""
    return np.asarray(np.sum([b.astype(np.float64) @ a for a, b in map(dequantize, module.parts)], axis=0))


def measured(exact: PackedModule, off: PackedModule) -> float:
    wanted = weight(exact)
    return float(np.linalg.norm(weight(off) - wanted) / np.linalg.norm(wanted))


def adapter_of(*modules: PackedModule) -> PackedAdapter:
    return PackedAdapter(version_digest(BASE, modules), BASE, "none", modules)


def random_module(rank: int, inner: int, out: int, seed: int, *, scale: float = 2.0, at: int = 0) -> PackedModule:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rank, inner), np.float32) / np.float32(np.sqrt(inner))
    b = rng.standard_normal((out, rank), np.float32) * np.float32(0.1)
    return PackedModule(f"layers.{at}.mlp.up_proj", rank, scale, "F32", a, b)


def round_trip(quantized: Quantized, file: Path) -> PackedAdapter:
    pack(quantized.adapter, file)
    return open_packed(file)


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.012), ("int4", 0.25)])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), WIDTHS, WIDTHS, st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_random_modules_keep_to_the_bound_and_errors_are_exact(
    tmp_path_factory, form, bound, rank, inner, out, seed, scale
):
    module = random_module(rank, inner, out, seed, scale=scale)
    quantized = quantize(adapter_of(module), form)
    opened = round_trip(quantized, tmp_path_factory.getbasetemp() / "quantized")
    assert (opened.format, opened.version_digest) == (form, quantized.adapter.version_digest)
    assert opened.modules[0].in_features == inner
    assert 0 <= opened.modules[0].rank - rank <= (max_corrections(rank) if form == "int8" else 0)
    error = measured(module, opened.modules[0])
    assert error <= bound
    assert quantized.errors[0] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("form", ["int8", "int4"])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 9),
    st.lists(st.integers(-30, 15), min_size=9, max_size=9),
    st.lists(st.integers(-15, 15), min_size=9, max_size=9),
    st.sets(st.integers(0, 8)),
    st.integers(0, 2**32),
)
def test_rows_of_very_different_sizes_and_zero_rows_keep_to_it_too(form, rank, a_sizes, b_sizes, zeros, seed):
    module = random_module(rank, 96, 48, seed)
    a = module.a * np.exp2(np.array(a_sizes[:rank], np.float32))[:, None]
    b = module.b * np.exp2(np.array(b_sizes[:rank], np.float32))
    for row in zeros:
        (a if row % 2 else b.T)[row % rank] = 0
    changed = PackedModule(module.name, rank, module.scale, "F32", a, b)
    if not (b @ a).any():
        return
    quantized = quantize(adapter_of(changed), form)
    error = measured(changed, quantized.adapter.modules[0])
    assert error <= (0.012 if form == "int8" else 0.3)
    assert quantized.errors[0] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(("a_size", "b_size", "scale"), [(1e-38, 1e30, 1e-3), (1e38, 1e-38, 1.0), (1e-44, 1e38, 1e5)])
def test_extreme_values_survive_where_their_product_is_a_number(form, a_size, b_size, scale):
    rng = np.random.default_rng(3)
    signs = [rng.choice([-1.0, -0.5, 0.5, 1.0], shape) for shape in ((2, 32), (48, 2))]
    a, b = (sign.astype(np.float64) * size for sign, size in zip(signs, (a_size, b_size), strict=True))
    module = PackedModule("layers.0.mlp.up_proj", 2, scale, "F32", a.astype(np.float32), b.astype(np.float32))
    quantized = quantize(adapter_of(module), form)
    exact = (module.b.astype(np.float64) @ module.a) * scale
    error = float(np.linalg.norm(weight(quantized.adapter.modules[0]) - exact) / np.linalg.norm(exact))
    assert error < 0.15
    assert quantized.errors[0] == pytest.approx(error, abs=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_int8_loses_no_more_than_promised_in_any_of_many_random_modules(rank):
    # As wide as down_proj of SmolLM2-135M, whose largest values lie furthest from the others.
    quantized = quantize(adapter_of(*(random_module(rank, 1536, 576, at, at=at) for at in range(200))), "int8")
    assert max(quantized.errors) <= INT8_ERROR
    added = sum(module.rank - rank for module in quantized.adapter.modules)
    assert added <= (20 if rank < 8 else 0)  # of 200 modules


@pytest.mark.parametrize("factor", ["A", "B"])
@pytest.mark.parametrize("rank", [1, 16])
def test_a_row_with_an_outlier_gets_a_correction_and_the_error_told_is_that_of_both(rank, factor, tmp_path):
    module = random_module(rank, 512, 512, 0)
    a, b = module.a.copy(), module.b.copy()
    row = a[rank // 2] if factor == "A" else b[:, rank // 2]
    row *= 8
    row[7] = 12 * np.abs(row).max()
    wide = PackedModule(module.name, rank, module.scale, "F32", a, b)
    quantized = quantize(adapter_of(wide), "int8")
    (stored,) = round_trip(quantized, tmp_path / "q").modules
    assert stored.rank == rank + 1
    assert measured(wide, stored) <= INT8_ERROR
    assert quantized.errors[0] == pytest.approx(measured(wide, stored), rel=1e-3)
    (part,) = stored.parts
    a_rows, b_rows = dequantize(part)
    alone = b_rows[:, :rank].astype(np.float64) @ a_rows[:rank]
    exact = weight(wide)
    assert np.linalg.norm(alone - exact) / np.linalg.norm(exact) > INT8_ERROR  # it was needed


def outliers_in(module: PackedModule, num_rows: int) -> PackedModule:
    """The module with one value far beyond the others in each of its first rows of A."""
    a = module.a.copy()
    a[:num_rows, 7] = 12 * np.abs(a).max()
    return PackedModule(module.name, module.rank, module.scale, "F32", a, module.b)


@pytest.mark.parametrize(("rank", "stored_rank"), [(240, 255), (241, 256), (250, 256), (256, 256), (257, 273)])
def test_corrections_take_no_module_beyond_the_rank_that_gpus_compute(rank, stored_rank, tmp_path):
    wide = outliers_in(random_module(rank, 256, 128, 1), rank)
    quantized = quantize(adapter_of(wide), "int8")
    (stored,) = round_trip(quantized, tmp_path / "q").modules
    assert stored.rank == stored_rank
    assert quantized.errors[0] == pytest.approx(measured(wide, stored), rel=1e-3)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_what_lies_beside_the_arena_is_corrected_whatever_its_rank(name):
    module = outliers_in(random_module(256, 64, 64, 1), 256)
    wide = PackedModule(name, 256, module.scale, "F32", module.a, module.b)
    assert quantize(adapter_of(wide), "int8").adapter.modules[0].rank == 272


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_values_that_no_scale_can_hold_are_refused_by_name(form):
    huge = np.full((1, 16), 3e38, np.float32)
    good, bad = random_module(1, 16, 16, 0), PackedModule("layers.1.mlp.up_proj", 1, 1e30, "F32", huge, huge.T)
    with pytest.raises(UnsupportedAdapter, match=r"layers\.1\.mlp\.up_proj.*none"):
        quantize(adapter_of(good, bad), form)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_rows_as_long_as_a_vocabulary_keep_to_the_promise_by_more_corrections(name):
    rng = np.random.default_rng(5)
    inner, out = (40_000, 64) if name == "embed_tokens" else (64, 40_000)
    a, b = rng.standard_normal((16, inner), dtype=np.float32), rng.standard_normal((out, 16), dtype=np.float32)
    exact = PackedAdapter("v", "b", "none", (PackedModule(name, 16, 0.5, "F32", a, b),))
    quantized = quantize(exact, "int8")
    assert quantized.errors[0] <= INT8_ERROR
    assert quantized.adapter.modules[0].rank <= 20


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_module_that_does_nothing_stays_so(form):
    zero = PackedModule(
        "layers.1.mlp.up_proj", 3, 1.0, "F32", np.ones((3, 16), np.float32), np.zeros((32, 3), np.float32)
    )
    quantized = quantize(adapter_of(random_module(3, 16, 32, 1), zero), form)
    assert not weight(quantized.adapter.modules[1]).any()
    assert quantized.errors[1] == 0


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(
    ("a_size", "b_size", "scale"),
    [
        (1e-30, 1e-30, 2.0),  # no int8 scale holds it, float16 or float32 scales of int4 do
        (1e-19, 1e-21, 2.0),  # float32 keeps a few digits of the int8 scales
        (1e-44, 1e-44, 1.0),
        (1.0, 1.0, 1e-45),
        (1.0, 1.0, 1e-200),  # its square is no number in float64
        (1e-44, 1e-44, 1e-300),  # nor is itself
    ],
)
def test_what_is_too_small_to_be_stored_is_told_as_lost_and_never_as_exact(form, a_size, b_size, scale):
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((4, 64)) * a_size).astype(np.float32)
    b = (rng.standard_normal((48, 4)) * b_size).astype(np.float32)
    module = PackedModule("layers.0.mlp.up_proj", 4, scale, "F32", a, b)
    zero = PackedModule("layers.1.mlp.up_proj", 4, scale, "F32", a, np.zeros_like(b))
    off = PackedModule("layers.2.mlp.up_proj", 4, 0.0, "F32", a, b)
    quantized = quantize(adapter_of(module, zero, off), form)
    # Exact in units of a_size * b_size * scale, which may be no number itself.
    unit_a, unit_b = a.astype(np.float64) / a_size, b.astype(np.float64) / b_size
    exact = unit_b @ unit_a
    rows = [(wide_b.astype(np.float64), wide_a.astype(np.float64)) for wide_a, wide_b in _rows(quantized, 0)]
    stored = np.sum([wide_b / b_size @ (wide_a / a_size) for wide_b, wide_a in rows], axis=0) / scale
    error = float(np.linalg.norm(stored - exact) / np.linalg.norm(exact))
    assert quantized.errors[0] == pytest.approx(error, rel=1e-3)
    assert quantized.errors[0] > 0
    assert quantized.errors[1:] == (0, 0)


def _rows(quantized: Quantized, at: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [dequantize(part) for part in quantized.adapter.modules[at].parts]


def test_widths_that_are_no_multiple_of_16_are_refused_with_the_remedy():
    adapter = adapter_of(random_module(2, 24, 16, 0))
    for form in ("int8", "int4"):
        with pytest.raises(UnsupportedAdapter, match=r"24 to 16 features.*--quantization none"):
            quantize(adapter, form)
    assert quantize(adapter, "none").adapter is adapter


def test_an_unknown_format_is_refused():
    with pytest.raises(InvalidParameter, match="int5"):
        quantize(adapter_of(random_module(1, 16, 16, 0)), "int5")


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_same_adapter_always_packs_to_the_same_bytes(tmp_path, form):
    modules = [random_module(5, 64 + 16 * (at % 2), 48, at, at=at) for at in range(6)]
    digests = {pack(quantize(adapter_of(*modules), form).adapter, tmp_path / "packed") for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_module_is_quantized_alike_whatever_stands_beside_it(form):
    modules = [random_module(1, 64, 48, at, at=at) for at in range(4)]
    alone = quantize(adapter_of(modules[2]), form).adapter.modules[0]
    beside = quantize(adapter_of(*modules), form).adapter.modules[2]
    for one, other in zip(module_tensors(alone), module_tensors(beside), strict=True):
        assert np.array_equal(one[2], other[2])


def test_factors_that_depend_on_each_other_lose_less_than_by_rounding_each():
    # What training leaves: a few directions carry most of the weight, spread over all rank rows.
    rng = np.random.default_rng(0)
    directions = np.diag(0.5 ** np.arange(16)).astype(np.float32) @ rng.standard_normal((16, 256), np.float32)
    a = rng.standard_normal((16, 16), np.float32) @ directions
    module = PackedModule("layers.0.mlp.up_proj", 16, 1.0, "F32", a, rng.standard_normal((128, 16), np.float32))
    assert quantize(adapter_of(module), "int4").errors[0] < 0.06


@pytest.mark.parametrize("folder", sorted(path.name for path in EXAMPLES.iterdir()))
def test_the_shipped_adapters_keep_to_the_promised_errors_and_sizes(folder, tmp_path):
    adapter = read_folder(EXAMPLES / folder)
    int8, int4 = quantize(adapter, "int8"), quantize(adapter, "int4")
    assert max(int8.errors) <= 0.012
    assert float(np.mean(int4.errors)) <= 0.08
    sizes = [
        sum(array.nbytes for module in one.modules for _, _, array in module_tensors(module))
        for one in (adapter, int4.adapter)
    ]
    assert sizes[1] <= INT4_BYTES * sizes[0]
    for at, module in enumerate(adapter.modules[:6]):
        assert int4.errors[at] == pytest.approx(measured(module, int4.adapter.modules[at]), rel=1e-3)
    if max(module.rank for module in adapter.modules) >= 8:
        pack(adapter, tmp_path / "none")
        pack(int4.adapter, tmp_path / "int4")
        assert (tmp_path / "int4").stat().st_size <= INT4_BYTES * (tmp_path / "none").stat().st_size


def test_what_a_format_would_take_is_reckoned_from_shapes(tmp_path):
    adapter = read_folder(EXAMPLES / "text-to-sql")
    for form in ("none", "int8", "int4"):
        pack(quantize(adapter, form).adapter, tmp_path / form)
        taken = (tmp_path / form).stat().st_size
        assert estimated_bytes(adapter.modules, form) == pytest.approx(taken, rel=0.02)
