"""Every kernel compiled for GPUs of three generations, none of which need be here.

No registers spill, weights and keys are loaded 16 bytes at once, shared memory suffices.

Shapes are Llama-3.1-8B's. A configuration compiles in seconds, so only those that workers launch are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl

from tests.kernels.triton.ahead_of_time import Compiled, compile_for
from worker.kernels.layout import AttentionShape
from worker.kernels.triton.attend import attend_kernel, combine_kernel
from worker.kernels.triton.attention import prefill_rows, queries_per_key
from worker.kernels.triton.draw import draw_kernel
from worker.kernels.triton.drawing import SEGMENTS, WARPS, WIDTH, unit
from worker.kernels.triton.expand import expand_kernel
from worker.kernels.triton.platform import power_of_2
from worker.kernels.triton.pointwise import affine_kernel, norm_kernel, silu_mul_kernel
from worker.kernels.triton.prefill import prefill_shrink_kernel
from worker.kernels.triton.rope import rope_kernel
from worker.kernels.triton.shrink import shrink_kernel

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CAPABILITIES = pytest.mark.parametrize("capability", SHARED_BYTES, ids=lambda capability: f"sm_{capability}")
FORMATS = ("BF16", "FP16", "INT8", "INT4")
MIXED = ("BF16", "INT8", "INT4")
# The default format everywhere; all in one kernel, which takes the most registers and the longest to compile, on two.
CONFIGURATIONS = pytest.mark.parametrize(
    ("capability", "formats"),
    [(80, ("INT8",)), (90, ("INT8",)), (100, ("INT8",)), (80, MIXED), (100, ("BF16",)), (90, MIXED)],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else f"sm_{value}",
)


@pytest.fixture(autouse=True, scope="module")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def lora(formats: tuple[str, ...], capability: int, dot: Any = tl.bfloat16) -> dict[str, Any]:
    return {name: name in formats for name in FORMATS} | {"DOT": dot, "MAGIC": capability < 90}


def assert_fits(compiled: Compiled, capability: int) -> None:
    assert compiled.stack_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES[capability]


@CONFIGURATIONS
def test_shrink(capability: int, formats: tuple[str, ...]) -> None:
    constants = {
        "K": 4096, "KT": 1024, "RANGES": 4, "RANGES_PER_PART": 1, "PARTS": 4, "GROUP_ROWS": 8, "WARPS": 4,
        **lora(formats, capability),
    }  # fmt: skip
    compiled = compile_for(shrink_kernel, capability, constants, num_warps=4)
    assert_fits(compiled, capability)
    assert compiled.widths_at("w = tl.load(") == {16}


@pytest.mark.parametrize("capability", [80, 90])
def test_shrink_of_several_ranges_a_part(capability: int) -> None:
    constants = {
        "K": 14336, "KT": 1024, "RANGES": 14, "RANGES_PER_PART": 4, "PARTS": 4, "GROUP_ROWS": 8, "WARPS": 4,
        **lora(("INT8",), capability),
    }  # fmt: skip
    compiled = compile_for(shrink_kernel, capability, constants, num_warps=4)
    assert_fits(compiled, capability)
    assert compiled.widths_at("w = tl.load(") == {16}


@CONFIGURATIONS
def test_expand(capability: int, formats: tuple[str, ...]) -> None:
    constants = {
        "N0": 4096, "N1": 1024, "N2": 1024, "SLICES": 3, "PARTS": 4, "GROUP_ROWS": 8, "ROWS": 8, "GROUPS": 4, "SIDE": 2,
        "ADD": False, **lora(formats, capability),
    }  # fmt: skip
    compiled = compile_for(expand_kernel, capability, constants, num_warps=2)
    assert_fits(compiled, capability)
    assert compiled.widths_at("weights = tl.load(") == {16}


@pytest.mark.parametrize("capability", [90, 100])
def test_expand_of_all_formats_at_once(capability: int) -> None:
    constants = {
        "N0": 576, "N1": 192, "N2": 192, "SLICES": 3, "PARTS": 1, "GROUP_ROWS": 8, "ROWS": 8, "GROUPS": 4, "SIDE": 2,
        "ADD": True, **lora(FORMATS, capability),
    }  # fmt: skip
    compiled = compile_for(expand_kernel, capability, constants, num_warps=2)
    assert_fits(compiled, capability)
    assert compiled.widths_at("weights = tl.load(") == {16}


@pytest.mark.parametrize(("capability", "formats"), [(80, ("INT8",)), (90, MIXED)])
def test_expand_of_prefill(capability: int, formats: tuple[str, ...]) -> None:
    constants = {
        "N0": 14336, "N1": 14336, "N2": 0, "SLICES": 2, "PARTS": 1, "GROUP_ROWS": 64, "ROWS": 8, "GROUPS": 4, "SIDE": 1,
        "ADD": True, **lora(formats, capability),
    }  # fmt: skip
    compiled = compile_for(expand_kernel, capability, constants, num_warps=2)
    assert_fits(compiled, capability)
    assert compiled.widths_at("weights = tl.load(") == {16}


@CONFIGURATIONS
def test_prefill_shrink(capability: int, formats: tuple[str, ...]) -> None:
    stages = 2 if capability < 90 else 3
    constants = {
        "K": 4096,
        "RANGES": 4,
        "GROUP_ROWS": 64,
        "SIDE": 4,
        "BK": 64,
        "STAGES": stages,
        **lora(formats, capability),
    }
    compiled = compile_for(prefill_shrink_kernel, capability, constants, num_warps=4)
    assert_fits(compiled, capability)
    assert compiled.widths_at("w = tl.load(") == {16}
    assert compiled.widths_at("w_ahead = tl.load(") == {16}


@pytest.mark.parametrize("kernel", ["shrink", "expand"])
def test_a_model_of_float16(kernel: str) -> None:
    types = {"x_ptr": "*fp16", "y_ptr": "*fp16"}
    flags = lora(("FP16", "INT4"), 90, tl.float16)
    if kernel == "shrink":
        constants = {"K": 4096, "KT": 1024, "RANGES": 4, "RANGES_PER_PART": 1, "PARTS": 4, "GROUP_ROWS": 8, "WARPS": 4}
        compiled = compile_for(shrink_kernel, 90, constants | flags, num_warps=4, types=types)
        assert compiled.widths_at("w = tl.load(") == {16}
    else:
        constants = {
            "N0": 4096, "N1": 0, "N2": 0, "SLICES": 1, "PARTS": 4, "GROUP_ROWS": 8, "ROWS": 8, "GROUPS": 4, "SIDE": 2,
            "ADD": True,
        }  # fmt: skip
        compiled = compile_for(expand_kernel, 90, constants | flags, num_warps=2, types=types)
        assert compiled.widths_at("weights = tl.load(") == {16}
    assert_fits(compiled, 90)


@CAPABILITIES
@pytest.mark.parametrize(("rows", "warps"), [(1, 4), (32, 8)], ids=["decode", "prefill"])
def test_attention(capability: int, rows: int, warps: int) -> None:
    constants = {
        "KV_HEADS": 8, "PER_KV": 4, "PER_KV_2": 4, "DIM": 128, "DIM_2": 128, "CHUNK_BYTES": 2 << 20, "ROWS": rows,
        "BLOCK": 64, "PER_SPLIT": 256 if rows == 1 else 1 << 30, "PARTIAL": rows == 1,
        "STAGES": 2 if capability < 90 else 3, "DOT": tl.bfloat16,
    }  # fmt: skip
    compiled = compile_for(attend_kernel, capability, constants, num_warps=warps, types={"blocks_ptr": "*i32"})
    assert_fits(compiled, capability)
    assert compiled.widths_at("key = tl.load(") == {16}
    assert compiled.widths_at("value = tl.load(") == {16}


@pytest.mark.parametrize(
    ("capability", "heads", "kv_heads", "dim"), [(80, 32, 32, 128), (90, 9, 3, 64), (90, 14, 2, 64)]
)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_attention_of_other_models(decode: bool, capability: int, heads: int, kv_heads: int, dim: int) -> None:
    """Llama 2 (every head its own keys), SmolLM2-135M and Qwen2.5-0.5B."""
    shape = AttentionShape(24, heads, kv_heads, dim)
    per_kv = queries_per_key(shape)
    constants = {
        "KV_HEADS": kv_heads, "PER_KV": per_kv, "PER_KV_2": power_of_2(per_kv), "DIM": dim, "DIM_2": dim,
        "CHUNK_BYTES": 2 * shape.block_elements, "ROWS": 1 if decode else prefill_rows(shape), "BLOCK": 64,
        "PER_SPLIT": 256 if decode else 1 << 30, "PARTIAL": decode, "STAGES": 2 if capability < 90 else 3,
        "DOT": tl.bfloat16,
    }  # fmt: skip
    warps = 4 if decode else 8
    compiled = compile_for(attend_kernel, capability, constants, num_warps=warps, types={"blocks_ptr": "*i32"})
    assert_fits(compiled, capability)
    assert compiled.widths_at("key = tl.load(") == {16}


@CAPABILITIES
def test_the_kernels_between(capability: int) -> None:
    combine = {"HEADS": 32, "DIM": 128, "DIM_2": 128, "SIDE": 16}
    compiled = compile_for(combine_kernel, capability, combine, num_warps=2, types={"rows_ptr": "*i32"})
    assert_fits(compiled, capability)
    assert compiled.widths_at("partial = tl.load(") == {16}
    rope = {
        "Q_HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF_2": 64, "CHUNK_BYTES": 2 << 20, "HEADS": 8, "DELTA": True,
        "NORM": True, "LARGEST": torch.finfo(torch.bfloat16).max,
    }  # fmt: skip
    assert_fits(compile_for(rope_kernel, capability, rope, num_warps=4), capability)
    for normed in (True, False):
        norm = {"H": 4096, "H_2": 4096, "ADD": True, "DELTA": True, "NORM": normed}
        compiled = compile_for(norm_kernel, capability, norm, num_warps=4)
        assert_fits(compiled, capability)
        assert compiled.widths_at("delta_ptr + at") == {16}
    silu = {"INNER": 14336, "BLOCK": 1024, "DELTA": True}
    compiled = compile_for(silu_mul_kernel, capability, silu, num_warps=4)
    assert_fits(compiled, capability)
    assert compiled.widths_at("gate_up_ptr + at") == {16}
    affine = {"N0": 4096, "N1": 1024, "N2": 1024, "STRIDE": 48, "FIRST": 0, "COLUMNS": 1024}
    compiled = compile_for(affine_kernel, capability, affine, num_warps=4, types={"rows_ptr": "*i32"})
    assert_fits(compiled, capability)
    for load in ("y_ptr + at", "delta_ptr + at", "scale = tl.load(", "shift = tl.load("):
        assert compiled.widths_at(load) == {16}


@pytest.mark.parametrize(
    ("capability", "vocab", "width"), [(80, 128256, 16), (90, 128256, 16), (100, 128256, 16), (80, 32003, 4)]
)
def test_drawing(capability: int, vocab: int, width: int) -> None:
    """A vocabulary that is no multiple of four leaves rows that do not begin on 16 bytes."""
    types = {
        "logits_ptr": "*fp32", "ids_ptr": "*i32", "wholes_ptr": "*i64", "numbers_ptr": "*fp64", "tokens_ptr": "*i64"
    }  # fmt: skip
    constants = {"VOCAB": vocab, "UNIT": unit(vocab), "SEGMENTS": SEGMENTS, "WIDTH": WIDTH}
    compiled = compile_for(draw_kernel, capability, constants, num_warps=WARPS, types=types)
    assert_fits(compiled, capability)
    assert compiled.registers <= 65536 // (32 * WARPS)
    for load in ("x = tl.load(row_ptr", "x = tl.load(ptr + i", "weight = _weight(tl.load("):
        assert compiled.widths_at(load) == {width}
