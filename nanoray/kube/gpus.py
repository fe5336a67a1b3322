"""How the pods of a run get their GPUs: counted by the device plugin, or claimed through DRA.

A cluster has one of the two. Overlays are written for one of them, and `--gpu_allocation` renders
any GPU overlay for the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.kube.claims import (
    CLAIM,
    GPU_CLASSES,
    MIG_SLICE,
    WHOLE_GPU,
    Request,
    claim_template,
    claim_templates,
    gpu_requests,
    select_profile,
)
from nanoray.kube.kustomize import Object

WHOLE = "nvidia.com/gpu"
SLICE = "nvidia.com/mig-"  # the prefix of a slice's resource name; its profile follows
# A MIG profile: 1g.18gb, 1c.3g.71gb, 1g.18gb+me. In a resource's name the + is a dot.
_PROFILE = re.compile(r"(\d+c\.)?\d+g\.\d+gb([.+-][a-z.+-]+)?")


@dataclass(frozen=True)
class Gpus:
    """The devices of a worker pod."""

    resource: str  # of the device plugin: nvidia.com/gpu, nvidia.com/mig-1g.18gb
    count: int
    request: Request | None = None  # the claim in place of the resource, with DRA


def template_name(job: str) -> str:
    """Return the name of a job's ResourceClaimTemplate: jobs of one namespace have one each."""
    return f"{job}-gpus"


