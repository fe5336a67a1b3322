"""Render the Kubernetes objects that train a configuration, or run a program.

kuberay/namespace, overlays/NAME/job ─► kubectl kustomize ─► set name, namespace, image, pods,
storage, configuration

The overlay shapes pods for a kind of machine; the settings of the run are applied on top. Nothing
here calls a cluster, so configuration errors are raised before a cluster is changed. What the
objects themselves get wrong, the API server and KubeRay's operator say.
"""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import yaml

from nanoray.config import Config, Kube
from nanoray.config.data import IMAGES
from nanoray.errors import ConfigError
from nanoray.kube.gpus import assign_gpus
from nanoray.kube.kustomize import Object, build, containers, groups, in_order, quantity
from nanoray.kube.program import PodProgram

# Where a wheel puts the checkout's kuberay/
_INSTALLED = Path(__file__).resolve().with_name("manifests")
KUBE_DIR = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[2] / "kuberay"
CONFIG_DIR = "/etc/nanoray"
RUNS = "/data/runs"
MIN_TIMEOUT_S = 300.0  # a replaced pod may need a new node and its image
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


def render(config: Config, started: float, program: PodProgram | None = None) -> list[Object]:
    """Return the objects of a RayJob that trains `config`, or runs a program with it.

    `config.workers` must be a number, because the cluster is made for it. `started`, in Unix
    seconds, makes the name of the run's folder on the volume unique. Raises ConfigError.
    """
    kube = config.kube
    _require_tag(kube.image)
    ranks = config.workers
    if ranks == "auto" or config.device == "auto":
        raise ConfigError(
            f"workers = {ranks}, device = {config.device}: the pods are made for this run, so auto "
            "has no devices to count; give --workers N --device cpu|cuda|mig"
        )

    # The overlay's objects.
    overlay = kube.overlay or OVERLAY[config.device]
    folder = KUBE_DIR / "overlays" / overlay / "job"
    if not folder.is_dir():
        names = sorted(path.parent.name for path in (KUBE_DIR / "overlays").glob("*/job"))
        known = ", ".join(names) or f"none in {KUBE_DIR}"
        raise ConfigError(f"there is no overlay {overlay!r}; one of {known}")
    # What the jobs of a namespace share is no part of an overlay, whose deletion would take it away
    shared = KUBE_DIR / f"namespace-{overlay}"
    if not shared.is_dir():
        shared = KUBE_DIR / "namespace"
    objects = build(shared) + build(folder)
    job = next(thing for thing in objects if thing["kind"] == "RayJob")

    # The run's settings. The pods come first, because the disruption budget counts them.
    name = job_name(config.name)
    job["metadata"]["name"] = name
    _shape_pods(objects, job, config, int(ranks))
    _protect_pods(objects, job, name)
    _set_storage(objects, kube)
    _drop_unused_download(objects, config)
    if program is None:
        objects.append(_config_map(config, name))
    else:
        objects.append(program.config_map(f"{name}-config"))

    # The command.
    spec = job["spec"]
    run_folder = _run_folder(config, started)
    flags = _flags_of_pods(int(ranks), config)
    if program is not None:
        spec["entrypoint"] = program.entrypoint(CONFIG_DIR, run_folder, flags)
    else:
        spec["entrypoint"] = entrypoint(flags, run_folder)
    has_own_store = spec["rayClusterSpec"].get("gcsFaultToleranceOptions")
    if has_own_store and program is None:  # a new head takes a minute
        spec["entrypoint"] += f" --head_timeout_s {max(MIN_TIMEOUT_S, config.head_timeout_s):g}"
    spec["ttlSecondsAfterFinished"] = kube.ttl_s
    if not spec.get("suspend"):  # a job in Kueue's queue is not retried: Kueue requeues it
        spec["backoffLimit"] = kube.retries

    for thing in objects:
        _place(thing, kube)
    return in_order(objects)


def job_name(name: str) -> str:
    """Return `name` as Kubernetes allows it: lower case, dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    if not plain[0].isalpha():
        plain = f"r-{plain}"
    return plain


def _require_tag(image: str) -> None:
    """Raise ConfigError for an image whose content can change between two pods of a run."""
    tag = image.rpartition("/")[2].partition(":")[2]  # a registry's port has a colon, too
    if image and "@sha256:" not in image and tag in ("", "latest"):
        raise ConfigError(
            f"image = {image} has no fixed tag, so two pods could get different ones; write "
            "NAME:TAG"
        )


def _flags_of_pods(ranks: int, config: Config) -> list[str]:
    """Return the flags of a job's command that its pods decide."""
    # Inside its pod, a MIG slice is a whole CUDA device.
    device_in_pod = "cpu" if config.device == "cpu" else "cuda"
    timeout_s = max(MIN_TIMEOUT_S, config.placement_timeout_s)
    flags = ["--workers", str(ranks), "--device", device_in_pod]
    return [*flags, "--placement_timeout_s", f"{timeout_s:g}"]


