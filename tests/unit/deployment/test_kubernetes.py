"""What a schema cannot say about the manifests: they fit the services' settings, each other, and restricted pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import ServiceSettings
from registry.settings import RegistrySettings
from router.settings import RouterSettings
from tools.check_deployment import KUSTOMIZATIONS, kubernetes_versions, manifest_problems, render
from worker.settings import WorkerSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "registry": RegistrySettings,
    "router": RouterSettings,
    "worker": WorkerSettings,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "registry": {"state_dir": "/state"},
    "router": {},
    "worker": {"base_dir": "/models/base", "cache_dir": "/cache"},
}
CUT_S = 2
"""What services give cut streams and ended calls, after their drain."""


@pytest.fixture(scope="module", params=KUSTOMIZATIONS)
def objects(request):
    return render(request.param)


@pytest.fixture(scope="module")
def base():
    return render("k8s/base")


def pods(objects):
    for found in objects:
        if found["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield found["metadata"]["name"], found["spec"]["template"]


def containers(pod):
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def of(objects, kind, name):
    return next(o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))


def service_pod(objects, name):
    return next(template for found, template in pods(objects) if found == name)


def config(objects):
    return next(o["data"] for o in objects if o["kind"] == "ConfigMap")


def test_an_unknown_field_is_a_problem_in_every_version(base):
    for version in kubernetes_versions():
        assert list(manifest_problems(base, version)) == []
        broken = [found | {"spec": found["spec"] | {"replica": 1}} for found in base if found["kind"] == "StatefulSet"]
        assert "replica" in next(manifest_problems(broken, version))


def test_every_pod_satisfies_the_restricted_standard(objects):
    for name, pod in pods(objects):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]], name
            assert container["resources"]["limits"]["memory"], name


def test_no_pod_is_told_of_services_in_its_environment(objects):
    # A service named loraplex-worker would set LORAPLEX_WORKER_PORT=tcp://…, which is a setting of ours.
    for name, pod in pods(objects):
        assert pod["spec"]["enableServiceLinks"] is False, name
        assert pod["spec"]["automountServiceAccountToken"] is False, name


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_is_a_setting_of_its_service(base, name, monkeypatch):
    prefix = f"LORAPLEX_{name.upper()}_"
    own = {variable: value for variable, value in config(base).items() if variable.startswith(prefix)}
    assert own
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    settings = SETTINGS[name](**REQUIRED[name])
    assert {variable.removeprefix(prefix).lower() for variable in own} <= settings.model_fields_set
    for variable in service_pod(base, name)["spec"]["containers"][0]["env"]:
        if variable["name"].startswith(prefix) and variable["name"] != "LORAPLEX_REGISTRY_BOOTSTRAP_KEY":
            assert variable["name"].removeprefix(prefix).lower() in SETTINGS[name].model_fields


def test_every_variable_of_the_shared_map_belongs_to_a_service(base):
    assert {variable.split("_")[1].lower() for variable in config(base)} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_grace_period_outlasts_the_drain(base, name):
    spec, settings = service_pod(base, name)["spec"], config(base)
    pre_stop_s = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain_s = sum(
        float(value)
        for variable, value in settings.items()
        if variable.startswith(f"LORAPLEX_{name.upper()}_DRAIN_") and variable.endswith("_S")
    )
    assert drain_s >= 10
    assert spec["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s + CUT_S + 5


@pytest.mark.parametrize(("name", "port"), [("registry", "admin"), ("worker", "admin"), ("router", "http")])
def test_probes_ask_the_service_over_http(base, name, port):
    container = service_pod(base, name)["spec"]["containers"][0]
    assert port in [declared["name"] for declared in container["ports"]]
    asked = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert asked == {
        "startup": {"path": "/livez", "port": port},
        "readiness": {"path": "/readyz", "port": port},
        "liveness": {"path": "/livez", "port": port},
    }


def test_routers_find_workers_that_are_not_ready(base):
    service = of(base, "Service", "worker")
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    workers = of(base, "StatefulSet", "worker")
    assert workers["spec"]["serviceName"] == "worker"
    assert workers["spec"]["podManagementPolicy"] == "Parallel"
    assert config(base)["LORAPLEX_ROUTER_WORKERS"] == "dns:worker:50052"
    assert service["spec"]["ports"][0]["port"] == 50052


@pytest.mark.parametrize("kustomization", ["k8s/base", "k8s/overlays/gpu", "k8s/overlays/postgres"])
def test_one_registry_at_a_time_owns_the_state(kustomization):
    objects = render(kustomization)
    registry = of(objects, "Deployment", "registry")["spec"]
    assert (registry["replicas"], registry["strategy"]) == (1, {"type": "Recreate"})
    assert of(objects, "PersistentVolumeClaim", "registry-state")["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_only_routers_reach_workers_and_nothing_is_open_that_is_not_listed(base):
    policies = {o["metadata"]["name"]: o["spec"] for o in base if o["kind"] == "NetworkPolicy"}
    assert policies["default-deny-ingress"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    (rule,) = policies["worker"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "router"}}}]
    (rule,) = policies["registry"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["router", "worker", "setup"]


def test_selectors_find_pods(objects):
    labels = [pod["metadata"]["labels"] for _, pod in pods(objects)]
    for found in objects:
        selector = found["spec"].get("selector") if "spec" in found else None
        wanted = (selector or {}).get("matchLabels", selector) or {}
        assert any(wanted.items() <= pod.items() for pod in labels), found["metadata"]["name"]


def test_the_gpu_overlay_asks_for_a_gpu_and_uses_it():
    (container,) = service_pod(render("k8s/overlays/gpu"), "worker")["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "LORAPLEX_WORKER_DEVICE", "value": "cuda"} in container["env"]
    assert "LORAPLEX_WORKER_WORKER_ID" in [variable["name"] for variable in container["env"]]


def test_no_secret_is_in_the_tree():
    for path in Path("k8s").rglob("*.yaml"):
        assert "kind: Secret\n" not in path.read_text(), path
