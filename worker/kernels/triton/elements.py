"""From stored elements to operands of `tl.dot`, exactly, and the fields of table entries and work words.

Operands are of the constexpr dtype DOT: the model's 16-bit type on a GPU, float32 in the interpreter, whose `tl.dot`
and bfloat16 arithmetic work on raw bits.
"""

import triton
import triton.language as tl


def _unpack_asm(magic: int, kind: str, one: int, bias: int) -> str:
    """PTX of four bytes to eight 16-bit floats: a nibble q under the exponent byte `magic` is the float `base + q`."""
    body = "and.b32 lo, $4, 0x0f0f0f0f; shr.u32 hi, $4, 4; and.b32 hi, hi, 0x0f0f0f0f;"
    body += f"mov.b32 one, {one:#x}; mov.b32 bias, {bias:#x};"
    for half, outs in (("lo", (0, 1)), ("hi", (2, 3))):
        for out, selector in zip(outs, (0x4140, 0x4342), strict=True):
            body += f"prmt.b32 t, {half}, {magic:#x}, {selector:#x}; fma.rn.{kind} ${out}, t, one, bias;"
    return "{ .reg .b32 lo, hi, t, one, bias; " + body + " }"


# bfloat16: 0x43·· is 128 + q, less 136; float16: 0x64·· is 1024 + q, less 1032.
_UNPACK_BF16 = tl.constexpr(_unpack_asm(0x43, "bf16x2", 0x3F803F80, 0xC308C308))
_UNPACK_FP16 = tl.constexpr(_unpack_asm(0x64, "f16x2", 0x3C003C00, 0xE408E408))

FORMAT_BF16 = tl.constexpr(0)
FORMAT_INT8 = tl.constexpr(1)
FORMAT_INT4 = tl.constexpr(2)
FORMAT_FP16 = tl.constexpr(3)


@triton.jit
def nibbles(w, DOT: tl.constexpr):
    """Bytes of two nibbles, value + 8, to (low, high) values in DOT, exact."""
    if DOT == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_BF16, "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif DOT == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_FP16, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = (w & 15).to(tl.float32) - 8.0
        high = (w >> 4).to(tl.float32) - 8.0
    return low, high


@triton.jit
def operand(w, DOT: tl.constexpr, MAGIC: tl.constexpr):
    """INT8 or 16-bit elements to DOT; exact, save bfloat16 to float16 and back.

    MAGIC replaces sm_80's slow int → float conversion: the byte b + 128 under the exponent of 2²³ is a float32.
    """
    if w.dtype == tl.int8 and MAGIC:
        bits = (w.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(DOT)
    if w.dtype == tl.bfloat16 and DOT == tl.float16:
        return w.to(tl.float32).to(tl.float16)
    if w.dtype == tl.float16 and DOT == tl.bfloat16:
        return w.to(tl.float32).to(tl.bfloat16)
    return w.to(DOT)


@triton.jit
def entry_rows(entry):
    """Rows of a tile, 0 where there is none."""
    return (entry & 31).to(tl.int32)


@triton.jit
def entry_format(entry):
    """Format of a tile."""
    return ((entry >> 5) & 7).to(tl.int32)


@triton.jit
def entry_offset(entry):
    """Offset of a tile in the arena in bytes. The product tells the compiler that it is a multiple of 32."""
    return (entry >> 8) * 32


@triton.jit
def low_word(word):
    """Bits 0 to 31."""
    return (word & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def bits(word, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """`COUNT` bits from bit `FIRST` on."""
    return ((word >> FIRST) & ((1 << COUNT) - 1)).to(tl.int32)
