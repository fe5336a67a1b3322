"""Compare the requests of pods with the cluster's nodes, before anything is applied.

The scheduler decides when the pods exist. This finds the pods that it could never place, and those
that have no room now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nanoray.kube.claims import GPU_CLASSES, claim_templates, gpu_requests
from nanoray.kube.cluster import Api, ApiError, KubeError
from nanoray.kube.devices import (
    ListedDevice,
    check_driver,
    evaluate,
    fits,
    label,
    read_allocated,
    read_devices,
    requests_of,
    summarize,
)
from nanoray.kube.kustomize import Object
from nanoray.kube.rules import cluster_spec, quantity, templates

Amounts = dict[str, float]  # resource -> CPUs, bytes or devices
_REMEDY = {"cpu": "lower --cpus", "memory": "lower --memory_gib"}
_UNITS = {"cpu": (1, "CPU"), "memory": (2**30, "GiB")}


@dataclass
class Node:
    """A node that takes new pods."""

    name: str
    labels: dict[str, str]
    taints: list[dict[str, str]]
    allocatable: Amounts
    free: Amounts = field(default_factory=dict)  # allocatable and requested by no pod
    devices: list[ListedDevice] = field(default_factory=list)  # which pods may claim


@dataclass(frozen=True)
class Pod:
    """A pod that would be created."""

    name: str
    requests: Amounts
    spec: dict[str, Any]
    is_worker: bool


def compare(objects: list[Object]) -> list[str]:
    """Return lines about requests and room.

    Raises KubeError for a pod that fits on no node, even on an empty one, and for a claim of a
    device class that the cluster does not have.
    """
    # A comparison is a service: without the right, or without an answer, the job is submitted.
    try:
        api = Api()
        nodes, note = _read_nodes(api, objects)
    except KubeError as error:
        return [f"fit    not compared with the nodes: {error}"]
    check_driver(api, objects)  # first: a missing class is no lack of room
    claims_are_known, lines = _read_devices(api, objects, nodes)

    # The largest pods first, because the small ones fit into what is left.
    pods = _pods(objects, claims_are_known)
    pods.sort(key=lambda pod: sorted(pod.requests.values()), reverse=True)
    total: Amounts = {}
    for pod in pods:
        reason = _why_on_no_node(pod, nodes)
        if reason:
            raise KubeError(f"{pod.name} fits on no node: {reason}")
        for resource, amount in pod.requests.items():
            total[resource] = total.get(resource, 0.0) + amount

    waiting = [pod for pod in pods if not _book_first_fit(pod, nodes)]
    summary = f"fit    {len(pods)} pods ask for {amounts(total)}"
    if not waiting:
        return [f"{summary}; {len(nodes)} node(s) have room for them{note}", *lines]

    rooms = []
    for node in nodes:
        left = {resource: node.free.get(resource, 0.0) for resource in total}
        rooms.append(f"{node.name} {amounts(left)}")
    names = ", ".join(dict.fromkeys(pod.name for pod in waiting))  # each name once

    # Other pods are the reason only if all of these fit on the nodes without them.
    for node in nodes:
        node.free = dict(node.allocatable)
    if all(_book_first_fit(pod, nodes) for pod in pods):
        outlook = "they wait until other pods end; or use"
    else:
        outlook = "no room was found on empty nodes either: add nodes, or use"
    return [
        f"{summary}{note}",
        f"fit    no room now for {len(waiting)} of them: {names}; after the others there is left: "
        f"{'; '.join(rooms)}",
        f"fit    {outlook} fewer or smaller ones (--workers, --cpus, --memory_gib, --overlay "
        "laptop)",
        *lines,
    ]


def amounts(values: Amounts) -> str:
    """Format amounts of resources: 1.5 CPU, 4 GiB, 2 nvidia.com/gpu."""
    parts = []
    for resource, amount in values.items():
        size, unit = _UNITS.get(resource, (1, resource))
        parts.append(f"{amount / size:.3g} {unit}")
    return ", ".join(parts)


def _pods(objects: list[Object], with_claims: bool) -> list[Pod]:
    """Return the pods of all objects; a template with three replicas is three pods."""
    claimable = claim_templates(objects)
    pods = []
    for thing in objects:
        is_cluster = cluster_spec(thing) is not None
        for number, (template, count) in enumerate(templates(thing)):
            name = f"pod of {thing['kind']} {thing['metadata']['name']}"
            is_worker = is_cluster and number > 0  # the head is the first template of a cluster
            if is_cluster:
                role = "worker" if is_worker else "head"
                name = f"{role} {name}"
            spec = template["spec"]
            requests = _requests(spec)
            if with_claims:
                for request in gpu_requests(spec, claimable):
                    key = label(request)
                    requests[key] = requests.get(key, 0.0) + request.count
            for _ in range(count):
                pods.append(Pod(name, requests, spec, is_worker))
    return pods


def _requests(spec: dict[str, Any]) -> Amounts:
    """Return the requests of a pod: the sum of its containers'."""
    total: Amounts = {}
    for container in spec.get("containers", ()):
        requests = container.get("resources", {}).get("requests", {})
        for resource, amount in _counted(requests).items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def _counted(resources: dict[str, str]) -> Amounts:
    """Return CPUs, memory and devices. The scheduler alone counts others, such as local storage."""
    counted = {}
    for resource, amount in resources.items():
        if (
            resource in ("cpu", "memory") or "/" in resource
        ):  # a device has a domain: nvidia.com/gpu
            counted[resource] = quantity(amount)
    return counted


