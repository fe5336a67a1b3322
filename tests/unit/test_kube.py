"""kuberay/ and `nanoray kube render`: built, checked against the schemas and KubeRay's rules."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.config import load_config, make_config
from nanoray.errors import ConfigError
from nanoray.kube import kustomize
from nanoray.kube.__main__ import main
from nanoray.kube.gpus import gpu_requests
from nanoray.kube.kustomize import containers, groups, quantity, to_yaml
from nanoray.kube.render import KUBE_DIR, entrypoint, job_name
from tests.harness.foreign import gpt2_weights
from tests.harness.kube_rules import DRAIN, cluster_spec, problems, templates
from tests.harness.manifests import build, render
from tests.harness.pods import missing

pytestmark = pytest.mark.usefixtures("kubectl")
ROOT = KUBE_DIR.parent
OVERLAYS = sorted(path.name for path in (KUBE_DIR / "overlays").iterdir())
FOLDERS = [f"overlays/{name}/{form}" for name in OVERLAYS for form in ("cluster", "job")]
WITHOUT_RAY = [
    "statefulset",
    "statefulset-dra",
    "statefulset-gpu",
    "statefulset-mig",
    "statefulset-rdma",
    "torchrun",
    "torchrun-gpu",
]
FOLDERS += [*WITHOUT_RAY, "nightly-bench", "tune"]
OPTIONS = ["storageclass", "monitoring", "object-storage"]  # components that no folder uses
Object = dict[str, Any]


def of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = [thing for thing in objects if thing["kind"] == kind]
    return found


# The folders themselves.


def test_overlays_are_the_eleven() -> None:
    assert OVERLAYS == [
        "cpu",
        "gcs-ft",
        "gpu-dra",
        "kueue",
        "laptop",
        "mig-dra",
        "mig-mixed",
        "mig-single",
        "multi-pod",
        "rdma",
        "single-pod",
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_builds_and_keeps_the_rules(folder: str) -> None:
    assert problems(build(KUBE_DIR / folder)) == []


@pytest.mark.parametrize(
    "path", sorted(KUBE_DIR.rglob("kustomization.yaml")), ids=lambda p: str(p.parent.name)
)
def test_five_lines_on_top(path: Path) -> None:
    head = path.read_text().splitlines()[:5]
    assert [line.split(":")[0] for line in head] == [
        "# Makes",
        "# Command",
        "# Expect",
        "# Takes",
        "# Delete",
    ]
    own = str(path.parent.relative_to(ROOT))
    if own.removeprefix("kuberay/") in FOLDERS:
        assert f"kubectl apply --server-side -k {own}" in head[1]
        assert f"kubectl delete --ignore-not-found -k {own}" in head[4]


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_job_holds_the_very_cluster(name: str) -> None:
    cluster, job = (build(KUBE_DIR / "overlays" / name / form) for form in ("cluster", "job"))
    assert (
        of_kind(job, "RayJob")["spec"]["rayClusterSpec"] == of_kind(cluster, "RayCluster")["spec"]
    )
    assert not [thing for thing in job if thing["kind"] == "RayCluster"]


def test_what_each_overlay_asks_for() -> None:
    asked = {}
    for name in OVERLAYS:
        objects = build(KUBE_DIR / "overlays" / name / "cluster")
        (group,) = of_kind(objects, "RayCluster")["spec"]["workerGroupSpecs"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        devices = {k.rpartition("/")[2]: v for k, v in limits.items() if k not in ("cpu", "memory")}
        for request in gpu_requests(group["template"]["spec"], objects):
            exactly = request["exactly"]
            devices[exactly["deviceClassName"]] = exactly["count"]
        asked[name] = (
            group["replicas"],
            devices,
            group["template"]["spec"]["containers"][0]["image"].rpartition("-")[2],
        )
    assert asked == {
        "cpu": (2, {}, "cpu"),
        "gcs-ft": (2, {}, "cpu"),
        "kueue": (2, {}, "cpu"),
        "laptop": (1, {}, "cpu"),
        "single-pod": (1, {"gpu": "4"}, "cuda"),
        "gpu-dra": (4, {"gpu.nvidia.com": 1}, "cuda"),
        "mig-dra": (7, {"mig.nvidia.com": 1}, "cuda"),
        "multi-pod": (4, {"gpu": "1"}, "cuda"),
        "mig-single": (7, {"gpu": "1"}, "cuda"),
        "mig-mixed": (7, {"mig-1g.18gb": "1"}, "cuda"),
        "rdma": (2, {"gpu": "8", "rdma_shared_device_a": "1"}, "cuda"),
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_that_ends_leaves_its_ranks_the_time_to_save(name: str) -> None:
    """Ray ends them when its drain is over, which by default is after 30 s, long before the grace
    period is.
    """
    from nanoray.launch.recover import SAVE_S

    for group in groups(
        of_kind(build(KUBE_DIR / "overlays" / name / "cluster"), "RayCluster")["spec"]
    ):
        pod = group["template"]["spec"]
        env = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
        assert SAVE_S < float(env[DRAIN]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_entrypoints_are_commands_of_nanoray_and_fit_the_pods(name: str) -> None:
    """The driver's flags parse, its batch divides, and it asks for exactly the ranks that the pods
    have.
    """
    from nanoray.cli import parse_args
    from nanoray.config import resolve_batch

    spec = of_kind(build(KUBE_DIR / "overlays" / name / "job"), "RayJob")["spec"]
    words = spec["entrypoint"].split()
    assert words[:3] == ["exec", "python", "/opt/nanoray/examples/train_shakespeare.py"]
    config = parse_args(words[3:], "x", "y").config
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    per_pod = int(group["rayStartParams"]["num-gpus"]) or int(group["rayStartParams"]["num-cpus"])
    assert config.workers == group["replicas"] * per_pod
    assert resolve_batch(config, int(config.workers)).micro > 0
    assert (config.device == "cpu") == (group["rayStartParams"]["num-gpus"] == "0")


@pytest.mark.parametrize(
    ("folder", "pods", "per_pod", "devices", "image"),
    [
        ("statefulset", 3, 1, {}, "cpu"),
        ("statefulset-gpu", 3, 1, {"nvidia.com/gpu": "1"}, "cuda"),
        ("statefulset-mig", 3, 1, {"nvidia.com/mig-1g.18gb": "1"}, "cuda"),
        ("statefulset-dra", 3, 1, {"gpu.nvidia.com": "1"}, "cuda"),
        (
            "statefulset-rdma",
            3,
            1,
            {"nvidia.com/gpu": "1", "rdma/rdma_shared_device_a": "1"},
            "cuda",
        ),
        ("torchrun", 1, 3, {}, "cpu"),
        ("torchrun-gpu", 1, 3, {"nvidia.com/gpu": "3"}, "cuda"),
    ],
)
def test_without_ray_the_ranks_fit_their_devices_and_their_batch(
    folder: str, pods: int, per_pod: int, devices: Object, image: str
) -> None:
    """As many ranks as devices, flags that nanoray.train takes, a batch that divides; on a node
    with GPUs.
    """
    from nanoray.cli import parse_args
    from nanoray.config import resolve_batch

    objects = build(KUBE_DIR / folder)
    assert not [o for o in objects if o["kind"] in ("RayCluster", "RayJob")]
    (thing,) = [
        o
        for o in objects
        if o["kind"] == "StatefulSet" or o["metadata"]["name"] == "nanoray-torchrun"
    ]
    ((template, count),) = templates(thing)
    pod, (container,) = template["spec"], template["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    if per_pod > 1:
        words = [*container["command"], *container["args"]]
        assert f"--nproc_per_node={per_pod}" in words
        flags = words[words.index("nanoray.train") + 1 :]
        assert of_kind(objects, "PodDisruptionBudget")["spec"]["minAvailable"] == 1
    else:
        assert env["WORLD_SIZE"] == str(count)
        (default,) = re.findall(r"\$\{TRAIN_FLAGS:-(.*)\}", container["args"][0])
        flags = (env.get("TRAIN_FLAGS") or default).split()
    config = parse_args(flags, "x", "y").config
    assert resolve_batch(config, pods * per_pod).micro > 0
    assert (count, container["image"].rpartition("-")[2]) == (pods, image)
    asked = {k: v for k, v in container["resources"]["limits"].items() if "/" in k}
    for request in gpu_requests(pod, objects):
        asked[request["exactly"]["deviceClassName"]] = str(request["exactly"]["count"])
    assert asked == devices
    assert config.out_dir == f"/data/runs/{re.sub('mig|rdma|dra', 'gpu', folder)}"
    assert (config.device == "cuda") == bool(devices) == ("tolerations" in pod)
    # A claim finds its node, so it needs no label of the node.
    assert ("affinity" in pod) == (config.device == "cuda" and folder != "statefulset-dra")


def test_rdma_is_an_option_of_the_statefulset() -> None:
    objects = build(KUBE_DIR / "statefulset-rdma")
    container = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (
        of_kind(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "privileged"
    )
    (values,) = [o["data"] for o in objects if o["metadata"]["name"] == "nanoray-nccl"]
    assert values["NCCL_IB_DISABLE"] == "0"


def _with_component(name: str, tmp_path: Path) -> Path:
    """Return a copy of an overlay that uses a component which no folder of the repository uses."""
    shutil.copytree(KUBE_DIR, tmp_path / "kuberay")
    path = tmp_path / "kuberay" / "overlays" / "cpu" / "cluster"
    with (path / "kustomization.yaml").open("a") as file:
        file.write(f"components:\n  - ../../../components/{name}\n")
    return path


def test_the_head_alone_has_the_credentials_of_object_storage(tmp_path: Path) -> None:
    cluster = of_kind(build(_with_component("object-storage", tmp_path)), "RayCluster")["spec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    secret = {"secretRef": {"name": "nanoray-storage", "optional": True}}
    assert secret in head["envFrom"]
    for group in cluster["workerGroupSpecs"]:
        for container in group["template"]["spec"]["containers"]:
            assert secret not in container["envFrom"]


def test_versions_are_the_same_everywhere() -> None:
    """Ray's and nanoray's version: constraints, pyproject, image, manifests."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    ray = re.search(r"^ray==([\d.]+)$", constraints, re.M)[1]  # type: ignore[index]
    own = re.search(r'^version = "([\d.]+)"', pyproject, re.M)[1]  # type: ignore[index]
    for device in ("cpu", "cuda"):
        assert f"\nray=={ray} " in (
            ROOT / "docker" / f"requirements-{device}.txt"
        ).read_text().replace("[default]", "")
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"nanoray:{own}-ray{ray}-cpu" in dockerfile
    assert f'image.version="{own}"' in dockerfile
    assert f"Ray {ray}" in dockerfile
    for folder in FOLDERS:
        for thing in build(KUBE_DIR / folder):
            for container in containers(thing):
                assert re.fullmatch(rf"nanoray:{own}-ray{ray}-(cpu|cuda)", container["image"]), (
                    folder
                )
            if spec := cluster_spec(thing):
                assert spec["rayVersion"] == ray


