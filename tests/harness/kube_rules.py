"""The rules that the manifests of kuberay/ keep: KubeRay's own, and nanoray's policy.

On a cluster the API server, the Pod Security Standard of the namespace and KubeRay's operator check
most of them, the operator only after the objects are accepted. Sources: KubeRay v1.7.0 (its
validation and its defaulting of pods), the Pod Security Standard "restricted".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from nanoray.kube.claims import MIG_SLICE, claim_templates, gpu_requests, requests_of
from nanoray.kube.kustomize import Object, containers, groups, quantity

NAME_LIMIT = {"RayCluster": 53, "RayJob": 47, "RayCronJob": 41}  # the operator appends a suffix
HEAD_MEMORY = 1.5 * 2**30  # the head of overlay laptop, with its driver, held 0.9 GiB at its peak
MIN_RAY = (2, 53)  # KubeRay's probes need it
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
    claimable = claim_templates(objects)
    for thing in objects:
        rules = [_check_policy(thing)]
        rules += [_check_claims(pod, claimable) for pod in _pods(thing)]
        spec = cluster_spec(thing)
        if spec:
            rules += [
                _check_name(thing),
                _check_commands(thing, spec),
                _check_cluster(spec, claimable),
            ]
        job = job_spec(thing)
        if job:
            rules.append(_check_job(job))
        if thing["kind"] == "RayCronJob":
            rules.append(_check_schedule(thing["spec"]))
        for rule in rules:
            for problem in rule:
                found.append(f"{_label(thing)}: {problem}")
    found += _check_references(objects)
    found += _check_selectors(objects)
    return found


def _label(thing: Object) -> str:
    return f"{thing['kind']} {thing['metadata']['name']}"


# KubeRay's rules.


def _check_name(thing: Object) -> Iterator[str]:
    name = thing["metadata"]["name"]
    limit = NAME_LIMIT[thing["kind"]]
    if len(name) > limit or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield (
            f"name {name!r} must be lower case letters, digits and -, at most {limit} of them; "
            "shorten it"
        )


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, () for a text without any."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _check_cluster(spec: dict[str, Any], claimable: dict[str, Object]) -> Iterator[str]:
    version = str(spec.get("rayVersion", ""))
    if _parse_version(version) < MIN_RAY:
        yield (
            f"rayVersion {version!r}: write the image's, 2.53 or newer, or probes look for wget "
            "and auth is refused"
        )
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode is not token: anyone who reaches the head could run code; set it"
    for group in groups(spec):
        name = group.get("groupName", "head")
        for problem in _check_group(group, claimable, is_head=name == "head"):
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


def _check_group(
    group: dict[str, Any], claimable: dict[str, Object], is_head: bool
) -> Iterator[str]:
    """Yield broken rules of the head group or of a worker group."""
    params = group.get("rayStartParams", {})
    for key, value in params.items():
        if not isinstance(value, str):
            yield f"rayStartParams.{key} = {value!r} must be a string; quote it"

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
    gpus = []
    for resource, count in limits.items():
        if resource.endswith("gpu") or resource.startswith("nvidia.com/mig-"):
            gpus.append(int(count))
    claimed = [request.count for request in gpu_requests(pod, claimable)]
    num_gpus = params.get("num-gpus")
    if gpus and claimed:
        yield (
            f"limits ask for {gpus} GPUs and claims for {claimed} more: the device plugin and DRA "
            "would give the same devices twice; write one of the two"
        )
    elif claimed and [num_gpus] != [str(count) for count in claimed]:
        yield f"claims ask for {claimed} GPUs, num-gpus = {num_gpus}; write them equal"
    elif not claimed and [num_gpus] != [str(count) for count in gpus or [0]]:
        yield f"limits ask for {gpus or 0} GPUs, num-gpus = {num_gpus}; write them equal"

    if is_head:
        num_cpus = params.get("num-cpus")
        if num_cpus != "0":
            yield f"num-cpus = {num_cpus!r}; '0' keeps ranks away from the head"
        if quantity(limits["memory"]) < HEAD_MEMORY:
            yield (
                f"memory {limits['memory']}; the dashboard and the driver need 1536Mi, with long "
                "runs 4Gi"
            )
    elif not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
        yield f"replicas {group['replicas']} outside {group['minReplicas']}..{group['maxReplicas']}"


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
    for key in ("ttlSecondsAfterFinished", "suspend"):
        if spec.get(key) and not spec.get("shutdownAfterJobFinishes"):
            yield f"{key} needs shutdownAfterJobFinishes: true"
    if "clusterSelector" in spec and {"suspend", "backoffLimit", "rayClusterSpec"} & spec.keys():
        yield "clusterSelector excludes suspend, backoffLimit and rayClusterSpec; drop it"

    words: list[str] = []
    try:
        words = shlex.split(spec.get("entrypoint", ""))
    except ValueError as error:
        yield f"entrypoint goes unquoted into bash, and bash cannot parse it: {error}"
    else:
        if not words:
            yield "entrypoint is empty"
    if words and words[0] != "exec":
        yield (
            "entrypoint without exec: a stop would wait RAY_JOB_STOP_WAIT_TIME_S in full; write "
            "exec before it"
        )
    if "--resume" not in words and spec.get("backoffLimit"):
        yield "backoffLimit starts over on a new cluster; add --resume auto to the entrypoint"
    elif "--placement_timeout_s" not in words and "nanoray.bench" not in spec.get("entrypoint", ""):
        yield (
            "a replaced pod takes longer than nanoray waits by default; add --placement_timeout_s "
            "300"
        )


def _check_schedule(spec: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a RayCronJob's schedule and with jobs that may meet each other."""
    schedule = str(spec.get("schedule", ""))
    fields = schedule.split()
    is_name = schedule.startswith("@")  # @daily, @every 24h
    if "TZ" in schedule or (len(fields) != 5 and not is_name):
        yield f"schedule {schedule!r} has not five fields without a time zone, such as 0 3 * * *"
    if not spec["jobTemplate"].get("activeDeadlineSeconds"):
        yield (
            "without activeDeadlineSeconds a job that hangs would still run when the next one "
            "starts, because RayCronJob has no concurrencyPolicy; set it"
        )


