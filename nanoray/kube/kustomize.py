"""Build the kustomizations of kuberay/ with `kubectl kustomize`, which needs no cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from nanoray.errors import ConfigError

Object = dict[str, Any]  # one Kubernetes object, as YAML has it

# Kinds that others refer to, in the order in which they must exist. All others come after them.
_ORDER = (
    "Namespace",
    "ServiceAccount",
    "ConfigMap",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "ResourceClaimTemplate",
    "NetworkPolicy",
)


def build(folder: Path) -> list[Object]:
    """Return the objects that `kubectl kustomize FOLDER` prints.

    Raises ConfigError without kubectl, and with its message for a folder that it cannot build.
    """
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"kubectl builds the manifests in {folder}, and it cannot be started: "
            f"{error.strerror}; install kubectl, and put its folder on PATH"
        ) from None
    if done.returncode != 0:
        raise ConfigError(f"kubectl kustomize {folder}: {' '.join(done.stderr.split())}")
    return [thing for thing in yaml.safe_load_all(done.stdout) if thing is not None]


def in_order(objects: list[Object]) -> list[Object]:
    """Return objects in the order in which they are applied: dependencies first."""

    def position(thing: Object) -> int:
        if thing["kind"] in _ORDER:
            return _ORDER.index(thing["kind"])
        return len(_ORDER)

    return sorted(objects, key=position)


def to_yaml(objects: list[Object]) -> str:
    """Write objects as YAML documents."""
    documents = []
    for thing in objects:
        documents.append(yaml.safe_dump(thing, sort_keys=False, width=110))
    return "---\n".join(documents)


# Reading objects.


def groups(cluster_spec: Object) -> list[Object]:
    """Return the head group and every worker group of a RayCluster."""
    return [cluster_spec["headGroupSpec"], *cluster_spec.get("workerGroupSpecs", ())]


def containers(thing: Any) -> list[Object]:
    """Return every container and init container in `thing`, at any depth."""
    found: list[Object] = []
    if isinstance(thing, list):
        for item in thing:
            found += containers(item)
    if not isinstance(thing, dict):
        return found

    # Those of this pod, then those of objects inside it: a RayJob has pod templates of groups.
    for key in ("initContainers", "containers"):
        for container in thing.get(key) or ():
            if isinstance(container, dict):
                found.append(container)
    for key, value in thing.items():
        if "ontainers" not in key:  # initContainers and containers
            found += containers(value)
    return found


_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def quantity(value: str | int | float) -> float:
    """Return a Kubernetes quantity ("500m", "4Gi", 2) as a number. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is no quantity; write for example 500m, 4 or 16Gi")
    return float(match[1]) * _UNITS[match[2]]
