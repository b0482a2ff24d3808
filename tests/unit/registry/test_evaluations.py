"""Evaluations: what can be true of an adapter's versions, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from loraplex.errors import InvalidParameter
from registry.domain import AdapterRecord, VersionRecord, cut_over
from registry.evaluations import Figures, check_figures, decode_figures, encode_figures, evaluated_version

GOOD = Figures("s", 1, 90, 3000, 0.9925, 0.00125, 0.5, "1.2.3", "cpu bfloat16")
INT8 = VersionRecord("v", "a", "d", "int8", 4, 100, ("q_proj",), 2, 14, "F32", 1, 2, "s", 300)
OF_INT8 = {"version_digest": "v", "artifact_digest": "a", "exact_artifact_digest": "s", "base_digest": "d"}


def adapter(version: VersionRecord = INT8) -> AdapterRecord:
    old = replace(version, version_digest="old", artifact_digest="a-old", source_digest="s-old")
    return cut_over(cut_over(None, "x", "tiny", old), "x", "tiny", version)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_set", 0),
        ("num_prompts", 0),
        ("num_positions", 0),
        ("num_positions", 2**31),
        ("num_prompts", 3001),
        ("top1_agreement", -0.01),
        ("top1_agreement", 1.01),
        ("top1_agreement", math.nan),
        ("mean_kl", -1e-3),
        ("mean_kl", math.inf),
        ("mean_kl", math.nan),
        ("mean_kl", 0.6),
        ("max_kl", math.inf),
        ("max_kl", math.nan),
        ("worker_version", "1\n2"),
        ("device", "x" * 101),
    ],
)
def test_figures_that_cannot_be_true_are_refused_by_name(field: str, value: float | str) -> None:
    wrong: dict[str, object] = {field: value}
    with pytest.raises(InvalidParameter) as caught:
        check_figures(replace(GOOD, **wrong))  # type: ignore[arg-type]
    assert caught.value.field == f"evaluation.{field}"


@pytest.mark.parametrize(
    "figures",
    [
        GOOD,
        replace(GOOD, top1_agreement=1.0, mean_kl=0.0, max_kl=0.0),
        replace(GOOD, top1_agreement=0.0),
        replace(GOOD, num_prompts=1, num_positions=1, mean_kl=0.5),
        replace(GOOD, mean_kl=0.1 + 0.2, max_kl=0.3),  # a mean of equal numbers, rounded up
        replace(GOOD, worker_version="", device=""),
    ],
)
def test_figures_that_can_be_true_pass_and_come_back_from_the_database(figures: Figures) -> None:
    assert check_figures(figures) is figures
    assert decode_figures(encode_figures(figures)) == figures


@pytest.mark.parametrize("field", list(OF_INT8))
def test_an_evaluation_of_something_else_is_refused_by_name(field: str) -> None:
    for other in ("b", "", "a-old" if field == "artifact_digest" else "s-old"):
        with pytest.raises(InvalidParameter) as caught:
            evaluated_version(adapter(), **{**OF_INT8, field: other})
        assert caught.value.field == f"evaluation.{field}"
        assert "evaluate the adapter again" in caught.value.message


def test_the_format_is_that_of_the_artifact() -> None:
    assert evaluated_version(adapter(), **OF_INT8) == (INT8, "int8")
    assert evaluated_version(adapter(), **{**OF_INT8, "artifact_digest": "s"}) == (INT8, "none")


def test_old_versions_can_be_evaluated_too() -> None:
    digests = {"version_digest": "old", "artifact_digest": "a-old", "exact_artifact_digest": "s-old"}
    assert evaluated_version(adapter(), base_digest="d", **digests)[0].version_digest == "old"