def choose_gpus(
    config: Config, objects: list[Object], group: Object, ranks_per_pod: int
) -> Gpus | None:
    """Return the devices of each worker pod of a run, None on CPUs.

    `group` is the overlay's worker group. Raises ConfigError for keys that would be ignored, and
    for devices that the ranks of a pod could not use.
    """
    kube = config.kube
    if config.device == "cpu":
        _refuse_gpu_keys_on_cpus(config)
        return None

    # What the overlay has: a resource among its limits, or a claim.
    pod = group["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    claimed = gpu_requests(pod, claim_templates(objects))
    uses_claims = kube.gpu_allocation == "dra"
    if kube.gpu_allocation == "auto":
        uses_claims = bool(claimed)

    resource = _resource_name(kube.gpu_resource, uses_claims) or _resource_of(limits, claimed)
    _refuse_shared_slices(config, resource, ranks_per_pod)
    if uses_claims:
        request = _request(config, resource, claimed, ranks_per_pod)
        return Gpus(resource, ranks_per_pod, request)
    if kube.gpu_selector:
        raise ConfigError(
            f"gpu_selector = {kube.gpu_selector} would be ignored: the device plugin only counts "
            "devices; give --gpu_allocation dra, or drop it"
        )
    if resource == SLICE:
        raise ConfigError(
            "gpu_allocation = device_plugin, and the overlay claims slices of any profile, but the "
            f"device plugin counts each profile by its name; give --gpu_resource {SLICE}1g.18gb"
        )
    return Gpus(resource, ranks_per_pod)


def _request(config: Config, resource: str, claimed: list[Request], count: int) -> Request:
    """Return what each pod claims of a resource; `claimed` is what the overlay's pods claim."""
    if resource == WHOLE:
        _refuse_slices_without_profile(config, resource)
        device_class = WHOLE_GPU
        selectors = []
    else:
        device_class = MIG_SLICE
        profile = _profile_of(resource)
        selectors = [select_profile(profile)] if profile else []

    # The overlay's other selectors stay.
    for request in claimed:
        if request.device_class == device_class:
            own_profile = select_profile(request.profile)
            selectors += [text for text in request.selectors if text.strip() != own_profile]
    if config.kube.gpu_selector:
        selectors.append(config.kube.gpu_selector)
    return Request(device_class, count, tuple(selectors))


def assign_gpus(gpus: Gpus | None, objects: list[Object], group: Object, name: str) -> None:
    """Give a worker group's pods these devices in place of the overlay's.

    The container's limits and requests must have no device yet. `name` is the template's. Raises
    ConfigError for claims that cannot be replaced.
    """
    pod = group["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    own_claim = _gpu_claim(pod, claim_templates(objects))

    if gpus is not None and gpus.request is not None:
        if own_claim is None:
            objects.append(claim_template(name, gpus.request))
            claim = {"name": CLAIM, "resourceClaimTemplateName": name}
            pod.setdefault("resourceClaims", []).append(claim)
            resources.setdefault("claims", []).append({"name": CLAIM})
        else:
            # In place, because the template may also have constraints and devices of other kinds.
            template = claim_templates(objects)[own_claim["resourceClaimTemplateName"]]
            _set_request(template, gpus.request)
            template["metadata"]["name"] = name
            own_claim["resourceClaimTemplateName"] = name
        return

    if own_claim is not None:
        _drop_claim(own_claim, objects, pod)
    if gpus is not None:
        resources["limits"][gpus.resource] = str(gpus.count)
        resources["requests"][gpus.resource] = str(gpus.count)


def _gpu_claim(pod: Object, templates: dict[str, Object]) -> Object | None:
    """Return the claim through which an overlay's pod gets its GPUs, None without one."""
    found = []
    for claim in pod.get("resourceClaims", ()):
        found += [claim] * len(gpu_requests({"resourceClaims": [claim]}, templates))
    if len(found) > 1:
        raise ConfigError(
            f"the overlay's pods claim GPUs in {len(found)} requests, and ranks_per_pod sets the "
            "count of one; write one request, or apply the overlay with kubectl"
        )
    return found[0] if found else None


def _set_request(template: Object, request: Request) -> None:
    """Change the request of GPUs in a template."""
    (asked,) = claim_template("", request)["spec"]["spec"]["devices"]["requests"]
    for own in template["spec"]["spec"]["devices"]["requests"]:
        if own.get("exactly", {}).get("deviceClassName") in GPU_CLASSES:
            own["exactly"].pop("selectors", None)
            own["exactly"] |= asked["exactly"]


def _drop_claim(claim: Object, objects: list[Object], pod: Object) -> None:
    """Remove an overlay's claim of GPUs, with its template. Raises ConfigError for shared ones."""
    template = claim_templates(objects)[claim["resourceClaimTemplateName"]]
    requests = template["spec"]["spec"]["devices"]["requests"]
    if len(requests) > 1:
        names = ", ".join(request["name"] for request in requests)
        raise ConfigError(
            f"the overlay claims GPUs together with other devices ({names}), which pods without "
            "that claim would not get; give --gpu_allocation dra"
        )
    objects.remove(template)
    _remove(pod, "resourceClaims", claim["name"])
    for container in pod["containers"]:
        _remove(container["resources"], "claims", claim["name"])


def _remove(parent: Object, key: str, name: str) -> None:
    """Remove the item of this name from a list, and an empty list from its parent."""
    kept = [item for item in parent.pop(key, ()) if item["name"] != name]
    if kept:
        parent[key] = kept


def _resource_of(limits: dict[str, str], claimed: list[Request]) -> str:
    """Return the name of an overlay's GPUs as a resource; a whole GPU's where it has none."""
    for resource in limits:
        if resource.startswith("nvidia.com/"):
            return resource
    for request in claimed:
        if request.device_class == MIG_SLICE:  # by the prefix alone if it selects no profile
            return f"{SLICE}{request.profile.replace('+', '.')}"
    return WHOLE


def _resource_name(given: str, uses_claims: bool) -> str:
    """Return the resource that --gpu_resource names; a MIG profile alone names its slices.

    Raises ConfigError for one that neither the device plugin nor NVIDIA's DRA driver can have.
    """
    if not given:
        return ""
    if _PROFILE.fullmatch(given):
        return f"{SLICE}{given.replace('+', '.')}"
    profile = given.removeprefix(SLICE)
    is_nvidias = given == WHOLE or (profile != given and _PROFILE.fullmatch(profile))
    if uses_claims and not is_nvidias:
        raise ConfigError(
            f"gpu_resource = {given} is no device of NVIDIA's DRA driver; give {WHOLE}, a MIG "
            f"profile such as {SLICE}1g.18gb, or --gpu_allocation device_plugin"
        )
    if "/" not in given:
        raise ConfigError(
            f"gpu_resource = {given} is no resource: a device plugin's has a domain; give {WHOLE} "
            f"or {SLICE}1g.18gb"
        )
    return given


def _profile_of(resource: str) -> str:
    """Return the MIG profile of a slice's resource: nvidia.com/mig-1g.18gb.me is 1g.18gb+me."""
    name = resource.removeprefix(SLICE)
    size, unit, attributes = name.partition("gb")
    return size + unit + attributes.replace(".", "+")


def _refuse_gpu_keys_on_cpus(config: Config) -> None:
    """Raise ConfigError for keys about GPUs, which a run on CPUs would ignore."""
    kube = config.kube
    given = {"gpu_resource": kube.gpu_resource, "gpu_selector": kube.gpu_selector}
    if kube.gpu_allocation != "auto":
        given["gpu_allocation"] = kube.gpu_allocation
    for key, value in given.items():
        if value:
            raise ConfigError(
                f"{key} = {value} would be ignored: pods of device = cpu get no GPU; give --device "
                f"cuda or mig, or drop {key}"
            )


def _refuse_shared_slices(config: Config, resource: str, ranks_per_pod: int) -> None:
    """Raise ConfigError for more than one rank in a pod with MIG slices."""
    if _has_slices(config, resource) and ranks_per_pod > 1:
        raise ConfigError(
            f"ranks_per_pod = {ranks_per_pod}, device = {config.device} with {resource}: a "
            "process sees only one MIG slice, and Ray would give each rank another one; use "
            "--ranks_per_pod 1"
        )


def _refuse_slices_without_profile(config: Config, resource: str) -> None:
    """Raise ConfigError for slices under the name of whole GPUs: the claim would get those."""
    if _has_slices(config, resource):
        raise ConfigError(
            f"gpu_allocation = dra, device = {config.device} with {resource}: a claim of "
            f"{resource} gets whole GPUs, and slices are claimed by their profile; give "
            f"--gpu_resource {SLICE}1g.18gb (or another profile), or --overlay mig-dra"
        )


def _has_slices(config: Config, resource: str) -> bool:
    if config.device == "mig" or resource.startswith(SLICE):
        return True
    return config.kube.overlay.startswith("mig-")
