from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from loraplex.cli import base_source
from loraplex.cli.base_source import Base, default_base_id, resolve_base
from loraplex.cli.tree import find_tree
from loraplex.errors import FailedPrecondition, InvalidBaseModel, Unavailable


def silent(_: str) -> None:
    pass


def test_a_folder_is_itself_and_named_after_itself(tiny_base):
    assert resolve_base(str(tiny_base), None, silent) == Base(tiny_base, "tiny")
    assert resolve_base(str(tiny_base), "owner/name", silent).base_id == "owner/name"


def test_a_folder_of_the_hub_cache_has_the_hubs_name():
    folder = Path("/cache/hub/models--owner--some--model/snapshots/abc")
    assert default_base_id(folder) == "abc"  # two separators: not an id we could be sure of
    assert default_base_id(Path("/cache/hub/models--owner--model/snapshots/abc")) == "owner/model"


@pytest.mark.parametrize("source", ["nowhere", "./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all", ""])
def test_what_is_neither_folder_nor_id_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidBaseModel, match="neither a folder here nor a Hugging Face id"):
        resolve_base(source, None, silent)


def test_a_file_is_refused(tiny_base):
    with pytest.raises(InvalidBaseModel, match="is a file"):
        resolve_base(str(tiny_base / "config.json"), None, silent)


def test_an_id_that_cannot_be_fetched_says_so_and_names_the_way_out(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    said: list[str] = []
    with pytest.raises(Unavailable, match=r"owner/model is not in the local cache.*--base DIR"):
        resolve_base("owner/model", None, said.append)
    assert "owner/model" in said[0]


def test_only_what_a_base_needs_is_fetched(monkeypatch, tiny_base):
    import fnmatch

    import huggingface_hub

    asked = {}

    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked[hub_id] = allow_patterns
        return str(tiny_base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_base("owner/model", None, silent) == Base(tiny_base, "owner/model")
    repository = ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "model.gguf", "run.py"]
    wanted = [name for name in repository if any(fnmatch.fnmatch(name, pattern) for pattern in asked["owner/model"])]
    assert wanted == ["config.json", "model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_base_is_refused_before_anything_starts(name, tiny_base, tmp_path):
    folder = shutil.copytree(tiny_base, tmp_path / "base")
    (folder / name).unlink()
    with pytest.raises(InvalidBaseModel, match=name):
        resolve_base(str(folder), None, silent)


def test_without_the_hub_package_an_id_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FailedPrecondition, match="huggingface-hub"):
        resolve_base("owner/model", None, silent)


def a_tree(folder: Path, demo_base: str) -> Path:
    (folder / "examples").mkdir()
    (folder / "examples" / "__init__.py").touch()
    (folder / "examples" / "demo_base.py").write_text(demo_base)
    return folder


def test_the_demo_base_is_what_its_script_prints_last(monkeypatch, tmp_path):
    tree = a_tree(tmp_path, "print('working'); print('/some/where')")
    monkeypatch.setattr(base_source, "find_tree", lambda: tree)
    assert resolve_base(None, None, silent) == Base(Path("/some/where"), "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_demo_base_that_cannot_be_had_names_the_way_out(monkeypatch, tmp_path, capfd):
    tree = a_tree(tmp_path, "import sys; print('no network', file=sys.stderr); sys.exit(1)")
    monkeypatch.setattr(base_source, "find_tree", lambda: tree)
    with pytest.raises(FailedPrecondition, match="--base DIR"):
        resolve_base(None, None, silent)
    assert "no network" in capfd.readouterr().err


def test_the_tree_is_the_one_this_package_lies_in(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (find_tree() / "loraplex" / "cli" / "tree.py").samefile(base_source.__file__.replace("base_source", "tree"))


def test_an_installed_package_without_the_tree_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loraplex.cli.tree.__file__", str(tmp_path / "site-packages" / "loraplex" / "cli" / "tree.py"))
    with pytest.raises(FailedPrecondition, match="checkout"):
        find_tree()