def entrypoint(flags: list[str], folder: str) -> str:
    """Return the job's command: the launcher on the mounted configuration.

    It resumes, because after a retry an earlier cluster has trained a part of the run. `exec` is
    needed for a quick stop: Ray waits until the processes that it signalled are gone, and in a
    container no init process reaps the child of a shell that exits first.
    """
    return (
        f"exec python -m nanoray.launch --config {CONFIG_DIR}/config.yaml {' '.join(flags)} "
        f"--out_dir {folder} --resume auto"
    )


def out_dir_of(job: Object) -> str:
    """Return the --out_dir in a RayJob's entrypoint, else an empty text."""
    _, _, arguments = job.get("spec", {}).get("entrypoint", "").partition("--out_dir ")
    return str(arguments.partition(" ")[0].strip())


def is_folder_of(job: str, folder: str) -> bool:
    """Return whether a folder of the volume's runs is one that a job of this name makes.

    Not those of NAME-and-more. An overlay's job has a folder of its name alone.
    """
    return bool(re.fullmatch(rf"{re.escape(job)}(-\d{{8}}-\d{{6}})?", folder))


def _run_folder(config: Config, started: float) -> str:
    """Return the run's own folder on the volume, or the one that --resume names."""
    if config.resume == "none":
        moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
        return f"{RUNS}/{job_name(config.name)}-{moment}"
    if not re.fullmatch(rf"{RUNS}/[A-Za-z0-9._-]+", config.resume):
        raise ConfigError(
            f"resume = {config.resume} is no folder of the volume; give --resume {RUNS}/FOLDER as "
            "submit printed it, or none for a new run"
        )
    return config.resume


def _config_map(config: Config, name: str) -> Object:
    """Return the ConfigMap with the configuration that the launcher reads. Raises ConfigError."""
    has_name = config.dataset in ("auto", "shakespeare", "stdlib", *IMAGES)
    if not has_name and not config.dataset.startswith("/data/"):
        raise ConfigError(
            f"dataset = {config.dataset} is a path of this machine; copy it to the volume and give "
            "/data/…, or use shakespeare or stdlib"
        )
    if config.init_from and not config.init_from.startswith("/data/"):
        raise ConfigError(
            f"init_from = {config.init_from} is a path of this machine; copy it to the volume and "
            "give /data/…"
        )
    # Only keys that differ from their defaults, so that the ConfigMap shows the run's choices.
    values = {}
    for key, value in config.model_dump(exclude_defaults=True).items():
        if key not in _LOCAL:
            values[key] = value
    values["dataset"] = config.dataset
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-config"},
        "data": {"config.yaml": yaml.safe_dump(values, sort_keys=False)},
    }


def _shape_pods(objects: list[Object], job: Object, config: Config, ranks: int) -> None:
    """Set the number of worker pods and their resources, and mount the configuration in all pods.

    Raises ConfigError for a number of ranks that the pods cannot hold.
    """
    kube = config.kube
    spec = job["spec"]["rayClusterSpec"]
    workers = spec["workerGroupSpecs"][0]
    params = dict(workers["rayStartParams"])
    container = workers["template"]["spec"]["containers"][0]
    overlay_limits = container["resources"]["limits"]

    # The number of pods. A pod with more ranks than the overlay's grows in proportion.
    overlay_ranks = int(params["num-gpus"]) or int(params["num-cpus"])
    ranks_per_pod = kube.ranks_per_pod or overlay_ranks
    growth = max(1.0, ranks_per_pod / overlay_ranks)
    pods = math.ceil(ranks / ranks_per_pod)
    if ranks % ranks_per_pod:
        raise ConfigError(
            f"workers = {ranks} is no multiple of ranks_per_pod = {ranks_per_pod}: pods of a group "
            f"are identical; use --workers {pods * ranks_per_pod}"
        )
    # All three are equal, because nothing may scale the group while the run trains.
    workers["replicas"] = pods
    workers["minReplicas"] = pods
    workers["maxReplicas"] = pods

    # The resources of each pod: those given as flags, else the overlay's.
    cpus = kube.cpus or quantity(overlay_limits["cpu"]) * growth
    memory_gib = kube.memory_gib or quantity(overlay_limits["memory"]) / 2**30 * growth
    limits = dict(overlay_limits) | {"cpu": f"{cpus:g}", "memory": f"{memory_gib:g}Gi"}
    container["resources"] |= {"requests": dict(limits), "limits": limits}
    gpus = assign_gpus(config, objects, workers, ranks_per_pod, job_name(config.name))

    # What Ray counts with. It must see a CPU for each rank, although ranks may share one.
    params["num-cpus"] = str(max(math.floor(cpus), ranks_per_pod))
    params["num-gpus"] = str(gpus)
    workers["rayStartParams"] = params

    # /dev/shm, where NCCL and Ray's object store exchange data.
    for volume in workers["template"]["spec"]["volumes"]:
        if "emptyDir" in volume:
            overlay_gib = quantity(volume["emptyDir"]["sizeLimit"]) / 2**30
            shm_gib = kube.shm_gib or overlay_gib * growth
            volume["emptyDir"]["sizeLimit"] = f"{shm_gib:g}Gi"

    _mount_config(spec, f"{job_name(config.name)}-config")

    # One image for all pods: that of the overlay, in the build for the device.
    build_tag = "cpu" if config.device == "cpu" else "cuda"
    for each in containers(objects):
        each["image"] = kube.image or re.sub(r"(cpu|cuda)$", build_tag, each["image"])


