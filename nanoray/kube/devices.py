"""The devices that DRA drivers list for the nodes, and which of them a claim could get.

driver on a node ─► ResourceSlice: devices with attributes and capacities ─► scheduler ─► claim

The scheduler evaluates the selectors of a claim, which are CEL. Here only the forms of selectors
are evaluated that kuberay/ and its README use, so that a dry run can name a device that no node
has; for any other form the answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt
from typing import Any

from nanoray.kube.claims import (
    API_VERSION,
    DRIVER,
    GPU_CLASSES,
    MIG_SLICE,
    Request,
    claim_templates,
    gpu_requests,
)
from nanoray.kube.cluster import Api, ApiError, KubeError
from nanoray.kube.kustomize import Object
from nanoray.kube.rules import quantity, templates

_API = f"/apis/{API_VERSION}"
_WITHOUT_DRA = (
    f"this cluster has no {API_VERSION}: Dynamic Resource Allocation needs Kubernetes 1.34 or "
    "newer; give --gpu_allocation device_plugin"
)
_DOMAIN = r"\['gpu\.nvidia\.com'\]\."
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {"==": eq, ">=": ge, "<=": le, ">": gt, "<": lt}
_EQUALS = re.compile(rf"device\.attributes{_DOMAIN}(\w+) == '([^']*)'")
_VERSION = re.compile(
    rf"device\.attributes{_DOMAIN}(\w+)\.compareTo\(semver\('([^']*)'\)\) (==|[<>]=?) 0"
)
_CAPACITY = re.compile(
    rf"device\.capacity{_DOMAIN}(\w+)\.compareTo\(quantity\('([^']*)'\)\) (==|[<>]=?) 0"
)


@dataclass(frozen=True)
class ListedDevice:
    """A GPU or a slice of one, as NVIDIA's driver lists it."""

    node: str
    pool: str
    name: str
    attributes: dict[str, str]  # of the driver's domain: type, productName, profile, ...
    capacity: dict[str, str]  # quantities
    is_partition: bool  # made on demand: it shares counters with others of its GPU

    @property
    def device_class(self) -> str:
        """The device class of NVIDIA's driver that selects this device."""
        return f"{self.attributes.get('type', '')}.nvidia.com"

    @property
    def model(self) -> str:
        """Its MIG profile, or the product name of a whole GPU."""
        return self.attributes.get("profile") or self.attributes.get("productName", "?")


def check_driver(api: Api, objects: list[Object]) -> str | None:
    """Return a line about the device classes that the pods claim, None without claims.

    Raises KubeError when the cluster has no DRA or not NVIDIA's driver for it.
    """
    classes = sorted({request.device_class for request in requests_of(objects)})
    for name in classes:
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
    if not classes:
        return None
    return f"dra:     {', '.join(classes)}"


def _refuse_without_dra(api: Api) -> None:
    """Raise KubeError when the API server does not serve DRA's API."""
    try:
        api.call("GET", _API)
    except ApiError as error:
        if error.status == 404:
            raise KubeError(_WITHOUT_DRA) from None


def requests_of(objects: list[Object]) -> list[Request]:
    """Return the requests of GPUs in the claims of all pod templates."""
    claimable = claim_templates(objects)
    found = []
    for thing in objects:
        for template, _ in templates(thing):
            found += gpu_requests(template["spec"], claimable)
    return found


def read_devices(api: Api) -> list[ListedDevice]:
    """Return the GPUs and slices that pods may claim. Raises KubeError."""
    try:
        slices = api.call("GET", f"{_API}/resourceslices")["items"]
    except ApiError as error:
        if error.status == 404:
            raise KubeError(_WITHOUT_DRA) from None
        raise

    # A driver that lists a pool anew raises its generation, and deletes the older slices later.
    newest: dict[str, int] = {}
    own = [thing["spec"] for thing in slices if thing["spec"]["driver"] == DRIVER]
    for spec in own:
        pool = spec["pool"]
        newest[pool["name"]] = max(newest.get(pool["name"], 0), pool["generation"])

    devices = []
    for spec in own:
        pool = spec["pool"]
        if pool["generation"] < newest[pool["name"]]:
            continue
        for listed in spec.get("devices", ()):
            # A taint marks a device that is broken or reserved, and our claims tolerate none.
            if listed.get("taints"):
                continue
            devices.append(_device(spec.get("nodeName", ""), pool["name"], listed))
    return devices


def _device(node: str, pool: str, listed: dict[str, Any]) -> ListedDevice:
    attributes = {}
    for name, value in listed.get("attributes", {}).items():
        ((_, content),) = value.items()  # {string: ...}, {version: ...}, {int: ...} or {bool: ...}
        attributes[name.removeprefix(f"{DRIVER}/")] = str(content)
    capacity = {}
    for name, value in listed.get("capacity", {}).items():
        capacity[name.removeprefix(f"{DRIVER}/")] = str(value["value"])
    is_partition = bool(listed.get("consumesCounters"))
    return ListedDevice(node, pool, listed["name"], attributes, capacity, is_partition)


def read_allocated(api: Api) -> set[tuple[str, str]]:
    """Return pool and name of the devices that claims have already. Raises KubeError."""
    allocated = set()
    for claim in api.call("GET", f"{_API}/resourceclaims")["items"]:
        allocation = claim.get("status", {}).get("allocation", {})
        for result in allocation.get("devices", {}).get("results", ()):
            if result["driver"] == DRIVER and not result.get("adminAccess"):
                allocated.add((result["pool"], result["device"]))
    return allocated


def fits(device: ListedDevice, request: Request) -> bool:
    """Return whether a device may satisfy a request; unknown selectors count as satisfied."""
    if device.device_class != request.device_class:
        return False
    return all(evaluate(text, device) is not False for text in request.selectors)


def evaluate(selector: str, device: ListedDevice) -> bool | None:
    """Return whether a device satisfies a selector, None for a form that is not known here."""
    text = selector.strip()
    match = _EQUALS.fullmatch(text)
    if match:
        return device.attributes.get(match[1]) == match[2]
    match = _VERSION.fullmatch(text)
    if match and match[1] in device.attributes:
        version = _version(device.attributes[match[1]])
        return _OPERATORS[match[3]](version, _version(match[2]))
    match = _CAPACITY.fullmatch(text)
    if match and match[1] in device.capacity:
        amount = quantity(device.capacity[match[1]])
        return _OPERATORS[match[3]](amount, quantity(match[2]))
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def label(request: Request) -> str:
    """Return how a request is printed: gpu.nvidia.com, or mig.nvidia.com 1g.18gb."""
    return f"{request.device_class} {request.profile}".strip()


def summarize(devices: list[ListedDevice]) -> str:
    """Return the models of devices with their numbers: 4 NVIDIA H200, 7 1g.18gb slices."""
    counts: dict[str, int] = {}
    for device in devices:
        if device.device_class in GPU_CLASSES:
            kind = " slices" if device.device_class == MIG_SLICE else ""
            name = f"{device.model}{kind}"
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