def _read_nodes(api: Api, objects: list[Object]) -> tuple[list[Node], str]:
    """Return the nodes that take pods, and a note if the requests of other pods may not be read.

    Raises KubeError if the nodes may not be read.
    """
    found = api.call("GET", "/api/v1/nodes")["items"]
    if not found:
        raise KubeError("there is none yet")

    nodes: dict[str, Node] = {}
    for thing in found:
        spec = thing.get("spec", {})
        if spec.get("unschedulable"):  # cordoned
            continue
        name = thing["metadata"]["name"]
        allocatable = _counted(thing["status"]["allocatable"])
        nodes[name] = Node(
            name=name,
            labels=thing["metadata"].get("labels", {}),
            taints=spec.get("taints", []),
            allocatable=allocatable,
            free=dict(allocatable),
        )

    # Without the right to list pods, the nodes count as empty.
    try:
        pods = api.call("GET", "/api/v1/pods")["items"]
    except ApiError as error:
        note = f" when they are empty; other pods may not be listed ({error.message})"
        return list(nodes.values()), note

    # The new pods replace those of the same Deployment or Job, so these are not counted twice.
    replaced_labels = []
    for thing in objects:
        if cluster_spec(thing) is None:
            for template, _ in templates(thing):
                replaced_labels.append(template["metadata"]["labels"])

    for pod in pods:
        node = nodes.get(pod.get("spec", {}).get("nodeName", ""))
        has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if node is None or has_ended:
            continue
        labels = pod["metadata"].get("labels", {})
        if not any(own.items() <= labels.items() for own in replaced_labels):
            _book(node, _requests(pod["spec"]))
    return list(nodes.values()), ""


def _read_devices(api: Api, objects: list[Object], nodes: list[Node]) -> tuple[bool, list[str]]:
    """Add the devices that pods may claim to the nodes' room.

    Returns whether the claims of pods can be compared with them, and lines about what is not.
    Raises KubeError when the cluster has no Dynamic Resource Allocation.
    """
    requests = list(dict.fromkeys(requests_of(objects)))  # each once
    if not requests:
        return False, []
    try:
        devices = read_devices(api)
    except ApiError as error:
        return False, [f"fit    claims of GPUs are not compared with the nodes: {error}"]
    lines = []
    try:
        allocated = read_allocated(api)
    except ApiError as error:
        allocated = set()
        lines.append(f"fit    GPUs count as free; claims may not be listed ({error.message})")

    by_name = {node.name: node for node in nodes}
    for device in devices:
        node = by_name.get(device.node)
        if node is None:
            continue
        node.devices.append(device)
        is_free = (device.pool, device.name) not in allocated
        for key in {label(request) for request in requests if fits(device, request)}:
            node.allocatable[key] = node.allocatable.get(key, 0.0) + 1
            if is_free:
                node.free[key] = node.free.get(key, 0.0) + 1

    # What only the scheduler can say.
    unknown = set()
    for request in requests:
        for selector in request.selectors:
            for device in devices:
                has_class = device.device_class == request.device_class
                if has_class and evaluate(selector, device) is None:
                    unknown.add(selector)
    for selector in sorted(unknown):
        lines.append(
            f"fit    counted as satisfied, because only the scheduler evaluates it: {selector}"
        )
    if any(device.is_partition for device in devices):
        lines.append(
            "fit    at most: the driver makes slices on demand, and lists each that a GPU could "
            "have, not those that it could have together"
        )
    return True, lines


def _book(node: Node, requests: Amounts) -> None:
    for resource, amount in requests.items():
        node.free[resource] = node.free.get(resource, 0.0) - amount