def test_the_dashboard_shows_metrics_that_exist() -> None:
    from nanoray.base.metrics import METRICS

    text = (KUBE_DIR / "components" / "monitoring" / "dashboard.json").read_text()
    shown = set(re.findall(r"ray_nanoray_(\w+)", text))
    assert shown <= {name.replace("/", "_") for name in METRICS}
    assert {"train_loss", "perf_tok_per_sec", "comm_exposed_share", "fault_restarts"} <= shown
    assert all(panel["description"] for panel in json.loads(text)["panels"])


# Against schemas.


@pytest.fixture(scope="module")
def crds() -> dict[str, Object]:
    """KubeRay's schemas, where NANORAY_TEST_KUBERAY_CRDS names their folder, made strict as the API
    server is.
    """
    folder = os.environ.get("NANORAY_TEST_KUBERAY_CRDS", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("NANORAY_TEST_KUBERAY_CRDS does not name a folder with KubeRay's CRDs")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for kind in ("RayCluster", "RayJob"):
        crd = yaml.load((Path(folder) / f"ray.io_{kind.lower()}s.yaml").read_text(), loader)
        (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
        found[kind] = _strict(version["schema"]["openAPIV3Schema"])
        found[kind]["properties"]["metadata"] = {"type": "object"}
    return found


def _strict(schema: Any) -> Any:
    """Make a structural schema JSON Schema: unknown fields refused, int-or-string, nullable,
    defaults not required.
    """
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {k: _strict(v) for k, v in schema.items() if not k.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        plain = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    properties = plain.get("properties")
    if isinstance(properties, dict) and plain.get("type") == "object":
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            plain["additionalProperties"] = False
        if required := [
            key for key in plain.get("required", ()) if "default" not in schema["properties"][key]
        ]:
            plain["required"] = required
        else:
            plain.pop("required", None)
    if plain.pop("nullable", False) is True:
        plain = {"anyOf": [plain, {"type": "null"}]}
    return plain


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in WITHOUT_RAY])
def test_ray_objects_fit_kuberays_schemas(crds: dict[str, Object], folder: str) -> None:
    import jsonschema

    objects = build(KUBE_DIR / folder)
    (thing,) = [thing for thing in objects if thing["apiVersion"] == "ray.io/v1"]
    if thing["kind"] == "RayCronJob":  # its own definition is none of those; its jobs are RayJobs
        assert thing["spec"].keys() == {"schedule", "jobTemplate"}
        thing = {"kind": "RayJob", "spec": thing["spec"]["jobTemplate"]}
    jsonschema.Draft7Validator(crds[thing["kind"]]).validate(thing)


def test_a_misspelt_field_does_not_fit(crds: dict[str, Object]) -> None:
    import jsonschema

    thing = of_kind(build(KUBE_DIR / "overlays" / "cpu" / "job"), "RayJob")
    for change in (
        lambda t: t["spec"].update(shutdownAfterFinish=True),
        lambda t: t["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(
            {"num-cpus": 0}
        ),
        lambda t: t["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"][
            "containers"
        ][0].update(img=1),
    ):
        broken = copy.deepcopy(thing)
        change(broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(crds["RayJob"]).validate(broken)


@cache
def _fits_kubernetes(text: str) -> None:
    """Check an object once: most stand in several folders, and each check reads all schemas anew."""
    import kubernetes_validate

    kubernetes_validate.validate(json.loads(text), "1.34", strict=True)


@pytest.mark.parametrize("folder", [*FOLDERS, *OPTIONS])
def test_other_objects_fit_kubernetes_schemas(folder: str, tmp_path: Path) -> None:
    for thing in build(
        KUBE_DIR / folder if folder in FOLDERS else _with_component(folder, tmp_path)
    ):
        if thing["apiVersion"].split("/")[0] not in (
            "ray.io",
            "kueue.x-k8s.io",
            "monitoring.coreos.com",
        ):
            _fits_kubernetes(json.dumps(thing))
        elif spec := cluster_spec(thing):  # the operator makes pods of these
            for group in groups(spec):
                pod = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": "x"},
                    "spec": group["template"]["spec"],
                }
                _fits_kubernetes(json.dumps(pod))


def _name(thing: Object) -> tuple[str, str]:
    return thing["kind"], thing["metadata"]["name"]


# The rules: each one must be able to fail.


def _head(job: Object) -> Object:
    return job["spec"]["rayClusterSpec"]["headGroupSpec"]


def _worker(job: Object) -> Object:
    return job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


def _container(job: Object) -> Object:
    return _worker(job)["template"]["spec"]["containers"][0]


def _pod(job: Object) -> Object:
    return _worker(job)["template"]["spec"]


BREAKS: list[tuple[Callable[[Object], Any], str]] = [
    (lambda j: j["metadata"].pop("annotations"), "the operator would append another start"),
    (lambda j: _container(j).pop("args"), "does not run $KUBERAY_GEN_RAY_START_CMD"),
    (lambda j: j["spec"]["rayClusterSpec"].pop("authOptions"), "authOptions.mode is not token"),
    (lambda j: j["spec"].update(submissionMode="K8sJobMode"), "use HTTPMode"),
    (lambda j: j["spec"].update(entrypoint="python x.py"), "add --resume auto"),
    (lambda j: j["spec"].update(entrypoint="python x.py"), "write exec before it"),
    (
        lambda j: j["spec"].update(entrypoint="python x.py --resume auto"),
        "add --placement_timeout_s",
    ),
    (
        lambda j: _head(j)["rayStartParams"].update({"num-cpus": "1"}),
        "keeps ranks away from the head",
    ),
    (
        lambda j: _container(j)["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
        "the pod asks for [1] GPUs",
    ),
    (
        lambda j: _head(j)["rayStartParams"].pop("num-gpus"),
        "head: the pod asks for 0 GPUs, num-gpus = None",
    ),
    (
        lambda j: _worker(j)["rayStartParams"].update({"num-gpus": "1"}),
        "ranks: the pod asks for 0 GPUs, num-gpus = 1",
    ),
    (
        lambda j: _pod(j).update(terminationGracePeriodSeconds=100),
        "Seconds 100 must be longer than RAY_GRACEFUL",
    ),
    (
        lambda j: _pod(j).pop("terminationGracePeriodSeconds"),
        "Seconds 30 must be longer than RAY_GRACEFUL",
    ),
]


@pytest.mark.parametrize(("change", "text"), BREAKS, ids=[text for _, text in BREAKS])
def test_each_rule_can_fail(change: Callable[[Object], Any], text: str) -> None:
    objects = build(KUBE_DIR / "overlays" / "cpu" / "job")
    change(of_kind(objects, "RayJob"))
    assert any(text in problem for problem in problems(objects)), problems(objects)


def test_a_selector_that_selects_nothing_is_found() -> None:
    objects = build(KUBE_DIR / "overlays" / "cpu" / "job")
    of_kind(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] = {"app": "other"}
    assert problems(objects) == [
        "PodDisruptionBudget nanoray: {'app': 'other'} selects no pod of these objects"
    ]


@pytest.mark.parametrize(
    "change", [{"minAvailable": 2}, {"minAvailable": "100%"}, {"maxUnavailable": 0}]
)
def test_a_budget_that_would_let_a_drain_end_a_rank_is_found(change: Object) -> None:
    """Only a number does: the disruption controller cannot count the pods of an object without a
    scale subresource.
    """
    objects = build(KUBE_DIR / "overlays" / "cpu" / "job")
    spec = of_kind(objects, "PodDisruptionBudget")["spec"]
    del spec["minAvailable"]
    spec.update(change)
    (problem,) = problems(objects)
    assert "and 3 pods; write 3: RayClusters have no scale subresource" in problem


def test_the_operator_gets_in_however_it_was_installed() -> None:
    """By the labels of Helm's chart and of the kustomize installation."""
    for folder in FOLDERS:
        rules = of_kind(build(KUBE_DIR / folder), "NetworkPolicy")["spec"]["ingress"]
        (peer,) = [
            peer
            for rule in rules
            for peer in rule["from"]
            if "matchExpressions" in peer["podSelector"]
        ]
        assert peer["namespaceSelector"] == {}, "in any namespace"
        (match,) = peer["podSelector"]["matchExpressions"]
        assert (match["key"], match["operator"]) == ("app.kubernetes.io/name", "In")
        assert set(match["values"]) == {"kuberay-operator", "kuberay"}


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("4Gi", 4 * 2**30), ("2", 2), (3, 3), ("1.5G", 1.5e9)]
)
def test_quantities(text: Any, value: float) -> None:
    assert quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "4GB", "-1", "1e3x"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