def _mount_config(cluster: Object, config_map: str) -> None:
    """Mount the ConfigMap in the head and in all workers: the driver runs on the head."""
    for group in groups(cluster):
        pod = group["template"]["spec"]
        pod["volumes"].append({"name": "config", "configMap": {"name": config_map}})
        mount = {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}
        pod["containers"][0]["volumeMounts"].append(mount)


def _protect_pods(objects: list[Object], job: Object, name: str) -> None:
    """Give the job a disruption budget for exactly its pods.

    Jobs of one namespace have a budget each, so the pods get a label with the job's name.
    """
    label = {"app.kubernetes.io/instance": name}
    pods = 0
    for group in groups(job["spec"]["rayClusterSpec"]):
        group["template"]["metadata"]["labels"] |= label
        pods += group.get("replicas", 1)  # the head group has no number
    for thing in objects:
        if thing["kind"] == "PodDisruptionBudget":
            thing["metadata"]["name"] = name
            thing["spec"]["minAvailable"] = pods
            thing["spec"]["selector"]["matchLabels"] |= label


def _set_storage(objects: list[Object], kube: Kube) -> None:
    """Set the claim's size and class; with a StorageClass of the cluster, drop our own volume."""
    # Overlay laptop has no volume of its own: it uses the cluster's default class as it is.
    has_volume = any(thing["kind"] == "PersistentVolume" for thing in objects)
    if kube.storage == "hostpath" and not has_volume:
        return
    size = f"{kube.storage_gib}Gi"
    for thing in list(objects):  # a copy, because the loop removes from the list
        if thing["kind"] == "PersistentVolume":
            if kube.storage == "hostpath":
                thing["spec"]["capacity"]["storage"] = size
                thing["spec"]["hostPath"]["path"] = kube.storage_path
            else:
                objects.remove(thing)
        elif thing["kind"] == "PersistentVolumeClaim":
            thing["spec"]["resources"]["requests"]["storage"] = size
            if kube.storage != "hostpath":
                thing["spec"]["storageClassName"] = kube.storage


def _drop_unused_download(objects: list[Object], config: Config) -> None:
    """Drop the Job that downloads Shakespeare when the run trains on something else."""
    needs_it = config.model not in ("resnet", "own") and config.dataset in ("auto", "shakespeare")
    for thing in list(objects):  # a copy, because the loop removes from the list
        is_download = thing["kind"] == "Job" and thing["metadata"]["name"] == "nanoray-dataset"
        if is_download and not needs_it:
            objects.remove(thing)


def _place(thing: Object, kube: Kube) -> None:
    """Put an object into the namespace."""
    kind = thing["kind"]
    metadata = thing["metadata"]
    if kind == "Namespace":
        metadata["name"] = kube.namespace
    elif kind not in ("PersistentVolume", "ResourceFlavor", "ClusterQueue"):
        metadata["namespace"] = kube.namespace

    # A PersistentVolume belongs to the whole cluster, so its name contains the namespace.
    if kind == "PersistentVolume":
        metadata["name"] = "nanoray"
        if kube.namespace != "nanoray":
            metadata["name"] = f"nanoray-{kube.namespace}"
