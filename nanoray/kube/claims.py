"""GPUs that pods claim through Kubernetes' Dynamic Resource Allocation (DRA).

pod.resourceClaims ─► ResourceClaimTemplate ─► requests: a device class, a count, CEL selectors

Kubernetes makes a claim of the template for every pod, and the scheduler allocates the devices that
the drivers of the nodes have listed in ResourceSlices. Sources: resource.k8s.io/v1 as of Kubernetes
1.34; NVIDIA's DRA driver (its device classes, and the attributes of its devices).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nanoray.kube.cluster import Api, ApiError, KubeError
from nanoray.kube.kustomize import Object

API_VERSION = "resource.k8s.io/v1"
_API = f"/apis/{API_VERSION}"
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


def gpu_requests(pod: Object, templates: dict[str, Object]) -> list[Request]:
    """Return the requests of a pod's claims that ask for GPUs or slices of NVIDIA's driver.

    A claim without a known template has none.
    """
    found = []
    for claim in pod.get("resourceClaims", ()):
        template = templates.get(claim.get("resourceClaimTemplateName", ""), {})
        for request in requests_of(template):
            exactly = request.get("exactly", {})
            if exactly.get("deviceClassName") not in GPU_CLASSES:
                continue
            expressions = []
            for selector in exactly.get("selectors", ()):
                expressions.append(selector["cel"]["expression"])
            found.append(
                Request(
                    device_class=exactly["deviceClassName"],
                    count=int(exactly.get("count", 1)),
                    selectors=tuple(expressions),
                )
            )
    return found


def requests_of(template: Object) -> list[dict[str, Any]]:
    """Return the requests of a template; of an empty one there are none."""
    spec = template.get("spec", {}).get("spec", {})
    requests: list[dict[str, Any]] = spec.get("devices", {}).get("requests", [])
    return requests


# The driver in the cluster.


def check_driver(api: Api, objects: list[Object]) -> str | None:
    """Return a line about the device classes that the pods claim, None without claims.

    Raises KubeError when the cluster has no DRA or not NVIDIA's driver for it.
    """
    classes: set[str] = set()
    for template in claim_templates(objects).values():
        for request in requests_of(template):
            classes.add(request.get("exactly", {}).get("deviceClassName", ""))
    claimed = sorted(classes.intersection(GPU_CLASSES))
    for name in claimed:
        try:
            api.call("GET", f"{_API}/deviceclasses/{name}")
        except ApiError as error:
            if error.status == 403:  # an account without the right can still submit jobs
                return f"dra:     device class {name} unknown ({error.message})"
            if error.status != 404:
                raise
            _refuse_without_dra(api)
            raise KubeError(
                f"this cluster has no device class {name}: NVIDIA's DRA driver is not installed, "
                "or does not allocate GPUs; see kuberay/README.md, or give --gpu_allocation "
                "device_plugin"
            ) from None
    if not claimed:
        return None
    return f"dra:     {', '.join(claimed)}"


def _refuse_without_dra(api: Api) -> None:
    """Raise KubeError when the API server does not serve DRA's API."""
    try:
        api.call("GET", _API)
    except ApiError as error:
        if error.status == 404:
            raise KubeError(
                f"this cluster has no {API_VERSION}: Dynamic Resource Allocation needs Kubernetes "
                "1.34 or newer; give --gpu_allocation device_plugin"
            ) from None
