"""Render the Kubernetes objects that train a configuration.

overlay (kuberay/overlays/NAME/job) ─► built ─► name, namespace, image, pods, storage, configuration
set ─► checked

The overlay shapes pods for a kind of machine; the settings of the run are applied on top. Nothing
here talks to a cluster, so configuration errors are raised before one is changed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import yaml

from nanoray.config import Config, Kube
from nanoray.config.spellings import join
from nanoray.errors import ConfigError
from nanoray.kube.kustomize import Object, build, containers
from nanoray.kube.rules import NAME_LIMIT, groups, problems, quantity, templates

# Where a wheel puts the checkout's kuberay/
_INSTALLED = Path(__file__).resolve().with_name("manifests")
KUBE_DIR = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[2] / "kuberay"
CONFIG_DIR = "/etc/nanoray"
RUNS = "/data/runs"
OVERLAY = {"cpu": "cpu", "cuda": "multi-pod", "mig": "mig-mixed"}  # defaults of --overlay
# Keys that are not passed to the job: the pods or its entrypoint set them.
_LOCAL = (
    "workers",
    "out_dir",
    "resume",
    "ray_address",
    "device",
    "dataset",
    "data_dir",
    "kube",
    "expected_val_loss",
)


def render(config: Config, timestamp: str) -> list[Object]:
    """Return the objects of a RayJob that trains `config`. Raises ConfigError with every broken
    rule.

    `config.workers` must be a number, because the cluster is made for it. `timestamp` makes the
    name of the run's folder on the volume unique.
    """
    kube, ranks = config.kube, config.workers
    if ranks == "auto" or config.device == "auto":
        raise ConfigError(
            f"workers = {ranks}, device = {config.device}: the pods are made for this run, so auto "
            "has no devices to "
            "count; give --workers N --device cpu|cuda|mig"
        )
    overlay = kube.overlay or OVERLAY[config.device]
    folder = KUBE_DIR / "overlays" / overlay / "job"
    if not folder.is_dir():
        names = sorted(path.parent.name for path in (KUBE_DIR / "overlays").glob("*/job"))
        raise ConfigError(
            f"there is no overlay {overlay!r}; one of {', '.join(names) or f'none in {KUBE_DIR}'}"
        )
    objects = build(folder)
    job = next(thing for thing in objects if thing["kind"] == "RayJob")
    name = job_name(config.name)
    _shape(job, config, int(ranks))
    _protect(objects, job, name)
    _storage(objects, kube)
    objects.insert(1, _config_map(config, name))
    job["metadata"]["name"] = name
    folder_of_run = _folder(config, f"{name}-{timestamp}")
    job["spec"]["entrypoint"] = entrypoint(
        int(ranks), config.device, folder_of_run, config.placement_timeout_s
    )
    if job["spec"]["rayClusterSpec"].get("gcsFaultToleranceOptions"):  # a new head takes a minute
        job["spec"]["entrypoint"] += f" --head_timeout_s {max(300.0, config.head_timeout_s):g}"
    job["spec"]["ttlSecondsAfterFinished"] = kube.ttl_s
    if not job["spec"].get("suspend"):
        job["spec"]["backoffLimit"] = kube.retries
    for thing in objects:
        _place(thing, kube)
    if broken := problems(objects):
        raise ConfigError("these manifests would not work:\n  " + "\n  ".join(broken))
    return objects


def job_name(name: str) -> str:
    """Return `name` in the form that Kubernetes allows; r- is put before a name that does not start
    with a letter.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    return (plain if plain[0].isalpha() else f"r-{plain}")[: NAME_LIMIT["RayJob"]].rstrip("-")


def entrypoint(ranks: int, device: str, folder: str, placement_timeout_s: float) -> str:
    """Return the job's command: the launcher on the mounted configuration, resuming from an earlier
    cluster's run.

    `exec` is needed for a quick stop: Ray waits until the processes that it signalled are gone, and
    in a container no init process reaps the child of a shell that exits first. The device of a MIG
    slice is cuda: inside the pod a slice is a whole device. A replaced pod takes minutes, so the
    timeout for its node is at least 300 s.
    """
    return (
        f"exec python -m nanoray.launch --config {CONFIG_DIR}/config.yaml --workers {ranks} "
        f"--device {'cpu' if device == 'cpu' else 'cuda'} --out_dir {folder} --resume auto "
        f"--placement_timeout_s {max(300.0, placement_timeout_s):g}"
    )


def _folder(config: Config, name: str) -> str:
    """Return the run's own folder on the volume, or the one that --resume names."""
    if config.resume == "none":
        return f"{RUNS}/{name}"
    if not re.fullmatch(rf"{RUNS}/[A-Za-z0-9._-]+", config.resume):
        raise ConfigError(
            f"resume = {config.resume} is no folder of the volume; give --resume {RUNS}/FOLDER as "
            "submit printed it, "
            "or none for a new run"
        )
    return config.resume


def _config_map(config: Config, name: str) -> Object:
    values = join(config.model_dump(exclude_defaults=True))
    values = {key: value for key, value in values.items() if key not in _LOCAL}
    if config.dataset not in ("auto", "shakespeare", "stdlib") and not config.dataset.startswith(
        "/data/"
    ):
        raise ConfigError(
            f"dataset = {config.dataset} is a path of this machine; copy it to the volume and give "
            "/data/…, "
            "or use shakespeare or stdlib"
        )
    values["dataset"] = config.dataset
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-config"},
        "data": {"config.yaml": yaml.safe_dump(values, sort_keys=False)},
    }


