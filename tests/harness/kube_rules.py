"""The rules that the manifests of kuberay/ keep, and that no server checks before a run starts.

What the API server, the namespace's Pod Security Standard and the scheduler refuse is left to them.
Sources: KubeRay v1.7.0, its validation and its defaulting of pods.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from nanoray.kube.gpus import gpu_requests
from nanoray.kube.kustomize import Object, groups

# The operator leaves the commands of containers alone
KEEPS_COMMAND = "ray.io/overwrite-container-cmd"
# Seconds after SIGTERM after which `ray start` ends its node
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def cluster_spec(thing: Object) -> dict[str, Any] | None:
    """Return the RayCluster spec of an object of KubeRay, None for other kinds."""
    if thing["kind"] == "RayCluster":
        return thing["spec"]
    job = job_spec(thing)
    if job is None:
        return None
    return job["rayClusterSpec"]


def job_spec(thing: Object) -> dict[str, Any] | None:
    """Return the RayJob spec of a RayJob or a RayCronJob, None for other kinds."""
    if thing["kind"] == "RayJob":
        return thing["spec"]
    if thing["kind"] == "RayCronJob":
        return thing["spec"]["jobTemplate"]
    return None


def problems(objects: list[Object]) -> list[str]:
    """Return each broken rule as one line that names the object, the value and the remedy."""
    found = []
    for thing in objects:
        rules = []
        spec = cluster_spec(thing)
        if spec:
            rules += [_check_commands(thing, spec), _check_cluster(spec, objects)]
        job = job_spec(thing)
        if job:
            rules.append(_check_job(job))
        for rule in rules:
            for problem in rule:
                found.append(f"{_label(thing)}: {problem}")
    found += _check_selectors(objects)
    return found


def _label(thing: Object) -> str:
    return f"{thing['kind']} {thing['metadata']['name']}"


# KubeRay's rules.


def _check_cluster(spec: dict[str, Any], objects: list[Object]) -> Iterator[str]:
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode is not token: anyone who reaches the head could run code; set it"
    for group in groups(spec):
        name = group.get("groupName", "head")
        for problem in _check_group(group, objects, is_head=name == "head"):
            yield f"{name}: {problem}"


def _check_commands(thing: Object, spec: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the commands of containers that start Ray themselves."""
    # The operator copies a RayJob's annotations to its cluster, but none of a RayCronJob to its jobs.
    kept = thing["metadata"].get("annotations", {}).get(KEEPS_COMMAND) == "true"
    remedy = f'annotate {KEEPS_COMMAND}: "true"'
    if thing["kind"] == "RayCronJob":
        kept = False
        remedy = "drop command and args, because a RayCronJob has no annotations for its jobs"
    for group in groups(spec):
        name = group.get("groupName", "head")
        container = group["template"]["spec"]["containers"][0]
        command = " ".join([*container.get("command", ()), *container.get("args", ())])
        starts_ray = "KUBERAY_GEN_RAY_START_CMD" in command
        if starts_ray and not kept:
            yield (
                f"{name}: the command starts Ray, and the operator would append another start; "
                f"{remedy}"
            )
        if kept and not starts_ray:
            yield (
                f"{name}: with the annotation {KEEPS_COMMAND} the operator starts no Ray, and the "
                "command does not run $KUBERAY_GEN_RAY_START_CMD; add it, or drop the annotation"
            )


def _check_group(group: dict[str, Any], objects: list[Object], is_head: bool) -> Iterator[str]:
    """Yield broken rules of the head group or of a worker group."""
    params = group.get("rayStartParams", {})

    # Otherwise the kubelet kills the pod before Ray has drained its node.
    pod = group["template"]["spec"]
    container = pod["containers"][0]
    grace_s = pod.get("terminationGracePeriodSeconds", 30)
    drain_s = _drain_timeout(container)
    if grace_s <= float(drain_s):
        yield (
            f"terminationGracePeriodSeconds {grace_s} must be longer than {DRAIN} = {drain_s}; "
            "raise it"
        )

    # Ray counts with num-gpus, the kubelet with limits or the scheduler with claims. A group has
    # one kind of GPU.
    limits = container["resources"]["limits"]
    gpus = [request["exactly"]["count"] for request in gpu_requests(pod, objects)]
    for resource, count in limits.items():
        if resource.endswith("gpu") or resource.startswith("nvidia.com/mig-"):
            gpus.append(int(count))
    num_gpus = params.get("num-gpus")
    if [num_gpus] != [str(count) for count in gpus or [0]]:
        yield f"the pod asks for {gpus or 0} GPUs, num-gpus = {num_gpus}; write them equal"
    if is_head and params.get("num-cpus") != "0":
        yield f"num-cpus = {params.get('num-cpus')!r}; '0' keeps ranks away from the head"


def _drain_timeout(container: Object) -> str:
    """Return Ray's timeout for a drain from the container's environment, else Ray's default."""
    for variable in container.get("env", ()):
        if variable["name"] == DRAIN:
            return str(variable["value"])
    return "30"


def _check_job(spec: dict[str, Any]) -> Iterator[str]:
    if spec.get("submissionMode") != "HTTPMode":
        yield (
            f"submissionMode {spec.get('submissionMode')} ends long jobs with their log stream; "
            "use HTTPMode"
        )
    words = shlex.split(spec.get("entrypoint", ""))
    if words and "exec" not in words:
        yield (
            "entrypoint without exec: a stop would wait RAY_JOB_STOP_WAIT_TIME_S in full; write "
            "exec before it"
        )
    # A program goes on by itself where it has saved something: its folder is on the volume.
    is_program = "nanoray run" in " ".join(words)
    if "--resume" not in words and spec.get("backoffLimit") and not is_program:
        yield "backoffLimit starts over on a new cluster; add --resume auto to the entrypoint"
    elif "--placement_timeout_s" not in words and "nanoray.bench" not in spec.get("entrypoint", ""):
        yield (
            "a replaced pod takes longer than nanoray waits by default; add --placement_timeout_s "
            "300"
        )


def templates(thing: Object) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the pod templates of an object, each with the number of its pods."""
    spec = cluster_spec(thing)
    if spec:
        for group in groups(spec):
            yield group["template"], group.get("replicas", 1)
    elif thing["kind"] in ("Job", "Deployment", "StatefulSet"):
        yield thing["spec"]["template"], thing["spec"].get("replicas", 1)


def _check_selectors(objects: list[Object]) -> Iterator[str]:
    """Yield selectors that select no pod, and disruption budgets for another number of pods."""
    # The labels of each pod template, and the number of its pods.
    labelled: list[tuple[dict[str, str], int]] = []
    for thing in objects:
        for template, count in templates(thing):
            labels = template.get("metadata", {}).get("labels", {})
            labelled.append((labels, count))

    for thing in objects:
        kind = thing["kind"]
        if kind not in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
            continue
        spec = thing.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if not selector:  # a NetworkPolicy for all pods
            continue
        match = selector.get("matchLabels", selector)  # a Service has its labels without the key
        pods = sum(count for labels, count in labelled if match.items() <= labels.items())
        if not pods:
            yield f"{_label(thing)}: {match} selects no pod of these objects"
        elif kind == "PodDisruptionBudget" and spec.get("minAvailable") != pods:
            yield (
                f"{_label(thing)}: minAvailable = {spec.get('minAvailable')} and {pods} pods; "
                f"write {pods}: RayClusters have no scale subresource, so only a number of pods "
                "keeps a drain from ending a rank"
            )
