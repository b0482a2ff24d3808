"""The assembly that unpacks nibbles, executed here as PTX defines it, for every byte: Triton's interpreter cannot."""

from __future__ import annotations

import re

import numpy as np
import pytest

from worker.kernels.triton import elements

WORD = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """Permute: each nibble of the selector picks one of the eight bytes of b:a."""
    source = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * n & 7] for n in range(4)), "little")


def to_float(bits: int, kind: str) -> float:
    if kind == "f16x2":
        return float(np.array([bits], dtype=np.uint16).view(np.float16)[0])
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])


def from_float(value: float, kind: str) -> int:
    """Exactly, or not at all."""
    if kind == "f16x2":
        bits = int(np.array([value], dtype=np.float16).view(np.uint16)[0])
    else:
        bits = int(np.array([value], dtype=np.float32).view(np.uint32)[0]) >> 16
    assert to_float(bits, kind) == value
    return bits


def execute(assembly: str, word: int) -> list[int]:
    """Run `and`, `shr`, `mov`, `prmt` and `fma` on 32-bit registers; returns $0 to $3 for $4 = word."""
    registers = {"$4": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for statement in assembly.strip("{ }").split(";"):
        text = statement.strip()
        if not text or text.startswith(".reg"):
            continue
        operation, arguments = text.split(None, 1)
        target, *sources = re.split(r"\s*,\s*", arguments.strip())
        values = [value(name) for name in sources]
        if operation == "and.b32":
            registers[target] = values[0] & values[1]
        elif operation == "shr.u32":
            registers[target] = values[0] >> values[1]
        elif operation == "mov.b32":
            registers[target] = values[0] & WORD
        elif operation == "prmt.b32":
            registers[target] = prmt(values[0], values[1], values[2])
        else:
            kind = operation.removeprefix("fma.rn.")
            halves = [[to_float(v >> shift & 0xFFFF, kind) for v in values] for shift in (0, 16)]
            low, high = (from_float(a * b + c, kind) for a, b, c in halves)
            registers[target] = low | high << 16
    return [registers[f"${n}"] for n in range(4)]


@pytest.mark.parametrize(("assembly", "kind"), [("_UNPACK_BF16", "bf16x2"), ("_UNPACK_FP16", "f16x2")])
def test_every_byte_becomes_its_two_values(assembly: str, kind: str) -> None:
    for byte in range(256):
        packed = [byte, byte * 7 + 3 & 255, 255 - byte, byte + 128 & 255]
        out = execute(getattr(elements, assembly).value, int.from_bytes(bytes(packed), "little"))
        values = [to_float(word >> shift & 0xFFFF, kind) for word in out for shift in (0, 16)]
        assert values == [*((b & 15) - 8 for b in packed), *((b >> 4) - 8 for b in packed)]