# kubectl.


def test_what_kubectl_cannot_build_is_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [absent.yaml]\n")
    with pytest.raises(ConfigError, match=rf"kubectl kustomize {tmp_path}: .*absent\.yaml"):
        kustomize.build(tmp_path)


def test_without_kubectl_a_render_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("nanoray.kube.render.build", kustomize.build)
    flags = ["--preset", "tiny", "--workers", "2", "--device", "cpu", "--dataset", "stdlib"]
    assert main(["render", *flags]) == 2
    error = capsys.readouterr().err
    assert "kubectl builds the manifests in" in error
    assert "install kubectl, and put its folder on PATH" in error


# nanoray kube render.


def kube_config(**values: Any) -> Any:
    kube = values.pop("kube", {})
    base = {"name": "My_Run", "workers": 2, "device": "cpu", "dataset": "shakespeare"}
    return load_config(None, "shakespeare-cpu", base | values | {"kube": kube}, elsewhere=True)


def test_render_carries_the_configuration_along() -> None:
    objects = render(
        kube_config(lr=2e-3, max_steps=7, kube={"namespace": "team", "retries": 5, "ttl_s": 9}), 0.0
    )
    job = of_kind(objects, "RayJob")
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("my-run", "team")
    assert job["spec"]["entrypoint"] == entrypoint(
        2, "cpu", "/data/runs/my-run-19700101-000000", 4.0
    )
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (5, 9)
    (config,) = [o for o in objects if o["metadata"]["name"] == "my-run-config"]
    carried = make_config(yaml.safe_load(config["data"]["config.yaml"]))
    assert (carried.name, carried.lr, carried.max_steps, carried.dataset) == (
        "My_Run",
        2e-3,
        7,
        "shakespeare",
    )
    assert carried.workers == "auto", "the entrypoint gives it"
    assert of_kind(objects, "Namespace")["metadata"]["name"] == "team"
    assert of_kind(objects, "PersistentVolume")["metadata"]["name"] == "nanoray-team"
    for pod in (group["template"]["spec"] for group in groups(job["spec"]["rayClusterSpec"])):
        assert {"name": "config", "mountPath": "/etc/nanoray", "readOnly": True} in pod[
            "containers"
        ][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("dataset", "downloads"),
    [("auto", True), ("shakespeare", True), ("stdlib", False), ("/data/text.txt", False)],
)
def test_only_a_run_on_shakespeare_has_the_job_that_downloads_it(
    dataset: str, downloads: bool
) -> None:
    kinds = [thing["kind"] for thing in render(kube_config(dataset=dataset), 0.0)]
    assert ("Job" in kinds) is downloads


