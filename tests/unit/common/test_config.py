"""Settings come from flags and environment, and every problem is told at once."""

from __future__ import annotations

import pytest
from pydantic_settings import SettingsConfigDict

from common.config import Port, ServiceSettings, is_loopback, load_settings


class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="LORAPLEX_THING_")

    port: Port = 50051
    state_dir: str


def test_flags_win_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_THING_PORT", "1")
    monkeypatch.setenv("LORAPLEX_THING_STATE_DIR", "from-env")
    settings = load_settings(Settings, "thing", ["--port", "2"])
    assert (settings.port, settings.state_dir) == (2, "from-env")


def test_every_problem_is_told_and_the_exit_status_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(Settings, "thing", ["--port", "99999", "--log-level", "loud"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "--port" in told
    assert "--log-level" in told
    assert "--state-dir" in told


def test_an_open_bind_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(Settings, "thing", ["--state-dir", "x", "--host", "0.0.0.0"])
    assert "--insecure" in capsys.readouterr().err
    assert load_settings(Settings, "thing", ["--state-dir", "x", "--host", "0.0.0.0", "--insecure"]).insecure


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("example.org", False),
        ("10.0.0.1", False),
    ],
)
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
