"""Check manifests before they are sent to a cluster: KubeRay's own rules, and nanoray's policy.

KubeRay checks its rules only after the API server has accepted the objects, and reports in the
operator's log. The policy (limits, users, tokens, references) is checked nowhere else. Sources:
KubeRay v1.7.0 (its validation and its defaulting of pods), the Pod Security Standard "restricted".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from nanoray.kube.kustomize import Object, containers

NAME_LIMIT = {"RayCluster": 53, "RayJob": 47}  # the operator appends a suffix
HEAD_MEMORY = 1.5 * 2**30  # the head of overlay laptop, with its driver, held 0.9 GiB at its peak
# After SIGTERM `ray start` ends its node when this is over
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(value: str | int | float) -> float:
    """Return a Kubernetes quantity ("500m", "4Gi", 2) as a number. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is no quantity; write for example 500m, 4 or 16Gi")
    return float(match[1]) * _UNITS[match[2]]


def cluster_spec(thing: Object) -> dict[str, Any] | None:
    """Return the RayCluster spec of a RayCluster or a RayJob, None for other kinds."""
    if thing["kind"] == "RayJob":
        return thing["spec"]["rayClusterSpec"]
    return thing["spec"] if thing["kind"] == "RayCluster" else None


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the head group and every worker group."""
    return [spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())]


def problems(objects: list[Object]) -> list[str]:
    """Return each broken rule as one line that names the object, the value and the remedy."""
    found = []
    for thing in objects:
        name = f"{thing['kind']} {thing['metadata']['name']}"
        rules = [_policy(thing)]
        if spec := cluster_spec(thing):
            rules += [_names(thing), _cluster(spec)]
        if thing["kind"] == "RayJob":
            rules.append(_job(thing["spec"]))
        found += [f"{name}: {problem}" for rule in rules for problem in rule]
    return [*found, *_references(objects)]


def _names(thing: Object) -> Iterator[str]:
    name, limit = thing["metadata"]["name"], NAME_LIMIT[thing["kind"]]
    if len(name) > limit or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"name {name!r} must be lower case letters, digits and -, at most {limit} of them; shorten it"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _cluster(spec: dict[str, Any]) -> Iterator[str]:
    version = str(spec.get("rayVersion", ""))
    if _version(version) < (2, 53):
        yield f"rayVersion {version!r}: write the image's, 2.53 or newer, or probes look for wget and auth is refused"
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode is not token: anyone who reaches the head could run code; set it"
    for group in groups(spec):
        which = group.get("groupName", "head")
        params = group.get("rayStartParams", {})
        for key, value in params.items():
            if not isinstance(value, str):
                yield f"{which}: rayStartParams.{key} = {value!r} must be a string; quote it"
        pod, container = group["template"]["spec"], group["template"]["spec"]["containers"][0]
        grace = pod.get("terminationGracePeriodSeconds", 30)
        drain = next((e["value"] for e in container.get("env", ()) if e["name"] == DRAIN), "30")
        if grace <= float(drain):
            yield f"{which}: terminationGracePeriodSeconds {grace} must be longer than {DRAIN} = {drain}; raise it"
        limits = container["resources"]["limits"]
        gpus = [
            int(v)
            for k, v in limits.items()
            if k.endswith("gpu") or k.startswith("nvidia.com/mig-")
        ]
        if [params.get("num-gpus")] != [str(count) for count in gpus or [0]]:
            yield f"{which}: limits ask for {gpus or 0} GPUs, num-gpus = {params.get('num-gpus')}; write them equal"
        if which == "head":
            if params.get("num-cpus") != "0":
                yield f"head: num-cpus = {params.get('num-cpus')!r}; '0' keeps ranks away from the head"
            if quantity(limits["memory"]) < HEAD_MEMORY:
                yield f"head: memory {limits['memory']}; the dashboard and the driver need 1536Mi, with long runs 4Gi"
        elif not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{which}: replicas {group['replicas']} outside {group['minReplicas']}..{group['maxReplicas']}"


def _job(spec: dict[str, Any]) -> Iterator[str]:
    if spec.get("submissionMode") != "HTTPMode":
        yield f"submissionMode {spec.get('submissionMode')} ends long jobs with their log stream; use HTTPMode"
    for key in ("ttlSecondsAfterFinished", "suspend"):
        if spec.get(key) and not spec.get("shutdownAfterJobFinishes"):
            yield f"{key} needs shutdownAfterJobFinishes: true"
    if "clusterSelector" in spec and {"suspend", "backoffLimit", "rayClusterSpec"} & spec.keys():
        yield "clusterSelector excludes suspend, backoffLimit and rayClusterSpec; drop it"
    try:
        words = shlex.split(spec.get("entrypoint", ""))
    except ValueError as error:
        words = []
        yield f"entrypoint goes unquoted into bash, and bash cannot parse it: {error}"
    else:
        if not words:
            yield "entrypoint is empty"
    if words and words[0] != "exec":
        yield "entrypoint without exec: a stop would wait RAY_JOB_STOP_WAIT_TIME_S in full; write exec before it"
    if "--resume" not in words and spec.get("backoffLimit"):
        yield "backoffLimit starts over on a new cluster; add --resume auto to the entrypoint"
    elif "--placement_timeout_s" not in words:
        yield "a replaced pod takes longer than nanoray waits by default; add --placement_timeout_s 300"


def templates(thing: Object) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the pod templates of an object, each with the number of its pods."""
    if spec := cluster_spec(thing):
        yield from ((group["template"], group.get("replicas", 1)) for group in groups(spec))
    elif thing["kind"] in ("Job", "Deployment", "StatefulSet"):
        yield thing["spec"]["template"], thing["spec"].get("replicas", 1)


