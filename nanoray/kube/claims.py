"""GPUs that pods claim through Kubernetes' Dynamic Resource Allocation (DRA).

pod.resourceClaims ─► ResourceClaimTemplate ─► requests: a device class, a count, CEL selectors

Kubernetes makes a claim of the template for every pod, and the scheduler allocates the devices that
the drivers of the nodes have listed in ResourceSlices. Sources: resource.k8s.io/v1 as of Kubernetes
1.34; NVIDIA's DRA driver (its device classes, and the attributes of its devices).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanoray.kube.kustomize import Object

API_VERSION = "resource.k8s.io/v1"
DRIVER = "gpu.nvidia.com"  # NVIDIA's driver; its devices' attributes have the same prefix
WHOLE_GPU = "gpu.nvidia.com"  # its device classes
MIG_SLICE = "mig.nvidia.com"
GPU_CLASSES = (WHOLE_GPU, MIG_SLICE)
CLAIM = "gpus"  # the claim's name in a pod, and the request's in a template
_PROFILE = re.compile(r"device\.attributes\['gpu\.nvidia\.com'\]\.profile == '([^']+)'")


@dataclass(frozen=True)
class Request:
    """Devices of one class that each pod of a template claims."""

    device_class: str
    count: int
    selectors: tuple[str, ...] = ()  # CEL; a device must satisfy all of them

    @property
    def profile(self) -> str:
        """The MIG profile that a selector asks for, else an empty text."""
        for selector in self.selectors:
            match = _PROFILE.fullmatch(selector.strip())
            if match:
                return match[1]
        return ""


def select_profile(profile: str) -> str:
    """Return the selector of slices with a MIG profile."""
    return f"device.attributes['{DRIVER}'].profile == '{profile}'"


def claim_template(name: str, request: Request) -> Object:
    """Return the ResourceClaimTemplate with one request."""
    exactly: Object = {"deviceClassName": request.device_class, "count": request.count}
    if request.selectors:
        exactly["selectors"] = [{"cel": {"expression": text}} for text in request.selectors]
    requests = [{"name": CLAIM, "exactly": exactly}]
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": requests}}},
    }


def claim_templates(objects: list[Object]) -> dict[str, Object]:
    """Return the ResourceClaimTemplates among objects by their names."""
    found = {}
    for thing in objects:
        if thing["kind"] == "ResourceClaimTemplate":
            found[thing["metadata"]["name"]] = thing
    return found


def claimed_templates(thing: Any) -> set[str]:
    """Return the names of the templates that pods of an object claim, at any depth."""
    names: set[str] = set()
    if isinstance(thing, list):
        for item in thing:
            names |= claimed_templates(item)
    if isinstance(thing, dict):
        for key, value in thing.items():
            if key == "resourceClaimTemplateName":
                names.add(value)
            else:
                names |= claimed_templates(value)
    return names


def pod_requests(pod: Object, templates: dict[str, Object]) -> list[Request]:
    """Return the requests of a pod's claims. A claim without a known template has none."""
    found = []
    for claim in pod.get("resourceClaims", ()):
        template = templates.get(claim.get("resourceClaimTemplateName", ""), {})
        for request in _requests(template):
            exactly = request.get("exactly", {})
            expressions = []
            for selector in exactly.get("selectors", ()):
                expressions.append(selector["cel"]["expression"])
            found.append(
                Request(
                    device_class=exactly.get("deviceClassName", ""),
                    count=int(exactly.get("count", 1)),
                    selectors=tuple(expressions),
                )
            )
    return found


def gpu_requests(pod: Object, templates: dict[str, Object]) -> list[Request]:
    """Return the requests of a pod's claims that ask for GPUs or slices of NVIDIA's driver."""
    requests = pod_requests(pod, templates)
    return [request for request in requests if request.device_class in GPU_CLASSES]


def _requests(template: Object) -> list[dict[str, Any]]:
    spec = template.get("spec", {}).get("spec", {})
    requests: list[dict[str, Any]] = spec.get("devices", {}).get("requests", [])
    return requests


def check_claims(pod: Object, templates: dict[str, Object]) -> Iterator[str]:
    """Yield claims of a pod that would share devices, reach no container, or have no certain count.

    A template that is missing is reported with the other references.
    """
    claimed = {claim["name"] for claim in pod.get("resourceClaims", ())}
    used = set()
    for container in [*pod.get("initContainers", ()), *pod.get("containers", ())]:
        for claim in container.get("resources", {}).get("claims", ()):
            used.add(claim["name"])
            if claim["name"] not in claimed:
                yield (
                    f"container {container['name']} uses the claim {claim['name']}, which is not "
                    "in the pod's resourceClaims; add it there"
                )
    for name in sorted(claimed - used):
        yield f"no container uses the claim {name}, so its devices reach none; add resources.claims"

    for claim in pod.get("resourceClaims", ()):
        if "resourceClaimName" in claim:
            yield (
                f"claim {claim['name']}: with resourceClaimName all pods would share the devices "
                f"of {claim['resourceClaimName']}; write resourceClaimTemplateName"
            )
        template = templates.get(claim.get("resourceClaimTemplateName", ""), {})
        for request in _requests(template):
            for problem in _check_request(request):
                yield f"claim {claim['name']}, request {request['name']}: {problem}"


def _check_request(request: dict[str, Any]) -> Iterator[str]:
    """Yield a request whose number of devices is not certain, or that may share them."""
    if "exactly" not in request:
        yield (
            "without exactly its number of devices is not certain, and num-gpus must be equal to "
            "it; write exactly in place of firstAvailable"
        )
        return
    exactly = request["exactly"]
    if exactly.get("allocationMode", "ExactCount") != "ExactCount":
        yield (
            f"allocationMode {exactly['allocationMode']} takes as many devices as a node has, and "
            "num-gpus must be equal to their number; write a count"
        )
    if exactly.get("adminAccess"):
        yield "adminAccess gives devices that others train on; drop it"
    if exactly.get("deviceClassName") == MIG_SLICE and exactly.get("count", 1) > 1:
        yield (
            f"{exactly['count']} MIG slices in one pod: a CUDA process can use only one; write "
            "count: 1 and more pods"
        )
