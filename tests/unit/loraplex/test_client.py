from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from loraplex.client import AsyncClient, Client, Message, Sampling, TextDelta, Timeouts, gather
from loraplex.errors import (
    AdapterNotFound,
    AlreadyExists,
    DeadlineExceeded,
    InvalidAdapter,
    InvalidParameter,
    InvalidRequest,
    LoraplexError,
    ModelNotFound,
    RegistryUnavailable,
    SourceNotFound,
    Unavailable,
)
from loraplex.manifest import read_manifest
from loraplex.records import ImportProgress


@pytest.fixture
def client(fake_cluster):
    with Client(fake_cluster.address, fake_cluster.address) as client:
        yield client


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that is taken, so that nobody else comes to listen there, and that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


def test_events_come_in_the_order_of_the_stream(client):
    completion = gather(client.generate("base", "to be or"))
    assert completion.text == "to be or "
    assert completion.choices[0].token_ids == (2, 2, 2)
    assert (completion.facts.tier_hit, completion.facts.adapter_load_s) == ("disk", 0.25)


def test_each_kind_of_input_reaches_the_router(client, fake_cluster):
    gather(client.generate("m", messages=[Message("system", "s"), Message("user", "u")]))
    gather(client.generate("m", token_ids=[1, 2], sampling=Sampling(temperature=0.0, n=2), request_id="r1"))
    chat, tokens = fake_cluster.requests
    assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "s"), ("user", "u")]
    assert list(tokens.tokens.token_ids) == [1, 2]
    assert (tokens.sampling.n, tokens.sampling.HasField("temperature")) == (2, True)
    assert fake_cluster.metadata[1]["x-loraplex-request-id"] == "r1"


def test_the_servers_error_comes_back_as_its_class(client):
    with pytest.raises(ModelNotFound, match="`loraplex models` lists them") as raised:
        gather(client.generate("unknown", "x"))
    assert raised.value.metadata == {"model": "unknown"}


def test_an_evaluation_is_asked_of_the_router_and_recorded_at_the_registry(client, fake_cluster, tiny_adapter):
    current = client.add_adapter("sql", tiny_adapter, quantization="int8").adapter.current
    told: list[tuple[int, int]] = []
    evaluation = client.evaluate_adapter("sql", progress=lambda *done: told.append(done))
    assert told == [(0, 2), (1, 2)]
    assert (evaluation.artifact_digest, evaluation.exact_artifact_digest) == (current.artifact_digest, "e" * 64)
    assert (evaluation.format, evaluation.top1_agreement, evaluation.mean_kl) == ("int8", 0.975, 0.00123)
    assert client.get_adapter("sql").evaluations == (evaluation,)
    with pytest.raises(InvalidParameter, match="packed as int8") as caught:
        client.evaluate_adapter("sql", quantization="int4")
    assert caught.value.field == "quantization"
    with pytest.raises(AdapterNotFound):
        client.evaluate_adapter("nobody")


def test_leaving_the_iterator_cancels_the_request(client, fake_cluster):
    events = client.generate("endless", "x")
    assert isinstance(next(events), TextDelta)
    events.close()
    assert fake_cluster.cancelled.wait(60)


def test_a_deadline_travels_and_ends_the_stream(client, fake_cluster):
    with pytest.raises(DeadlineExceeded, match="had finished"):
        gather(client.generate("endless", "x", timeout_s=0.3))
    gather(client.generate("m", "x", timeout_s=60))
    gather(client.generate("m", "x"))
    given, unless_given = fake_cluster.remaining_s[-2:]  # the first call's may have passed before the server began it
    assert 0 < given <= 61  # gRPC rounds up
    assert 500 < unless_given <= 1.02 * Timeouts().generate_s


