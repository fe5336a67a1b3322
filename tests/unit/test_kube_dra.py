"""GPUs through Dynamic Resource Allocation: rendered from every overlay, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.config import load_config
from nanoray.errors import ConfigError
from nanoray.kube.__main__ import main
from nanoray.kube.claims import claim_templates, gpu_requests
from nanoray.kube.gpus import assign_gpus, choose_gpus
from nanoray.kube.render import KUBE_DIR
from tests.harness.kube_rules import problems
from tests.harness.kube_server import ApiServer, submit_of
from tests.harness.manifests import build, render

pytestmark = pytest.mark.usefixtures("kubectl")
Object = dict[str, Any]
CAPABILITY = (
    "device.attributes['gpu.nvidia.com'].cudaComputeCapability.compareTo(semver('7.5.0')) >= 0"
)
CLASSES = ("gpu.nvidia.com", "mig.nvidia.com")
H100 = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA H100 80GB HBM3'"


def profile(name: str) -> str:
    return f"device.attributes['gpu.nvidia.com'].profile == '{name}'"


def config_of(device: str = "cuda", name: str = "run", workers: int = 2, **kube: Any) -> Any:
    values = {"name": name, "workers": workers, "device": device, "dataset": "shakespeare"}
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
    objects = render(config_of(device, **kube), 0.0)
    assert asked_of(objects) == asked
    group = worker_of(objects)
    claims = [value[0] for value in asked.values() if isinstance(value, tuple)]
    assert group["rayStartParams"]["num-gpus"] == str(kube.get("ranks_per_pod", len(asked)))
    container = group["template"]["spec"]["containers"][0]
    assert ("claims" in container["resources"]) == bool(claims)
    assert list(claim_templates(objects)) == ["run-gpus"] * bool(claims)
    for template in claim_templates(objects).values():
        assert template["metadata"]["namespace"] == "nanoray"


@pytest.mark.parametrize(
    ("device", "kube", "text"),
    [
        # A key that would be ignored.
        ("cpu", {"gpu_allocation": "dra"}, "gpu_allocation = dra would be ignored: pods of device"),
        ("cpu", {"gpu_allocation": "device_plugin"}, "device_plugin would be ignored: pods of"),
        ("cpu", {"gpu_resource": "nvidia.com/gpu"}, "gpu_resource = nvidia.com/gpu would be"),
        ("cpu", {"gpu_selector": H100}, "productName == 'NVIDIA H100 80GB HBM3' would be ignored"),
        ("cuda", {"gpu_selector": H100}, "the device plugin only counts devices; give --gpu_al"),
        (
            "cuda",
            {"overlay": "gpu-dra", "gpu_allocation": "device_plugin", "gpu_selector": H100},
            "the device plugin only counts devices",
        ),
        # A device that the way of allocation cannot have.
        (
            "cuda",
            {"gpu_allocation": "dra", "gpu_resource": "amd.com/gpu"},
            "gpu_resource = amd.com/gpu is no device of NVIDIA's DRA driver; give nvidia.com/gpu",
        ),
        (
            "mig",
            {"gpu_allocation": "dra", "gpu_resource": "nvidia.com/mig-small"},
            "gpu_resource = nvidia.com/mig-small is no device",
        ),
        ("cuda", {"gpu_resource": "gpu"}, "gpu_resource = gpu is no resource: a device plugin's"),
        # Slices that a claim by the name of whole GPUs would not get.
        *(
            (device, {"gpu_allocation": "dra"} | kube, "a claim of nvidia.com/gpu gets whole GPUs")
            for device, kube in (
                ("mig", {"overlay": "mig-single"}),
                ("cuda", {"overlay": "mig-single"}),
                ("mig", {"overlay": "gpu-dra"}),
                ("mig", {"gpu_resource": "nvidia.com/gpu"}),
            )
        ),
        # Ranks that would share one.
        (
            "mig",
            {"gpu_allocation": "dra", "ranks_per_pod": 2},
            "ranks_per_pod = 2, device = mig with nvidia.com/mig-1g.18gb: a process sees only one",
        ),
        ("cuda", {"overlay": "mig-dra", "ranks_per_pod": 2}, "use --ranks_per_pod 1"),
        (
            "cuda",
            {"gpu_allocation": "dra", "gpu_resource": "3g.71gb", "ranks_per_pod": 2},
            "ranks_per_pod = 2, device = cuda with nvidia.com/mig-3g.71gb",
        ),
    ],
)
def test_what_is_refused(device: str, kube: Object, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        render(config_of(device, **kube), 0.0)
    assert text in str(refused.value)


def test_a_typo_in_the_allocation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kube\.gpu_allocation = 'DRA'"):
        config_of(gpu_allocation="DRA")


# Overlays that are not ours: gpu-dra and mig-dra with other claims.

MEMORY = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('15Gi')) >= 0"


def request(name: str, device_class: str, *selectors: str) -> Object:
    exactly: Object = {"deviceClassName": device_class, "count": 1}
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": text}} for text in selectors]
    return {"name": name, "exactly": exactly}


def assigned(config: Any, **devices: Any) -> list[Object]:
    """Return the objects of the configuration's overlay, with these devices in its template."""
    objects = build(KUBE_DIR / "overlays" / config.kube.overlay / "job")
    (template,) = claim_templates(objects).values()
    template["spec"]["spec"]["devices"] = copy.deepcopy(devices)
    group = worker_of(objects)
    ranks_per_pod = config.kube.ranks_per_pod or 1
    assign_gpus(choose_gpus(config, objects, group, ranks_per_pod), objects, group, "run-gpus")
    group["rayStartParams"]["num-gpus"] = str(ranks_per_pod)
    assert problems(objects) == []
    return objects


