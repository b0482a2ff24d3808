"""Formats: what is packed, told, kept, changed and brought up to date, on a real registry."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from alembic import command

from common.adapter_format.packed import PackedAdapter, open_packed
from common.adapter_format.parts import dequantize
from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from registry.artifacts import ArtifactFolder
from registry.database import alembic_config, migrate, open_engine, parse_url
from registry.domain import VersionRecord, outdated
from registry.packing import repack
from registry.tables import VERSIONS
from tests.running_registry import (
    Client,
    eventually,
    header,
    refusal,
    registry_here,
    stored_files,
    upload_parts,
)
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

Format = Any  # the stubs alone know its name
NONE, INT8, INT4 = a.ADAPTER_FORMAT_NONE, a.ADAPTER_FORMAT_INT8, a.ADAPTER_FORMAT_INT4
NAMES = {NONE: "none", INT8: "int8", INT4: "int4"}
MOST = {"none": 0.0, "int8": 0.012, "int4": 0.2}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter"), base_folder, seed=1)


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def database(database_url):
    return database_url


@pytest.fixture
async def registry(state_dir, database, base_folder) -> AsyncIterator[Client]:
    async with registry_here(state_dir, database, default_quantization="none") as client:
        await client.add_base(base_folder)
        yield client


async def upload(
    client: Client, folder: Path, name: str, form: Format = a.ADAPTER_FORMAT_UNSPECIFIED
) -> a.UploadArtifactResponse:
    parts = upload_parts(folder, name)
    parts[0] = a.UploadArtifactRequest(header=a.UploadHeader(name=name, format=form))
    return await client.send(parts)


async def update(client: Client, name: str, form: Format) -> a.UpdateAdapterResponse:
    return await client.adapters.UpdateAdapter(a.UpdateAdapterRequest(name=name, format=form), timeout=30)


async def get(client: Client, name: str) -> a.GetAdapterResponse:
    return await client.adapters.GetAdapter(a.GetAdapterRequest(name=name), timeout=10)


async def fetched(client: Client, version: a.AdapterVersion, folder: Path) -> PackedAdapter:
    """Download a version's artifact, check its digest, and open it."""
    size, raw = await client.download(version.artifact_digest)
    assert size == len(raw) == version.artifact_bytes
    assert hashlib.sha256(raw).hexdigest() == version.artifact_digest
    (folder / version.artifact_digest).write_bytes(raw)
    return open_packed(folder / version.artifact_digest)


# --- registration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", NAMES)
async def test_an_adapter_is_packed_as_asked_and_its_report_is_true(registry, adapter_folder, tmp_path, form):
    exact = await fetched(registry, (await upload(registry, adapter_folder, "exact", NONE)).adapter.current, tmp_path)
    answer = await upload(registry, adapter_folder, "x", form)
    version, report, name = answer.adapter.current, answer.report, NAMES[form]
    assert (version.format, report.format, report.version_digest) == (name, name, version.version_digest)
    assert version.version_digest == exact.version_digest
    assert (version.rank, version.dtype, version.num_modules) == (4, "F32", 14)

    sizes = {size.format: size.size_bytes for size in report.sizes}
    assert sizes[name] == version.artifact_bytes
    assert sorted(sizes) == ["int4", "int8", "none"]

    errors_told = {entry.module: entry.relative_error for entry in report.modules}
    assert [entry.relative_error for entry in report.modules] == sorted(errors_told.values(), reverse=True)
    assert report.mean_error == pytest.approx(np.mean(list(errors_told.values())))
    assert max(errors_told.values()) <= MOST[name]
    packed = await fetched(registry, version, tmp_path)
    for module, source in zip(packed.modules, exact.modules, strict=True):
        weights = [
            np.sum([b.astype(np.float64) @ a for a, b in map(dequantize, one.parts)], axis=0)
            for one in (module, source)
        ]
        error = np.linalg.norm(weights[0] - weights[1]) / np.linalg.norm(weights[1])
        assert errors_told[module.name] == pytest.approx(error, rel=1e-3, abs=1e-9)
    assert list((await get(registry, "x")).reports) == [report]