def _book_first_fit(pod: Pod, nodes: list[Node]) -> bool:
    """Book a pod on the first node with room for it; return whether there is one."""
    for node in nodes:
        if not _why_refused(pod.spec, node) and _holds(node.free, pod.requests):
            _book(node, pod.requests)
            return True
    return False


def _holds(room: Amounts, requests: Amounts) -> bool:
    return all(room.get(resource, 0.0) >= amount for resource, amount in requests.items())


def _why_on_no_node(pod: Pod, nodes: list[Node]) -> str | None:
    """Return why no node could hold a pod even if it were empty, with the remedy.

    Returns None if one could.
    """
    # Labels and taints.
    open_nodes = []
    refusals = []
    for node in nodes:
        refusal = _why_refused(pod.spec, node)
        if refusal:
            refusals.append(f"{node.name} {refusal}")
        else:
            open_nodes.append(node)
    if not open_nodes:
        why = "; ".join(refusals) or "no node takes pods"
        return f"{why}; label or untaint a node, or take another --overlay"

    # Room.
    if any(_holds(node.allocatable, pod.requests) for node in open_nodes):
        return None
    reasons = []
    remedies = []
    smaller = "add a larger node"
    for resource, amount in pod.requests.items():
        largest = max(open_nodes, key=lambda node: node.allocatable.get(resource, 0.0))
        most = largest.allocatable.get(resource, 0.0)
        if most < amount:
            asked = amounts({resource: amount})
            available = amounts({resource: most})
            reasons.append(f"it asks for {asked}, and {largest.name} has the most, {available}")
            if resource in _REMEDY:
                remedies.append(_REMEDY[resource])
                smaller = "take --overlay laptop, or add a larger node"
            else:
                remedies.append(_remedy_of_devices(resource, most, open_nodes))
    # Each resource is on some node, but not all of them on one.
    if not reasons:
        reasons = [f"no single node has all of {amounts(pod.requests)}"]
        remedies = list(_REMEDY.values())

    # The flags change worker pods only.
    remedy = smaller
    if pod.is_worker:
        remedy = f"{', '.join(remedies)}, or {smaller}"
    return f"{'; '.join(reasons)}; {remedy}"


def _remedy_of_devices(resource: str, most: float, nodes: list[Node]) -> str:
    """Return what to do about a device of which no node has enough; `most` is on one of them."""
    fewer = "lower --ranks_per_pod or " if most else ""  # fewer of none do not help
    if not resource.startswith(GPU_CLASSES):
        return (
            f"{fewer}give another --gpu_resource, or --gpu_allocation dra where NVIDIA's DRA "
            "driver gives out the GPUs"
        )
    devices = []
    for node in nodes:
        devices += node.devices
    if not devices:
        return (
            "NVIDIA's DRA driver lists no device there: see kubectl get resourceslices and "
            "kubectl -n nvidia-dra-driver-gpu get pods"
        )
    return (
        f"{fewer}give another --gpu_resource or --gpu_selector (the driver lists: "
        f"{summarize(devices)})"
    )


def _why_refused(spec: dict[str, Any], node: Node) -> str | None:
    """Return why a node does not take a pod whatever room it has: labels, affinity, taints."""
    for key, value in spec.get("nodeSelector", {}).items():
        if node.labels.get(key) != value:
            return f"has no label {key}={value}"

    # A node must match every rule of at least one term.
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [term.get("matchExpressions", ()) for term in required.get("nodeSelectorTerms", ())]
    if terms and not any(all(_matches(rule, node.labels) for rule in term) for term in terms):
        wanted = " or ".join(_format_term(term) for term in terms)
        return f"has no label {wanted}".rstrip()

    tolerations = spec.get("tolerations", ())
    for taint in node.taints:
        if taint["effect"] == "PreferNoSchedule":  # a preference, not a refusal
            continue
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            return f"has the taint {taint['key']}:{taint['effect']}"
    return None


def _format_term(term: list[dict[str, Any]]) -> str:
    return ",".join(f"{rule['key']} {rule['operator']} {rule.get('values', '')}" for rule in term)


def _matches(rule: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a node's labels match one rule of an affinity."""
    is_present = rule["key"] in labels
    is_listed = labels.get(rule["key"]) in rule.get("values", ())
    answers = {
        "In": is_listed,
        "NotIn": not is_listed,
        "Exists": is_present,
        "DoesNotExist": not is_present,
    }
    return answers.get(rule["operator"], True)  # Gt and Lt are left to the scheduler


def _tolerates(toleration: dict[str, Any], taint: dict[str, str]) -> bool:
    """Return whether a toleration matches a taint. An empty key or effect matches all."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return toleration.get("value", "") == taint.get("value", "")
