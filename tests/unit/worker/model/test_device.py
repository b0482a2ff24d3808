from __future__ import annotations

import pytest
import torch

from loraplex.errors import InvalidParameter
from worker.model.device import choose_device, choose_dtype, free_bytes

CPU = torch.device("cpu")


def test_auto_on_a_cpu_is_as_the_base_is_stored() -> None:
    assert choose_dtype("auto", CPU, stored_bfloat16=True) == "bfloat16"
    assert choose_dtype("auto", CPU, stored_bfloat16=False) == "float32"


def test_what_is_asked_for_is_taken() -> None:
    assert choose_dtype("float32", CPU, stored_bfloat16=True) == "float32"
    assert choose_dtype("bfloat16", CPU, stored_bfloat16=False) == "bfloat16"
    assert choose_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(InvalidParameter, match="cuda"):
        choose_device("cuda")


def test_free_memory_is_measured() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50
