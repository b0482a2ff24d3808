"""What the schema cannot say about the compose file and the images: they fit the services and old composes."""

from __future__ import annotations

import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from common.config import ServiceSettings
from registry.settings import RegistrySettings
from router.settings import RouterSettings
from tools.compose_cluster import Failed, plain_environment, readme_request
from worker.settings import WorkerSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "registry": RegistrySettings,
    "router": RouterSettings,
    "worker": WorkerSettings,
}
OTHERS = {"LORAPLEX_CLUSTER_TOKEN", "PGPASSWORD"}


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load(Path("docker-compose.yml").read_text())["services"]


def seconds(text):
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_is_a_setting_of_its_service(services, name):
    in_image = re.findall(rf"LORAPLEX_{name.upper()}_\w+(?==)", Path("Dockerfile").read_text())
    assert in_image
    for variable in {*services[name]["environment"], *in_image} - OTHERS:
        field = variable.removeprefix(f"LORAPLEX_{name.upper()}_").lower()
        assert field in SETTINGS[name].model_fields, variable


@pytest.mark.parametrize("name", SETTINGS)
def test_containers_get_longer_to_stop_than_services_take_to_drain(services, name):
    fields = SETTINGS[name].model_fields
    drain_s = sum(field.default for key, field in fields.items() if key.startswith("drain_"))
    assert seconds(services[name]["stop_grace_period"]) >= drain_s + 5


def test_only_the_router_is_published_and_only_on_loopback(services):
    assert [name for name, service in services.items() if "ports" in service] == ["router"]
    assert all(port.startswith("127.0.0.1:") for port in services["router"]["ports"])


@pytest.mark.parametrize("name", [*SETTINGS, "setup", "cli"])
def test_nothing_starts_without_a_cluster_token(services, name):
    token = services[name]["environment"]["LORAPLEX_CLUSTER_TOKEN"]
    assert token.startswith("${LORAPLEX_CLUSTER_TOKEN:?")  # neither unset nor empty
    assert "make compose-env" in token


def test_the_router_lets_nobody_in_without_a_key_unless_that_is_said(services):
    for name in SETTINGS:
        assert services[name]["environment"][f"LORAPLEX_{name.upper()}_INSECURE"] == "${LORAPLEX_INSECURE:-false}"
    key = services["registry"]["environment"]["LORAPLEX_REGISTRY_BOOTSTRAP_KEY"]
    assert key.startswith("${LORAPLEX_API_KEY?")  # set, and empty only where somebody wrote so
    assert services["cli"]["environment"]["LORAPLEX_API_KEY"] == key


def test_nothing_in_the_file_is_newer_than_compose_1_29():
    text = Path("docker-compose.yml").read_text()
    assert not re.search(r"(?m)^(name|secrets|configs):", text)
    assert not re.search(r"\b(gpus|start_interval|create_host_path|required|develop|include):", text)
    assert not re.search(r"\$\{[^}]*\$\{", text)  # no variable in another's default
    assert ":+" not in text


def test_the_readmes_request_to_containers_reads_env_and_sends_the_key():
    readme = Path("README.md").read_text()
    request = readme_request(readme)
    assert request.startswith("set -a; . ./.env; set +a")
    assert '-H "Authorization: Bearer $LORAPLEX_API_KEY"' in request
    assert "make compose-env" in readme
    with pytest.raises(Failed, match="no request"):
        readme_request(readme.replace(". ./.env", "source .env"))


def test_what_the_compose_test_is_called_with_does_not_reach_the_cluster():
    ours = {"PATH": "/bin", "DOCKER_HOST": "unix:///docker.sock"}
    others = {"LORAPLEX_CLUSTER_TOKEN": "x", "COMPOSE_FILE": "x", "MAKEFLAGS": "x", "PGPASSWORD": "x"}
    assert plain_environment(ours | others) == ours


@pytest.mark.parametrize(("extra", "has", "lacks"), [
    ("registry", {"alembic", "sqlalchemy"}, {"torch", "tokenizers"}),
    ("router", {"starlette", "uvicorn"}, {"torch", "sqlalchemy", "tokenizers"}),
    ("worker", {"torch", "tokenizers"}, {"sqlalchemy"}),
])  # fmt: skip
def test_an_image_gets_what_its_service_needs_and_no_more(extra, has, lacks):
    listed = subprocess.run(
        [sys.executable, "docker/requirements.py", extra], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = {re.split(r"[^\w-]", line)[0].lower() for line in listed}
    assert names >= has | {"grpcio", "structlog", "typer"}
    assert not names & lacks
    assert not any("loraplex" in line for line in listed)


@pytest.fixture
def url():
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/readyz" else 503)
            self.end_headers()
            self.wfile.write(b"catalog not synced")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def probe(url):
    return subprocess.run([sys.executable, "docker/probe.py", url], capture_output=True, text=True, check=False)


def test_the_probe_tells_ready_from_not_ready_and_absent(url):
    assert probe(f"{url}/readyz").returncode == 0
    refused = probe(f"{url}/other")
    assert (refused.returncode, refused.stdout) == (1, f"{url}/other: 503 catalog not synced\n")
    absent = probe("http://127.0.0.1:1/readyz")
    assert absent.returncode == 1
    assert "refused" in absent.stdout