def _pods(thing: Object) -> Iterator[dict[str, Any]]:
    yield from (template["spec"] for template, _ in templates(thing))


def _policy(thing: Object) -> Iterator[str]:
    """Yield violations of the policy: Pod Security "restricted", limits equal to requests, fixed
    tags, no API token.
    """
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
            yield from (
                f"container {container['name']}: {problem}"
                for problem in _container(container, pod)
            )


def _container(container: Object, pod: Object) -> Iterator[str]:
    image = container.get("image", "")
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        yield f"image {image!r} has no fixed tag"
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield "may gain privileges; set allowPrivilegeEscalation: false"
    capabilities = security.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "keeps capabilities; drop ALL"
    if extra := set(capabilities.get("add", ())) - {"IPC_LOCK"}:
        yield f"adds capabilities {sorted(extra)}; only RDMA's IPC_LOCK has a use here"
    resources = container.get("resources", {})
    limits = resources.get("limits", {})
    if not {"cpu", "memory"} <= limits.keys() or limits != resources.get("requests"):
        yield f"limits {limits} and requests {resources.get('requests')} must both be set and be equal"
    shm = [
        v["emptyDir"]
        for v in pod.get("volumes", ())
        if v.get("emptyDir", {}).get("medium") == "Memory"
    ]
    for volume in shm:
        if "sizeLimit" not in volume or quantity(volume["sizeLimit"]) >= quantity(
            limits.get("memory", 0)
        ):
            yield f"/dev/shm of {volume.get('sizeLimit')} counts against the memory limit of {limits.get('memory')}"


def _references(objects: list[Object]) -> Iterator[str]:
    """Yield accounts, claims and ConfigMaps that a pod names but that are missing, and selectors
    without a match.
    """
    there = {(thing["kind"], thing["metadata"]["name"]) for thing in objects}
    # Of each pod template, with the number of its pods
    labels: list[tuple[dict[str, str], int]] = []
    for thing in objects:
        for pod in _pods(thing):
            wanted = {("ServiceAccount", pod.get("serviceAccountName", "default"))}
            for volume in pod.get("volumes", ()):
                if "persistentVolumeClaim" in volume:
                    wanted.add(
                        ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
                    )
                if "configMap" in volume:
                    wanted.add(("ConfigMap", volume["configMap"]["name"]))
            for container in containers(pod):
                refs = [
                    source["configMapRef"]
                    for source in container.get("envFrom", ())
                    if "configMapRef" in source
                ]
                wanted |= {("ConfigMap", ref["name"]) for ref in refs if not ref.get("optional")}
            for kind, name in sorted(wanted - there):
                yield f"{thing['kind']} {thing['metadata']['name']}: names {kind} {name}, which is not there"
        labels += [
            (template.get("metadata", {}).get("labels", {}), count)
            for template, count in templates(thing)
        ]
    for thing in objects:
        selector = thing.get("spec", {}).get("selector") or thing.get("spec", {}).get("podSelector")
        if (
            thing["kind"] not in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor")
            or not selector
        ):
            continue
        match, name = (
            selector.get("matchLabels", selector),
            f"{thing['kind']} {thing['metadata']['name']}",
        )
        pods = sum(count for own, count in labels if match.items() <= own.items())
        if not pods:
            yield f"{name}: {match} selects no pod of these objects"
        elif thing["kind"] == "PodDisruptionBudget" and thing["spec"].get("minAvailable") != pods:
            yield (
                f"{name}: minAvailable = {thing['spec'].get('minAvailable')} and {pods} pods; "
                f"write {pods}: "
                "RayClusters have no scale subresource, so only a number of pods keeps a drain "
                "from ending a rank"
            )
