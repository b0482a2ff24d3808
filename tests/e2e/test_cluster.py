"""A real cluster of three processes, used as its users do: command line, HTTP, client library."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import openai
import pytest

from loraplex.client import AsyncClient, Completion, Gatherer, Message, Sampling, TextDelta
from loraplex.errors import ModelNotFound
from tests.e2e.fleet_calls import caught_up
from tests.e2e.local_cluster import LocalCluster
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture
async def client(cluster: LocalCluster):
    async with AsyncClient(cluster.ready["router"], cluster.ready["registry"]) as client:
        yield client


async def ask(client: AsyncClient, model: str, prompt: str = "How are you?", sampling: Sampling = GREEDY) -> Completion:
    gatherer = Gatherer()
    async for event in client.generate(model, messages=[Message("user", prompt)], sampling=sampling, timeout_s=240):
        gatherer.add(event)
    return gatherer.completion()


def test_the_command_line_shows_what_was_registered(cluster, adapters):
    listed = {entry["name"]: entry for entry in cluster.run("adapter", "list", "--json").json()["adapters"]}
    assert set(adapters) <= set(listed)
    assert (listed["half"]["base_id"], listed["half"]["current"]["rank"], listed["half"]["current"]["dtype"]) == (
        "tiny", 16, "BF16",
    )  # fmt: skip
    assert (listed["attention"]["current"]["num_modules"], listed["attention"]["current"]["num_base_modules"]) == (
        4,
        14,
    )
    models = cluster.run("models", "--json").json()["models"]
    assert models[0]["name"] == "tiny"
    assert {model["name"]: model["parent"] for model in models[1:]}.items() >= dict.fromkeys(adapters, "tiny").items()
    shown = cluster.run("adapter", "show", "half")
    assert "rank     16, BF16" in shown.out
    (worker,) = cluster.run("worker", "list", "--json").json()["workers"]
    assert worker["state"] == "serving"
    computes = {name: worker[name] for name in ("device", "dtype", "base_quantization")}
    assert cluster.ready["compute"] == {worker["worker_id"]: computes}
    assert (computes["device"], computes["base_quantization"]) == ("cpu", "none")


def test_generate_streams_text_and_the_same_text_in_json(cluster):
    plain = cluster.run("generate", "all-seven", "How are you?", "--max-tokens", 24, "--ignore-eos", "--stats")
    assert plain.code == 0, plain.err
    answer = cluster.run("generate", "all-seven", "How are you?", "--max-tokens", 24, "--ignore-eos", "--json").json()
    assert plain.out == answer["choices"][0]["text"] + "\n"
    assert len(answer["choices"][0]["token_ids"]) == 24
    digest = cluster.run("adapter", "show", "all-seven", "--json").json()["current"]["artifact_digest"]
    assert answer["facts"]["artifact_digest"] == digest
    assert digest[:12] in plain.err
    assert "tok/s" in plain.err


def test_an_unknown_model_is_one_clear_line(cluster):
    ran = cluster.run("generate", "nobody", "hello")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert "nobody" in ran.err
    assert ran.err.count("\n") == 1


def test_an_adapter_of_another_base_is_refused_and_the_tensor_named(cluster, tmp_path):
    other = write_tiny_base(tmp_path / "other", hidden=32)
    ran = cluster.run("adapter", "add", "misfit", write_adapter(tmp_path / "misfit", other))
    assert ran.code == 1
    assert "proj" in ran.err
    assert "misfit" not in cluster.run("adapter", "list").out


async def test_each_model_answers_differently_and_says_what_answered(client, adapters):
    answers = {model: await ask(client, model) for model in ("tiny", *adapters)}
    assert len({answer.choices[0].token_ids for answer in answers.values()}) == len(answers)
    for model, answer in answers.items():
        wanted = (await client.get_model(model)).artifact_digest
        assert answer.facts.artifact_digest == wanted
        assert bool(wanted) is (model != "tiny")
    version = answers["half"].facts.version_digest
    assert (await ask(client, f"half@{version[:12]}")).choices == answers["half"].choices


async def test_mixed_concurrent_answers_equal_those_given_alone(client, adapters):
    prompts = ["How are you?", "x", "Tell me of the sea, the wind and the sky, and then of the sand. " * 3]
    sampled = Sampling(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
    asked = [(model, prompt, how) for model in ("tiny", *adapters) for prompt in prompts for how in (GREEDY, sampled)]
    alone = [await ask(client, *question) for question in asked]
    mixed = await asyncio.gather(*(ask(client, *question) for question in asked))
    assert [answer.choices for answer in mixed] == [answer.choices for answer in alone]


async def test_requests_in_flight_finish_on_the_old_version_and_new_ones_take_the_new(client, tiny_base, tmp_path):
    first = await client.add_adapter("cut", write_adapter(tmp_path / "first", tiny_base, seed=11))
    long = Sampling(temperature=0.0, max_tokens=2000, ignore_eos=True)
    await caught_up(client)
    before = await ask(client, "cut", sampling=long)
    events = client.generate("cut", messages=[Message("user", "How are you?")], sampling=long)
    gatherer = Gatherer()
    gatherer.add(await anext(events))
    second = await client.add_adapter("cut", write_adapter(tmp_path / "second", tiny_base, seed=12))
    await caught_up(client)
    after = await ask(client, "cut")
    async for event in events:
        gatherer.add(event)
    during = gatherer.completion()
    assert during.choices == before.choices
    assert during.facts.artifact_digest == first.adapter.current.artifact_digest
    assert after.facts.artifact_digest == second.adapter.current.artifact_digest
    assert after.choices[0].token_ids != before.choices[0].token_ids[: len(after.choices[0].token_ids)]
    pinned = await ask(client, f"cut@{first.adapter.current.version_digest[:12]}")
    assert pinned.choices[0].token_ids == before.choices[0].token_ids[: len(pinned.choices[0].token_ids)]
    await client.remove_adapter("cut")


async def test_a_removed_adapter_is_unknown_at_once(cluster, client, tiny_base, tmp_path):
    await client.add_adapter("brief", write_adapter(tmp_path / "brief", tiny_base, seed=21))
    await caught_up(client)
    assert (await ask(client, "brief")).text
    assert cluster.run("adapter", "rm", "brief").code == 0
    with pytest.raises(ModelNotFound, match="brief"):
        await ask(client, "brief")


async def test_leaving_a_stream_frees_the_worker(client):
    events = client.generate("tiny", "x", sampling=Sampling(temperature=0.0, max_tokens=8000, ignore_eos=True, n=4))
    assert isinstance(await anext(events), TextDelta)
    await events.aclose()
    async with asyncio.timeout(10):
        while True:
            workers = [worker async for worker in client.list_workers()]
            if sum(worker.running_requests + worker.waiting_requests for worker in workers) == 0:
                return
            await asyncio.sleep(0.1)


def test_the_openai_client_streams_the_same_text(cluster):
    wanted = cluster.run("generate", "attention", "How are you?", "--max-tokens", 16, "--json").json()
    with openai.OpenAI(base_url=f"{cluster.ready['http']}/v1", api_key="none", max_retries=0) as client:
        ids = [model.id for model in client.models.list()]
        assert ids[0] == "tiny"
        assert "attention" in ids
        stream = client.chat.completions.create(
            model="attention",
            messages=[{"role": "user", "content": "How are you?"}],
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == (wanted["choices"][0]["text"])
    )
    assert {chunk.model for chunk in chunks} == {"attention"}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == wanted["usage"]["completion_tokens"]


def test_http_errors_have_openais_shape(cluster):
    with httpx2.Client(base_url=cluster.ready["http"], timeout=30) as http:
        unknown = http.post(
            "/v1/chat/completions", json={"model": "nobody", "messages": [{"role": "user", "content": "x"}]}
        )
        wrong = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "temperature": "hot"})
    assert unknown.status_code == 404
    assert "nobody" in unknown.json()["error"]["message"]
    assert set(unknown.json()["error"]) >= {"message", "type", "param", "code"}
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "temperature"


def test_chat_goes_on_from_what_was_said(cluster):
    options = ("--json", "--temperature", 0, "--max-tokens", 8)
    both = cluster.run("chat", "tiny", *options, stdin="first\nsecond\n")
    assert both.code == 0, both.err
    first, second = (json.loads(line) for line in both.out.splitlines())
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 8


def test_logs_hold_no_prompt(cluster: LocalCluster):
    secret = "xylophone-zeppelin-quartz"
    assert cluster.run("generate", "tiny", secret, "--max-tokens", 4).code == 0
    logs = [file.read_text() for file in Path(cluster.state_dir / "logs").glob("*.log")]
    assert len(logs) == 3
    assert not any(secret in log for log in logs)