# The policy.


def templates(thing: Object) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the pod templates of an object, each with the number of its pods."""
    spec = cluster_spec(thing)
    if spec:
        for group in groups(spec):
            yield group["template"], group.get("replicas", 1)
    elif thing["kind"] in ("Job", "Deployment", "StatefulSet"):
        yield thing["spec"]["template"], thing["spec"].get("replicas", 1)


def _pods(thing: Object) -> Iterator[dict[str, Any]]:
    for template, _ in templates(thing):
        yield template["spec"]


# Claims of devices.


def _check_claims(pod: Object, templates: dict[str, Object]) -> Iterator[str]:
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
        for request in requests_of(template):
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


def _check_policy(thing: Object) -> Iterator[str]:
    """Yield pods against the Pod Security Standard "restricted", and with access to the API."""
    for pod in _pods(thing):
        security = pod.get("securityContext", {})
        if not security.get("runAsNonRoot") or security.get("runAsUser", 0) == 0:
            yield "pod runs as root; set runAsNonRoot and runAsUser 1000"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield "pod without seccompProfile RuntimeDefault"
        if pod.get("automountServiceAccountToken") is not False:
            yield "pod gets a token for the Kubernetes API; set automountServiceAccountToken: false"
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(key):
                yield f"{key} is set; training needs none of the host's namespaces"
        if any("hostPath" in volume for volume in pod.get("volumes", ())):
            yield "hostPath in a pod; go through a PersistentVolumeClaim"
        for container in containers(pod):
            for problem in _check_container(container, pod):
                yield f"container {container['name']}: {problem}"


def _check_container(container: Object, pod: Object) -> Iterator[str]:
    """Yield containers without a fixed tag, with rights, or without equal limits and requests."""
    image = container.get("image", "")
    tag = image.rpartition("/")[2].partition(":")[2]  # a registry's port has a colon, too
    if "@sha256:" not in image and tag in ("", "latest"):
        yield f"image {image!r} has no fixed tag"
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield "may gain privileges; set allowPrivilegeEscalation: false"
    capabilities = security.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "keeps capabilities; drop ALL"
    extra = set(capabilities.get("add", ())) - {"IPC_LOCK"}
    if extra:
        yield f"adds capabilities {sorted(extra)}; only RDMA's IPC_LOCK has a use here"
    resources = container.get("resources", {})
    limits = resources.get("limits", {})
    if not {"cpu", "memory"} <= limits.keys() or limits != resources.get("requests"):
        requests = resources.get("requests")
        yield f"limits {limits} and requests {requests} must both be set and be equal"

    # Memory of a tmpfs is the container's, so a full /dev/shm without a limit kills the rank.
    memory = limits.get("memory", 0)
    for volume in pod.get("volumes", ()):
        tmpfs = volume.get("emptyDir", {})
        if tmpfs.get("medium") != "Memory":
            continue
        if "sizeLimit" not in tmpfs or quantity(tmpfs["sizeLimit"]) >= quantity(memory):
            yield (
                f"/dev/shm of {tmpfs.get('sizeLimit')} counts against the memory limit of "
                f"{limits.get('memory')}"
            )


# References between objects.


def _check_references(objects: list[Object]) -> Iterator[str]:
    """Yield accounts, claims and ConfigMaps that a pod refers to and that are missing."""
    existing = {(thing["kind"], thing["metadata"]["name"]) for thing in objects}
    for thing in objects:
        for pod in _pods(thing):
            for kind, name in sorted(_references(pod) - existing):
                yield f"{_label(thing)}: names {kind} {name}, which is not there"


def _references(pod: Object) -> set[tuple[str, str]]:
    """Return (kind, name) of the objects without which a pod does not start."""
    needed = {("ServiceAccount", pod.get("serviceAccountName", "default"))}
    for volume in pod.get("volumes", ()):
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            needed.add(("PersistentVolumeClaim", claim))
        if "configMap" in volume:
            needed.add(("ConfigMap", volume["configMap"]["name"]))
    for claim in pod.get("resourceClaims", ()):
        if "resourceClaimTemplateName" in claim:
            needed.add(("ResourceClaimTemplate", claim["resourceClaimTemplateName"]))
    for container in containers(pod):
        for source in container.get("envFrom", ()):
            reference = source.get("configMapRef")
            if reference is not None and not reference.get("optional"):
                needed.add(("ConfigMap", reference["name"]))
    return needed


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
