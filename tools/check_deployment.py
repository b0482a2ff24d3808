"""Check what deploys the services, offline: the Dockerfile, the compose file, and every rendered Kubernetes manifest.

Run: python -m tools.check_deployment. Manifests are validated strictly (unknown fields are errors) against the oldest
Kubernetes that is supported and the newest whose schema is at hand.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import yaml

TREE: Final = Path(__file__).resolve().parent.parent
KUSTOMIZATIONS: Final = ("k8s/base", "k8s/jobs", "k8s/overlays/gpu", "k8s/overlays/postgres")
OLDEST_KUBERNETES: Final = "1.32.0"
_BIN: Final = Path(sys.executable).parent  # the tools are installed beside this Python


def render(kustomization: str) -> list[dict[str, Any]]:
    """Return the objects of a kustomization. Raises RuntimeError with kubectl's words where it cannot be rendered."""
    command = [str(_BIN / "kubectl"), "kustomize", str(TREE / kustomization)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{kustomization}: {done.stderr.strip()}")
    return [found for found in yaml.safe_load_all(done.stdout) if found is not None]


def kubernetes_versions() -> tuple[str, str]:
    """Return the oldest supported version and the newest one whose schema is at hand."""
    return OLDEST_KUBERNETES, kubernetes_validate.latest_version()


def manifest_problems(objects: list[dict[str, Any]], version: str) -> Iterator[str]:
    """Yield a line for each object that this version of Kubernetes would refuse, unknown fields included."""
    for found in objects:
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(str(part) for part in error.path)
            yield f"{found['kind']} {found['metadata']['name']}: {where}: {error.message} (Kubernetes {version})"


def _tool_problems(*command: str | Path) -> Iterator[str]:
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield f"{done.stdout}{done.stderr}".strip()


def main() -> int:
    """Print every problem and return 1, or print what was checked."""
    problems = [
        *_tool_problems(_BIN / "hadolint", "Dockerfile"),
        *_tool_problems(_BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"),
    ]
    for kustomization in KUSTOMIZATIONS:
        try:
            objects = render(kustomization)
        except RuntimeError as error:
            problems.append(str(error))
            continue
        for version in kubernetes_versions():
            problems += [f"{kustomization}: {problem}" for problem in manifest_problems(objects, version)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"Dockerfile, compose file and {len(KUSTOMIZATIONS)} kustomizations are valid", end="")
        print(f" (Kubernetes {' and '.join(kubernetes_versions())})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