def test_an_adapter_is_uploaded_byte_by_byte(client, fake_cluster, tiny_adapter):
    sent: list[int] = []
    done = client.add_adapter("sql", tiny_adapter, base_id="tiny", progress=sent.append)
    assert (done.adapter.name, done.adapter.base_id, done.revision, done.changed) == ("sql", "tiny", 1, True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert fake_cluster.uploads["sql"][name] == (tiny_adapter / name).read_bytes()
    assert sum(sent) == sum(len(data) for data in fake_cluster.uploads["sql"].values())
    assert client.add_adapter("sql", tiny_adapter).changed is False


def test_an_import_is_asked_for_and_its_progress_told(client, fake_cluster):
    told: list[ImportProgress] = []
    done = client.import_adapter("sql", "hf://acme/sql", base_id="tiny", quantization="int4", progress=told.append)
    assert (done.adapter.current.source, done.adapter.current.format) == ("hf://acme/sql", "int4")
    assert told == [ImportProgress("hf://acme/sql", received, 1024) for received in (0, 512, 1024)]
    assert client.min_revision == done.revision == 1
    with pytest.raises(SourceNotFound):
        client.import_adapter("sql", "s3://bucket/missing")
    with pytest.raises(InvalidRequest):
        client.import_adapter("sql", "\udc80")


async def test_the_asynchronous_client_imports_too(fake_cluster):
    told: list[ImportProgress] = []
    async with AsyncClient(fake_cluster.address, fake_cluster.address) as client:
        done = await client.import_adapter("sql", "https://host/sql/", progress=told.append)
        assert done.adapter.current.source == "https://host/sql/"
        assert len(told) == 3
        with pytest.raises(SourceNotFound):
            await client.import_adapter("sql", "s3://bucket/missing")


def test_a_format_is_asked_for_and_changed(client, fake_cluster, tiny_adapter):
    done = client.add_adapter("sql", tiny_adapter, quantization="int4")
    assert done.adapter.current.format == "int4"
    assert done.report == client.get_adapter("sql").reports[0]
    assert (done.report.format, done.report.mean_error, done.report.sizes["int8"]) == ("int4", 0.0123, 2048)
    assert done.report.errors[0] == ("layers.0.mlp.up_proj", 0.5)
    changed = client.repack_adapter("sql", "none")
    assert (changed.changed, changed.revision, changed.adapter.current.format) == (True, 2, "none")
    assert client.repack_adapter("sql", "none").changed is False
    list(client.list_models())
    assert fake_cluster.metadata[-1]["x-loraplex-min-revision"] == "2"


def test_an_unknown_format_is_refused_before_anything_is_sent(client, fake_cluster, tiny_adapter):
    with pytest.raises(InvalidParameter, match="int8, int4, none"):
        client.add_adapter("sql", tiny_adapter, quantization="fp8")
    assert fake_cluster.uploads == {}


def test_nothing_is_sent_for_a_folder_that_is_no_adapter(client, fake_cluster, tmp_path):
    with pytest.raises(InvalidAdapter):
        client.add_adapter("sql", tmp_path)
    assert fake_cluster.uploads == {}


def test_a_client_reads_its_own_writes(client, fake_cluster, tiny_adapter):
    gather(client.generate("m", "x"))
    assert "x-loraplex-min-revision" not in fake_cluster.metadata[-1]
    client.add_adapter("sql", tiny_adapter)
    gather(client.generate("sql", "x"))
    assert fake_cluster.metadata[-1]["x-loraplex-min-revision"] == "1"
    client.remove_adapter("sql")
    list(client.list_models())
    assert fake_cluster.metadata[-1]["x-loraplex-min-revision"] == "2"


def test_lists_go_on_over_pages(client, tiny_adapter):
    for name in ("a", "b", "c", "d", "e"):
        client.add_adapter(name, tiny_adapter)
    assert [adapter.name for adapter in client.list_adapters()] == ["a", "b", "c", "d", "e"]
    assert [model.name for model in client.list_models()] == ["a", "b", "c", "d", "e"]


def test_adapters_are_shown_and_removed(client, tiny_adapter):
    client.add_adapter("sql", tiny_adapter)
    assert client.get_adapter("sql").versions[0].rank == 4
    assert client.get_model("sql").parent == "tiny"
    assert client.remove_adapter("sql") == 2
    for call in (client.get_adapter, client.remove_adapter):
        with pytest.raises(AdapterNotFound):
            call("sql")


def test_a_base_is_registered_by_its_manifest(client, tiny_base):
    manifest = read_manifest(tiny_base)
    done = client.add_base("tiny", manifest)
    assert done.base_model.digest == manifest.digest()
    assert [base.base_id for base in client.list_bases()] == ["tiny"]
    other = type(manifest)(manifest.config_json, "0" * 64, "", manifest.tensors)
    with pytest.raises(AlreadyExists):
        client.add_base("tiny", other)


def test_workers_are_listed_with_their_adapters(client):
    (worker,) = client.list_workers()
    assert (worker.worker_id, worker.state) == ("w0", "serving")
    assert (worker.adapters[0].names, worker.adapters[0].tier) == (("sql",), "device")


def test_an_absent_service_is_named_with_its_address(nobody):
    with Client(nobody, nobody) as client:
        with pytest.raises(Unavailable, match=f"the router at {nobody} cannot be reached") as raised:
            list(client.list_models())
        assert raised.value.metadata == {"service": "router", "address": nobody}
        with pytest.raises(RegistryUnavailable, match=f"the registry at {nobody}"):
            list(client.list_adapters())


def test_the_wrong_service_behind_an_address_is_said(fake_cluster, tiny_adapter):
    import asyncio
    import threading

    from common.rpc import Server

    up, down, loop, port = threading.Event(), asyncio.Event(), asyncio.new_event_loop(), []

    async def serve() -> None:
        server = Server([], [])
        port.append(await server.start("127.0.0.1", 0))
        up.set()
        await down.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(60)
    try:
        with (
            Client(f"127.0.0.1:{port[0]}") as client,
            pytest.raises(LoraplexError, match="not a Loraplex router"),
        ):
            list(client.list_models())
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join(60)
        loop.close()


async def test_the_asynchronous_client_does_the_same(fake_cluster, tiny_base, tiny_adapter):
    async with AsyncClient(fake_cluster.address, fake_cluster.address) as client:
        await client.add_base("tiny", read_manifest(tiny_base))
        for name in ("a", "b", "c"):
            await client.add_adapter(name, tiny_adapter, base_id="tiny")
        assert client.min_revision == 4
        texts = [event.text async for event in client.generate("a", "to be") if isinstance(event, TextDelta)]
        assert texts == ["to ", "be "]
        assert fake_cluster.metadata[-1]["x-loraplex-min-revision"] == "4"
        assert [adapter.name async for adapter in client.list_adapters()] == ["a", "b", "c"]
        assert [model.name async for model in client.list_models()] == ["tiny", "a", "b", "c"]
        assert [base.base_id async for base in client.list_bases()] == ["tiny"]
        assert [worker.worker_id async for worker in client.list_workers()] == ["w0"]
        assert (await client.get_adapter("a")).name == (await client.get_model("a")).name
        assert await client.remove_adapter("a") == 5
        told: list[tuple[int, int]] = []
        evaluation = await client.evaluate_adapter("b", progress=lambda *done: told.append(done), timeout_s=9)
        assert (told, evaluation.num_positions, client.min_revision) == ([(0, 2), (1, 2)], 80, 6)
        assert (await client.get_adapter("b")).evaluations == (evaluation,)
        with pytest.raises(AdapterNotFound):
            await client.get_adapter("a")
        with pytest.raises(ModelNotFound):
            _ = [event async for event in client.generate("unknown", "x")]


async def test_closing_an_asynchronous_stream_cancels_the_request(fake_cluster):
    async with AsyncClient(fake_cluster.address) as client:
        events = client.generate("endless", "x")
        await anext(events)
        await events.aclose()
        import asyncio

        assert await asyncio.to_thread(fake_cluster.cancelled.wait, 60)


async def test_the_asynchronous_client_names_an_absent_router(nobody):
    async with AsyncClient(nobody) as client:
        with pytest.raises(Unavailable, match=f"the router at {nobody} cannot be reached"):
            await client.get_model("m")
