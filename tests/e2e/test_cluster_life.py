"""What `loraplex up` does when things die, are stopped, or are in the way."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil

from loraplex.client import Client, Finished, Message, Sampling, TextDelta
from tests.e2e.local_cluster import KERNELS, local_cluster, loraplex

FREE_PORTS = [part for name in ("router", "http", "registry", "worker") for part in (f"--{name}-port", "0")]


def test_a_killed_worker_is_restarted_and_answers_as_before(cluster):
    question = ("generate", "half", "hello", "--max-tokens", 8, "--json")
    before = cluster.run(*question).json()["choices"]
    seen, first = len(cluster.events), cluster.pid("worker-0")
    engine = psutil.Process(first).children(recursive=True)
    assert engine
    os.kill(first, signal.SIGKILL)
    restarting = cluster.wait(cluster.state("worker-0", "restarting"), since=seen)
    assert "killed by SIGKILL" in restarting["detail"]
    cluster.wait(cluster.state("worker-0", "ready"), since=seen)
    assert cluster.pid("worker-0") != first
    assert psutil.wait_procs(engine, timeout=60)[1] == []
    cluster.wait_serving()
    assert cluster.run(*question).json()["choices"] == before


def test_a_taken_port_is_named_with_the_option_that_changes_it(cluster, tiny_base, tmp_path):
    port = cluster.ready["router"].rpartition(":")[2]
    ran = loraplex("up", "--base", tiny_base, "--state", tmp_path, *FREE_PORTS, "--router-port", port)
    assert ran.code == 1
    assert ran.err.startswith(f"error: port {port} on 127.0.0.1, meant for the router, is taken")
    assert "--router-port" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_state_folder_in_use_names_its_holder_though_ports_are_taken_too(cluster, tiny_base):
    port = cluster.ready["router"].rpartition(":")[2]
    for ports in (FREE_PORTS, [*FREE_PORTS, "--router-port", port]):
        ran = loraplex("up", "--base", tiny_base, "--state", cluster.state_dir, *ports)
        assert ran.code == 1
        assert f"is in use by process {cluster.process.pid} on host" in ran.err


def test_sigterm_lets_streams_finish_and_leaves_nothing(tiny_base):
    with local_cluster(tiny_base, "--drain", "60") as cluster:
        with Client(cluster.ready["router"]) as client:
            sampling = Sampling(temperature=0.0, max_tokens=2000, ignore_eos=True)
            events = client.generate("tiny", messages=[Message("user", "hello")], sampling=sampling)
            got = [next(events)]
            family = cluster.family()
            cluster.process.send_signal(signal.SIGTERM)
            got += events
        assert isinstance(got[-1], Finished)
        assert sum(len(event.token_ids) for event in got if isinstance(event, TextDelta)) == 2000
        assert cluster.process.wait(60) == 0
        assert len(family) >= 4  # three services and the worker's engine
        assert psutil.wait_procs(family, timeout=5)[1] == []
        cluster.join()
        assert [e["name"] for e in cluster.events if e.get("state") == "stopped"] == ["router", "worker-0", "registry"]
        assert cluster.events[-1]["event"] == "stopped"
        assert not any("killing" in str(event.get("detail")) for event in cluster.events)


def test_nothing_outlives_an_up_that_is_killed(tiny_base):
    with local_cluster(tiny_base) as cluster:
        cluster.wait(cluster.state("registry", "ready"))
        worker = psutil.Process(cluster.pid("worker-0"))
        deadline = time.monotonic() + 60
        while not worker.children():  # its engine
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.05)
        family = cluster.family()
        assert len(family) >= 4
        cluster.process.kill()
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_ctrl_c_while_starting_stops_with_130_and_leaves_nothing(tiny_base):
    with local_cluster(tiny_base) as cluster:
        cluster.wait(cluster.state("router", "starting"))
        family = cluster.family()
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(60) == 130
        assert psutil.wait_procs(family, timeout=5)[1] == []


def test_a_service_that_cannot_start_is_told_with_its_last_words(tiny_base, tmp_path):
    (tmp_path / "registry").write_text("a file where the registry wants its folder")
    ran = loraplex("up", "--base", tiny_base, "--state", tmp_path, *FREE_PORTS)
    assert ran.code == 1
    assert "registry could not start (exit code 1)" in ran.err
    assert str(tmp_path / "logs" / "registry.log") in ran.err
    assert f"{tmp_path / 'registry'} cannot be used" in ran.err
    assert "Traceback" not in ran.err


def test_the_demo_shows_each_model_alone_and_all_mixed(tiny_base, adapters, tmp_path):
    prompts = [{"model": model, "prompt": "How are you?", "max_tokens": 12} for model in ("base", *adapters)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    folder = next(iter(adapters.values())).parent
    ran = loraplex(
        "demo", "--base", tiny_base, "--adapters", folder, "--prompts", tmp_path / "prompts.json", "--json",
        env={"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": KERNELS}, timeout_s=240,
    )  # fmt: skip
    shown = ran.json()
    assert shown["ok"] is True
    assert shown["problems"] == []
    answers = shown["alone"]["answers"]
    assert [answer["model"] for answer in answers] == ["base", *adapters]
    assert len({answer["facts"]["artifact_digest"] for answer in answers}) == len(answers)
    assert shown["mixed"]["num_tokens"] == shown["alone"]["num_tokens"] > 0
    assert not list(tmp_path.glob("loraplex-demo-*"))
