from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.errors import InvalidParameter
from worker.model import device
from worker.model.device import choose_device, choose_dtype, free_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 fma", "bfloat16"),
        ("flags\t\t: fpu amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("flags\t\t: fpu avx avx2 avx512f fma", "float32"),
        ("", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\n")
    found = device._cpu_flags(cpuinfo)
    monkeypatch.setattr(device, "_cpu_flags", lambda: found)
    assert choose_dtype("auto", CPU) == dtype


def test_what_is_asked_for_is_taken() -> None:
    assert choose_dtype("float32", CPU) == "float32"
    assert choose_dtype("bfloat16", CPU) == "bfloat16"
    assert choose_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(InvalidParameter, match="cuda"):
        choose_device("cuda")


def test_free_memory_is_measured() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50
