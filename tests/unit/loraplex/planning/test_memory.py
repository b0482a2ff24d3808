"""The planner's account against a real runner's: weights, chunks, tables."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.errors import InvalidParameter
from loraplex.planning.adapters import table_bytes_per_slot
from loraplex.planning.devices import DEVICES, Device
from loraplex.planning.memory import WorkerPlan, account
from loraplex.planning.shapes import SHAPES, shape_from_folder
from tests.unit.worker.model.tiny import make_model, open_runner, save_model
from worker.adapters.device import BaseShape
from worker.kernels.cpu.linear import pack_linear
from worker.kernels.triton.directory import Geometry, TileTable
from worker.model.base_quantization import quantize_linear
from worker.model.config import read_config
from worker.model.memory import default_arena_bytes
from worker.model.weights import load_weights

CPU = replace(DEVICES["CPU"], memory_bytes=16 * 2**30)
SMALL = WorkerPlan(concurrency=1, context_tokens=64)


def num_bytes(weights: Any) -> int:
    """Of every tensor in nested dataclasses and tuples; one that is there twice counts once."""
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.data_ptr()] = value.nbytes
        elif is_dataclass(value):
            for field in fields(value):
                walk(getattr(value, field.name))
        elif isinstance(value, tuple):
            for entry in value:
                walk(entry)

    walk(weights)
    return sum(found.values())


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama_tied", "llama_biases", "qwen2_bias", "qwen3_qk_norm"])
def test_a_cpus_weights_take_what_the_loader_takes(
    variant: str, stored: torch.dtype, quantization: str, tmp_path: Path
) -> None:
    save_model(make_model(variant).to(stored), tmp_path)
    weights = load_weights(
        tmp_path,
        read_config(tmp_path),
        device=torch.device("cpu"),
        dtype=stored,
        pack=pack_linear if quantization == "none" else lambda linear: pack_linear(quantize_linear(linear)),
    )
    planned = account(shape_from_folder(tmp_path), CPU, replace(SMALL, base_quantization=quantization))
    assert planned.base_bytes == num_bytes(weights)


@pytest.mark.parametrize("variant", ["llama_tied", "llama_biases", "qwen3_qk_norm"])
def test_a_gpus_weights_are_all_of_its_dtype(variant: str, tmp_path: Path) -> None:
    """On a device without GPU, in float32, where the loader makes the same tensors."""
    save_model(make_model(variant), tmp_path)
    weights = load_weights(
        tmp_path, read_config(tmp_path), device=torch.device("cpu"), dtype=torch.float32, pack=lambda linear: linear
    )
    planned = account(shape_from_folder(tmp_path), DEVICES["L4"], SMALL)
    assert planned.base_bytes * 2 == num_bytes(weights)


def test_a_real_worker_has_the_planned_chunks_and_context(tmp_path: Path) -> None:
    save_model(make_model("llama_tied"), tmp_path)
    runner = open_runner(tmp_path, arena_bytes=2**20 + 5, threads=1)
    planned = account(shape_from_folder(tmp_path), CPU, replace(SMALL, arena_bytes=2**20 + 5))
    assert (planned.chunk_bytes, planned.num_chunks) == (runner.chunk_bytes, runner.total_blocks)
    assert planned.max_context_tokens == runner.max_context_tokens
    assert planned.dtype == runner.dtype


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-0.6B", "SmolLM2-135M"])
def test_tables_and_default_arenas_are_the_workers(name: str) -> None:
    shape = SHAPES[name]
    base = BaseShape("1" * 64, shape.num_layers, shape.module_shapes())
    table = TileTable(
        Geometry(base.sites(), 256), num_layers=shape.num_layers, num_slots=3, chunk_bytes=1, device=torch.device("cpu")
    )
    assert table_bytes_per_slot(shape) * 3 == table.entries.nbytes
    planned = account(shape, DEVICES["H200"], SMALL)
    free = planned.device_bytes - planned.base_bytes - planned.fixed[0].num_bytes
    assert planned.arena_bytes == default_arena_bytes("cuda", free)
    assert planned.num_chunks == planned.arena_bytes // planned.chunk_bytes
    assert account(shape, replace(CPU, memory_bytes=64 * 2**30), SMALL).arena_bytes == 2**30


def test_the_arena_is_divided_and_nothing_is_counted_twice() -> None:
    planned = account(SHAPES["Llama-3.1-8B"], DEVICES["H100"], WorkerPlan(concurrency=32, context_tokens=4090))
    assert planned.chunk_bytes == 2 * 2**20
    assert planned.kv_bytes_per_token == 128 * 1024
    assert planned.kv_chunks == 32 * 256
    assert planned.reserve_chunks == planned.num_chunks // 100
    assert planned.kv_chunks + planned.reserve_chunks + planned.adapter_chunks == planned.num_chunks
    items = sum(item.num_bytes for item in (*planned.fixed, *planned.workspace))
    assert items + planned.base_bytes + planned.arena_bytes + planned.spare_bytes == planned.device_bytes
    assert planned.spare_bytes > 0


@pytest.mark.parametrize(
    ("device", "plan", "words"),
    [
        (DEVICES["CPU"], SMALL, "--memory: say"),
        (DEVICES["L4"], replace(SMALL, base_quantization="int8"), "--base-quantization int8 is for CPUs"),
        (DEVICES["H100"], replace(SMALL, context_tokens=200_000), "--context is 200000"),
        (DEVICES["H100"], replace(SMALL, concurrency=0), "--concurrency is 0"),
        (DEVICES["H100"], replace(SMALL, concurrency=65), "--max-running-requests 64"),
        (DEVICES["L4"], WorkerPlan(concurrency=64, context_tokens=8192), "which is 5 such requests"),
        (DEVICES["L4"], replace(SMALL, arena_bytes=23 * 10**9), "--arena: 23.00 GB are asked for"),
        (DEVICES["L4"], replace(SMALL, arena_bytes=1000), "give 2097152 at least"),
        (replace(DEVICES["L4"], memory_bytes=16 * 10**9), SMALL, "--device L4: the base takes 16.06 GB"),
    ],
)
def test_what_does_not_fit_is_refused_by_flag(device: Device, plan: WorkerPlan, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        account(SHAPES["Llama-3.1-8B"], device, plan)
