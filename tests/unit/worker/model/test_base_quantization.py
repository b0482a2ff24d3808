"""INT8 bases: the numbers, and that a whole model computes with them what it would with the rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.errors import InvalidParameter
from tests.unit.worker.model.tiny import first_logits, open_runner, relative_error
from worker.kernels.linear import Linear
from worker.model.base_quantization import check_base_quantization, quantize_linear


def test_an_output_uses_its_whole_range_and_is_off_by_half_a_level_at_most() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 20)[:, None]
    weight[3] = 0
    linear = quantize_linear(Linear.plain(weight, None))
    assert linear.scales is not None
    assert linear.weight.dtype == torch.int8
    assert linear.weight.abs().amax(dim=1).tolist() == [127] * 3 + [0] + [127] * 16
    restored = linear.weight.float() * linear.scales[:, None]
    assert ((restored - weight).abs() <= linear.scales[:, None] * 0.5001).all()


def test_a_weight_that_is_not_finite_stays_visible() -> None:
    weight = torch.ones(3, 8)
    weight[0, 1], weight[1, 2] = torch.nan, torch.inf
    linear = quantize_linear(Linear.plain(weight, None))
    assert linear.scales is not None
    y = (linear.weight.float() * linear.scales[:, None]).sum(dim=1)
    assert y.isfinite().tolist() == [False, False, True]


def test_a_model_of_rounded_weights_gives_the_same_logits_in_int8(llama_folder: Path, tmp_path: Path) -> None:
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    for file in llama_folder.iterdir():
        (rounded / file.name).write_bytes(file.read_bytes())
    for file in rounded.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                linear = quantize_linear(Linear.plain(tensor, None))
                assert linear.scales is not None
                tensors[name] = linear.weight.float() * linear.scales[:, None]
        save_file(tensors, file, metadata={"format": "pt"})
    tokens = (5, 9, 17, 3, 80, 41)
    expected = first_logits(open_runner(rounded), tokens)
    assert relative_error(first_logits(open_runner(llama_folder, base_quantization="int8"), tokens), expected) < 1e-5
    exact = first_logits(open_runner(llama_folder), tokens)
    assert 1e-4 < relative_error(expected, exact) < 0.1


def test_what_cannot_be_is_refused_by_name() -> None:
    check_base_quantization("int8", torch.device("cpu"))
    check_base_quantization("none", torch.device("cuda"))
    for asked, device in (("int4", "cpu"), ("int8", "cuda")):
        with pytest.raises(InvalidParameter) as caught:
            check_base_quantization(asked, torch.device(device))
        assert caught.value.field == "base_quantization"
