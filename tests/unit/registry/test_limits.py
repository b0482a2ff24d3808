"""Limits on what may be registered: each refusal names the field and the limit."""

from __future__ import annotations

import numpy as np
import pytest

from common.adapter_format.packed import PackedAdapter, PackedMatrix, PackedModule
from loraplex.errors import ResourceExhausted, UnsupportedAdapter
from registry.limits import TARGET_MODULES, AdapterLimits, check_limits, check_room, parse_target_modules

ALL = frozenset(TARGET_MODULES)


def module(name: str, rank: int) -> PackedModule:
    return PackedModule(name, rank, 1.0, "F32", np.zeros((rank, 4), np.float32), np.zeros((4, rank), np.float32))


def adapter(*modules: PackedModule, matrices: tuple[str, ...] = ()) -> PackedAdapter:
    weights = tuple(PackedMatrix(name, "F32", np.zeros((4, 4), np.float32)) for name in matrices)
    return PackedAdapter("v", "b", "none", modules, weights)


Q, UP = "layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        (AdapterLimits(8, ALL, 1), adapter(module(Q, 8), module(UP, 1))),
        (AdapterLimits(8, frozenset({"q_proj", "up_proj"}), 1), adapter(module(Q, 8), module(UP, 1))),
        (AdapterLimits(8, frozenset({"embed_tokens", "lm_head"}), 1), adapter(module("lm_head", 2))),
        (AdapterLimits(8, frozenset({"lm_head"}), 1), adapter(matrices=("lm_head",))),
    ],
)
def test_what_keeps_to_the_limits_passes(limits, allowed):
    check_limits(allowed, limits)


def test_one_rank_above_the_limit_is_refused_and_named():
    with pytest.raises(UnsupportedAdapter) as caught:
        check_limits(adapter(module(Q, 8), module(UP, 9)), AdapterLimits(8, ALL, 1))
    assert caught.value.metadata == {"field": "r", "module": UP, "rank": "9", "limit": "8"}
    assert "max_rank" in caught.value.message


@pytest.mark.parametrize(
    ("refused", "field", "named"),
    [
        (adapter(module(Q, 8), module(UP, 1)), "target_modules", "up_proj"),
        (adapter(module("embed_tokens", 8)), "target_modules", "embed_tokens"),
        (adapter(module(Q, 8), matrices=("lm_head",)), "modules_to_save", "lm_head"),
    ],
)
def test_a_module_off_the_list_is_refused_and_named(refused, field, named):
    with pytest.raises(UnsupportedAdapter, match=f"changes {named},") as caught:
        check_limits(refused, AdapterLimits(8, frozenset({"q_proj", "v_proj"}), 1))
    assert (caught.value.field, caught.value.metadata["limit"]) == (field, "q_proj,v_proj")


def test_one_adapter_more_than_may_be_is_refused():
    limits = AdapterLimits(8, ALL, 2)
    check_room(1, limits)
    with pytest.raises(ResourceExhausted) as caught:
        check_room(2, limits)
    assert caught.value.metadata == {"field": "name", "limit": "2"}


@pytest.mark.parametrize(
    ("text", "kinds"), [("", ALL), (" q_proj, lm_head,", {"q_proj", "lm_head"}), ("down_proj", {"down_proj"})]
)
def test_the_list_of_modules_reads(text, kinds):
    assert parse_target_modules(text) == kinds


def test_a_module_that_does_not_exist_is_told_with_those_that_do():
    with pytest.raises(ValueError, match=r"no module is called all-linear; there are q_proj, .*lm_head"):
        parse_target_modules("all-linear,q_proj")
