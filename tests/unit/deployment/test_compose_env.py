"""`make compose-env`: fresh secrets that the services take, for the owner only, and nothing that was there is lost."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from common.api_keys import id_of
from common.config import load_settings
from registry.settings import RegistrySettings
from tools.compose_cluster import read_env_file

NAMES = ["LORAPLEX_CLUSTER_TOKEN", "LORAPLEX_API_KEY", "LORAPLEX_POSTGRES_PASSWORD"]


@pytest.fixture
def env(tmp_path):
    return tmp_path / ".env"


def make(env):
    command = [sys.executable, "docker/compose_env.py", str(env)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_services_take_what_it_makes(env, tmp_path, monkeypatch):
    assert make(env).returncode == 0
    values = read_env_file(env)
    assert list(values) == NAMES
    assert id_of(values["LORAPLEX_API_KEY"]) == "bootstrap"
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", values["LORAPLEX_CLUSTER_TOKEN"])
    monkeypatch.setenv("LORAPLEX_REGISTRY_BOOTSTRAP_KEY", values["LORAPLEX_API_KEY"])
    settings = load_settings(RegistrySettings, "registry", ["--host", "0.0.0.0", "--state-dir", str(tmp_path)])
    assert settings.cluster_secret == values["LORAPLEX_CLUSTER_TOKEN"]


def test_every_run_elsewhere_makes_other_secrets(tmp_path):
    values: list[str] = []
    for name in ("one", "two"):
        make(tmp_path / name)
        values += read_env_file(tmp_path / name).values()
    assert len(set(values)) == 2 * len(NAMES)


def test_only_the_owner_can_read_it_whatever_the_mask_and_the_mode_before(env):
    env.write_text("LORAPLEX_HTTP_PORT=80\n")
    env.chmod(0o666)
    before = os.umask(0)
    try:
        make(env)
    finally:
        os.umask(before)
    assert stat.S_IMODE(env.stat().st_mode) == 0o600


def test_no_secret_is_printed(env):
    done = make(env)
    assert not any(value in done.stdout + done.stderr for value in read_env_file(env).values())
    assert all(name in done.stdout for name in NAMES)


def test_lines_that_are_there_stay_and_what_is_missing_is_added(env):
    there = "LORAPLEX_DEVICE=cpu\n# LORAPLEX_API_KEY=lpx_old\nexport LORAPLEX_CLUSTER_TOKEN=my-own-token-of-before"
    env.write_text(there)
    assert make(env).returncode == 0
    text = env.read_text()
    assert text.startswith(f"{there}\n")
    assert text.count("LORAPLEX_CLUSTER_TOKEN=") == 1
    assert id_of(read_env_file(env)["LORAPLEX_API_KEY"])


def test_a_second_run_changes_nothing_not_even_an_emptied_key(env):
    make(env)
    text = env.read_text().replace(read_env_file(env)["LORAPLEX_API_KEY"], "")
    env.write_text(text)
    assert "nothing was changed" in make(env).stdout
    assert env.read_text() == text


def test_a_file_that_cannot_be_had_is_told_in_one_line(tmp_path):
    done = make(tmp_path / "absent" / ".env")
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert "No such file" in done.stdout


def test_nothing_is_left_beside_it(env, tmp_path):
    make(env)
    assert [path.name for path in tmp_path.iterdir()] == [".env"]


def test_git_ignores_it():
    ignored = subprocess.run(["git", "check-ignore", "--quiet", ".env"], check=False)
    assert ignored.returncode == 0
