"""Compare what pods ask for with what the cluster's nodes have, before anything is applied.

The scheduler decides again when the pods exist; this finds what it could never place, and what has
no room now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nanoray.kube.cluster import Api, ApiError, KubeError
from nanoray.kube.kustomize import Object
from nanoray.kube.rules import cluster_spec, quantity, templates

Amounts = dict[str, float]  # resource -> CPUs, bytes or devices
_REMEDY = {"cpu": "lower --cpus", "memory": "lower --memory_gib"}


@dataclass
class Node:
    """A node that takes new pods."""

    name: str
    labels: dict[str, str]
    taints: list[dict[str, str]]
    has: Amounts  # allocatable
    free: Amounts = field(default_factory=dict)  # of that, what no pod has requested


@dataclass(frozen=True)
class Pod:
    """A pod that would be made."""

    name: str
    asks: Amounts
    spec: dict[str, Any]
    is_worker: bool


def compare(objects: list[Object]) -> list[str]:
    """Return lines about requests and room. Raises KubeError for a pod that fits on no node, even
    on an empty one.
    """
    pods = sorted(_pods(objects), key=lambda pod: sorted(pod.asks.values()), reverse=True)
    try:
        nodes, note = _nodes(Api(), objects)
    except KubeError as error:
        return [f"fit    not compared with the nodes: {error}"]
    total: Amounts = {}
    for pod in pods:
        if reason := _fits_nowhere(pod, nodes):
            raise KubeError(f"{pod.name} fits on no node: {reason}")
        total = {key: total.get(key, 0.0) + pod.asks.get(key, 0.0) for key in total | pod.asks}
    waiting = [pod for pod in pods if not _take(pod, nodes)]
    lines = [
        f"fit    {len(pods)} pods ask for {amounts(total)}; {len(nodes)} node(s) have room for "
        f"them{note}"
    ]
    if waiting:
        free = "; ".join(
            f"{node.name} {amounts({key: node.free.get(key, 0.0) for key in total})}"
            for node in nodes
        )
        names = ", ".join(dict.fromkeys(pod.name for pod in waiting))
        lines = [
            f"fit    {len(pods)} pods ask for {amounts(total)}{note}",
            f"fit    no room now for {len(waiting)} of them: {names}; beside the others there is "
            f"left: {free}",
            "fit    they wait until other pods end; or use fewer or smaller ones (--workers, "
            "--cpus, --memory_gib, "
            "--overlay laptop)",
        ]
    return lines


def amounts(values: Amounts) -> str:
    """Write amounts of resources for people: 1.5 CPU, 4 GiB, 2 nvidia.com/gpu."""
    units = {"cpu": (1, "CPU"), "memory": (2**30, "GiB")}
    parts = [
        (value / units.get(key, (1, ""))[0], units.get(key, (1, key))[1])
        for key, value in values.items()
    ]
    return ", ".join(f"{value:.3g} {unit}" for value, unit in parts)


def _pods(objects: list[Object]) -> list[Pod]:
    found = []
    for thing in objects:
        for i, (template, count) in enumerate(templates(thing)):
            what = ("head" if i == 0 else "worker") if cluster_spec(thing) else ""
            name = f"{what} pod of {thing['kind']} {thing['metadata']['name']}".strip()
            found += [
                Pod(name, _requests(template["spec"]), template["spec"], what == "worker")
            ] * count
    return found


def _requests(spec: dict[str, Any]) -> Amounts:
    """Return what a pod asks for: the sum of its containers."""
    asks: Amounts = {}
    for container in spec.get("containers", ()):
        for key, value in _counted(container.get("resources", {}).get("requests", {})).items():
            asks[key] = asks.get(key, 0.0) + value
    return asks


def _counted(resources: dict[str, str]) -> Amounts:
    """Return CPUs, memory and devices; other resources, such as ephemeral storage, are left to the
    scheduler.
    """
    return {k: quantity(v) for k, v in resources.items() if k in ("cpu", "memory") or "/" in k}


def _nodes(api: Api, objects: list[Object]) -> tuple[list[Node], str]:
    """Return the nodes that take pods, and a note when the requests of other pods may not be read."""
    nodes, found = {}, api.call("GET", "/api/v1/nodes")["items"]
    if not found:
        raise KubeError("there is none yet")
    for thing in found:
        name, spec = thing["metadata"]["name"], thing.get("spec", {})
        has = _counted(thing["status"]["allocatable"])
        if not spec.get("unschedulable"):
            nodes[name] = Node(
                name, thing["metadata"].get("labels", {}), spec.get("taints", []), has, dict(has)
            )
    try:
        others = api.call("GET", "/api/v1/pods")["items"]
    except ApiError as error:
        return list(
            nodes.values()
        ), f" when they are empty; other pods may not be listed ({error.message})"
    # What is there already of the same Deployment or Job is not needed twice.
    own = [t["metadata"]["labels"] for o in objects if not cluster_spec(o) for t, _ in templates(o)]
    for pod in others:
        labels, node = (
            pod["metadata"].get("labels", {}),
            nodes.get(pod.get("spec", {}).get("nodeName", "")),
        )
        over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if node and not over and not any(mine.items() <= labels.items() for mine in own):
            _book(node, _requests(pod["spec"]))
    return list(nodes.values()), ""


def _book(node: Node, asks: Amounts) -> None:
    for key, value in asks.items():
        node.free[key] = node.free.get(key, 0.0) - value


def _take(pod: Pod, nodes: list[Node]) -> bool:
    """Book a pod on the first node with room for it; return whether there is one."""
    for node in nodes:
        if not _refusal(pod.spec, node) and all(
            node.free.get(k, 0.0) >= v for k, v in pod.asks.items()
        ):
            _book(node, pod.asks)
            return True
    return False


def _fits_nowhere(pod: Pod, nodes: list[Node]) -> str:
    """Return why no node could hold a pod even if it were empty, with the remedy; empty if one
    could.
    """
    open_to = [node for node in nodes if not _refusal(pod.spec, node)]
    if not open_to:
        reasons = (
            "; ".join(f"{node.name} {_refusal(pod.spec, node)}" for node in nodes)
            or "no node takes pods"
        )
        return f"{reasons}; label or untaint a node, or take another --overlay"
    if any(all(node.has.get(k, 0.0) >= v for k, v in pod.asks.items()) for node in open_to):
        return ""
    short, remedies = [], []
    for key, value in pod.asks.items():
        best = max(open_to, key=lambda node: node.has.get(key, 0.0))
        if best.has.get(key, 0.0) < value:
            most = amounts({key: best.has.get(key, 0.0)})
            short.append(
                f"it asks for {amounts({key: value})}, and {best.name} has the most, {most}"
            )
            remedies.append(
                _REMEDY.get(key, "lower --ranks_per_pod or give another --gpu_resource")
            )
    if not short:
        short, remedies = [f"no single node has all of {amounts(pod.asks)}"], [*_REMEDY.values()]
    smaller = (
        ", ".join(remedies) + ", or take --overlay laptop"
        if pod.is_worker
        else "take --overlay laptop"
    )
    return f"{'; '.join(short)}; {smaller}, or add a larger node"


def _refusal(spec: dict[str, Any], node: Node) -> str:
    """Return why a node does not take a pod whatever room it has: labels, affinity, taints."""
    for key, value in spec.get("nodeSelector", {}).items():
        if node.labels.get(key) != value:
            return f"has no label {key}={value}"
    affinity = (
        spec.get("affinity", {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
    )
    terms = [term.get("matchExpressions", ()) for term in affinity.get("nodeSelectorTerms", ())]
    if terms and not any(all(_matches(rule, node.labels) for rule in term) for term in terms):
        wanted = " or ".join(
            ",".join(f"{r['key']} {r['operator']} {r.get('values', '')}" for r in t) for t in terms
        )
        return f"has no label {wanted}".rstrip()
    for taint in node.taints:
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(t, taint) for t in spec.get("tolerations", ())
        ):
            return f"has the taint {taint['key']}:{taint['effect']}"
    return ""


def _matches(rule: dict[str, Any], labels: dict[str, str]) -> bool:
    present, value = rule["key"] in labels, labels.get(rule["key"])
    listed = value in rule.get("values", ())
    answers = {"In": listed, "NotIn": not listed, "Exists": present, "DoesNotExist": not present}
    return answers.get(rule["operator"], True)  # Gt and Lt are left to the scheduler


def _tolerates(toleration: dict[str, Any], taint: dict[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get(
        "value", ""
    )