def test_slices_of_any_profile() -> None:
    """Claimed by their memory: the device plugin has no name for them."""
    devices = {"requests": [request("gpus", "mig.nvidia.com", MEMORY)]}
    kept = assigned(config_of("mig", overlay="mig-dra"), **devices)
    assert asked_of(kept) == {"mig.nvidia.com": (1, MEMORY)}
    named = assigned(config_of("mig", overlay="mig-dra", gpu_resource="2g.35gb"), **devices)
    assert asked_of(named) == {"mig.nvidia.com": (1, profile("2g.35gb"), MEMORY)}
    with pytest.raises(ConfigError, match="the overlay claims slices of any profile"):
        assigned(config_of("mig", overlay="mig-dra", gpu_allocation="device_plugin"), **devices)
    with pytest.raises(ConfigError, match="use --ranks_per_pod 1"):
        assigned(config_of("mig", overlay="mig-dra", ranks_per_pod=2), **devices)


def test_whole_gpus_in_place_of_slices() -> None:
    """The profile's selector goes: no whole GPU has that attribute."""
    devices = {"requests": [request("gpus", "mig.nvidia.com", profile("1g.18gb"))]}
    objects = assigned(config_of(overlay="gpu-dra", gpu_resource="nvidia.com/gpu"), **devices)
    assert asked_of(objects) == {"gpu.nvidia.com": (1,)}


