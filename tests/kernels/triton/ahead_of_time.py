"""Compiling a kernel for a GPU that is not there, and reading off what the machine code does."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.kernels.triton.platform import COMPILE

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_LOAD = re.compile(r"\bld\.global((?:\.[\w:]+)*)\.[bufs](\d+)\b")
_ASYNC = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)\s*(?:,|;)")

TYPES = {
    "layer": "i32",
    "scale_log2e": "fp32",
    "eps": "fp32",
    "arena_ptr": "*u8",
    "table_ptr": "*i64",
    "cells_ptr": "*i64",
    "groups_ptr": "*i64",
    "blocks_ptr": "*i64",
    "order_ptr": "*i32",
    "items_ptr": "*i32",
    "adapted_ptr": "*i32",
    "positions_ptr": "*i32",
    "slots_ptr": "*i64",
    "h_ptr": "*fp32",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "max_sum_ptr": "*fp32",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What matters of a cubin."""

    registers: int
    stack_bytes: int
    """Above 0 where registers spill."""
    shared_bytes: int
    widths: dict[str, set[int]]
    """Bytes of each global load, by the source line's text."""

    def widths_at(self, mark: str) -> set[int]:
        """Widths of the loads on lines that contain `mark` as whole words."""
        whole = re.compile(r"(?<!\w)" + re.escape(mark))
        return {width for line, widths in self.widths.items() if whole.search(line) for width in widths}


def compile_for(
    kernel: Any,
    capability: int,
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    types: Mapping[str, str] | None = None,
) -> Compiled:
    """Compile as the JIT would for pointers on 16 bytes. Pointers not in `TYPES` or `types` are bfloat16."""
    known = TYPES | dict(types or {})
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else known.get(name, "*bf16") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, **COMPILE}
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return Compiled(registers, stack, compiled.metadata.shared, _widths(compiled.asm["ptx"]))


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, check=False, text=True, timeout=60
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert found, said
    return int(found[1]), int(found[2])


def _widths(ptx: str) -> dict[str, set[int]]:
    files = {m[1]: Path(m[2]) for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
    texts = {number: path.read_text().splitlines() for number, path in files.items() if path.is_file()}
    found: dict[str, set[int]] = {}
    line, inside, fresh = "", False, True
    for text in ptx.splitlines():
        # In a block of inline assembly only the first .loc is the source's; the others count the block's own lines.
        if "begin inline asm" in text:
            inside = fresh = True
        elif "end inline asm" in text:
            inside = False
        elif place := _LOC.search(text):
            if not inside or fresh:
                line = texts[place[1]][int(place[2]) - 1].strip() if place[1] in texts else ""
                fresh = False
        elif load := _LOAD.search(text):
            vector = re.search(r"\.v(\d)", load[1])
            found.setdefault(line, set()).add(int(load[2]) // 8 * (int(vector[1]) if vector else 1))
        elif load := _ASYNC.search(text):
            found.setdefault(line, set()).add(int(load[1], 0))
    return found
