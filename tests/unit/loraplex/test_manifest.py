from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.errors import CorruptArtifact, InvalidBaseModel
from loraplex.manifest import (
    MAX_HEADER_BYTES,
    chat_template,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
    weight_files,
)
from loraplex.safetensors_header import TensorEntry, read_header


@pytest.fixture
def base(tmp_path, tiny_base) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


def tensors_of(file: Path) -> Mapping[str, TensorEntry]:
    return read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors


def edit_json(file: Path, **fields) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def shard(folder: Path) -> None:
    """Split model.safetensors in two, as large models come."""
    whole = folder / "model.safetensors"
    header, raw = tensors_of(whole), whole.read_bytes()
    weight_map = {}
    for number, names in enumerate((sorted(header)[::2], sorted(header)[1::2]), start=1):
        file, at, blob, entries = f"model-{number:05}-of-00002.safetensors", 0, b"", {}
        for name in names:
            entry = header[name]
            stop = at + entry.stop - entry.start
            entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, stop]}
            blob, at, weight_map[name] = blob + raw[entry.start : entry.stop], stop, file
        head = json.dumps(entries).encode()
        (folder / file).write_bytes(len(head).to_bytes(8, "little") + head + blob)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_manifest_tells_tensors_and_parameters(base):
    manifest = read_manifest(base)
    header = tensors_of(base / "model.safetensors")
    assert [tensor.name for tensor in manifest.tensors] == sorted(header)
    embedding = next(tensor for tensor in manifest.tensors if tensor.name == "model.embed_tokens.weight")
    assert (embedding.shape, embedding.dtype) == ((300, 64), "F32")
    assert manifest.num_parameters == sum(entry.stop - entry.start for entry in header.values()) // 4


def test_the_digest_does_not_depend_on_how_the_weights_are_split_or_where_they_lie(base, tiny_base):
    whole = read_manifest(tiny_base).digest()
    shard(base)
    assert len(weight_files(base)) == 2
    assert read_manifest(base).digest() == whole


@pytest.mark.parametrize("field", ["_name_or_path", "transformers_version"])
def test_the_digest_does_not_depend_on_who_saved_the_config(base, field):
    before = read_manifest(base).digest()
    edit_json(base / "config.json", **{field: "other"})
    assert read_manifest(base).digest() == before


def one_weight(base: Path) -> None:
    file = base / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def a_config_field(base: Path) -> None:
    edit_json(base / "config.json", rope_theta=5e5)


def the_tokenizer(base: Path) -> None:
    (base / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + " ")


def the_template(base: Path) -> None:
    edit_json(base / "tokenizer_config.json", chat_template="{{ messages }}")


@pytest.mark.parametrize("change", [one_weight, a_config_field, the_tokenizer, the_template])
def test_the_digest_depends_on_all_that_changes_an_answer(base, change):
    before = read_manifest(base).digest()
    change(base)
    assert read_manifest(base).digest() != before


def test_json_brings_the_manifest_back(base):
    manifest = read_manifest(base)
    assert manifest_from_json(manifest_to_json(manifest)) == manifest


def test_the_cache_spares_the_hashing_until_a_file_changes(base, tmp_path):
    hashed: list[int] = []
    first = read_manifest(base, cache_dir=tmp_path / "cache", progress=hashed.append)
    assert sum(hashed) == first.num_parameters * 4
    hashed.clear()
    assert read_manifest(base, cache_dir=tmp_path / "cache", progress=hashed.append) == first
    assert hashed == []
    one_weight(base)
    assert read_manifest(base, cache_dir=tmp_path / "cache", progress=hashed.append).digest() != first.digest()
    assert hashed


def test_a_cache_that_cannot_be_written_is_only_a_slow_start(base, tmp_path):
    (tmp_path / "file").touch()
    assert read_manifest(base, cache_dir=tmp_path / "file") == read_manifest(base)


def test_a_damaged_cache_entry_is_only_a_slow_start(base, tmp_path):
    first = read_manifest(base, cache_dir=tmp_path)
    (entry,) = (tmp_path / "manifests").iterdir()
    entry.write_text("{")
    assert read_manifest(base, cache_dir=tmp_path) == first


def test_a_separate_template_file_wins(base):
    (base / "chat_template.jinja").write_text("separate")
    assert chat_template(base) == "separate"


def test_of_several_named_templates_the_default_is_taken(base):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_json(base / "tokenizer_config.json", chat_template=named)
    assert chat_template(base) == "plain"


def test_a_base_without_a_template_says_so(base):
    (base / "tokenizer_config.json").unlink()
    assert chat_template(base) is None
    assert read_manifest(base).chat_template_sha256 == ""


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(base, name):
    (base / name).unlink()
    with pytest.raises(InvalidBaseModel, match=name):
        read_manifest(base)


def test_missing_shards_are_named(base):
    shard(base)
    (base / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidBaseModel, match="model-00002-of-00002"):
        read_manifest(base)


def test_no_folder_is_said(tmp_path):
    with pytest.raises(InvalidBaseModel, match="not a folder"):
        read_manifest(tmp_path / "absent")


@pytest.mark.parametrize("text", ["{", "[]", '"text"'])
def test_a_config_that_is_no_object_is_refused(base, text):
    (base / "config.json").write_text(text)
    with pytest.raises(InvalidBaseModel, match=r"config\.json"):
        read_manifest(base)


DAMAGE = {
    "model.safetensors.index.json": ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', "[" * 100_000],
    "tokenizer_config.json": ["{", "[]", '"text"', "\udcff"],
    "chat_template.jinja": ["\udcff"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_any_other_damaged_file_is_named(base, name, text):
    (base / name).write_text(text, errors="surrogateescape")
    with pytest.raises(InvalidBaseModel, match=name):
        read_manifest(base)


def test_named_templates_without_a_template_are_none(base):
    edit_json(base / "tokenizer_config.json", chat_template=[5, {"name": "default"}])
    assert chat_template(base) is None


def test_a_folder_in_the_place_of_a_file_is_refused(base):
    (base / "tokenizer.json").unlink()
    (base / "tokenizer.json").mkdir()
    with pytest.raises(InvalidBaseModel, match=r"tokenizer\.json"):
        read_manifest(base)


@pytest.mark.parametrize("keep", [0, 5, 40, 4_000, -1])
def test_truncated_weights_are_refused(base, keep):
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptArtifact):
        read_manifest(base)


def test_a_header_longer_than_the_file_is_refused(base):
    file = base / "model.safetensors"
    file.write_bytes((2**63).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(CorruptArtifact):
        read_manifest(base)