@pytest.mark.parametrize("dataset", ["auto", "cifar10", "cifar10-generated"])
def test_a_run_on_images_is_taken_and_downloads_no_text(dataset: str) -> None:
    values = {"name": "run", "workers": 2, "device": "cpu", "dataset": dataset, "model": "resnet"}
    config = load_config(None, None, values | {"global_batch_size": 16}, elsewhere=True)
    assert "Job" not in [thing["kind"] for thing in render(config, 0.0)]


@pytest.mark.parametrize(("asked", "waits"), [(None, "300"), (20.0, "300"), (1800.0, "1800")])
def test_a_job_waits_for_nodes_as_long_as_it_is_told_but_long_enough_for_a_new_pod(
    asked: Any, waits: str
) -> None:
    """The entrypoint's flag wins over the file, so it must not be shorter than what the file says."""
    config = kube_config(**({"placement_timeout_s": asked} if asked else {}))
    words = of_kind(render(config, 0.0), "RayJob")["spec"]["entrypoint"].split()
    assert words[words.index("--placement_timeout_s") + 1 :] == [waits]


def test_the_laptops_claim_asks_the_default_class() -> None:
    """Also when it is rendered; a StorageClass that is named wins."""
    for objects in (
        build(KUBE_DIR / "overlays" / "laptop" / "job"),
        render(kube_config(kube={"overlay": "laptop"}), 0.0),
    ):
        assert not [o for o in objects if o["kind"] == "PersistentVolume"]
        claim = of_kind(objects, "PersistentVolumeClaim")["spec"]
        assert claim == {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "2Gi"}},
        }
    named = render(kube_config(kube={"overlay": "laptop", "storage": "nfs", "storage_gib": 7}), 0.0)
    claim = of_kind(named, "PersistentVolumeClaim")["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("nfs", "7Gi")


def test_each_job_has_a_disruption_budget_of_its_own() -> None:
    """Two jobs of a namespace with different numbers of pods: neither budget counts the other's
    pods.
    """
    budgets = {}
    for name, workers in (("one", 2), ("two", 4)):
        objects = render(kube_config(name=name, workers=workers), 0.0)
        budget = of_kind(objects, "PodDisruptionBudget")
        labels = [
            g["template"]["metadata"]["labels"]
            for g in groups(cluster_spec(of_kind(objects, "RayJob")) or {})
        ]
        assert all(
            budget["spec"]["selector"]["matchLabels"].items() <= own.items() for own in labels
        )
        budgets[budget["metadata"]["name"]] = (
            budget["spec"]["minAvailable"],
            labels[0]["app.kubernetes.io/instance"],
        )
    assert budgets == {"one": (3, "one"), "two": (5, "two")}
    overlays = of_kind(build(KUBE_DIR / "overlays" / "cpu" / "cluster"), "PodDisruptionBudget")
    assert not overlays["spec"]["selector"]["matchLabels"].items() <= labels[0].items(), (
        "nor that of an overlay"
    )


def test_render_shapes_pods() -> None:
    shape = {
        "ranks_per_pod": 4,
        "cpus": 32,
        "memory_gib": 128,
        "shm_gib": 16,
        "image": "registry/nanoray:7",
    }
    job = of_kind(
        render(kube_config(device="cuda", workers=8, global_batch_size=16, kube=shape), 0.0),
        "RayJob",
    )
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    store = {"object-store-memory": "268435456"}
    assert group["rayStartParams"] == {"num-cpus": "32", "num-gpus": "4"} | store
    limits = {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "4"}
    assert group["template"]["spec"]["containers"][0]["resources"] == {
        "requests": limits,
        "limits": limits,
    }
    assert {c["image"] for c in containers(job)} == {"registry/nanoray:7"}


@pytest.mark.parametrize(
    ("overlay", "device", "flags", "pods", "limits", "shm", "params"),
    [
        ("cpu", "cpu", {}, 4, {"cpu": "1", "memory": "4Gi"}, "1Gi", {"num-cpus": "1"}),
        ("laptop", "cpu", {}, 2, {"cpu": "0.75", "memory": "1.5Gi"}, "0.125Gi", {"num-cpus": "2"}),
        (
            "laptop",
            "cpu",
            {"ranks_per_pod": 4},
            1,
            {"cpu": "1.5", "memory": "3Gi"},
            "0.25Gi",
            {"num-cpus": "4"},
        ),
        (
            "laptop",
            "cpu",
            {"ranks_per_pod": 1},
            4,
            {"cpu": "0.75", "memory": "1.5Gi"},
            "0.125Gi",
            {"num-cpus": "1"},
        ),
        (
            "cpu",
            "cpu",
            {"ranks_per_pod": 2, "cpus": 0.5},
            2,
            {"cpu": "0.5", "memory": "8Gi"},
            "2Gi",
            {"num-cpus": "2"},
        ),
        (
            *(
                "single-pod",
                "cuda",
                {},
                1,
                {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"},
                "16Gi",
            ),
            {"num-cpus": "16", "num-gpus": "4"},
        ),
    ],
)
def test_pods_are_the_overlays_unless_their_size_is_given(
    overlay: str, device: str, flags: Object, pods: int, limits: Object, shm: str, params: Object
) -> None:
    """A pod with more ranks than the overlay's gets that many times its resources; one with fewer
    keeps them.
    """
    config = kube_config(
        device=device, workers=4, global_batch_size=12, kube={"overlay": overlay, **flags}
    )
    (group,) = of_kind(render(config, 0.0), "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == pods
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == limits
    assert group["template"]["spec"]["volumes"][1]["emptyDir"]["sizeLimit"] == shm
    started = {k: v for k, v in group["rayStartParams"].items() if k != "object-store-memory"}
    assert started == {"num-gpus": "0"} | params


def test_with_gcs_fault_tolerance_the_driver_is_not_on_the_head() -> None:
    """Else it would die with the head, whatever the head's store keeps. All the other overlays are
    without both.
    """
    for name in OVERLAYS:
        job = of_kind(build(KUBE_DIR / "overlays" / name / "job"), "RayJob")["spec"]
        head, worker = groups(job["rayClusterSpec"])
        options = job["rayClusterSpec"].get("gcsFaultToleranceOptions")
        assert bool(options) == ("entrypointResources" in job) == (name == "gcs-ft")
        if options:
            assert options["backend"] == "rocksdb"
            asked = json.loads(job["entrypointResources"])
            offered = json.loads(json.loads(worker["rayStartParams"]["resources"]))
            assert all(0 < amount <= offered[key] for key, amount in asked.items())
            assert "resources" not in head["rayStartParams"]
        assert ("--head_timeout_s 300" in job["entrypoint"]) == bool(options)
        if name in ("cpu", "gcs-ft"):
            rendered = of_kind(render(kube_config(kube={"overlay": name}), 0.0), "RayJob")["spec"]
            assert ("--head_timeout_s 300" in rendered["entrypoint"]) == bool(options)
            assert ("entrypointResources" in rendered) == bool(options)


def test_every_overlay_has_the_documented_network_defaults() -> None:
    """Plain Ethernet: the pod's interface by its name, no InfiniBand; in the pod of every rank, and
    of the driver.
    """
    for folder in FOLDERS:
        objects = build(KUBE_DIR / folder)
        (values,) = [o["data"] for o in objects if o["metadata"]["name"] == "nanoray-nccl"]
        assert values["NCCL_IB_DISABLE"] == ("0" if folder == "statefulset-rdma" else "1")
        assert values["NCCL_SOCKET_IFNAME"] == values["GLOO_SOCKET_IFNAME"] == "eth0"
        trains = [
            o
            for o in objects
            if cluster_spec(o) or o["kind"] == "StatefulSet" or "torchrun" in o["metadata"]["name"]
        ]
        assert trains
        for template in [template for thing in trains for template, _ in templates(thing)]:
            refs = [
                source["configMapRef"]["name"]
                for source in template["spec"]["containers"][0]["envFrom"]
            ]
            assert refs == ["nanoray-proxy", "nanoray-nccl"], folder


def test_render_mig_and_storage_class() -> None:
    kube = {"storage": "nfs", "storage_gib": 5, "cpus": 2, "memory_gib": 8}
    objects = render(kube_config(device="mig", workers=7, global_batch_size=14, kube=kube), 0.0)
    (group,) = of_kind(objects, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (
        group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.18gb"]
        == "1"
    )
    claim = of_kind(objects, "PersistentVolumeClaim")["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("nfs", "5Gi")
    assert not [o for o in objects if o["kind"] == "PersistentVolume"]


@pytest.mark.parametrize(
    ("overlay", "ranks_per_pod"), [("gpu-dra", 1), ("gpu-dra", 2), ("mig-dra", 1)]
)
def test_pods_that_claim_gpus_claim_one_for_each_rank(overlay: str, ranks_per_pod: int) -> None:
    """In a template of the job's own, with the overlay's class and selectors."""
    (before,) = _claimed(build(KUBE_DIR / "overlays" / overlay / "job"))
    kube = {"overlay": overlay, "ranks_per_pod": ranks_per_pod}
    objects = render(kube_config(device="cuda", workers=2, kube=kube), 0.0)
    (after,) = _claimed(objects)
    assert after["exactly"] == before["exactly"] | {"count": ranks_per_pod}
    assert of_kind(objects, "ResourceClaimTemplate")["metadata"]["name"] == "my-run-gpus"
    worker = _worker(of_kind(objects, "RayJob"))
    assert worker["rayStartParams"]["num-gpus"] == str(ranks_per_pod)


def _claimed(objects: list[Object]) -> list[Object]:
    """Return the requests for GPUs of the worker pods of the RayJob among these objects."""
    return gpu_requests(_pod(of_kind(objects, "RayJob")), objects)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"workers": "auto"}, "give --workers N"),
        ({"device": "auto"}, "give --workers N --device"),
        (
            {"kube": {"overlay": "gpu"}},
            "there is no overlay 'gpu'; one of cpu, gcs-ft, gpu-dra, kueue",
        ),
        ({"workers": 3, "global_batch_size": 3, "kube": {"ranks_per_pod": 2}}, "use --workers 4"),
        (
            {"device": "mig", "kube": {"ranks_per_pod": 2}},
            "ranks_per_pod = 2, device = mig with MIG slices: a process sees only one slice",
        ),
        (
            {
                "device": "mig",
                "workers": 8,
                "global_batch_size": 16,
                "kube": {"overlay": "single-pod"},
            },
            "use --ranks_per_pod 1",
        ),
        (
            {"device": "cuda", "kube": {"overlay": "mig-mixed", "ranks_per_pod": 2}},
            "use --ranks_per_pod 1",
        ),
        (
            {
                "device": "cuda",
                "kube": {"ranks_per_pod": 2, "gpu_resource": "nvidia.com/mig-3g.71gb"},
            },
            "ranks_per_pod = 2, device = cuda with MIG slices",
        ),
        ({"dataset": "/home/me/text.txt"}, "is a path of this machine"),
        ({"init_from": "/home/me/gpt2"}, "init_from = /home/me/gpt2 is a path of this machine"),
        ({"resume": "auto"}, "is no folder of the volume; give --resume /data/runs/FOLDER"),
        ({"kube": {"image": "nanoray"}}, "no fixed tag"),
        ({"kube": {"gpu_resource": "nvidia.com/gpu"}}, "would be ignored: pods of device = cpu"),
        ({"kube": {"overlay": "gpu-dra"}}, "pods of overlay gpu-dra claim GPUs"),
        (
            {"device": "cuda", "kube": {"overlay": "gpu-dra", "gpu_resource": "nvidia.com/gpu"}},
            "would be ignored: the overlay claims its GPUs",
        ),
        (
            {"device": "cuda", "kube": {"overlay": "mig-dra", "ranks_per_pod": 2}},
            "use --ranks_per_pod 1",
        ),
    ],
)
def test_render_refuses(values: Object, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        render(kube_config(**values), 0.0)
    assert text in str(refused.value)


def test_a_typo_in_kube_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kube\.imag"):
        kube_config(kube={"imag": "x"})


@pytest.mark.parametrize(("name", "job"), [("a.b_C", "a-b-c"), ("7up", "r-7up"), ("...", "run")])
def test_job_names(name: str, job: str) -> None:
    assert job_name(name) == job


def test_render_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with a `kube:` section trains locally as it is; flags win over it; the output reads
    back.
    """
    file = tmp_path / "mine.yaml"
    recipe = json.loads(load_config(None, "tiny").to_json())
    keep = (
        "n_layer",
        "n_head",
        "n_embd",
        "block_size",
        "global_batch_size",
        "max_steps",
        "eval_samples",
    )
    values = {k: recipe[k] for k in keep} | {"dataset": "stdlib", "workers": 2, "device": "cpu"}
    file.write_text(yaml.safe_dump(values | {"kube": {"namespace": "one", "cpus": 2}}))
    assert load_config(str(file)).kube.cpus == 2
    assert main(["render", "--config", str(file), "--namespace", "two"]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    job = of_kind(objects, "RayJob")
    assert (job["metadata"]["namespace"], job["metadata"]["name"]) == ("two", "mine")
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] == "2"
    assert objects[0]["kind"] == "Namespace"
    assert main(["render", "--config", str(file), "--cpus", "much"]) == 2
    assert "kube.cpus = 'much'" in capsys.readouterr().err


def test_weights_on_the_volume_are_read_in_the_pod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes of a preset give way to theirs there; what the user gave is kept, and compared there."""
    flags = ["--preset", "shakespeare-char", "--block_size", "96", "--workers", "2"]
    flags += [
        "--device",
        "cpu",
        "--dataset",
        "shakespeare",
        "--init_from",
        "/data/gpt2.safetensors",
    ]
    assert main(["render", *flags]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    (text,) = [thing for thing in objects if thing["metadata"]["name"].endswith("-config")]
    carried = yaml.safe_load(text["data"]["config.yaml"])
    assert carried["init_from"] == "/data/gpt2.safetensors"
    assert carried["block_size"] == 96
    assert "n_layer" not in carried

    # As the launcher in the pod loads it
    weights = gpt2_weights(tmp_path / "gpt2.safetensors", positions=128)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(carried | {"init_from": str(weights)}))
    config = load_config(str(file))
    assert (config.n_layer, config.n_embd, config.block_size) == (2, 32, 96)


def test_yaml_reads_back() -> None:
    objects = build(KUBE_DIR / "overlays" / "mig-mixed" / "job")
    assert sorted(map(_name, yaml.safe_load_all(to_yaml(objects)))) == sorted(map(_name, objects))


# Scripts.

SCRIPTS = sorted(path for path in (KUBE_DIR / "scripts").glob("*.sh"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_shellcheck_clean(path: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "-x", "-P", str(path.parent), str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


DRY_RUNS = {
    "install.sh gpu": [
        "helm upgrade --install kuberay-operator",
        "helm upgrade --install gpu-operator",
        "--set devicePlugin.enabled=true",
        "image.sh cuda; ",
        "-o 1000 -g 1000",
    ],
    "install.sh gpu-dra": [
        "--set devicePlugin.enabled=false",
        "helm upgrade --install nvidia-dra-driver-gpu",
        "--set nvidiaDriverRoot=/run/nvidia/driver --set gpuResourcesEnabledOverride=true",
        "/try.sh gpu-dra",
    ],
    "image.sh cuda 2.32.3": ["--build-arg NCCL=2.32.3", "k3s ctr images import"],
    "mig.sh node-1 all-1g.18gb": [
        "kubectl label node node-1 nvidia.com/mig.config- ",
        "kubectl label node node-1 nvidia.com/mig.config=all-1g.18gb "
        "nvidia.com/mig.config.state=pending --overwrite",
    ],
    "mig.sh": ["get configmap default-mig-parted-config"],
    "try.sh cpu statefulset-is-none": ["kubectl apply --server-side -k"],
    "try.sh cpu mig-mixed": ["overlays/cpu/job", "overlays/mig-mixed/job", "kubectl delete -k"],
    "bundle.sh x.tar.gz": [
        "kubectl describe nodes",
        "get deviceclasses\\,resourceslices",
        "tar -czf x.tar.gz",
    ],
    "cleanup.sh everything": [
        "delete raycronjobs --all",
        "delete rayjobs\\,rayclusters --all",
        "helm uninstall gpu-operator",
        "k3s-uninstall.sh",
    ],
}


@pytest.mark.parametrize("line", DRY_RUNS)
def test_dry_runs_print_every_step_and_touch_nothing(line: str, tmp_path: Path) -> None:
    """With no kubectl, helm or k3s on the path: a dry run needs none of them."""
    script, *args = line.split()
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = ["bash", str(KUBE_DIR / "scripts" / script), "--dry-run", *args]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode == 0) != ("is-none" in line), done.stdout + done.stderr
    for part in DRY_RUNS[line]:
        assert part in done.stdout
    assert list(tmp_path.iterdir()) == []


KUBECTL = """#!/bin/bash
# What kubectl answers about an operator of either label, in a namespace of its own. `logs` takes no -A.
case " $* " in
  *" logs "*" -A "* | *" -A "*" logs "*) echo "error: unknown shorthand flag: 'A' in -A" >&2; exit 1 ;;
  *" -A -l "*custom-columns*) [ "$NO_OPERATOR" = 1 ] || echo "ray-system   operator-x" ;;
  *" -n ray-system logs operator-x "*) echo "operator says auth_token=secret http://me:secret@proxy" ;;
  *" -n nanoray get pods -o name "*) echo pod/words-head-x ;;
  *" exec words-head-x "*) echo "driver says" ;;
  *) echo "$*" ;;
esac
"""


@pytest.mark.parametrize("operator", [True, False])
def test_the_bundle_has_the_operators_log_and_no_secret(operator: bool, tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "TMPDIR": str(tmp_path),
        "NO_OPERATOR": "" if operator else "1",
    }
    command = ["bash", str(KUBE_DIR / "scripts" / "bundle.sh"), "x.tar.gz"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "x.tar.gz\n"), done.stderr
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        files = {
            m.name: archive.extractfile(m).read().decode()
            for m in archive.getmembers()
            if m.isfile()
        }  # type: ignore[union-attr]
    assert "failed: " not in "".join(files.values())
    log = "operator says auth_token=(removed) http://(removed)@proxy\n"
    assert files["./operator.log"] == (
        log if operator else "no operator pod was found, or it may not be read\n"
    )
    assert files["./driver.log"] == "driver says\n"
    assert "kuberay-operator,kuberay" in files["./operator.txt"]


MIG_KUBECTL = """#!/bin/bash
# A node's labels as files, and the MIG manager, which acts only when the profile's label changes; STATE comes of it.
case " $* " in
  *" nvidia.com/mig.config- "*) rm -f profile ;;
  *" label node "*)
    for word in "$@"; do case "$word" in nvidia.com/mig.config=*) new="${word#*=}" ;; esac; done
    echo pending >state
    [ "$(cat profile 2>/dev/null)" = "$new" ] || echo "$STATE" >state
    echo "$new" >profile
    ;;
  *"mig\\\\.config\\\\.state"*) cat state ;;
  *" get node -l "*state=success*) ! grep -q success state 2>/dev/null || echo node/node-1 ;;
  *" get node -l "*"mig.config=$(cat profile 2>/dev/null) "*) echo node/node-1 ;;
  *" get node -l "*) ;;
  *) echo "$*" ;;
esac
"""


def test_mig_ends_when_the_manager_fails_and_the_same_profile_can_be_set_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "kubectl").write_text(MIG_KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "YES": "1", "TIMEOUT": "5", "PAUSE": "0.1"}
    command = ["bash", str(KUBE_DIR / "scripts" / "mig.sh"), "node-1", "all-1g.18gb"]
    for state, code, text in (
        ("failed", 2, "node-1 did not get all-1g.18gb; end what uses its GPUs"),
        ("success", 0, "s: success\n"),
        ("success", 0, "node-1 has all-1g.18gb already\n"),
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=env | {"STATE": state}, capture_output=True, text=True
        )
        assert (done.returncode, text in done.stdout + done.stderr) == (code, True), (
            done.stdout + done.stderr
        )


@pytest.mark.parametrize(
    ("namespace", "volume"), [("nanoray", "nanoray"), ("team", "nanoray-team")]
)
def test_cleanup_deletes_the_volume_of_its_own_namespace(namespace: str, volume: str) -> None:
    """And not that of another one: the names are those that `nanoray kube` gives."""
    objects = render(kube_config(kube={"namespace": namespace}), 0.0)
    assert of_kind(objects, "PersistentVolume")["metadata"]["name"] == volume
    env = {"PATH": "/usr/bin:/bin", "NAMESPACE": namespace}
    command = ["bash", str(KUBE_DIR / "scripts" / "cleanup.sh"), "--dry-run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert f"kubectl delete persistentvolume {volume} --ignore-not-found \n" in done.stdout


# A `ray` that fails as often as $FAILS says, and then runs until it gets a signal.
_RAY = """#!/bin/bash
echo "$@" >> "$FOLDER/calls"
[ "$1" = start ] || exit 0
[ "$(grep -c ^start "$FOLDER/calls")" -gt "$FAILS" ] || exit 7
trap 'echo drained >> "$FOLDER/calls"; exit 0' TERM
touch "$FOLDER/runs"
while :; do /bin/sleep 0.05; done
"""


@pytest.mark.parametrize("which", ["head", "worker"])
def test_a_pod_starts_ray_again_when_a_busy_node_was_too_slow(which: str, tmp_path: Path) -> None:
    """The command of each pod, with a ray that fails: its start is repeated in the container, a
    SIGTERM reaches it, and what fails six times ends the container with Ray's exit code.
    """
    (job,) = [o for o in build(KUBE_DIR / "overlays" / "cpu" / "job") if o["kind"] == "RayJob"]
    group = _head(job) if which == "head" else _worker(job)
    container = group["template"]["spec"]["containers"][0]
    for name, text in (("ray", _RAY), ("sleep", "#!/bin/bash\n")):  # pauses take no time
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(fails: int) -> subprocess.Popen[str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOLDER": str(tmp_path), "FAILS": str(fails)}
        env["KUBERAY_GEN_RAY_START_CMD"] = "ray start --block"
        command = [*container["command"], *container["args"]]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    process = start(fails=2)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "runs").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, "the code of the drained node"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["start --block", "stop --force"] * 2 + ["start --block", "drained"]
    assert re.fullmatch(r"ray start ended with 7 after \d s: try 2 of 6", printed.splitlines()[1])

    process = start(fails=9)
    process.communicate(timeout=60)
    assert process.returncode == 7
    assert (tmp_path / "calls").read_text().splitlines().count("start --block") == 6


# A `ray` with the processes of a node. At SIGTERM it waits for the raylet's end, or asks a head that is gone.
_NODE = """#!/bin/bash
for name in /opt/raylet ray::IDLE ray::DashboardAgent ray::RuntimeEnvAgent ray::Worker.run; do
  (exec -a "$name" /bin/sleep 1000) &
  echo $! > "$FOLDER/${name##*/}"
done
trap 'echo drained >> "$FOLDER/calls"' TERM
touch "$FOLDER/runs"
while [ "$HEADLESS" ] || kill -0 "$(cat "$FOLDER/raylet")"; do /bin/sleep 0.05; done
exit 1
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("headless", ["", "yes"])
def test_a_pod_that_is_deleted_ends_when_no_rank_is_left_in_it(
    headless: str, tmp_path: Path
) -> None:
    """While a rank is there, the notice is the rank's. Afterwards Ray alone would wait for its end:
    the run's CPUs are still reserved on the node, or its head is gone.
    """
    (job,) = [o for o in build(KUBE_DIR / "overlays" / "cpu" / "job") if o["kind"] == "RayJob"]
    container = _worker(job)["template"]["spec"]["containers"][0]
    for name, text in (("ray", _NODE), ("sleep", "#!/bin/bash\nexec /bin/sleep 0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOLDER": str(tmp_path), "HEADLESS": headless}
    env["KUBERAY_GEN_RAY_START_CMD"] = "ray start --block"
    own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
    # With a shell of its own in the namespace: its pids are those that the stand-in writes.
    command = [*own, *container["command"], *container["args"]]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        _wait(lambda: (tmp_path / "runs").exists())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (init,) = [int(pid) for pid in children.read_text().split()]
        os.kill(init, signal.SIGTERM)
        _wait(lambda: (tmp_path / "calls").exists())
        time.sleep(3.0)  # 30 of its seconds
        assert process.poll() is None, "a rank is there, and may save"

        rank = (tmp_path / "ray::Worker.run").read_text().strip()
        enter = ["nsenter", "--target", str(init), "--pid", "--mount"]
        subprocess.run([*enter, "/bin/bash", "-c", f"kill -KILL {rank}"], check=True)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert printed == "nothing runs on this node any more: it ends before its notice\n"
    assert process.returncode == (137 if headless else 1)


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_dataset_job_without_internet_says_so_once_and_takes_a_cache_that_comes(
    shakespeare: Path, tmp_path: Path, forked: dict[str, str]
) -> None:
    """The manifest's command, as a process: one remedy over several tries, pauses that grow, then
    the text is there.
    """
    (job,) = [o for o in build(KUBE_DIR / "overlays" / "cpu" / "job") if o["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert (job["spec"]["backoffLimit"], job["spec"]["template"]["spec"]["restartPolicy"]) == (
        0,
        "Never",
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho try >> {tmp_path}/tries\nexec "{forked["PYTHON"]}" "$@"\n')
    python.chmod(0o755)
    env = (
        forked
        | {item["name"]: item.get("value", "") for item in container["env"]}
        | {"FIRST_PAUSE_S": "1"}
    )
    env |= {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOSTNAME": "dataset-pod",
        "https_proxy": "http://127.0.0.1:9",
    }
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*container["command"], *container["args"]], env=env, stdout=out, stderr=out
        )
    try:
        end = time.monotonic() + 120
        (tmp_path / "tries").touch()
        while len((tmp_path / "tries").read_text().split()) < 2:
            assert time.monotonic() < end, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        said = log.read_text()
        assert said.count("error: cannot get Shakespeare from") == 1
        assert said.count(f"cp input.txt dataset-pod:{tmp_path}/cache/nanoray/shakespeare.txt") == 1
        # As kubectl cp does: it writes into a folder that must exist.
        shutil.copy(shakespeare, tmp_path / "cache" / "nanoray" / "shakespeare.txt")
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert log.read_text().removeprefix(said).splitlines()[-1] == "dry run: nothing was started"


@pytest.mark.parametrize("path", [p for p in SCRIPTS if p.name != "lib.sh"], ids=lambda p: p.name)
def test_scripts_explain_themselves_and_refuse_typos(path: Path) -> None:
    helped = subprocess.run(["bash", str(path), "--help"], capture_output=True, text=True)
    assert helped.returncode == 0
    assert helped.stdout.startswith(f"usage: {path.name}")
    typo = subprocess.run(["bash", str(path), "--dryrun"], capture_output=True, text=True)
    assert (typo.returncode, "unknown flag --dryrun" in typo.stderr) == (2, True)


def test_a_password_in_the_proxy_is_refused(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HTTPS_PROXY": "http://me:secret@proxy:3128"}
    command = ["bash", str(KUBE_DIR / "scripts" / "install.sh"), "--dry-run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "holds a password" in done.stderr
    assert "secret" not in done.stdout + done.stderr


# The image's recipe.


def test_requirements_of_the_image_are_the_pins_with_hashes() -> None:
    pins = dict(
        re.findall(r"^([a-z0-9._-]+)==([^ \n]+)", (ROOT / "constraints.txt").read_text(), re.M)
    )
    every = {
        (n, v)
        for n, v in re.findall(
            r"^([a-z0-9._-]+)==([^ \n]+)", (ROOT / "constraints.txt").read_text(), re.M
        )
    }
    for device in ("cpu", "cuda"):
        text = (ROOT / "docker" / f"requirements-{device}.txt").read_text()
        found = re.findall(
            r"^([a-z0-9._-]+)(?:\[\w+\])?==([^ \\\n]+)(?: ;[^\\\n]*)? \\\n((?:    "
            r"--hash=sha256:[0-9a-f]{64}.*\n)+)",
            text,
            re.M,
        )
        assert len(found) == len(re.findall(r"^[a-z]", text, re.M)), "a line without a hash"
        assert {n for n, _, _ in found} >= {
            "torch",
            "ray",
            "numpy",
            "pydantic",
            "safetensors",
            "tensorboard",
        }
        assert [(n, v) for n, v, _ in found if (n, v.removesuffix("+cpu")) not in every] == []
        assert any(n.startswith("nvidia-nccl") for n, _, _ in found) == (device == "cuda")
    assert pins["torch"]


def test_what_the_dockerfile_copies_is_let_in() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.M):
        for source in line.replace("${DEVICE}", "*").split():
            assert f"!{source}" in ignore, source
            assert list(ROOT.glob(source)), source


def test_dockerfile_is_hadolint_clean() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not hadolint:
        pytest.skip("hadolint is not installed; its package is for Linux on x86_64")
    done = subprocess.run(
        [hadolint, str(ROOT / "docker" / "Dockerfile")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_dockerfile_keeps_our_rules() -> None:
    """A user by number, a health check, hashes, nothing fetched but by package managers, no moving
    tag.
    """
    text = (ROOT / "docker" / "Dockerfile").read_text()
    last = text[text.rindex("\nFROM") :]
    assert re.search(r"^USER 1000:1000$", last, re.M)
    assert "HEALTHCHECK" in last
    assert "--require-hashes" in text
    assert ":latest" not in text
    assert "NVIDIA_VISIBLE_DEVICES=" not in text, (
        "a pod without a GPU of its own would see those of the node"
    )
    assert not re.search(r"^ADD |curl|wget", text, re.M)
    (packages,) = re.findall(
        r'"\$\{DEVICE\}" = cuda \]; then apt-get install -y \S+ ([^;]+);', last
    )
    assert packages.split() == ["gcc", "libc6-dev", "python3-dev"], (
        "what Triton compiles its driver with"
    )
