"""Who gets into the compose cluster: nobody without a secret, unless that is said, and then the log warns."""

from __future__ import annotations

import http.client
import json
from typing import Final

from loraplex.errors import PermissionDenied, Unauthenticated
from tools.compose_cluster import Cluster, Failed, until

RESTART_S: Final = 180.0
_CALLS: Final = """
import sys
import grpc
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc
from loraplex.worker.v1 import worker_pb2, worker_pb2_grpc
registry = adapter_pb2_grpc.AdapterServiceStub(grpc.insecure_channel("registry:50051"))
worker = worker_pb2_grpc.WorkerServiceStub(grpc.insecure_channel("worker:50052"))
calls = {
    "registry": lambda options: registry.ListAdapters(adapter_pb2.ListAdaptersRequest(), **options),
    "worker": lambda options: next(worker.WatchStatus(worker_pb2.WatchStatusRequest(), **options)),
}
for secret in sys.argv[1:]:
    for name, call in calls.items():
        try:
            call({"timeout": 20, "metadata": (("authorization", "Bearer " + secret),) if secret else ()})
        except grpc.RpcError as error:
            print(name, error.code().name)
        else:
            print(name, "OK")
"""
"""Asks registry and worker, from inside their network, once with each secret of the command line."""


def check_env(cluster: Cluster) -> None:
    """Make .env as the README says; fail where compose would start without it, or where others could read it."""
    refused = cluster.try_compose("up", "--detach", "--no-build")
    if refused.returncode == 0 or "is not set; run make compose-env" not in refused.stderr:
        raise Failed(f"compose starts without secrets: {refused.stderr[-1000:]}")
    command = "make compose-env"
    if command not in (cluster.clone / "README.md").read_text():
        raise Failed(f"README.md does not name {command}")
    said = cluster.run(*command.split()).stdout
    env = cluster.clone / ".env"
    if env.stat().st_mode & 0o077 or any(secret in said for secret in cluster.secrets.values()):
        raise Failed("make compose-env shows its secrets to others")
    if cluster.run("git", "status", "--porcelain", "--", ".env").stdout:
        raise Failed("git does not ignore .env")


def status_of(cluster: Cluster, api_key: str | None) -> int:
    """Return the HTTP status of a request with this key; 0 where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", cluster.ports["http"], timeout=60)
    body = {"model": "text-to-sql", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def check_refusals(cluster: Cluster) -> None:
    """Fail unless every door opens with its own secret only."""
    key, token = cluster.secrets["LORAPLEX_API_KEY"], cluster.secrets["LORAPLEX_CLUSTER_TOKEN"]
    wrong = f"{key[:-64]}{'0' * 64}"
    statuses = [status_of(cluster, secret) for secret in (None, wrong, token, key)]
    if statuses != [401, 401, 401, 200]:
        raise Failed(f"no key, a wrong one, the cluster token and the key were answered with {statuses}")
    for secrets, refusal in ({}, Unauthenticated), ({"cluster_token": key}, PermissionDenied):
        with cluster.client(**secrets) as client:
            try:
                list(client.list_workers())
            except refusal:
                continue
            raise Failed("the workers were told to somebody without the cluster token")
    words = ("run", "--rm", "-T", "--entrypoint", "python", "cli", "-c", _CALLS)
    said = cluster.compose(*words, "", "0" * 64, key, token).split()
    if said != [*(["registry", "UNAUTHENTICATED", "worker", "UNAUTHENTICATED"] * 3), "registry", "OK", "worker", "OK"]:
        raise Failed(f"inside the network, no token, a wrong one, the API key and the token were answered with {said}")
    print("refused: requests without the key (401), calls to registry and worker without the cluster token", flush=True)


def check_insecure(cluster: Cluster) -> None:
    """Fail unless LORAPLEX_INSECURE with an empty key lets everybody on this machine in, and the log warns."""
    cluster.environment |= {"LORAPLEX_INSECURE": "true", "LORAPLEX_API_KEY": ""}
    try:
        cluster.compose("up", "--detach", "--no-build", "--scale", "worker=1", "registry", "worker", "router")
        cluster.compose("run", "--rm", "-T", "cli", "key", "rm", "bootstrap")  # the registry remembers it
        until("a request without a key is answered", RESTART_S, lambda: status_of(cluster, None) == 200 or None)
        for service in ("registry", "worker", "router"):
            if "security.insecure" not in cluster.compose("logs", "--no-color", service):
                raise Failed(f"the {service} does not warn of LORAPLEX_INSECURE")
    finally:
        del cluster.environment["LORAPLEX_INSECURE"], cluster.environment["LORAPLEX_API_KEY"]
    print("LORAPLEX_INSECURE=true and no key: everybody on this machine is let in, and every service warns", flush=True)