async def test_the_default_is_the_registrys_unless_a_known_version_has_another(
    state_dir, database, base_folder, adapter_folder
):
    async with registry_here(state_dir, database, default_quantization="int8") as client:
        await client.add_base(base_folder)
        assert (await upload(client, adapter_folder, "x")).adapter.current.format == "int8"
        again = await upload(client, adapter_folder, "x", INT4)
        assert (again.changed, again.adapter.current.format, len(again.adapter.versions)) == (True, "int4", 1)
        kept = await upload(client, adapter_folder, "x")
        assert (kept.changed, kept.adapter) == (False, again.adapter)
        assert (await upload(client, adapter_folder, "y")).adapter.current.format == "int8"


async def test_a_base_of_odd_widths_gets_none_by_default_and_is_told_why_when_asked(state_dir, database, tmp_path):
    odd = write_tiny_base(tmp_path / "odd", hidden=40, heads=4, kv_heads=2)
    folder = write_adapter(tmp_path / "adapter", odd)
    async with registry_here(state_dir, database, default_quantization="int8") as client:
        await client.add_base(odd)
        assert (await upload(client, folder, "x")).adapter.current.format == "none"
        error = await refusal(upload(client, folder, "y", INT8), errors.UnsupportedAdapter)
        assert error.field == "quantization"
        assert "multiples of 16" in error.message
        await refusal(update(client, "x", INT4), errors.UnsupportedAdapter)
        assert (await get(client, "x")).adapter.current.format == "none"


async def test_unknown_formats_are_refused(registry, adapter_folder):
    assert (await refusal(upload(registry, adapter_folder, "x", 9), errors.InvalidParameter)).field == "format"
    await registry.send([header("x"), *upload_parts(adapter_folder, "x")[1:]])
    for form in (0, 9):
        assert (await refusal(update(registry, "x", form), errors.InvalidParameter)).field == "format"
    await refusal(update(registry, "nobody", INT8), errors.AdapterNotFound)
    await refusal(update(registry, "Not A Name", INT8), errors.InvalidName)


# --- another format ---------------------------------------------------------------------------------------------------


async def test_a_format_changes_in_one_transaction_and_back_without_an_upload(registry, adapter_folder, tmp_path):
    first = (await upload(registry, adapter_folder, "x")).adapter
    changed = await update(registry, "x", INT8)
    assert (changed.changed, changed.revision) == (True, 3)
    version = changed.adapter.current
    assert (version.format, version.version_digest) == ("int8", first.current.version_digest)
    assert version.artifact_digest != first.current.artifact_digest
    assert changed.adapter.update_time == first.update_time
    assert list(changed.adapter.versions) == [version]
    await fetched(registry, version, tmp_path)
    await fetched(registry, first.current, tmp_path)  # for those who were told of it before

    again = await update(registry, "x", INT8)
    assert (again.changed, again.revision, again.adapter, again.report) == (
        False,
        3,
        changed.adapter,
        changed.report,
    )
    smaller = (await update(registry, "x", INT4)).adapter.current
    assert smaller.artifact_bytes < version.artifact_bytes
    await fetched(registry, version, tmp_path)  # replaced, and in its grace
    back = await update(registry, "x", NONE)
    assert back.adapter.current == first.current
    assert back.report.mean_error == 0


async def test_only_the_current_version_changes_and_old_ones_tell_their_worst_module(
    registry, adapter_folder, base_folder, tmp_path
):
    await upload(registry, adapter_folder, "x", INT8)
    await upload(registry, write_adapter(tmp_path / "other", base_folder, seed=2), "x", INT8)
    await update(registry, "x", INT4)
    found = await get(registry, "x")
    assert [version.format for version in found.adapter.versions] == ["int4", "int8"]
    assert [(report.format, len(report.modules)) for report in found.reports] == [("int4", 14), ("int8", 1)]


