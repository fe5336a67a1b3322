"""GPUs through Dynamic Resource Allocation: rendered from every overlay, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nanoray.config import load_config
from nanoray.kube.claims import claim_templates, gpu_requests
from nanoray.kube.render import render

Object = dict[str, Any]
CAPABILITY = (
    "device.attributes['gpu.nvidia.com'].cudaComputeCapability.compareTo(semver('7.5.0')) >= 0"
)
H100 = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA H100 80GB HBM3'"


def profile(name: str) -> str:
    return f"device.attributes['gpu.nvidia.com'].profile == '{name}'"


def config_of(device: str = "cuda", workers: int = 2, **kube: Any) -> Any:
    values = {"name": "run", "workers": workers, "device": device, "dataset": "shakespeare"}
    values |= {"global_batch_size": 2 * workers, "kube": kube}
    return load_config(None, "shakespeare-cpu", values, elsewhere=True)


def job_of(objects: list[Object]) -> Object:
    (job,) = [thing for thing in objects if thing["kind"] == "RayJob"]
    return job


def worker_of(objects: list[Object]) -> Object:
    (group,) = job_of(objects)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return group


def asked_of(objects: list[Object]) -> Object:
    """Return what a worker pod asks for of GPUs: its limits, or its claims."""
    pod = worker_of(objects)["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    asked = {key: value for key, value in limits.items() if key.startswith("nvidia.com/")}
    for request in gpu_requests(pod, claim_templates(objects)):
        asked[request.device_class] = (request.count, *request.selectors)
    return asked


@pytest.mark.parametrize(
    ("device", "kube", "asked"),
    [
        # By the device alone, and by the overlay alone.
        ("cuda", {"gpu_allocation": "dra"}, {"gpu.nvidia.com": (1, CAPABILITY)}),
        ("mig", {"gpu_allocation": "dra"}, {"mig.nvidia.com": (1, profile("1g.18gb"))}),
        ("cuda", {"overlay": "gpu-dra"}, {"gpu.nvidia.com": (1, CAPABILITY)}),
        ("cuda", {"overlay": "mig-dra"}, {"mig.nvidia.com": (1, profile("1g.18gb"))}),
        ("cuda", {}, {"nvidia.com/gpu": "1"}),
        # The number of ranks is the count.
        (
            "cuda",
            {"gpu_allocation": "dra", "ranks_per_pod": 2},
            {"gpu.nvidia.com": (2, CAPABILITY)},
        ),
        # An overlay of the device plugin, rendered for DRA.
        ("cuda", {"overlay": "multi-pod", "gpu_allocation": "dra"}, {"gpu.nvidia.com": (1,)}),
        (
            "cuda",
            {"overlay": "rdma", "gpu_allocation": "dra", "ranks_per_pod": 2},
            {"gpu.nvidia.com": (2,)},
        ),
        (
            "mig",
            {"overlay": "mig-mixed", "gpu_allocation": "dra"},
            {"mig.nvidia.com": (1, profile("1g.18gb"))},
        ),
        # And the other way round.
        (
            "cuda",
            {"overlay": "gpu-dra", "gpu_allocation": "device_plugin"},
            {"nvidia.com/gpu": "1"},
        ),
        (
            "mig",
            {"overlay": "mig-dra", "gpu_allocation": "device_plugin"},
            {"nvidia.com/mig-1g.18gb": "1"},
        ),
        ("cpu", {"overlay": "gpu-dra"}, {}),
        # The profile is the selector, by the resource's name or by its own.
        *(
            ("mig", {"gpu_allocation": "dra", "gpu_resource": name}, {"mig.nvidia.com": (1, text)})
            for name, text in (
                ("nvidia.com/mig-3g.71gb", profile("3g.71gb")),
                ("3g.71gb", profile("3g.71gb")),
                ("nvidia.com/mig-1g.18gb.me", profile("1g.18gb+me")),
                ("1g.18gb+me", profile("1g.18gb+me")),
                ("1c.3g.71gb", profile("1c.3g.71gb")),
            )
        ),
        (
            "mig",
            {"gpu_allocation": "device_plugin", "gpu_resource": "1g.18gb+me"},
            {"nvidia.com/mig-1g.18gb.me": "1"},
        ),
        (
            "cuda",
            {"overlay": "mig-dra", "gpu_resource": "nvidia.com/mig-2g.35gb"},
            {"mig.nvidia.com": (1, profile("2g.35gb"))},
        ),
        # A selector of the user is one more.
        (
            "cuda",
            {"gpu_allocation": "dra", "gpu_selector": H100},
            {"gpu.nvidia.com": (1, CAPABILITY, H100)},
        ),
    ],
)
def test_what_pods_ask_for(device: str, kube: Object, asked: Object) -> None:
    objects = render(config_of(device, **kube), "s")
    assert asked_of(objects) == asked
    group = worker_of(objects)
    claims = [value[0] for value in asked.values() if isinstance(value, tuple)]
    assert group["rayStartParams"]["num-gpus"] == str(kube.get("ranks_per_pod", len(asked)))
    container = group["template"]["spec"]["containers"][0]
    assert ("claims" in container["resources"]) == bool(claims)
    assert list(claim_templates(objects)) == ["run-gpus"] * bool(claims)
    for template in claim_templates(objects).values():
        assert template["metadata"]["namespace"] == "nanoray"
