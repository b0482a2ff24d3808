"""Binds that others can reach need a cluster token; secrets come from the environment or a file, never from a flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic_settings import SettingsConfigDict
from structlog.testing import capture_logs

from common.config import ServiceSettings, load_settings
from common.exposure import warn_where_open
from common.secret_settings import Secret
from registry.settings import RegistrySettings
from router.settings import RouterSettings
from worker.settings import WorkerSettings

TOKEN = "0123456789abcdef-cluster-token"
KEY = "lpx_bootstrap_" + "a1" * 32


class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="LORAPLEX_THING_")

    password: Secret = None


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAPLEX_CLUSTER_TOKEN", "LORAPLEX_CLUSTER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], cls: type[ServiceSettings], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load_settings(cls, "thing", argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


SERVICES = [
    (RegistrySettings, ["--state-dir", "x"]),
    (RouterSettings, []),
    (WorkerSettings, ["--base-dir", "x", "--cache-dir", "y"]),
]


@pytest.mark.parametrize(("cls", "needed"), SERVICES)
def test_every_service_binds_loopback_by_default(cls, needed):
    assert load_settings(cls, "x", needed).host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "registry.example.org"])
@pytest.mark.parametrize(("cls", "needed"), SERVICES)
def test_no_service_binds_elsewhere_without_a_token_or_insecure(cls, needed, host, capsys, monkeypatch):
    told = refused(capsys, cls, *needed, "--host", host)
    for remedy in (host, "LORAPLEX_CLUSTER_TOKEN", "--cluster-token-file", "--insecure", "openssl rand -hex 32"):
        assert remedy in told
    assert load_settings(cls, "x", [*needed, "--host", host, "--insecure"]).cluster_secret is None
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", TOKEN)
    assert load_settings(cls, "x", [*needed, "--host", host]).cluster_secret == TOKEN


@pytest.mark.parametrize("written", ["--cluster-token", f"--cluster-token={TOKEN}", "--CLUSTER_TOKEN"])
def test_the_token_is_refused_on_the_command_line_unseen(written, capsys):
    told = refused(capsys, Settings, written, TOKEN)
    assert "LORAPLEX_CLUSTER_TOKEN" in told
    assert TOKEN not in told


def test_the_help_offers_no_flag_for_secrets(capsys):
    with pytest.raises(SystemExit):
        load_settings(RegistrySettings, "registry", ["--help"])
    told = capsys.readouterr().out
    assert "--cluster-token-file" in told
    assert "--cluster-token " not in told
    assert "bootstrap" not in told


def test_other_secrets_are_refused_on_the_command_line_too(capsys, monkeypatch):
    told = refused(capsys, Settings, "--password=hush-hush")
    assert "LORAPLEX_THING_PASSWORD" in told
    assert "hush-hush" not in told
    assert "--bootstrap-key" in refused(capsys, RegistrySettings, "--state-dir", "x", "--bootstrap-key", KEY)
    monkeypatch.setenv("LORAPLEX_THING_PASSWORD", "hush-hush")
    password = load_settings(Settings, "thing", []).password
    assert password is not None
    assert password.get_secret_value() == "hush-hush"


def test_the_token_may_come_from_a_file_named_by_flag_or_environment(tmp_path: Path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    argv = ["--host", "0.0.0.0"]
    assert load_settings(Settings, "thing", [*argv, "--cluster-token-file", str(file)]).cluster_secret == TOKEN
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN_FILE", str(file))
    assert load_settings(Settings, "thing", argv).cluster_secret == TOKEN


def test_one_services_own_variable_wins_over_the_shared_one(monkeypatch):
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setenv("LORAPLEX_THING_CLUSTER_TOKEN", f"own-{TOKEN}")
    assert load_settings(Settings, "thing", []).cluster_secret == f"own-{TOKEN}"


def test_bad_tokens_are_told_without_being_shown(tmp_path: Path, monkeypatch, capsys):
    for bad in ("short-one", "has spaces and is long enough", "not-ascii-ééééééééééééé"):
        monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", bad)
        told = refused(capsys, Settings)
        assert "LORAPLEX_CLUSTER_TOKEN: the cluster token must be" in told
        assert bad not in told
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", TOKEN)
    (tmp_path / "token").write_text("short-one")
    assert "--cluster-token-file" in refused(capsys, Settings, "--cluster-token-file", str(tmp_path / "token"))
    assert "cannot be read" in refused(capsys, Settings, "--cluster-token-file", str(tmp_path / "none"))
    (tmp_path / "token").write_text(TOKEN)
    told = refused(capsys, Settings, "--cluster-token-file", str(tmp_path / "token"))
    assert "not both" in told
    assert TOKEN not in told


def test_an_empty_variable_counts_as_none(monkeypatch, capsys):
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", "")
    monkeypatch.setenv("LORAPLEX_THING_CLUSTER_TOKEN", "")
    monkeypatch.setenv("LORAPLEX_REGISTRY_BOOTSTRAP_KEY", "")
    assert load_settings(Settings, "thing", []).cluster_secret is None
    assert load_settings(RegistrySettings, "registry", ["--state-dir", "x"]).bootstrap_key is None
    assert "LORAPLEX_CLUSTER_TOKEN" in refused(capsys, Settings, "--host", "0.0.0.0")


def test_a_bootstrap_key_must_be_formed_like_a_key(monkeypatch, capsys):
    monkeypatch.setenv("LORAPLEX_REGISTRY_BOOTSTRAP_KEY", "my-password")
    told = refused(capsys, RegistrySettings, "--state-dir", "x")
    assert told.startswith("thing: LORAPLEX_REGISTRY_BOOTSTRAP_KEY: ")
    assert "openssl rand -hex 32" in told
    assert "my-password" not in told


def test_settings_do_not_show_their_secrets(monkeypatch):
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setenv("LORAPLEX_REGISTRY_BOOTSTRAP_KEY", KEY)
    settings = load_settings(RegistrySettings, "registry", ["--state-dir", "x"])
    shown = f"{settings} {settings!r} {settings.model_dump()} {settings.model_dump_json()}"
    assert TOKEN not in shown
    assert KEY not in shown


def test_insecure_binds_are_warned_of(monkeypatch):
    with capture_logs() as said:
        warn_where_open(load_settings(Settings, "thing", ["--host", "0.0.0.0", "--insecure"]))
    assert [(line["event"], line["log_level"], line["host"]) for line in said] == [
        ("security.insecure", "warning", "0.0.0.0")
    ]
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", TOKEN)
    with capture_logs() as said:
        warn_where_open(load_settings(Settings, "thing", ["--insecure"]))
        warn_where_open(load_settings(Settings, "thing", ["--host", "0.0.0.0"]))
    assert said == []
