"""How many GPUs each worker pod of a run gets, asked for as its overlay asks for them.

    device plugin: a resource of the container, such as nvidia.com/gpu: 4
    DRA:           a ResourceClaimTemplate with a device class, a count and selectors

The overlay chooses between the two, and with DRA it selects the devices. Here each pod gets as many
as it has ranks. Whether a cluster has such devices, its API server and its scheduler say.
"""

from __future__ import annotations

from typing import Any

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.kube.kustomize import Object

WHOLE = "nvidia.com/gpu"  # resources of NVIDIA's device plugin
SLICE = "nvidia.com/mig-"
MIG_CLASS = "mig.nvidia.com"  # device classes of NVIDIA's DRA driver
GPU_CLASSES = ("gpu.nvidia.com", MIG_CLASS)


def template_name(job: str) -> str:
    """Return the name of a job's ResourceClaimTemplate: jobs of one namespace have one each."""
    return f"{job}-gpus"


def assign_gpus(
    config: Config, objects: list[Object], group: Object, ranks_per_pod: int, job: str
) -> int:
    """Give each pod of the overlay's worker group a GPU for each rank, and return how many.

    Raises ConfigError for a key that would be ignored, and for ranks that would share a MIG slice.
    """
    given = config.kube.gpu_resource
    pod = group["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    overlay_resource = _take_resource(resources)
    requests = gpu_requests(pod, objects)

    if config.device == "cpu":
        if given:
            raise ConfigError(
                f"gpu_resource = {given} would be ignored: pods of device = cpu get no GPU; give "
                "--device cuda or mig, or drop gpu_resource"
            )
        if requests:
            raise ConfigError(
                f"device = cpu, but pods of overlay {config.kube.overlay} claim GPUs; give --device "
                "cuda or mig, or another --overlay"
            )
        return 0

    resource = given or overlay_resource or WHOLE
    _refuse_shared_slices(config, resource, requests, ranks_per_pod)
    if not requests:
        for kind in ("limits", "requests"):
            resources[kind][resource] = str(ranks_per_pod)
        return ranks_per_pod

    # The overlay claims its GPUs. It also selects them.
    if given:
        raise ConfigError(
            f"gpu_resource = {given} would be ignored: the overlay claims its GPUs; copy it, and "
            "write the device class and the profile into its claims.yaml"
        )
    if len(requests) > 1:
        raise ConfigError(
            f"the overlay's pods claim GPUs in {len(requests)} requests, and ranks_per_pod sets the "
            "count of one; write one request, or apply the overlay with kubectl"
        )
    requests[0]["exactly"]["count"] = ranks_per_pod
    _rename_template(pod, objects, template_name(job))
    return ranks_per_pod


def gpu_requests(pod: Object, objects: list[Object]) -> list[Object]:
    """Return the requests for GPUs, or slices of them, of the templates that a pod claims."""
    found = []
    for template in _templates_of(pod, objects):
        for request in template["spec"]["spec"]["devices"]["requests"]:
            if request.get("exactly", {}).get("deviceClassName") in GPU_CLASSES:
                found.append(request)
    return found


def claims_template(job: Object, name: str) -> bool:
    """Return whether worker pods of a RayJob claim devices through the template of this name."""
    for group in job["spec"].get("rayClusterSpec", {}).get("workerGroupSpecs", ()):
        for claim in group["template"]["spec"].get("resourceClaims", ()):
            if claim.get("resourceClaimTemplateName") == name:
                return True
    return False


def _templates_of(pod: Object, objects: list[Object]) -> list[Object]:
    """Return the ResourceClaimTemplates among `objects` that a pod claims."""
    claims = pod.get("resourceClaims", ())
    names = [claim.get("resourceClaimTemplateName") for claim in claims]
    found = []
    for thing in objects:
        if thing["kind"] == "ResourceClaimTemplate" and thing["metadata"]["name"] in names:
            found.append(thing)
    return found


def _rename_template(pod: Object, objects: list[Object], name: str) -> None:
    """Give the template with a pod's GPUs the job's name, because its count is the job's own."""
    for claim in pod["resourceClaims"]:
        if gpu_requests({"resourceClaims": [claim]}, objects):
            (template,) = _templates_of({"resourceClaims": [claim]}, objects)
            template["metadata"]["name"] = name
            claim["resourceClaimTemplateName"] = name
            return


def _take_resource(resources: dict[str, Any]) -> str:
    """Remove the overlay's GPU resource from a container, and return its name; "" if it has none."""
    taken = ""
    for kind in ("limits", "requests"):
        for resource in list(resources[kind]):  # a copy, because the loop removes from it
            if resource.startswith("nvidia.com/"):
                taken = resource
                del resources[kind][resource]
    return taken


def _refuse_shared_slices(
    config: Config, resource: str, requests: list[Object], ranks_per_pod: int
) -> None:
    """Raise ConfigError for more than one rank in a pod with MIG slices."""
    has_slices = config.device == "mig" or resource.startswith(SLICE)
    has_slices |= config.kube.overlay.startswith("mig-")
    has_slices |= any(each["exactly"]["deviceClassName"] == MIG_CLASS for each in requests)
    if has_slices and ranks_per_pod > 1:
        raise ConfigError(
            f"ranks_per_pod = {ranks_per_pod}, device = {config.device} with MIG slices: a process "
            "sees only one slice, and Ray would give each rank another one; use --ranks_per_pod 1"
        )
