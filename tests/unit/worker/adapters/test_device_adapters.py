from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.adapter_format.packed import PackedAdapter, PackedModule, pack
from loraplex.errors import CorruptArtifact
from tests.unit.worker.model.tiny import BASE_DIGEST, random_adapter
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.kernels.layout import Site
from worker.model.config import parse_config

CONFIG = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)


def slots(dtype: torch.dtype = torch.float32) -> DeviceAdapters:
    base = BaseShape(BASE_DIGEST, CONFIG.num_layers, CONFIG.module_shapes())
    return DeviceAdapters(base, num_slots=2, device=torch.device("cpu"), dtype=dtype)


def packed_file(path: Path, name: str, a: tuple[int, int], b: tuple[int, int]) -> Path:
    module = PackedModule(name, a[0], 1.0, "F32", np.ones(a, np.float32), np.ones(b, np.float32))
    pack(PackedAdapter("v" * 64, BASE_DIGEST, "none", (module,)), path)
    return path


def test_factors_lie_where_the_fused_weights_have_their_modules(tmp_path: Path) -> None:
    ranks = {"self_attn.q_proj": 2, "self_attn.v_proj": 3, "mlp.up_proj": 1}
    adapters = slots()
    adapters.load(1, random_adapter(CONFIG, tmp_path / "a", ranks=ranks, seed=0, layers=[0, 2]))
    first, missing, last = adapters.get(1).layers
    assert missing == (None, None, None, None)
    for layer in (first, last):
        qkv, gate_up = layer[Site.QKV], layer[Site.GATE_UP]
        assert layer[Site.O] is layer[Site.DOWN] is None
        assert qkv is not None
        assert gate_up is not None
        assert qkv.shrink_t.shape == (16, 5)
        assert [(e.out, e.rank) for e in qkv.expands] == [
            (slice(0, 16), slice(0, 2)),  # q
            (slice(24, 32), slice(2, 5)),  # v, behind q and k
        ]
        assert [(e.out, e.rank) for e in gate_up.expands] == [(slice(24, 48), slice(0, 1))]
        assert [e.factor_t.shape for e in qkv.expands] == [(2, 16), (3, 8)]


@pytest.mark.parametrize(
    ("stored", "kept"),
    [("F32", "F32"), ("F16", "F32"), ("BF16", "F32"), ("F32", "BF16"), ("F16", "BF16"), ("BF16", "BF16")],
)
def test_stored_numbers_arrive_as_they_are(stored: str, kept: str, tmp_path: Path) -> None:
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[kept]
    ranks = {"self_attn.o_proj": 4}
    file = random_adapter(CONFIG, tmp_path / "a", ranks=ranks, seed=5, dtype=stored)
    exact = random_adapter(CONFIG, tmp_path / "b", ranks=ranks, seed=5)
    adapters, wide = slots(dtype), slots()
    adapters.load(0, file)
    wide.load(0, exact)
    got, expected = adapters.get(0).layers[1][Site.O], wide.get(0).layers[1][Site.O]
    assert got is not None
    assert expected is not None
    assert got.shrink_t.dtype == dtype
    if stored != "BF16":
        through = expected.shrink_t.half() if stored == "F16" else expected.shrink_t
        assert torch.equal(got.shrink_t, through.to(dtype))
    else:  # the helper cuts the lower bits off
        torch.testing.assert_close(got.shrink_t.float(), expected.shrink_t, rtol=2**-7, atol=0)


def test_bytes_are_those_of_the_factors_and_slots_add_up(tmp_path: Path) -> None:
    adapters = slots()
    file = random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0)
    expected = 3 * 4 * (24 + 16) * 4
    assert adapters.load(0, file) == expected
    assert adapters.load(1, file) == expected
    assert adapters.device_bytes == 2 * expected
    adapters.release(0)
    adapters.release(0)
    assert adapters.device_bytes == expected


def test_a_step_that_looked_an_adapter_up_keeps_it(tmp_path: Path) -> None:
    adapters = slots()
    adapters.load(0, random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0))
    held = adapters.get(0)
    adapters.release(0)
    down = held.layers[0][Site.DOWN]
    assert down is not None
    assert torch.isfinite(down.shrink_t).all()


@pytest.mark.parametrize("slot", [-1, 2])
def test_only_the_engines_slots_exist(slot: int, tmp_path: Path) -> None:
    file = random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0)
    with pytest.raises(ValueError, match="slot"):
        slots().load(slot, file)


def test_a_slot_in_use_is_not_overwritten(tmp_path: Path) -> None:
    adapters = slots()
    file = random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0)
    adapters.load(0, file)
    before = adapters.get(0)
    with pytest.raises(ValueError, match="in use"):
        adapters.load(0, file)
    assert adapters.get(0) is before


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("layers.3.self_attn.q_proj", (2, 16), (16, 2)),
        ("layers.0.self_attn.w_proj", (2, 16), (16, 2)),
        ("layers.00.self_attn.q_proj", (2, 16), (16, 2)),
        ("lm_head", (2, 16), (32, 2)),
        ("layers.0.self_attn.k_proj", (2, 16), (16, 2)),
        ("layers.0.mlp.down_proj", (2, 16), (16, 2)),
    ],
)
def test_a_module_that_does_not_fit_the_base_is_named(
    name: str, a: tuple[int, int], b: tuple[int, int], tmp_path: Path
) -> None:
    with pytest.raises(CorruptArtifact) as caught:
        slots().load(0, packed_file(tmp_path / "a", name, a, b))
    assert caught.value.metadata["tensor"] == name
