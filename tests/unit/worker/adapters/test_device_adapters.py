from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, PackedAffine, PackedModule, open_packed, pack
from common.adapter_format.parts import dequantize
from common.adapter_format.quantize import quantize
from loraplex.errors import CorruptArtifact, ResourceExhausted
from tests.unit.worker.model.tiny import BASE_DIGEST, random_adapter
from worker.adapters.device import BaseShape, DeviceAdapters
from worker.kernels import tiles
from worker.kernels.layout import Arena, AttentionShape, Site
from worker.kernels.tiles import AFFINE, Field, PlacedAdapter, read_affine, read_tile, usable_chunk_bytes
from worker.model.config import ModelConfig, parse_config

RAW_CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIG = parse_config(RAW_CONFIG)


CHUNKS = tuple(range(60, 0, -1))  # neither neighbours nor in order


def slots(config: ModelConfig = CONFIG) -> DeviceAdapters:
    base = BaseShape(BASE_DIGEST, config.num_layers, config.module_shapes())
    shape = AttentionShape(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    arena = Arena(shape, num_chunks=70, dtype=torch.float32, device=torch.device("cpu"))
    arena.memory.fill_(0xFF)
    return DeviceAdapters(base, arena, num_slots=2)


def records(adapters: DeviceAdapters, slot: int, layer: int, site: Site) -> list[NDArray[np.int64]]:
    adapter, place = adapters.get(slot), layer * len(Site) + site
    return list(adapter.records[adapter.starts[place] : adapter.starts[place + 1]])


def packed_file(path: Path, name: str, a: tuple[int, int], b: tuple[int, int]) -> Path:
    module = PackedModule(name, a[0], 1.0, "F32", np.ones(a, np.float32), np.ones(b, np.float32))
    pack(PackedAdapter("v" * 64, BASE_DIGEST, "none", (module,)), path)
    return path


def test_factors_lie_where_the_fused_weights_have_their_modules(tmp_path: Path) -> None:
    ranks = {"self_attn.q_proj": 2, "self_attn.v_proj": 3, "mlp.up_proj": 1}
    adapters = slots()
    adapters.load(1, random_adapter(CONFIG, tmp_path / "a", ranks=ranks, seed=0, layers=[0, 2]), CHUNKS)
    shape = [Field.RANKS, Field.INNER, Field.OUTER, Field.OUT]
    for layer in (0, 2):
        assert [record[shape].tolist() for record in records(adapters, 1, layer, Site.QKV)] == [
            [2, 16, 16, 0],  # q
            [3, 16, 8, 24],  # v, behind q and k
        ]
        assert [record[shape].tolist() for record in records(adapters, 1, layer, Site.GATE_UP)] == [[1, 16, 24, 24]]
    for layer, site in [(0, Site.O), (0, Site.DOWN), *((1, site) for site in Site)]:
        assert records(adapters, 1, layer, site) == []


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_stored_numbers_arrive_as_they_are(stored: str, tmp_path: Path) -> None:
    ranks = {"self_attn.o_proj": 40}
    file = random_adapter(CONFIG, tmp_path / "a", ranks=ranks, seed=5, dtype=stored)
    adapters = slots()
    adapters.load(0, file, CHUNKS)
    module = next(module for module in open_packed(file).modules if module.name.startswith("layers.1."))
    a, b = (_floats(factor, stored) for factor in (module.a, module.b))
    tiles = [read_tile(adapters._arena.memory, record) for record in records(adapters, 0, 1, Site.O)]
    assert len(tiles) > 2
    torch.testing.assert_close(torch.cat([tile[0] for tile in tiles]), a * module.scale, rtol=1e-6, atol=0)
    assert torch.equal(torch.cat([tile[1] for tile in tiles]), b.T)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_parts_arrive_as_they_are(quantization: str, tmp_path: Path) -> None:
    config = parse_config({**RAW_CONFIG, "hidden_size": 80, "intermediate_size": 144, "head_dim": 16})
    file = random_adapter(config, tmp_path / "a", ranks={"mlp.up_proj": 20}, seed=5)
    quantized = tmp_path / "q"
    pack(quantize(open_packed(file), quantization).adapter, quantized)
    adapters = slots(config)
    adapters.load(0, quantized, CHUNKS)
    for layer in range(3):
        module = open_packed(quantized).modules[layer]
        factors = [dequantize(part) for part in module.parts]
        expected = sum(b.astype(np.float64) @ a for a, b in factors)
        tiles = [read_tile(adapters._arena.memory, record) for record in records(adapters, 0, layer, Site.GATE_UP)]
        got = sum(b.T.double() @ a.double() for a, b in tiles)
        torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    if quantization == "int8":
        placed = adapters.get(0)
        assert placed.device_bytes <= 1.03 * quantized.stat().st_size


def _floats(array: NDArray[np.generic], stored: str) -> torch.Tensor:
    if stored == "BF16":
        return torch.from_numpy(array.copy()).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32))


