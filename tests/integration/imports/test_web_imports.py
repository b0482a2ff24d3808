"""Imports over HTTP from a real server: what comes, what breaks off, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import shutil

import grpc
import pytest

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.file_server import Answer
from tests.running_registry import Client, eventually, nothing_is_left, refusal, registry_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STALL_S = 0.4


@pytest.fixture
def folder(server, adapter_folder, request):
    """The path of a served adapter."""
    path = f"/{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}/"
    server.put_folder(path, adapter_folder)
    return path


async def imported(registry: Client, server, folder, adapter_folder) -> a.UploadArtifactResponse:
    """Import, and hold the version against that of an upload; both are deleted again."""
    registered = await registry.import_(server.base + folder)
    uploaded = await registry.upload(adapter_folder, "uploaded")
    assert registered.adapter.current.version_digest == uploaded.adapter.current.version_digest
    assert registered.adapter.current.source == server.base + folder
    assert uploaded.adapter.current.source == ""
    for name in ("x", "uploaded"):
        await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name))
    return registered


async def refused(registry, state_dir, source, kind) -> errors.LoraplexError:
    """Import what must be refused so, and leave nothing behind."""
    error = await refusal(registry.events(source), kind)
    assert await nothing_is_left(registry, state_dir)
    return error


async def test_a_folder_is_fetched_packed_and_told_of_with_its_source(registry, server, folder, adapter_folder):
    secret = server.base.replace("http://", "http://user:pass@") + f"{folder}?signature=secret"
    events = await registry.events(secret)
    assert [event.WhichOneof("event") for event in events[-2:]] == ["progress", "registered"]
    size = sum(file.stat().st_size for file in adapter_folder.iterdir())
    assert (events[-2].progress.received_bytes, events[-2].progress.total_bytes) == (size, size)
    told = (await registry.adapters.GetAdapter(a.GetAdapterRequest(name="x"))).adapter
    assert told.current.source == events[-2].progress.source == server.base + folder
    [asked] = server.asked(folder + WEIGHTS)
    assert asked.headers["authorization"] == "Basic dXNlcjpwYXNz"
    assert asked.target.endswith("?signature=secret")
    again = await registry.import_(f"{server.base}{folder}{CONFIG}")  # a file of the folder names it too
    assert not again.changed
    # Of equal content the first source is kept, whatever brings it again.
    assert (await registry.upload(adapter_folder, "x")).adapter.current.source == told.current.source
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))


async def test_a_download_that_breaks_off_goes_on_where_it_was(registry, server, folder, adapter_folder):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    server.put(folder + WEIGHTS, Answer(raw, until=5000), Answer(b"", 503), Answer(raw, until=7000), Answer(raw))
    await imported(registry, server, folder, adapter_folder)
    ranges = [request.headers.get("range") for request in server.asked(folder + WEIGHTS)]
    assert ranges == [None, "bytes=5000-", "bytes=5000-", "bytes=12000-"]


async def test_a_server_without_ranges_or_tags_is_read_from_the_start(registry, server, folder, adapter_folder):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    server.put(folder + WEIGHTS, Answer(raw, until=5000), Answer(raw, ranges=False, until=9000), Answer(raw))
    server.put(folder + CONFIG, Answer((adapter_folder / CONFIG).read_bytes(), until=10, tagged=False),
               Answer((adapter_folder / CONFIG).read_bytes(), tagged=False))  # fmt: skip
    await imported(registry, server, folder, adapter_folder)
    assert [request.headers.get("range") for request in server.asked(folder + CONFIG)] == [None, None]


async def test_a_file_that_changes_between_two_parts_is_never_mixed(registry, server, folder, adapter_folder):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    old = raw[:4000] + bytes(len(raw) - 4000)
    server.put(folder + WEIGHTS, Answer(old, until=8000), Answer(raw))
    await imported(registry, server, folder, adapter_folder)


async def test_a_download_that_stands_still_is_asked_again_and_then_given_up(
    tmp_path, base_folder, server, folder, adapter_folder
):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    server.put(folder + WEIGHTS, Answer(raw, until=3000, stalls=True), Answer(raw))
    rules = {"import_schemes": "http", "import_private_hosts": "127.0.0.1"}
    async with registry_here(tmp_path, import_stall_s=STALL_S, **rules) as registry:
        await registry.add_base(base_folder)
        await imported(registry, server, folder, adapter_folder)
        server.put(folder + WEIGHTS, Answer(raw, until=3000, stalls=True), Answer(raw, until=0, stalls=True))
        error = await refused(registry, tmp_path, server.base + folder, errors.SourceTimeout)
    assert f"stood still for {STALL_S:g} s" in error.message
    assert WEIGHTS in error.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, errors.SourceNotFound), (410, errors.SourceNotFound), (401, errors.SourceForbidden),
     (403, errors.SourceForbidden), (500, errors.SourceUnreachable), (304, errors.SourceUnreachable)],
)  # fmt: skip
async def test_refusals_of_the_server_are_told_as_what_they_are(registry, state_dir, server, folder, status, kind):
    server.put(folder + CONFIG, Answer(b"<html>", status))
    error = await refused(registry, state_dir, f"{server.base}{folder}?key=secret", kind)
    assert folder + CONFIG in error.message
    assert "secret" not in error.message
    assert len(server.asked(folder + CONFIG)) == (4 if kind is errors.SourceUnreachable else 1)


async def test_what_is_too_large_is_refused_before_and_while_it_comes(registry, state_dir, server, folder):
    server.put(folder + WEIGHTS, Answer(b"x", announced=2**24))
    before = await refused(registry, state_dir, server.base + folder, errors.TooLarge)
    assert before.metadata["limit"] == str(2**24 - int(_config_size(server, folder)))
    server.put(folder + CONFIG, Answer(b" " * (2**20 + 1)))
    await refused(registry, state_dir, server.base + folder, errors.TooLarge)
    assert len(server.asked(folder + WEIGHTS)) == 1


def _config_size(server, folder) -> int:
    return len(server.acts[folder + CONFIG][0](None).body)


async def test_a_truncated_or_damaged_file_is_refused(registry, state_dir, server, folder, adapter_folder):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    server.put(folder + WEIGHTS, Answer(raw[:-100]))  # whole, as far as HTTP can tell
    await refused(registry, state_dir, server.base + folder, errors.CorruptArtifact)
    server.put(folder + WEIGHTS, Answer(raw[:900], announced=len(raw)))
    await refused(registry, state_dir, server.base + folder, errors.SourceUnreachable)


async def test_weights_that_are_not_those_that_were_asked_for_are_refused(
    registry, state_dir, server, folder, adapter_folder
):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    actual, asked = (hashlib.sha256(some).hexdigest() for some in (raw, raw[::-1]))
    source = server.base + folder
    error = await refusal(registry.events(source, weights_sha256=asked), errors.CorruptArtifact)
    assert (error.field, error.metadata["file"]) == ("weights_sha256", WEIGHTS)
    assert actual[:12] in error.message
    assert asked[:12] in error.message
    assert await nothing_is_left(registry, state_dir)
    assert len(server.asked(folder + WEIGHTS)) == 1  # it is not tried again
    server.put(folder + WEIGHTS, Answer(raw, until=5000), Answer(raw))
    assert (await registry.import_(source, weights_sha256=actual)).changed
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))


@pytest.mark.parametrize("digest", ["x", "ab" * 31, "ab" * 33, "AB" * 32, "0x" + "ab" * 31])
async def test_what_is_no_digest_is_refused_before_anything_is_fetched(registry, server, folder, digest):
    error = await refusal(registry.events(server.base + folder, weights_sha256=digest), errors.InvalidParameter)
    assert error.field == "weights_sha256"
    assert not server.asked(folder + CONFIG)


@pytest.mark.parametrize(
    "target",
    ["http://localhost:1/x", "http://169.254.169.254/latest/meta-data/", "http://[::1]:1/", "file:///etc/passwd",
     "ftp://127.0.0.1/x", "http://127.0.0.1.nip.invalid/"],
)  # fmt: skip
async def test_a_redirect_leads_nowhere_that_the_url_may_not(registry, state_dir, server, folder, target):
    server.put(folder + CONFIG, Answer(b"", 302, {"Location": target}))
    kind = errors.SourceUnreachable if "invalid" in target else errors.SourceForbidden
    await refused(registry, state_dir, server.base + folder, kind)


@pytest.mark.parametrize("target", ["http://[", "https://[::1", "//[x]:y/"])
async def test_a_redirect_to_what_is_no_url_is_told_as_that(registry, state_dir, server, folder, target):
    server.put(folder + CONFIG, Answer(b"", 302, {"Location": target}))
    error = await refused(registry, state_dir, server.base + folder, errors.SourceUnreachable)
    assert "no URL" in error.message


async def test_a_size_that_no_file_has_is_no_size(registry, state_dir, server, folder):
    ranges = {"Content-Range": f"bytes {'9' * 5000}-{'9' * 5000}/{'9' * 5000}"}
    server.put(folder + CONFIG, Answer(b"{}", 206, ranges))
    await refused(registry, state_dir, server.base + folder, errors.SourceUnreachable)


async def test_redirects_are_followed_without_credentials_and_not_for_ever(
    registry, state_dir, server, folder, adapter_folder
):
    host = server.base.replace("127.0.0.1", "localhost")
    server.put(folder + CONFIG, Answer(b"", 302, {"Location": "moved"}))
    server.put(folder + "moved", (adapter_folder / CONFIG).read_bytes())
    await imported(registry, server, folder, adapter_folder)
    server.put(folder + CONFIG, Answer(b"", 302, {"Location": CONFIG}))
    error = await refused(registry, state_dir, server.base + folder, errors.SourceUnreachable)
    assert "redirects more than 5 times" in error.message
    server.put(folder + CONFIG, Answer(b"", 307, {"Location": f"{host}{folder}moved"}))
    await refused(registry, state_dir, server.base + folder, errors.SourceForbidden)


async def test_eight_stalled_imports_hold_up_neither_an_upload_nor_another_import(
    registry, server, folder, adapter_folder
):
    slow = folder.rstrip("/") + "-slow/"
    server.put_folder(slow, adapter_folder)
    server.put(slow + CONFIG, Answer(b"{", announced=100, until=1, stalls=True))
    before = server.stalling
    stalled = [asyncio.ensure_future(registry.events(server.base + slow, f"slow{i}")) for i in range(8)]
    await server.until_stalling(before + 8)
    await registry.upload(adapter_folder, "uploaded")
    await registry.import_(server.base + folder)
    assert not any(task.done() for task in stalled)
    for task in stalled:
        task.cancel()
    await asyncio.wait(stalled)
    for name in ("x", "uploaded"):
        await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name))


async def test_a_cancelled_import_leaves_nothing_and_gives_its_place_back(
    registry, state_dir, server, folder, adapter_folder
):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    server.put(folder + WEIGHTS, Answer(raw, until=3000, stalls=True), Answer(raw))
    before = server.stalling
    call = registry.adapters.ImportAdapter(a.ImportAdapterRequest(name="x", source=server.base + folder))
    await server.until_stalling(before + 1)
    await eventually(lambda: list((state_dir / "incoming").glob(f"*/{WEIGHTS}")))
    call.cancel()
    await eventually(lambda: not list((state_dir / "incoming").iterdir()))
    await imported(registry, server, folder, adapter_folder)


async def test_what_a_client_did_wrong_is_told_before_anything_is_fetched(registry, server, folder):
    for fields, kind in (
        ({"name": "../x"}, errors.InvalidName),
        ({"base_id": "unknown"}, errors.BaseModelNotFound),
        ({"format": 99}, errors.InvalidParameter),
        ({"name": "tiny"}, errors.AlreadyExists),
    ):
        await refusal(registry.events(server.base + folder, **fields), kind)
    assert not server.asked(folder + CONFIG)


async def test_a_full_disk_is_told_and_over_when_there_is_room(
    registry, state_dir, server, folder, adapter_folder, monkeypatch
):
    usage = shutil.disk_usage(state_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    error = await refused(registry, state_dir, server.base + folder, errors.NoSpace)
    assert error.metadata["free_bytes"] == "1000"
    monkeypatch.undo()
    await imported(registry, server, folder, adapter_folder)


async def test_a_call_whose_time_is_up_ends_the_import(registry, state_dir, server, folder):
    server.put(folder + CONFIG, Answer(b"{", announced=9, until=1, stalls=True))
    request = a.ImportAdapterRequest(name="x", source=server.base + folder)
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in registry.adapters.ImportAdapter(request, timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: not list((state_dir / "incoming").iterdir()))
