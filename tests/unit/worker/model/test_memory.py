from __future__ import annotations

from worker.model.config import parse_config
from worker.model.memory import ArenaPlan, block_bytes, default_arena_bytes, plan_arena

SMOLLM2 = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    }
)


def plan(arena_bytes: int, context: int | None = None) -> ArenaPlan:
    return plan_arena(SMOLLM2, itemsize=2, arena_bytes=arena_bytes, max_context_tokens=context)


def test_a_block_has_keys_and_values_of_all_layers() -> None:
    assert block_bytes(SMOLLM2, 2) == 360 * 1024


def test_the_arena_takes_what_it_is_given_and_bounds_the_context() -> None:
    assert plan(2**30) == ArenaPlan(2**30 // (360 * 1024), 8192)
    assert plan(2**30, context=100) == ArenaPlan(2**30 // (360 * 1024), 100)
    assert plan(10 * 360 * 1024) == ArenaPlan(10, 160)


def test_the_default_leaves_room_for_others() -> None:
    assert default_arena_bytes("cpu", 64 * 2**30) == 2**30
    assert default_arena_bytes("cpu", 2**30) == 2**28
    assert default_arena_bytes("cuda", 100 * 2**30) == 80 * 2**30
