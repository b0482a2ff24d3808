"""Imports by path: below the import root, and nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import nothing_is_left, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def root(import_root, adapter_folder):
    """The import root with one adapter, sql, anew."""
    for entry in import_root.iterdir():
        entry.unlink() if entry.is_symlink() else shutil.rmtree(entry)
    shutil.copytree(adapter_folder, import_root / "sql")
    return import_root


@pytest.mark.parametrize(
    "form", ["sql", "./sql/", "{root}/sql", "file:sql", "file://{root}/sql", "{root}/../{name}/sql"]
)
async def test_every_form_of_a_path_below_the_root_is_read(registry, root, form):
    registered = await registry.import_(form.format(root=root, name=root.name))
    assert registered.adapter.current.source == "file:sql"
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))


async def test_a_folder_s_weights_are_held_against_the_digest_that_was_asked_for(registry, state_dir, root):
    digest = hashlib.sha256((root / "sql" / WEIGHTS).read_bytes()).hexdigest()
    error = await refusal(registry.events("sql", weights_sha256="ab" * 32), errors.CorruptArtifact)
    assert error.field == "weights_sha256"
    assert await nothing_is_left(registry, state_dir)
    assert (await registry.import_("sql", weights_sha256=digest)).changed
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))


async def test_links_inside_the_root_are_followed_and_none_out_of_it(
    registry, state_dir, root, adapter_folder, tmp_path
):
    (root / "link").symlink_to("sql")
    assert (await registry.import_("link")).adapter.current.source == "file:sql"
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))
    (root / "out").symlink_to(adapter_folder)
    (root / "half").mkdir()
    shutil.copy(root / "sql" / CONFIG, root / "half")
    (root / "half" / WEIGHTS).symlink_to(adapter_folder / WEIGHTS)
    sibling = root.with_name(root.name + "-other")
    shutil.copytree(adapter_folder, sibling)
    for path in ("out", "half", "..", "../../etc", "/etc", str(sibling), f"../{sibling.name}", str(adapter_folder)):
        error = await refusal(registry.events(path), errors.SourceForbidden)
        assert "import root" in error.message
    assert await nothing_is_left(registry, state_dir)


async def test_what_is_missing_or_no_plain_file_is_told_so(registry, state_dir, root):
    await refusal(registry.events("nothing"), errors.SourceNotFound)
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / CONFIG)
    assert "plain file" in (await refusal(registry.events("pipe"), errors.InvalidParameter)).message
    await refusal(registry.events(f"sql/{CONFIG}"), errors.SourceNotFound)
    (root / "circle").symlink_to("circle")
    for path in ("circle", "circle/sql"):
        assert "circle" in (await refusal(registry.events(path), errors.InvalidParameter)).message
    (root / "sql" / WEIGHTS).write_bytes(b"x" * 2**24)
    await refusal(registry.events("sql"), errors.TooLarge)
    assert await nothing_is_left(registry, state_dir)


async def test_a_link_that_appears_after_the_path_was_judged_is_not_followed(
    registry, root, adapter_folder, monkeypatch
):
    real = os.open

    def swapping(path, flags, *args, dir_fd=None, **kwargs):
        if path == "sql" and dir_fd is not None:
            shutil.rmtree(root / "sql")
            (root / "sql").symlink_to(adapter_folder)
        return real(path, flags, *args, dir_fd=dir_fd, **kwargs)

    monkeypatch.setattr(os, "open", swapping)
    await refusal(registry.events("sql"), errors.SourceNotFound)  # ENOTDIR: a link is no folder here
