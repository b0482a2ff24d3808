"""What `loraplex up` says once all is up."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.cli.base_source import Base
from loraplex.cli.board import LineBoard
from loraplex.cli.cluster import ClusterPlan
from loraplex.cli.up import _greet, dedicated_adapters
from loraplex.errors import InvalidParameter
from loraplex.records import Worker


class Heard(LineBoard):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def say(self, text: str) -> None:
        self.text += text


def worker(worker_id: str, base_quantization: str) -> Worker:
    return Worker(
        worker_id, "127.0.0.1:1", "serving", "e", "b", 0, 0, 0, 1.0, 1.0, 1, 1, (), 0.0, "", "cpu", "bfloat16",
        base_quantization,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("quantized", "line"),
    [
        ("int8", "worker-0 (cpu bfloat16, int8 base), worker-1 (cpu bfloat16, int8 base)"),
        ("none", "worker-0 (cpu bfloat16), worker-1 (cpu bfloat16)"),
    ],
)
def test_the_greeting_tells_what_workers_compute_in_and_whether_the_base_is_quantized(tmp_path, quantized, line):
    plan = ClusterPlan(tmp_path, tmp_path, Path("base"), "auto", "127.0.0.1", 1, 2, 3, (4, 5))
    board = Heard()
    _greet(plan, Base(Path("base"), "tiny"), [], [worker(f"worker-{index}", quantized) for index in (0, 1)], board)
    assert f"  workers   {line}\n" in board.text


def test_dedicated_workers_are_asked_for_by_name_and_number() -> None:
    assert dedicated_adapters(["sql", "support=2"]) == ["sql", "support", "support"]
    for wrong in ("", "=2", "sql=", "sql=0", "sql=many", "sql=65", "sql=-1"):
        with pytest.raises(InvalidParameter, match="--dedicated"):
            dedicated_adapters([wrong])
