"""Settings: bad ones are told all at once, before anything starts."""

from __future__ import annotations

import pytest

from common.config import load_settings
from registry.database import parse_url
from registry.settings import RegistrySettings


def test_defaults_and_the_database_in_the_state_folder(tmp_path):
    settings = load_settings(RegistrySettings, "registry", ["--state-dir", str(tmp_path)])
    assert (settings.host, settings.port) == ("127.0.0.1", 50051)
    assert str(settings.url) == f"sqlite+aiosqlite:///{tmp_path}/registry.sqlite3"


def test_flags_win_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAPLEX_REGISTRY_STATE_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("LORAPLEX_REGISTRY_PORT", "1234")
    settings = load_settings(RegistrySettings, "registry", ["--state-dir", str(tmp_path / "flag")])
    assert (settings.state_dir, settings.port) == (tmp_path / "flag", 1234)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--database-url", "mysql://x/y"], "--database-url"),
        (["--database-url", "sqlite://"], "--database-url"),
        (["--database-url", "nonsense"], "--database-url"),
        (["--port", "70000"], "--port"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--keep-changes", "0"], "--keep-changes"),
    ],
)
def test_bad_settings_are_told_with_status_2(tmp_path, flags, said, capsys):
    with pytest.raises(SystemExit) as caught:
        load_settings(RegistrySettings, "registry", ["--state-dir", str(tmp_path), *flags])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_state_folder_must_be_told(capsys):
    with pytest.raises(SystemExit):
        load_settings(RegistrySettings, "registry", [])
    assert "--state-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("sqlite:////var/x.db", "sqlite+aiosqlite"),
        ("postgresql://me:pw@db:5432/loraplex", "postgresql+psycopg"),
        ("postgres://db/loraplex", "postgresql+psycopg"),
        ("postgresql+psycopg://db/loraplex?sslmode=require", "postgresql+psycopg"),
    ],
)
def test_urls_get_the_driver_that_is_used(text, driver):
    assert parse_url(text).drivername == driver
