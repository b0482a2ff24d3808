"""`loraplex adapter merge` as a process, with a real registry: by name, version and folder, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.adapter_format.base import read_linears
from common.adapter_format.parts import dequantize
from common.adapter_format.tensor_file import open_tensors
from common.adapter_format.validate import validate
from loraplex.client import AsyncClient
from loraplex.errors import ArtifactNotFound, CorruptArtifact
from loraplex.manifest import read_manifest
from tests.running_registry import ROOT, Client, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, base) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), base, seed=1)


@pytest.fixture
async def registry(tmp_path, base, adapter) -> AsyncIterator[Client]:
    async with registry_here(tmp_path / "state", default_quantization="int8") as client:
        await client.add_base(base)
        await client.upload(adapter, "mine")
        yield client


async def merge(registry: Client | None, *arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "loraplex.cli", "adapter", "merge", *map(str, arguments)]
    if registry is not None:
        command += ["--registry", registry.address]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": os.devnull},  # nowhere: the base's manifest is not remembered
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def tensors(folder: Path) -> dict[str, Any]:
    return {name: tensor.array() for name, tensor in open_tensors(folder / "model.safetensors").tensors.items()}


def expected(base: Path, adapter: Path) -> dict[str, Any]:
    found = tensors(base)
    packed = validate(
        (adapter / "adapter_config.json").read_bytes(),
        adapter / "adapter_model.safetensors",
        read_linears(read_manifest(base)),
    )
    for module in packed.modules:
        (part,) = module.parts
        a, b = dequantize(part)
        found[f"model.{module.name}.weight"] = found[f"model.{module.name}.weight"] + b @ a
    return found


async def test_name_version_and_folder_give_the_same_model(tmp_path, base, adapter, registry) -> None:
    code, out, err = await merge(registry, "mine", tmp_path / "by-name", "--base-dir", base, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    async with AsyncClient(registry=registry.address) as client:
        version = (await client.get_adapter("mine")).current
    assert told["version_digest"] == version.version_digest
    assert told["format"] == "none"
    record = json.loads((tmp_path / "by-name" / "loraplex_merge.json").read_text())
    assert record["artifact_digest"] == version.exact_artifact_digest
    wanted = expected(base, adapter)
    for name, array in tensors(tmp_path / "by-name").items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)

    named = f"mine@{version.artifact_digest[:12]}"
    code, out, _ = await merge(registry, named, tmp_path / "by-version", "--base-dir", base)
    assert code == 0
    assert "holds the merged model" in out
    code, _, err = await merge(None, adapter, tmp_path / "by-folder", "--base-dir", base)
    assert (code, err) == (0, "")
    files = [(tmp_path / one / "model.safetensors").read_bytes() for one in ("by-name", "by-version", "by-folder")]
    assert files[0] == files[1] == files[2]

    code, out, _ = await merge(registry, "mine", tmp_path / "served", "--base-dir", base, "--artifact", "--json")
    assert code == 0
    assert json.loads(out)["format"] == "int8"
    off = (
        tensors(tmp_path / "served")["model.layers.0.mlp.up_proj.weight"] - wanted["model.layers.0.mlp.up_proj.weight"]
    )
    assert 1e-5 < np.abs(off).max() < 0.05


async def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path, base, adapter, registry) -> None:
    other = write_tiny_base(tmp_path / "other", seed=5)

    async def refused(words: str, *arguments: object) -> None:
        code, out, err = await merge(registry, *arguments)
        assert (code, out) == (1, "")
        assert words in err
        assert "Traceback" not in err

    await refused("no adapter", "nobody", tmp_path / "merged", "--base-dir", base)
    await refused("names no version", "mine@0123456789ab", tmp_path / "merged", "--base-dir", base)
    await refused("give the folder of the base", "mine", tmp_path / "merged", "--base-dir", other)
    await refused("holds no config.json", "mine", tmp_path / "merged", "--base-dir", tmp_path)
    await refused("exists", "mine", other, "--base-dir", base)
    await refused("--artifact is for registered", adapter, tmp_path / "merged", "--base-dir", base, "--artifact")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "state"]


async def test_downloads_are_checked_and_leave_no_half_file(tmp_path, registry) -> None:
    async with AsyncClient(registry=registry.address) as client:
        version = (await client.get_adapter("mine")).current
        told: list[tuple[int, int]] = []
        await client.download_artifact(version.artifact_digest, tmp_path / "whole", lambda *now: told.append(now))
        assert told[-1] == (version.artifact_bytes, version.artifact_bytes)
        assert (tmp_path / "whole").stat().st_size == version.artifact_bytes
        with pytest.raises(ArtifactNotFound):
            await client.download_artifact("0" * 64, tmp_path / "absent")
        stored = next(file for file in (tmp_path / "state").rglob(f"*{version.artifact_digest}*") if file.is_file())
        stored.chmod(0o600)
        raw = bytearray(stored.read_bytes())
        raw[-1] ^= 1
        stored.write_bytes(raw)
        with pytest.raises(CorruptArtifact):
            await client.download_artifact(version.artifact_digest, tmp_path / "damaged")
    assert not (tmp_path / "absent").exists()
    assert not (tmp_path / "damaged").exists()