def test_other_devices_of_a_claim_stay() -> None:
    """A network card that is claimed with the GPUs, on the same PCIe root: only the count changes."""
    card = request("card", "nic.example.com")
    constraints = [{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]
    devices = {"requests": [card, request("gpu", "gpu.nvidia.com", H100)]}
    objects = assigned(
        config_of(overlay="gpu-dra", ranks_per_pod=2), constraints=constraints, **devices
    )
    (template,) = claim_templates(objects).values()
    found = template["spec"]["spec"]["devices"]
    assert found["constraints"] == constraints
    assert found["requests"][0] == card
    assert found["requests"][1] == request("gpu", "gpu.nvidia.com", H100) | {
        "exactly": request("gpu", "gpu.nvidia.com", H100)["exactly"] | {"count": 2}
    }
    with pytest.raises(ConfigError, match=r"together with other devices \(card, gpu\)"):
        assigned(config_of(overlay="gpu-dra", gpu_allocation="device_plugin"), **devices)


def test_two_requests_of_gpus_are_refused() -> None:
    """ranks_per_pod is the count of one."""
    requests = [request("a", "gpu.nvidia.com"), request("b", "gpu.nvidia.com")]
    with pytest.raises(ConfigError, match="claim GPUs in 2 requests, and ranks_per_pod sets the"):
        assigned(config_of(overlay="gpu-dra"), requests=requests)


# The rules: each one must be able to fail.


def _pod(objects: list[Object]) -> Object:
    pod: Object = worker_of(objects)["template"]["spec"]
    return pod


def _resources(objects: list[Object]) -> Object:
    resources: Object = _pod(objects)["containers"][0]["resources"]
    return resources


def _request(objects: list[Object]) -> Object:
    (template,) = claim_templates(objects).values()
    (found,) = template["spec"]["spec"]["devices"]["requests"]
    return found


BREAKS: list[tuple[Callable[[list[Object]], Any], str]] = [
    (
        lambda o: _request(o)["exactly"].update(count=2),
        "ranks: claims ask for [2] GPUs, num-gpus = 1",
    ),
    (
        lambda o: worker_of(o)["rayStartParams"].update({"num-gpus": "0"}),
        "ranks: claims ask for [1] GPUs, num-gpus = 0",
    ),
    (
        lambda o: _resources(o)["limits"].update({"nvidia.com/gpu": "1"}),
        "limits ask for [1] GPUs and claims for [1] more",
    ),
    (lambda o: _resources(o).pop("claims"), "no container uses the claim gpus"),
    (
        lambda o: _resources(o)["claims"].append({"name": "other"}),
        "container ray-worker uses the claim other, which is not in the pod's resourceClaims",
    ),
    (
        lambda o: _pod(o).update(resourceClaims=[{"name": "gpus", "resourceClaimName": "mine"}]),
        "with resourceClaimName all pods would share the devices of mine",
    ),
    (
        lambda o: _pod(o)["resourceClaims"][0].update(resourceClaimTemplateName="x"),
        "names ResourceClaimTemplate x, which is not there",
    ),
    (
        lambda o: _request(o).update(firstAvailable=[_request(o).pop("exactly")]),
        "request gpus: without exactly its number of devices is not certain",
    ),
    (
        lambda o: _request(o)["exactly"].update(allocationMode="All"),
        "request gpus: allocationMode All takes as many devices as a node has",
    ),
    (lambda o: _request(o)["exactly"].update(adminAccess=True), "adminAccess gives devices that"),
    (
        lambda o: _request(o)["exactly"].update(deviceClassName="mig.nvidia.com", count=2),
        "2 MIG slices in one pod",
    ),
]


@pytest.mark.parametrize(("change", "text"), BREAKS, ids=[text for _, text in BREAKS])
def test_each_rule_can_fail(change: Callable[[list[Object]], Any], text: str) -> None:
    objects = build(KUBE_DIR / "overlays" / "gpu-dra" / "job")
    change(objects)
    assert any(text in problem for problem in problems(objects)), problems(objects)


def test_the_rules_hold_without_ray() -> None:
    """A StatefulSet whose pods would share one claim."""
    objects = build(KUBE_DIR / "statefulset-dra")
    (thing,) = [thing for thing in objects if thing["kind"] == "StatefulSet"]
    thing["spec"]["template"]["spec"]["resourceClaims"] = [
        {"name": "gpus", "resourceClaimName": "mine"}
    ]
    assert any("share the devices of mine" in problem for problem in problems(objects))


def test_both_ways_of_whole_gpus_claim_the_same() -> None:
    """The template of the StatefulSet is that of the overlay; kustomize reads no file above."""
    (ours,) = claim_templates(build(KUBE_DIR / "overlays" / "gpu-dra" / "job")).values()
    (without_ray,) = claim_templates(build(KUBE_DIR / "statefulset-dra")).values()
    assert without_ray == ours


# Submit, stop, over real HTTP.


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with the device classes of NVIDIA's driver."""
    with ApiServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        for name in CLASSES:
            device_class(server, name)
        yield server


def device_class(server: ApiServer, name: str) -> None:
    server.objects["deviceclasses", "", name] = {"metadata": {"name": name}, "spec": {}}


def submitted(tmp_path: Path, *flags: str) -> list[str]:
    how = ["--dataset", "shakespeare", "--device", "cuda", "--gpu_allocation", "dra"]
    return [*submit_of(tmp_path), *how, *flags]


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (lambda s: setattr(s, "dra", False), "give --gpu_allocation device_plugin"),
        (
            lambda s: [s.objects.pop(("deviceclasses", "", name)) for name in CLASSES],
            "has no device class gpu.nvidia.com: NVIDIA's DRA driver is not installed",
        ),
        (
            lambda s: s.objects.pop(("deviceclasses", "", "gpu.nvidia.com")),
            "has no device class gpu.nvidia.com",
        ),
    ],
    ids=["old", "no-driver", "other-class"],
)
def test_a_cluster_without_the_driver_is_refused_before_anything_is_applied(
    server: ApiServer, tmp_path: Path, capsys: Any, prepare: Any, error: str
) -> None:
    prepare(server)
    before = dict(server.objects)
    for flags in ([], ["--dry_run"]):
        assert main(submitted(tmp_path, *flags)) == 4
        assert error in capsys.readouterr().err
        assert server.objects == before


def test_a_job_is_submitted_again_with_other_claims_and_deleted(
    server: ApiServer, tmp_path: Path, capsys: Any
) -> None:
    """A template is immutable, so the old one is deleted first; `stop --delete` deletes it too."""
    server.refusals["PATCH rayjobs"] = (403, "no")  # so that nothing is followed
    counts = []
    for ranks_per_pod in ("1", "2"):
        assert main([*submitted(tmp_path), "--ranks_per_pod", ranks_per_pod]) == 4
        captured = capsys.readouterr()
        assert "dra:     gpu.nvidia.com" in captured.out
        assert "RayJob words: no" in captured.err
        template = server.objects["resourceclaimtemplates", "nanoray", "words-gpus"]
        (found,) = template["spec"]["spec"]["devices"]["requests"]
        counts.append(found["exactly"]["count"])
    assert counts == [1, 2]

    # A job without claims needs no right to delete a template.
    right = "DELETE resourceclaimtemplates"
    server.refusals[right] = (403, "may not delete")
    key = ("rayjobs", "nanoray", "words")
    server.objects[key] = job_of(render(config_of("cpu", name="words"), 0.0))
    assert main(["stop", "words", "--delete"]) == 0
    server.objects[key] = job_of(render(config_of(name="words", gpu_allocation="dra"), 0.0))
    assert main(["stop", "words", "--delete"]) == 4
    assert "may not delete" in capsys.readouterr().err

    del server.refusals[right]
    server.objects[key] = job_of(render(config_of(name="words", gpu_allocation="dra"), 0.0))
    assert main(["stop", "words", "--delete"]) == 0
    assert not [kind for kind, _, _ in server.objects if kind == "resourceclaimtemplates"]