async def test_replaced_artifacts_go_when_the_grace_is_over_but_the_exact_factors_stay(
    state_dir, database, base_folder, adapter_folder
):
    async with registry_here(state_dir, database, artifact_grace_s=0.3) as client:
        await client.add_base(base_folder)
        exact = (await upload(client, adapter_folder, "x", NONE)).adapter.current
        await update(client, "x", INT8)
        int4 = (await update(client, "x", INT4)).adapter.current
        wanted = sorted(f"{version.artifact_digest}.safetensors" for version in (exact, int4))
        await eventually(lambda: stored_files(state_dir) == wanted)
        await client.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))
        assert stored_files(state_dir) == []


async def test_a_registry_that_restarts_sweeps_what_was_replaced_and_keeps_the_sources(
    state_dir, database, base_folder, adapter_folder
):
    async with registry_here(state_dir, database) as client:
        await client.add_base(base_folder)
        await upload(client, adapter_folder, "x", INT8)
        await update(client, "x", INT4)
        assert len(stored_files(state_dir)) == 3
    async with registry_here(state_dir, database) as client:
        assert len(stored_files(state_dir)) == 2
        assert (await update(client, "x", NONE)).adapter.current.format == "none"


async def test_lost_factors_are_told_and_leave_the_artifact_in_its_place(registry, adapter_folder, state_dir):
    digest = (await upload(registry, adapter_folder, "x", NONE)).adapter.current.artifact_digest
    int8 = (await update(registry, "x", INT8)).adapter
    (state_dir / "artifacts" / digest[:2] / f"{digest}.safetensors").unlink()
    error = await refusal(update(registry, "x", INT4), errors.ArtifactUnreachable)
    assert digest in error.message
    assert (await get(registry, "x")).adapter == int8
    await upload(registry, adapter_folder, "x", INT8)  # brings them back
    assert (await update(registry, "x", INT4)).changed


# --- packers that are out of date -------------------------------------------------------------------------------------


async def forget_formats(state_dir: Path, database: str | None) -> None:
    """Make the versions what they are after the migration of a registry from before formats."""
    engine = open_engine(parse_url(database or f"sqlite:///{state_dir}/registry.sqlite3"))
    async with engine.begin() as connection:
        await connection.execute(sa.update(VERSIONS).values(packer=0, report=""))
    await engine.dispose()


async def formats(client: Client) -> dict[str, list[str]]:
    listed = await client.adapters.ListAdapters(a.ListAdaptersRequest())
    found = [await get(client, entry.name) for entry in listed.adapters]
    return {one.adapter.name: [version.format for version in one.adapter.versions] for one in found}


async def until(client: Client, wanted: dict[str, list[str]]) -> None:
    async with asyncio.timeout(60):
        while await formats(client) != wanted:  # noqa: ASYNC110 - the registry works in the background
            await asyncio.sleep(0.02)


async def test_versions_from_before_formats_are_packed_at_start_in_the_default(
    state_dir, database, base_folder, adapter_folder, tmp_path
):
    other = write_adapter(tmp_path / "other", base_folder, seed=2)
    async with registry_here(state_dir, database, default_quantization="none") as client:
        await client.add_base(base_folder)
        await upload(client, adapter_folder, "x")
        lost = (await upload(client, other, "x")).adapter.current.artifact_digest
        exact = (await upload(client, adapter_folder, "y")).adapter
    await forget_formats(state_dir, database)
    kept = state_dir / "artifacts" / lost[:2] / f"{lost}.safetensors"
    kept.rename(tmp_path / "kept")
    async with registry_here(state_dir, database, default_quantization="int8") as client:
        await until(client, {"x": ["none", "int8"], "y": ["int8"]})  # a version whose file is gone holds up no other
        assert (await get(client, "y")).reports[0].mean_error > 0
        after = (await get(client, "y")).adapter
        assert (after.current.version_digest, after.update_time) == (exact.current.version_digest, exact.update_time)
        await fetched(client, after.current, tmp_path)
    (tmp_path / "kept").rename(kept)
    async with registry_here(state_dir, database, default_quantization="int4") as client:
        await until(client, {"x": ["int4", "int8"], "y": ["int8"]})  # what is up to date keeps its format


