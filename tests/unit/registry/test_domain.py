"""Names, and the cutover between versions."""

from __future__ import annotations

import dataclasses
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.adapter_format.base import BaseLinears
from common.adapter_format.modules import PackedAdapter, PackedMatrix, PackedModule
from loraplex.errors import AlreadyExists, InvalidName
from registry.domain import (
    AdapterRecord,
    BaseModelRecord,
    DeletedAdapter,
    VersionRecord,
    check_adapter_name,
    check_base_id,
    cut_over,
    describe_version,
)
from registry.entries import decode_entries, encode_entries


def version(digest: str, artifact: str = "", at: int = 1) -> VersionRecord:
    return VersionRecord(digest, artifact or f"a-{digest}", "base", "none", 4, 100, ("q_proj",), 2, 14, "F32", at)


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "my.adapter_v2-x", "a..b", "0x"])
def test_good_adapter_names(name):
    assert check_adapter_name(name) == name


@pytest.mark.parametrize("base_id", ["a", "A/B", "HuggingFaceTB/SmolLM2-135M-Instruct", "a" * 96 + "/" + "b" * 96])
def test_good_base_ids(base_id):
    assert check_base_id(base_id) == base_id


@given(st.text(max_size=70))
def test_no_name_that_is_accepted_can_leave_a_folder_or_a_line(name):
    for check, allowed in ((check_adapter_name, ""), (check_base_id, "/" + string.ascii_uppercase)):
        try:
            check(name)
        except InvalidName:
            continue
        assert set(name) <= set(string.ascii_lowercase + string.digits + "._-" + allowed)
        assert all(part and part[0] not in "._-" for part in name.split("/"))


def test_the_first_version_makes_the_adapter():
    adapter = cut_over(None, "x", "tiny", version("v1", at=5))
    assert (adapter.current, adapter.create_time_us, adapter.update_time_us) == ("v1", 5, 5)
    assert adapter.versions == (version("v1", at=5),)


def test_modules_outside_the_layers_and_matrices_count_where_an_adapter_changes_them():
    a, b = np.ones((3, 16), np.float32), np.ones((16, 3), np.float32)
    base = BaseLinears("b" * 64, {f"layers.0.mlp.{kind}": (16, 16) for kind in ("up_proj", "down_proj")})
    modules = tuple(PackedModule(name, 3, 1.0, "F32", a, b) for name in ("embed_tokens", "layers.0.mlp.up_proj"))
    matrices = (PackedMatrix("lm_head", "BF16", np.ones((16, 16), np.uint16)),)
    record = describe_version(PackedAdapter("v", "b" * 64, "none", modules, matrices), "d", 9, base, 1)
    assert (record.num_modules, record.num_base_modules, record.rank, record.dtype) == (3, 4, 3, "F32")
    assert record.target_modules == ("embed_tokens", "lm_head", "up_proj")
    alone = describe_version(PackedAdapter("v", "b" * 64, "none", (), matrices), "d", 9, base, 1)
    assert (alone.num_modules, alone.num_base_modules, alone.rank, alone.dtype) == (1, 3, 0, "BF16")


def test_new_content_becomes_current_and_stands_first():
    first = cut_over(None, "x", "tiny", version("v1", at=5))
    second = cut_over(first, "x", "tiny", version("v2", at=9))
    assert second.current == "v2"
    assert [v.version_digest for v in second.versions] == ["v2", "v1"]
    assert (second.create_time_us, second.update_time_us) == (5, 9)


def test_the_current_content_again_changes_nothing():
    first = cut_over(None, "x", "tiny", version("v1", at=5))
    assert cut_over(first, "x", "tiny", version("v1", at=9)) is first


def test_older_content_becomes_current_again_in_its_place():
    both = cut_over(cut_over(None, "x", "tiny", version("v1", at=5)), "x", "tiny", version("v2", at=9))
    back = cut_over(both, "x", "tiny", version("v1", at=11))
    assert back.current_version == version("v1", at=5)
    assert back.versions == both.versions
    assert back.update_time_us == 11


def test_another_packing_of_a_version_replaces_its_artifact():
    both = cut_over(cut_over(None, "x", "tiny", version("v1", at=5)), "x", "tiny", version("v2", at=9))
    repacked = cut_over(both, "x", "tiny", version("v1", "other", at=11))
    assert repacked.current_version == version("v1", "other", at=5)
    assert [v.artifact_digest for v in repacked.versions] == ["a-v2", "other"]


def test_a_name_stays_with_its_base():
    first = cut_over(None, "x", "tiny", version("v1"))
    with pytest.raises(AlreadyExists) as caught:
        cut_over(first, "x", "other", version("v2"))
    assert caught.value.field == "name"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_any_sequence_of_uploads_ends_with_the_last_current_and_each_content_once(contents):
    adapter = None
    for at, content in enumerate(contents):
        adapter = cut_over(adapter, "x", "tiny", version(content, at=at))
    assert adapter is not None
    assert adapter.current == contents[-1]
    firsts = sorted(set(contents), key=contents.index, reverse=True)
    assert [v.version_digest for v in adapter.versions] == firsts
    assert [v.create_time_us for v in adapter.versions] == [contents.index(content) for content in firsts]


def test_change_log_payloads_are_read_back():
    entries = (
        BaseModelRecord("tiny", "d", "LlamaForCausalLM", 5, 1),
        AdapterRecord("default", "x", "tiny", "v1", (version("v1"), version("v0")), 1, 2),
        DeletedAdapter("default", "y"),
    )
    assert decode_entries(encode_entries(entries)) == entries
    assert encode_entries([dataclasses.replace(entries[0], base_id="ü")])
