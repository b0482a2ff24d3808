"""The commands, run in this process against a fake cluster behind a real gRPC server."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket

import pytest

from loraplex.errors import QueueFull
from loraplex.registry.v1 import adapter_pb2


def test_generate_streams_the_answer_and_nothing_else(run, fake_cluster):
    ran = run("generate", "sql", "how many users")
    assert (ran.code, ran.out, ran.err) == (0, "how many users \n", "")
    request = fake_cluster.requests[-1]
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "how many users")]
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0


def test_generate_reads_stdin(run, fake_cluster):
    assert run("generate", "sql", "-", stdin="from a pipe\n").out == "from a pipe \n"
    assert run("generate", "sql", "--raw", stdin="two\nlines\n").out == "two\nlines \n"
    assert fake_cluster.requests[-1].prompt == "two\nlines"


def test_every_sampling_option_reaches_the_router(run, fake_cluster):
    options = {
        "--temperature": 0.5, "--top-p": 0.25, "--top-k": 7, "--min-p": 0.125, "--seed": -3, "--max-tokens": 9,
        "--min-tokens": 2, "--repetition-penalty": 1.5, "--presence-penalty": -0.5, "--frequency-penalty": 0.75,
        "--n": 2, "--logprobs": 0,
    }  # fmt: skip
    flat = [str(part) for pair in options.items() for part in pair]
    flat += ["--stop", "a", "--stop", "b", "--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--ignore-eos"]
    assert run("generate", "m", "hi", "--system", "be brief", *flat).code == 0
    request = fake_cluster.requests[-1]
    for name, value in options.items():
        field = name.removeprefix("--").replace("-", "_")
        assert request.sampling.HasField(field)
        assert getattr(request.sampling, field) == value
    assert list(request.sampling.stop) == ["a", "b"]
    assert dict(request.sampling.logit_bias) == {5: -1.5, 6: 2.0}
    assert request.sampling.ignore_eos
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize(
    "command", [("adapter", "add", "x"), ("base", "add"), ("adapter", "merge", "x", "out", "--base-dir")]
)
def test_a_folder_that_cannot_be_looked_at_is_told_in_one_line(run, command, tmp_path):
    too_long, nobodys, circle = tmp_path / ("a" * 300), "~nobody-of-that-name/x", tmp_path / "circle"
    circle.symlink_to("circle")
    for folder in (too_long, nobodys, circle):
        ran = run(*command, folder, "--json")
        told = json.loads(ran.err)["error"]
        assert (ran.code, ran.out) == (1, "")
        assert str(folder) in told["message"]
        assert told["metadata"]["field"] in ("path", "base", "model")


def test_several_answers_are_told_apart(run):
    assert run("generate", "m", "hi", "--n", "2").out == "[0] hi \n[1] hi \n"


def test_generate_in_json_is_one_object(run):
    answer = run("generate", "m", "hi there", "--json").json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "hi there ",
        "token_ids": [2, 5],
        "finish_reason": "stop",
        "stop_string": None,
        "logprobs": [],
    }
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 2}
    assert answer["facts"]["tier_hit"] == "disk"
    assert answer["time_to_first_token_s"] > 0


def test_stats_go_to_stderr(run):
    ran = run("generate", "m", "hi there", "--stats")
    assert ran.out == "hi there \n"
    assert "adapter aaaaaaaaaaaa (version ffffffffffff, from disk) · 3 + 4 tokens" in ran.err
    assert "load 250.0 ms" in ran.err


def test_an_unknown_model_is_one_line_and_exit_1(run):
    ran = run("generate", "unknown", "hi")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: there is no model unknown; `loraplex models` lists them\n"
    ran = run("generate", "unknown", "hi", "--json")
    assert ran.code == 1
    assert json.loads(ran.err)["error"]["reason"] == "MODEL_NOT_FOUND"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate"], "MODEL"),
        (["generate", "m", "hi", "--logit-bias", "x"], "TOKEN_ID=BIAS"),
        (["generate", "m", "hi", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "m", "hi", "--raw", "--system", "s"], "--system"),
        (["models", "--router", "nowhere"], "HOST:PORT"),
        (["models", "--router", "x:99999"], "HOST:PORT"),
        (["nonsense"], "nonsense"),
        (["adapter", "add", "name"], "SOURCE"),
        (["up", "--dtype", "int3"], "float32"),
        (["up", "--workers", "0"], "--workers"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(run, arguments, says):
    ran = run(*arguments)
    assert ran.code == 2
    assert says in ran.err


@pytest.mark.parametrize("prompt", [[""], [], ["-"]])
def test_an_empty_prompt_is_refused(run, prompt):
    ran = run("generate", "m", *prompt)
    assert (ran.code, ran.out) == (1, "")
    assert "prompt is empty" in ran.err


def test_arguments_that_are_no_text_are_refused(run):
    for arguments in (["generate", "m", "\udc80"], ["generate", "\udc80", "hi"], ["adapter", "show", "\udc80"]):
        ran = run(*arguments)
        assert ran.code == 1
        assert ran.err.startswith("error: ")
        assert "Traceback" not in ran.err


def test_an_unreachable_router_says_how_to_get_one(run):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        ran = run("models", "--router", address)
    assert ran.code == 1
    assert re.fullmatch(rf"error: the router at {address} cannot be reached .*`loraplex up`.*--router.*\n", ran.err)


def test_adapters_from_add_to_rm(run, fake_cluster, tiny_adapter):
    added = run("adapter", "add", "sql", tiny_adapter)
    assert added.code == 0
    digest = fake_cluster.adapters["sql"].current.artifact_digest
    assert "sql registered for base tiny" in added.out
    assert digest in added.out
    assert "14 of 14 changed" in added.out
    assert "loraplex generate sql" in added.out
    assert "is this version already" in run("adapter", "add", "sql", tiny_adapter).out
    assert "14/14" in run("adapter", "list").out
    assert digest[:12] in run("adapter", "show", "sql").out
    assert run("adapter", "list", "--json").json()["adapters"][0]["current"]["artifact_digest"] == digest
    assert run("adapter", "show", "sql", "--json").json()["versions"][0]["rank"] == 4
    assert [model["name"] for model in run("models", "--json").json()["models"]] == ["sql"]
    assert run("adapter", "rm", "sql").out == "sql is deleted\n"
    assert run("adapter", "list").out == ""
    assert "no adapter sql" in run("adapter", "show", "sql").err


@pytest.mark.parametrize("source", ["hf://acme/sql@main", "https://host/sql/", "file:sql", "s3://bucket/sql"])
def test_what_is_no_folder_here_is_fetched_by_the_registry_and_shown(run, fake_cluster, source):
    added = run("adapter", "add", "sql", source, "--base-id", "tiny", "--quantization", "int4", "--json")
    assert added.code == 0
    assert added.json()["adapter"]["current"]["source"] == source
    assert added.json()["router_knows"] is True
    [asked] = fake_cluster.imports
    assert (asked.name, asked.base_id, asked.format) == ("sql", "tiny", adapter_pb2.ADAPTER_FORMAT_INT4)
    assert f"source   {source}" in run("adapter", "show", "sql").out
    assert not fake_cluster.uploads


def test_the_digest_that_weights_must_have_goes_to_the_registry_or_is_held_against_the_folder(
    run, fake_cluster, tiny_adapter
):
    digest = hashlib.sha256((tiny_adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert run("adapter", "add", "sql", "hf://acme/sql", "--sha256", "ab" * 32).code == 0
    assert fake_cluster.imports[0].weights_sha256 == "ab" * 32
    for wrong, words in (("ab" * 32, digest[:12]), ("ab", "64 hex digits")):
        ran = run("adapter", "add", "local", tiny_adapter, "--sha256", wrong)
        assert ran.code == 1
        assert words in ran.err
    assert not fake_cluster.uploads
    assert run("adapter", "add", "local", tiny_adapter, "--sha256", digest).code == 0


def test_a_source_that_does_not_exist_is_told_as_the_registry_tells_it(run):
    ran = run("adapter", "add", "sql", "hf://acme/missing", "--json")
    assert ran.code == 1
    error = json.loads(ran.err)["error"]
    assert (error["reason"], error["metadata"]["field"]) == ("SOURCE_NOT_FOUND", "source")


def test_a_format_is_chosen_shown_and_changed(run, tiny_adapter):
    added = run("adapter", "add", "sql", tiny_adapter, "--quantization", "int8")
    assert "format int8" in added.out
    assert "1.23% mean over the modules; worst layers.0.mlp.up_proj 50.00%, layers.1.mlp.up_proj" in added.out
    assert "layers.3" not in added.out
    assert "sizes    none 2.0 kB, int8 2.0 kB, int4 ~2.0 kB" in added.out
    assert "int8" in run("adapter", "list").out
    assert "sizes    none 2.0 kB, int8 2.0 kB, int4 ~2.0 kB" in run("adapter", "show", "sql").out
    report = run("adapter", "show", "sql", "--json").json()["reports"][0]
    assert (report["format"], len(report["errors"]), report["mean_error"]) == ("int8", 5, 0.0123)
    assert (list(report["sizes"]), report["estimated_sizes"]) == (["none", "int8", "int4"], ["int4"])
    repacked = run("adapter", "repack", "sql", "--quantization", "int4").out
    assert "sql is packed as int4\n" in repacked
    assert "sizes    none 2.0 kB, int8 ~2.0 kB, int4 2.0 kB" in repacked
    again = run("adapter", "repack", "sql", "--quantization", "int4", "--json").json()
    assert (again["changed"], again["adapter"]["current"]["format"], again["router_knows"]) == (False, "int4", True)
    assert run("adapter", "repack", "sql").code == 2
    assert run("adapter", "repack", "sql", "--quantization", "int5").code == 2
    assert "no adapter nobody" in run("adapter", "repack", "nobody", "--quantization", "int8").err


def test_what_became_of_an_upload_is_shown(run, fake_cluster, tiny_adapter):
    run("adapter", "add", "sql", tiny_adapter, "--quantization", "int8")
    before = run("adapter", "show", "sql").out
    assert "dropped" not in before
    assert run("adapter", "show", "sql", "--json").json()["reports"][0]["load"] is None
    fake_cluster.format_errors = {"none": 0.0, "int8": 0.0123, "int4": 0.0642}
    fake_cluster.load_facts = adapter_pb2.LoadFacts(
        num_file_tensors=45,
        num_file_modules=15,
        equal_to_base=["lm_head.base_layer.weight"],
        features=["DoRA", "lm_head LoRA"],
        base_check=adapter_pb2.BASE_CHECK_WEIGHTS,
        trained_on="SmolLM2 [red]135M",
    )
    out = run("adapter", "show", "sql").out
    assert "  file     45 tensors of 15 modules\n" in out
    assert "  dropped  lm_head.base_layer.weight: the same as the base's\n" in out
    assert "  has      DoRA, lm_head LoRA\n" in out
    assert "checked by the base's weights, by their digest; trained on SmolLM2 [red]135M, by its own account" in out
    assert "sizes    none 2.0 kB, int8 2.0 kB (error 1.23%), int4 ~2.0 kB (error ~6.42%)\n" in out
    report = run("adapter", "show", "sql", "--json").json()["reports"][0]
    assert report["format_errors"] == {"none": 0.0, "int8": 0.0123, "int4": 0.0642}
    assert report["load"] == {
        "num_file_tensors": 45,
        "num_file_modules": 15,
        "equal_to_base": ["lm_head.base_layer.weight"],
        "features": ["DoRA", "lm_head LoRA"],
        "base_check": "weights",
        "trained_on": "SmolLM2 [red]135M",
    }


def test_an_evaluation_is_asked_for_recorded_and_shown(run, fake_cluster, tiny_adapter):
    run("adapter", "add", "sql", tiny_adapter, "--quantization", "int8")
    assert "as exact;" not in run("adapter", "show", "sql").out
    ran = run("adapter", "evaluate", "sql", "--timeout", 77)
    assert ran.code == 0, ran.err
    began, *told = ran.err.splitlines()
    assert began.startswith("evaluating sql on a worker: ")
    assert told == ["1 of 2 prompts are compared"]
    assert ran.out.startswith(
        "sql in int8: 97.50% of 80 tokens as exact; KL 0.0012 mean, 0.5 at most; 2 prompts of set 1"
    )
    asked, recorded = fake_cluster.remaining_s[-2:]
    assert 60 < asked < 78  # gRPC rounds a deadline up
    assert recorded < 20
    shown = run("adapter", "show", "sql").out
    assert "answers  97.50% of 80 tokens" in shown
    assert [line for line in shown.splitlines() if "current" in line and "97.50%" in line and "0.0012" in line]
    (told,) = run("adapter", "show", "sql", "--json").json()["evaluations"]
    assert (told["top1_agreement"], told["num_positions"], told["format"]) == (0.975, 80, "int8")
    as_json = run("adapter", "evaluate", "sql", "--json")
    assert (as_json.json(), as_json.err) == (told, "")


def test_an_evaluation_that_fails_records_nothing(run, fake_cluster, tiny_adapter):
    run("adapter", "add", "sql", tiny_adapter)
    fake_cluster.evaluation_error = QueueFull("an evaluation is running on this worker already")
    ran = run("adapter", "evaluate", "sql")
    assert (ran.code, "is running on this worker already" in ran.err) == (1, True)
    assert not fake_cluster.evaluations


def test_a_format_that_the_adapter_is_not_packed_in_is_not_evaluated(run, fake_cluster, tiny_adapter):
    run("adapter", "add", "sql", tiny_adapter, "--quantization", "int8")
    ran = run("adapter", "evaluate", "sql", "--quantization", "int4")
    assert ran.code == 1
    assert "packed as int8" in ran.err
    assert "--quantization int4" in ran.err
    assert run("adapter", "evaluate", "sql", "--quantization", "none").code == 0
    assert fake_cluster.evaluations["sql"].evaluation.artifact_digest == "e" * 64
    assert run("adapter", "evaluate", "sql", "--quantization", "int5").code == 2
    assert "no adapter nobody" in run("adapter", "evaluate", "nobody").err


def test_add_waits_until_the_router_knows(run, fake_cluster, tiny_adapter):
    fake_cluster.catalog_lag = 3
    assert run("adapter", "add", "sql", tiny_adapter, "--json").json()["router_knows"] is True
    assert fake_cluster.catalog_lag == 0
    assert fake_cluster.metadata[-1]["x-loraplex-min-revision"] == "1"


def test_add_does_not_wait_when_told_so(run, fake_cluster, tiny_adapter):
    assert run("adapter", "add", "sql", tiny_adapter, "--no-wait", "--json").json()["router_knows"] is False
    assert fake_cluster.metadata == []


def test_add_without_a_router_succeeds_with_a_note_unless_waiting_was_asked_for(run, tiny_adapter):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
        ran = run("adapter", "add", "sql", tiny_adapter, "--router", nobody)
        assert ran.code == 0
        assert "no router can be reached" in ran.err
        assert run("adapter", "add", "sql", tiny_adapter, "--router", nobody, "--wait").code == 1


def test_a_pickle_is_refused_before_anything_is_sent(run, fake_cluster, tiny_adapter, tmp_path):
    folder = shutil.copytree(tiny_adapter, tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    ran = run("adapter", "add", "sql", folder)
    assert ran.code == 1
    assert "pickle (adapter_model.bin)" in ran.err
    assert fake_cluster.uploads == {}


def test_a_base_is_added_and_listed(run, tiny_base, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "tiny registered" in run("base", "add", tiny_base).out
    assert run("base", "add", tiny_base, "--id", "owner/tiny", "--json").json()["base_model"]["base_id"] == "owner/tiny"
    assert [base["base_id"] for base in run("base", "list", "--json").json()["base_models"]] == ["tiny", "owner/tiny"]
    assert "owner/tiny" in run("base", "list").out
    assert (tmp_path / "loraplex" / "manifests").is_dir()
    assert "config.json" in run("base", "add", tmp_path).err


def test_workers_are_listed(run):
    listed = run("worker", "list").out
    assert "sql (device)" in listed
    assert "cpu bfloat16, int8 base" in listed
    (worker,) = run("worker", "list", "--json").json()["workers"]
    assert worker["state"] == "serving"
    assert (worker["device"], worker["dtype"], worker["base_quantization"]) == ("cpu", "bfloat16", "int8")


def test_the_version_is_the_packages(run):
    assert re.match(r"loraplex \d+\.\d+\.\d+ \(Python", run("version").out)
    assert set(run("version", "--json").json()) == {"loraplex", "python", "grpc"}


def test_chat_remembers_and_resets(run, fake_cluster):
    fake_cluster.bases["m"] = None
    ran = run("chat", "m", "--system", "be brief", "--seed", "1", stdin="one\n\ntwo\n/reset\nthree\n")
    assert (ran.code, ran.out) == (0, "one \ntwo \nthree \n")
    said = [[(m.role, m.content) for m in request.chat.messages] for request in fake_cluster.requests]
    first = [("system", "be brief"), ("user", "one")]
    assert said == [
        first,
        [*first, ("assistant", "one "), ("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]
    assert fake_cluster.requests[0].sampling.max_tokens == 512


def test_chat_in_json_is_an_object_a_line(run, fake_cluster):
    fake_cluster.bases["m"] = None
    lines = run("chat", "m", "--json", stdin="one\ntwo\n").out.splitlines()
    assert [json.loads(line)["choices"][0]["text"] for line in lines] == ["one ", "two "]


def test_chat_with_an_unknown_model_ends_before_the_first_turn(run):
    ran = run("chat", "nobody", stdin="hello\n")
    assert (ran.code, ran.out) == (1, "")
    assert "no model nobody" in ran.err


def test_an_interrupt_exits_130_and_cancels_the_request(run, fake_cluster, monkeypatch):
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loraplex.cli.output.write_text", interrupt)
    ran = run("generate", "endless", "hi")
    assert ran.code == 130
    assert "Traceback" not in ran.err
    assert fake_cluster.cancelled.wait(60)


@pytest.mark.parametrize(
    "command", ["up", "demo", "generate", "chat", "models", "version", "adapter add", "adapter list", "adapter show",
                "adapter evaluate", "adapter repack", "adapter rm", "adapter pin", "adapter unpin", "adapter prefetch",
                "adapter unload", "advice", "base add", "base list", "worker list"],
)  # fmt: skip
def test_every_command_has_help_and_json(run, command):
    ran = run(*command.split(), "--help")
    assert ran.code == 0
    assert "--json" in ran.out


def test_a_router_that_asks_for_a_key_does_not_hinder_registering(run, fake_cluster, tiny_adapter, monkeypatch):
    fake_cluster.asks_for_key = True
    ran = run("adapter", "add", "sql", tiny_adapter)
    assert (ran.code, "sql" in fake_cluster.adapters) == (0, True)
    assert "asks for an API key" in ran.err
    ran = run("adapter", "add", "sql", tiny_adapter, "--wait")
    assert (ran.code, "an API key is needed" in ran.err) == (1, True)
    monkeypatch.setenv("LORAPLEX_API_KEY", "lpx_abcd_secret")
    assert run("adapter", "add", "sql", tiny_adapter, "--wait").code == 0
    monkeypatch.setenv("LORAPLEX_API_KEY", "two words")
    ran = run("models")
    assert (ran.code, ran.err) == (1, "error: api_key has spaces or characters beyond ASCII; it is one word\n")
