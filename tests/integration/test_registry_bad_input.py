"""Bad input to the registry: each kind gets its typed answer, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import (
    Client,
    data,
    eventually,
    file_header,
    header,
    nothing_is_left,
    refusal,
    registry_here,
    upload_parts,
)
from tests.tiny_adapters import adapter_config, adapter_tensors, write_adapter
from tests.tiny_base import write_safetensors, write_tiny_base

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter"), base_folder, seed=1)


# One registry answers all of this module: a refusal that left something behind would show in the next test.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry(state_dir, base_folder, fresh_database) -> AsyncIterator[Client]:
    with fresh_database() as url:
        async with registry_here(state_dir, url, max_upload_bytes=2**24, upload_idle_timeout_s=5) as client:
            await client.add_base(base_folder)
            yield client


async def serves_on(client: Client, adapter_folder) -> None:
    """A good adapter is still taken."""
    await client.upload(adapter_folder, "x")
    await client.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))


BAD_NAMES = ["", "..", "../x", "a/b", "/etc/passwd", "A", "-a", ".a", "a b", "a\0", "a\n", "ä", "a@b", "a" * 64]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_names_outside_the_grammar_are_refused_everywhere(registry, adapter_folder, state_dir, name):
    for call in (
        registry.upload(adapter_folder, name),
        registry.adapters.GetAdapter(a.GetAdapterRequest(name=name)),
        registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name)),
    ):
        assert (await refusal(call, errors.InvalidName)).field == "name"
    assert await nothing_is_left(registry, state_dir)


def _pickle_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return out.getvalue()


def _tensor(name, dtype, values):
    return lambda tensors: tensors.__setitem__(name, (dtype, values))


NAN = np.full((64, 4), np.nan, np.float32)
BAD_CONTENT = {
    "rank": ({"config": {"r": 8}}, errors.AdapterMismatch, {"tensor": f"{Q0}.lora_A.weight"}),
    "shape": (
        {"change": _tensor(f"{Q0}.lora_B.weight", "F32", np.ones((63, 4), np.float32))},
        errors.AdapterMismatch,
        {"tensor": f"{Q0}.lora_B.weight", "expected": "[64, 4]", "actual": "[63, 4]"},
    ),
    "module of another base": (
        {"change": _tensor(f"{Q0.replace('.0.', '.7.')}.lora_A.weight", "F32", np.ones((4, 64), np.float32))},
        errors.AdapterMismatch,
        {"tensor": f"{Q0.replace('.0.', '.7.')}.lora_A.weight"},
    ),
    "module without tensors": (
        {"config": {"target_modules": ["q_proj", "k_proj"]}},
        errors.AdapterMismatch,
        {"tensor": "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"},
    ),
    "NaN": (
        {"change": _tensor(f"{Q0}.lora_B.weight", "F32", NAN)},
        errors.CorruptArtifact,
        {"tensor": f"{Q0}.lora_B.weight"},
    ),
    "zero": (
        {"change": lambda tensors: [v.fill(0) for _, v in tensors.values()]},
        errors.InvalidAdapter,
        {"field": "adapter_model.safetensors"},
    ),
    "activated": (
        {"config": {"alora_invocation_tokens": [1]}},
        errors.UnsupportedAdapter,
        {"field": "alora_invocation_tokens"},
    ),
    "unknown field": ({"config": {"new": 1}}, errors.UnsupportedAdapter, {"field": "new"}),
    "config not JSON": ({"raw_config": b"{"}, errors.InvalidAdapter, {"field": "adapter_config.json"}),
    "truncated": ({"cut": -100}, errors.CorruptArtifact, {"file": "adapter_model.safetensors"}),
    "empty": ({"raw": b""}, errors.CorruptArtifact, {"file": "adapter_model.safetensors"}),
    "pickle": ({"raw": pickle.dumps({"w": 1})}, errors.UnsupportedAdapter, {"file": "adapter_model.safetensors"}),
    "pickle zip": ({"raw": _pickle_zip()}, errors.UnsupportedAdapter, {"file": "adapter_model.safetensors"}),
}


@pytest.mark.parametrize("case", BAD_CONTENT)
async def test_a_bad_adapter_is_refused_and_nothing_is_left(registry, base_folder, state_dir, tmp_path, case):
    made, kind, facts = BAD_CONTENT[case]
    folder = tmp_path / "adapter"
    folder.mkdir()
    tensors = adapter_tensors(base_folder, targets=("q_proj",))
    made.get("change", lambda _: None)(tensors)
    config = json.dumps(adapter_config(**{"target_modules": ["q_proj"], **made.get("config", {})})).encode()
    (folder / "adapter_config.json").write_bytes(made.get("raw_config", config))
    file = write_safetensors(folder / "adapter_model.safetensors", tensors)
    file.write_bytes(made.get("raw", file.read_bytes()[: made.get("cut")]))
    error = await refusal(registry.upload(folder, "x"), kind)
    assert facts.items() <= error.metadata.items()
    assert next(iter(facts.values())) in error.message
    assert await nothing_is_left(registry, state_dir)
    await serves_on(registry, write_adapter(tmp_path / "good", base_folder))


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
START = [header("x")]
BAD_STREAMS = {
    "nothing": ([], errors.InvalidRequest, "header"),
    "no header": ([file_header(CONFIG, b"{}")], errors.InvalidRequest, "header"),
    "empty message first": ([a.UploadArtifactRequest()], errors.InvalidRequest, "header"),
    "header only": (START, errors.InvalidAdapter, CONFIG),
    "config only": ([*START, file_header(CONFIG, b"{}"), *data(b"{}")], errors.InvalidAdapter, WEIGHTS),
    "weights only": ([*START, file_header(WEIGHTS, b"{}"), *data(b"{}")], errors.InvalidAdapter, CONFIG),
    "data before a file": ([*START, *data(b"x")], errors.InvalidRequest, "data"),
    "header twice": ([*START, *START], errors.InvalidRequest, "header"),
    "empty message": ([*START, a.UploadArtifactRequest()], errors.InvalidRequest, "part"),
    "file twice": (
        [*START, *[file_header(CONFIG, b"{}"), *data(b"{}")] * 2],
        errors.InvalidRequest,
        "file_header.name",
    ),
    "pickle by name": ([*START, file_header("adapter_model.bin", b"")], errors.UnsupportedAdapter, "file_header.name"),
    "foreign file": ([*START, file_header("README.md", b"")], errors.InvalidAdapter, "file_header.name"),
    "path upwards": ([*START, file_header(f"../{CONFIG}", b"")], errors.InvalidAdapter, "file_header.name"),
    "absolute path": ([*START, file_header("/etc/passwd", b"")], errors.InvalidAdapter, "file_header.name"),
    "name with NUL": ([*START, file_header(f"{CONFIG}\0", b"")], errors.InvalidAdapter, "file_header.name"),
    "endless name": ([*START, file_header("x" * 100_000, b"")], errors.InvalidAdapter, "file_header.name"),
    "no sha256": ([*START, file_header(CONFIG, b"", sha256="")], errors.InvalidParameter, "file_header.sha256"),
    "wrong sha256": ([*START, file_header(CONFIG, b"[]"), *data(b"{}")], errors.CorruptArtifact, None),
    "too little data": ([*START, file_header(CONFIG, b"{}"), *data(b"{")], errors.CorruptArtifact, None),
    "too much data": (
        [*START, file_header(CONFIG, b"{}"), *data(b"{}}")],
        errors.InvalidRequest,
        "file_header.size_bytes",
    ),
    "huge data message": (
        [*START, file_header(WEIGHTS, b"", size_bytes=2**24), a.UploadArtifactRequest(data=bytes(2**20 + 1))],
        errors.InvalidParameter,
        "data",
    ),
    "huge config": (
        [*START, file_header(CONFIG, b"", size_bytes=2**20 + 1)],
        errors.TooLarge,
        "file_header.size_bytes",
    ),
    "huge weights": (
        [*START, file_header(WEIGHTS, b"", size_bytes=2**24 + 1)],
        errors.TooLarge,
        "file_header.size_bytes",
    ),
    "endless size": (
        [*START, file_header(WEIGHTS, b"", size_bytes=2**64 - 1)],
        errors.TooLarge,
        "file_header.size_bytes",
    ),
}


@pytest.mark.parametrize("case", BAD_STREAMS)
async def test_a_bad_stream_is_refused_and_nothing_is_left(registry, state_dir, case):
    parts, kind, field = BAD_STREAMS[case]
    error = await refusal(registry.send(parts), kind)
    assert error.field == field
    assert len(error.message) < 500
    assert await nothing_is_left(registry, state_dir)


async def test_a_client_that_vanishes_in_mid_upload_leaves_nothing(registry, adapter_folder, state_dir):
    parts = upload_parts(adapter_folder, "x")
    call = registry.adapters.UploadArtifact()
    for part in parts[:4]:
        await call.write(part)
    await eventually(lambda: list((state_dir / "incoming").glob("*/adapter_config.json")))
    call.cancel()
    await eventually(lambda: not list((state_dir / "incoming").iterdir()))
    assert await nothing_is_left(registry, state_dir)
    await serves_on(registry, adapter_folder)


async def test_an_upload_that_stands_still_is_ended(tmp_path, database_url, base_folder):
    state_dir = tmp_path / "state"
    async with registry_here(state_dir, database_url, upload_idle_timeout_s=0.2) as client:
        await client.add_base(base_folder)

        async def silent() -> None:
            call = client.adapters.UploadArtifact()
            await call.write(header("x"))  # refused already, where it came too late
            await call

        await refusal(silent(), errors.DeadlineExceeded)
        assert await nothing_is_left(client, state_dir)


async def test_more_uploads_than_places_wait_their_turn(tmp_path, database_url, base_folder, adapter_folder):
    async with registry_here(tmp_path / "state", database_url, max_concurrent_uploads=1) as client:
        await client.add_base(base_folder)
        await asyncio.gather(*(client.upload(adapter_folder, f"n{i}") for i in range(5)))


async def test_a_full_disk_is_told_before_the_data_comes(registry, adapter_folder, state_dir, monkeypatch):
    usage = shutil.disk_usage(state_dir)
    monkeypatch.setattr("registry.artifacts.shutil.disk_usage", lambda path: usage._replace(free=50_000))
    error = await refusal(registry.upload(adapter_folder, "x"), errors.NoSpace)
    assert error.metadata["free_bytes"] == "50000"
    assert await nothing_is_left(registry, state_dir)


@pytest.mark.parametrize("digest", ["", "abc", "../../etc/passwd", "A" * 64, "0" * 65])
async def test_downloads_of_what_is_no_digest_are_refused(registry, digest):
    error = await refusal(registry.download(digest), errors.InvalidParameter)
    assert error.field == "artifact_digest"