def test_bytes_are_those_of_the_factors_and_a_slot_is_emptied_alone(tmp_path: Path) -> None:
    adapters = slots()
    file = random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0)
    factors = 3 * (384 + 256 + 64)  # A 4 x 24, B 4 x 16 and 4 scales, in units of 64 bytes
    first, second = adapters.load(0, file, CHUNKS[:2]), adapters.load(1, file, CHUNKS[2:])
    assert (first.device_bytes, first.chunks_used) == (second.device_bytes, second.chunks_used) == (factors, 1)
    adapters.release(0)
    adapters.release(0)
    with pytest.raises(KeyError):
        adapters.get(0)
    assert adapters.get(1) is second


def test_an_affine_lies_behind_its_modules_tiles_and_is_cut_where_chunks_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    modules = []
    for name in ("gate_proj", "up_proj"):
        a, b = rng.normal(size=(2, 16)).astype(np.float32), rng.normal(size=(24, 2)).astype(np.float32)
        scale, shift = (rng.normal(size=24).astype(np.float32) for _ in range(2))
        affine = PackedAffine(scale, shift) if name == "up_proj" else None
        modules.append(PackedModule(f"layers.1.mlp.{name}", 2, 1.0, "F32", a, b, (), affine))
    pack(PackedAdapter("v" * 64, BASE_DIGEST, "none", tuple(modules)), tmp_path / "a")
    for pieces, cuts, units in ((8, [24], 6 + 6 + 4), (48, [16, 8], 8 + 8 + 4)):  # the latter cuts ranks as well
        monkeypatch.setattr(tiles, "_PIECES_PER_CHUNK", pieces)
        adapters = slots()
        placed = adapters.load(0, tmp_path / "a", CHUNKS)
        here = records(adapters, 0, 1, Site.GATE_UP)
        kinds = [int(record[Field.FORMAT]) for record in here]
        assert kinds == sorted(kinds)
        assert {int(record[Field.OUT]) for record in here if record[Field.FORMAT] != AFFINE} == {0, 24}
        affines = [read_affine(adapters._arena.memory, record) for record in here[-len(cuts) :]]
        assert [columns.stop - columns.start for columns, _, _ in affines] == cuts
        assert affines[0][0].start == 24
        affine = modules[1].affine
        assert affine is not None
        assert np.array_equal(torch.cat([scale for _, scale, _ in affines]), affine.scale)
        assert np.array_equal(torch.cat([shift for _, _, shift in affines]), affine.shift)
        assert placed.device_bytes == 64 * units


def test_only_the_granted_chunks_are_written(tmp_path: Path) -> None:
    adapters = slots()
    file = random_adapter(CONFIG, tmp_path / "a", ranks=dict.fromkeys(CONFIG.module_shapes(), 30), seed=0)
    placed = adapters.load(0, file, CHUNKS)
    assert 2 < placed.chunks_used < len(CHUNKS)
    used = CHUNKS[: placed.chunks_used]
    written = (adapters._arena.memory.view(70, -1) != 0xFF).any(dim=1).nonzero().flatten().tolist()
    assert sorted(used) == written
    chunk_bytes = adapters._arena.chunk_bytes
    needed = -(-placed.device_bytes // usable_chunk_bytes(chunk_bytes)) + 1
    assert placed.chunks_used <= needed  # what the engine grants
    pieces = sorted(_pieces(placed))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(pieces))
    assert all(start // chunk_bytes == (end - 1) // chunk_bytes and start % 64 == 0 for start, end in pieces)


def _pieces(placed: PlacedAdapter) -> Iterator[tuple[int, int]]:
    """Where float32 tiles lie, by their records."""
    for record in placed.records:
        for field, width in ((Field.A, Field.INNER), (Field.B, Field.OUTER)):
            yield int(record[field]), int(record[field] + 4 * record[Field.RANKS] * record[width])
        yield int(record[Field.SCALE]), int(record[Field.SCALE] + 4 * record[Field.RANKS])


def test_an_adapter_that_its_chunks_do_not_hold_is_refused_and_leaves_the_slot_free(tmp_path: Path) -> None:
    adapters = slots()
    file = random_adapter(CONFIG, tmp_path / "a", ranks=dict.fromkeys(CONFIG.module_shapes(), 30), seed=0)
    with pytest.raises(ResourceExhausted, match="chunks"):
        adapters.load(0, file, CHUNKS[:2])
    with pytest.raises(KeyError):
        adapters.get(0)


@pytest.mark.parametrize("slot", [-1, 2])
def test_only_the_engines_slots_exist(slot: int, tmp_path: Path) -> None:
    file = random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0)
    with pytest.raises(ValueError, match="slot"):
        slots().load(slot, file, CHUNKS)


def test_a_slot_in_use_is_not_overwritten(tmp_path: Path) -> None:
    adapters = slots()
    file = random_adapter(CONFIG, tmp_path / "a", ranks={"mlp.down_proj": 4}, seed=0)
    adapters.load(0, file, CHUNKS)
    before = adapters.get(0)
    with pytest.raises(ValueError, match="in use"):
        adapters.load(0, file, CHUNKS)
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
        slots().load(0, packed_file(tmp_path / "a", name, a, b), CHUNKS)
    assert caught.value.metadata["tensor"] == name
