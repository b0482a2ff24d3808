"""`loraplex plan`, run in this process; it asks nobody."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from loraplex.cli.__main__ import main
from loraplex.planning.shapes import SHAPES


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loraplex", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def plan(run):
    def plan(*arguments: object) -> Any:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return plan


H200 = ("--model", "Llama-3.1-8B", "--device", "H200")


def test_json_holds_the_whole_account(plan) -> None:
    made = plan(*H200, "--concurrency", 64, "--context", 4096, "--requests-per-s", 50, "--adapters", 2000)
    memory = made["memory"]
    assert memory["chunk_bytes"] == 2 * 2**20
    assert memory["kv_chunks"] == 64 * 256
    assert {(fit["rank"], fit["format"]) for fit in made["fits"]} >= {(16, "int8"), (64, "none")}
    assert made["fleet"]["num_workers"] >= made["fleet"]["for_tokens"] >= 1
    assert made["assumptions"]
    assert [load["source"] for load in made["adapter_loads"]] == ["host memory", "disk", "network"]
    assert [load["source"] for load in made["base_loads"]] == ["disk", "network", "object store"]


def test_tables_are_for_people(run) -> None:
    code, out, err = run(*H200, "--requests-per-s", 5, "--max-resident-adapters", 2_500)
    assert (code, err) == (0, "")
    for words in (
        "base weights",
        "KV cache asked for",
        "fit beside the KV",
        "object store",
        "workers for 5 requests/s",
    ):
        assert words in out
    assert "assumed: H200: 4800 GB/s" in out
    (row,) = [line for line in out.splitlines() if line.strip().startswith("object store")]
    assert len(row.split()) == 4  # the base alone comes from there: a name of two words, and a time with its unit


def test_a_rank_of_its_own_gets_its_row_and_slots_are_warned_of(run) -> None:
    assert "8.55 GB more" in run(*H200, "--max-resident-adapters", 100_000)[2]  # the table of their tiles
    code, out, err = run(*H200, "--rank", 12, "--format", "int4")
    assert code == 0
    assert any(line.split()[:2] == ["12", "int4"] for line in out.splitlines())
    assert "--max-resident-adapters 32" in err


def test_what_one_format_cannot_hold_is_a_row_not_a_failure(run, tmp_path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 160,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--base-dir", tmp_path, "--device", "cpu", "--memory", "4GiB", "--context", 256)
    code, out, _ = run(*arguments, "--format", "none")
    assert code == 0
    assert any(line.split() == ["8", "int8", "none", "none"] for line in out.splitlines())
    code, _, err = run(*arguments, "--format", "int8")
    assert code == 1
    assert "multiples of 16" in err


def test_flags_reach_the_plan(plan) -> None:
    usual = plan("--model", "SmolLM2-135M", "--device", "cpu", "--memory", "8GiB")
    assert usual["memory"]["arena_bytes"] == 2**30
    assert usual["memory"]["layout"] == "records"
    changed = plan(
        *("--model", "SmolLM2-135M", "--device", "cpu", "--memory", "8GiB", "--arena", "2GiB"),
        *("--base-quantization", "int8", "--dtype", "float32", "--target-modules", "q_proj,v_proj", "--disk", "1GB"),
    )
    assert changed["memory"]["arena_bytes"] == 2**31
    assert changed["memory"]["kv_bytes_per_token"] == 2 * usual["memory"]["kv_bytes_per_token"]
    assert changed["memory"]["base_bytes"] < 0.6 * usual["memory"]["base_bytes"]
    sizes = [made["fits"][0]["weight"]["file_bytes"] for made in (usual, changed)]
    assert sizes[1] < 0.4 * sizes[0]
    assert "disk 1 GB/s" in changed["assumptions"][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--model NAME"),
        (("--model", "x", "--base-dir", "."), "--model NAME"),
        (("--model", "GPT-5"), "--model 'GPT-5'"),
        (("--model", "SmolLM2-135M", "--device", "cpu"), "--memory"),
        (("--model", "Qwen3-32B", "--device", "L4"), "--device L4"),
        ((*H200, "--memory", "lots"), "--memory 'lots'"),
        ((*H200, "--concurrency", "0"), "--concurrency is 0"),
        ((*H200, "--requests-per-s", "1", "--popularity", "pareto"), "--popularity"),
        ((*H200, "--target-modules", "w1"), "--target-modules"),
    ],
)
def test_bad_input_names_its_flag(run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert words in err
    assert "Traceback" not in err


def test_known_names_are_listed(run, plan) -> None:
    assert {model["name"] for model in plan("--list")["models"]} == set(SHAPES)
    assert "RTX-4090" in run("--list")[1]