async def test_a_failure_in_mid_repack_leaves_the_old_artifact_and_the_next_start_goes_on(
    state_dir, database, base_folder, adapter_folder, monkeypatch
):
    async with registry_here(state_dir, database, default_quantization="none") as client:
        await client.add_base(base_folder)
        before = (await upload(client, adapter_folder, "x")).adapter
    await forget_formats(state_dir, database)
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail(self, file, digest):
        loop.call_soon_threadsafe(failed.set)
        raise OSError("the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactFolder, "publish", fail)
        async with registry_here(state_dir, database, default_quantization="int8") as client:
            await asyncio.wait_for(failed.wait(), 60)
            assert (await get(client, "x")).adapter == before
            await client.download(before.current.artifact_digest)
        assert not list((state_dir / "incoming").iterdir())
    async with registry_here(state_dir, database, default_quantization="int8") as client:
        await until(client, {"x": ["int8"]})


async def test_a_format_that_is_chosen_while_the_registry_repacks_is_kept(
    state_dir, database, base_folder, adapter_folder, monkeypatch
):
    async with registry_here(state_dir, database) as client:
        await client.add_base(base_folder)
        await upload(client, adapter_folder, "x")
    await forget_formats(state_dir, database)
    begun, chosen = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert chosen.wait(60)
        return repack(*args)

    monkeypatch.setattr("registry.service.repacking.repack", slow)
    async with registry_here(state_dir, database, default_quantization="int8") as client:
        assert await asyncio.to_thread(begun.wait, 60)
        mine = (await upload(client, adapter_folder, "x", INT4)).adapter
        chosen.set()
        await eventually(lambda: not list((state_dir / "incoming").iterdir()))
        assert (await get(client, "x")).adapter == mine


def test_only_an_older_packer_is_out_of_date():
    version = VersionRecord("v", "a", "b", "int4", 4, 1, ("q_proj",), 1, 7, "F16", 1, packer=1)
    assert outdated(version, "int8") is None
    assert outdated(replace(version, format="int8"), "none") == "int8"  # its packer 2 adds corrections
    before_formats = VersionRecord("v", "a", "b", "none", 4, 1, ("q_proj",), 1, 7, "F16", 1)
    assert outdated(before_formats, "int8") == "int8"
    assert outdated(before_formats, "none") == "none"


async def test_the_migration_makes_old_versions_their_own_source(tmp_path, database_url):
    engine = open_engine(parse_url(database_url or f"sqlite:///{tmp_path}/x.sqlite3"))
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.run_sync(_down_to_second)
        for statement in (
            "INSERT INTO base_models VALUES ('tiny', 'd', 'L', 5, '{}', 1)",
            "INSERT INTO adapters VALUES ('default', 'x', 'tiny', 'v', 1, 1)",
            "INSERT INTO versions VALUES (1, 'default', 'x', 'v', 'art', 'd', 'none', 4, 77, 'q', 1, 7, 'F32', 1)",
        ):
            await connection.execute(sa.text(statement))
    await migrate(engine)
    async with engine.connect() as connection:
        row = (await connection.execute(sa.select(VERSIONS))).one()
    assert (row.packer, row.source_digest, row.source_bytes, row.report) == (0, "art", 77, "")
    await engine.dispose()


def _down_to_second(connection: sa.Connection) -> None:
    command.downgrade(alembic_config(connection), "0002")