def _shape(job: Object, config: Config, ranks: int) -> None:
    """Set the number of worker pods and their resources, and mount the configuration in all pods."""
    kube, spec = config.kube, job["spec"]["rayClusterSpec"]
    workers = spec["workerGroupSpecs"][0]
    params = dict(workers["rayStartParams"])
    of_overlay = int(params["num-gpus"]) or int(params["num-cpus"])  # ranks of its pods
    per_pod = kube.ranks_per_pod or of_overlay
    container = workers["template"]["spec"]["containers"][0]
    given, larger = container["resources"]["limits"], max(1.0, per_pod / of_overlay)
    gpu = kube.gpu_resource or next(
        (key for key in given if key.startswith("nvidia.com/")), "nvidia.com/gpu"
    )
    slices = gpu.startswith("nvidia.com/mig-") or kube.overlay.startswith("mig-")
    if per_pod > 1 and (config.device == "mig" or (config.device == "cuda" and slices)):
        raise ConfigError(
            f"ranks_per_pod = {per_pod}, device = {config.device} with {gpu}: a process sees only "
            "one MIG slice, and "
            "Ray would give each rank another one; use --ranks_per_pod 1"
        )
    pods = math.ceil(ranks / per_pod)
    if ranks % per_pod:
        raise ConfigError(
            f"workers = {ranks} is no multiple of ranks_per_pod = {per_pod}: pods of a group are "
            "alike; "
            f"use --workers {pods * per_pod}"
        )
    workers |= {"replicas": pods, "minReplicas": pods, "maxReplicas": pods}
    cpus = kube.cpus or quantity(given["cpu"]) * larger
    memory = kube.memory_gib or quantity(given["memory"]) / 2**30 * larger
    limits = {k: v for k, v in given.items() if k.startswith("rdma/")}
    limits |= {"cpu": f"{cpus:g}", "memory": f"{memory:g}Gi"}
    # What Ray counts with; ranks may share a CPU
    params["num-cpus"] = str(max(math.floor(cpus), per_pod))
    if config.device != "cpu":
        limits[gpu] = str(per_pod)
    params["num-gpus"] = "0" if config.device == "cpu" else str(per_pod)
    container["resources"] = {"requests": dict(limits), "limits": dict(limits)}
    workers["rayStartParams"] = params
    for volume in workers["template"]["spec"]["volumes"]:
        if "emptyDir" in volume:
            shm = kube.shm_gib or quantity(volume["emptyDir"]["sizeLimit"]) / 2**30 * larger
            volume["emptyDir"]["sizeLimit"] = f"{shm:g}Gi"
    for group in groups(spec):
        pod = group["template"]["spec"]
        pod["volumes"].append(
            {"name": "config", "configMap": {"name": f"{job_name(config.name)}-config"}}
        )
        mount = {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}
        pod["containers"][0]["volumeMounts"].append(mount)
    tag = "cpu" if config.device == "cpu" else "cuda"
    for container in containers(job):
        container["image"] = kube.image or re.sub(r"(cpu|cuda)$", tag, container["image"])


def _protect(objects: list[Object], job: Object, name: str) -> None:
    """Give the job a disruption budget of its own, for exactly its pods: other jobs of the
    namespace have theirs.
    """
    own = {"app.kubernetes.io/instance": name}
    pods = 0
    for template, count in templates(job):
        template["metadata"]["labels"] |= own
        pods += count
    for thing in objects:
        if thing["kind"] == "PodDisruptionBudget":
            thing["metadata"]["name"] = name
            thing["spec"]["minAvailable"] = pods
            thing["spec"]["selector"]["matchLabels"] |= own


def _storage(objects: list[Object], kube: Kube) -> None:
    """Set the claim's size and class; with a StorageClass of the cluster, drop our own volume."""
    default_class = kube.storage == "hostpath" and not any(
        o["kind"] == "PersistentVolume" for o in objects
    )
    for thing in [] if default_class else list(objects):  # overlay laptop: its claim stays as it is
        if thing["kind"] == "PersistentVolume" and kube.storage != "hostpath":
            objects.remove(thing)
        elif thing["kind"] == "PersistentVolume":
            thing["spec"]["capacity"]["storage"] = f"{kube.storage_gib}Gi"
            thing["spec"]["hostPath"]["path"] = kube.storage_path
        elif thing["kind"] == "PersistentVolumeClaim":
            thing["spec"]["resources"]["requests"]["storage"] = f"{kube.storage_gib}Gi"
            if kube.storage != "hostpath":
                thing["spec"]["storageClassName"] = kube.storage


def _place(thing: Object, kube: Kube) -> None:
    """Put `thing` into the namespace; a given image replaces those of Jobs and Deployments, too."""
    if thing["kind"] == "Namespace":
        thing["metadata"]["name"] = kube.namespace
    elif thing["kind"] not in ("PersistentVolume", "ResourceFlavor", "ClusterQueue"):
        thing["metadata"]["namespace"] = kube.namespace
    if thing["kind"] == "PersistentVolume":
        thing["metadata"]["name"] = (
            f"nanoray-{kube.namespace}" if kube.namespace != "nanoray" else "nanoray"
        )
    if thing["kind"] in ("Job", "Deployment") and kube.image:
        for container in containers(thing):
            container["image"] = kube.image
