"""kuberay/ and `nanoray kube render`: built, checked against the schemas and KubeRay's rules."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.config import load_settings, make_config
from nanoray.kube.__main__ import main
from nanoray.kube.gpus import gpu_requests
from nanoray.kube.kustomize import containers, groups
from nanoray.kube.render import KUBE_DIR
from nanoray.launch.program.flags import ProgramCommand
from tests.harness.kube_rules import DRAIN, cluster_spec, problems, templates
from tests.harness.manifests import build, render
from tests.harness.pods import missing

pytestmark = pytest.mark.usefixtures("kubectl")
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
FOLDERS += [*WITHOUT_RAY, "nightly-bench", "run", "tune"]
NAMESPACES = sorted(path.name for path in KUBE_DIR.glob("namespace*"))
POD_SECURITY = "pod-security.kubernetes.io/enforce"
Object = dict[str, Any]


def of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = [thing for thing in objects if thing["kind"] == kind]
    return found


# The folders themselves.


@pytest.mark.parametrize("folder", [*FOLDERS, *NAMESPACES])
def test_every_folder_builds_and_keeps_the_rules(folder: str) -> None:
    assert problems(build(KUBE_DIR / folder)) == []


def names_of(objects: list[Object]) -> set[tuple[str, str]]:
    return {(thing["kind"], thing["metadata"]["name"]) for thing in objects}


def needs_of(objects: list[Object]) -> set[tuple[str, str]]:
    """Return what the pods of objects cannot start without."""
    needs = set()
    for pod in (template["spec"] for thing in objects for template, _ in templates(thing)):
        needs.add(("ServiceAccount", pod["serviceAccountName"]))
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                needs.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for container in pod["containers"]:
            for source in container.get("envFrom", ()):
                if "configMapRef" in source:
                    needs.add(("ConfigMap", source["configMapRef"]["name"]))
    return needs


@pytest.mark.parametrize("form", ["cluster", "job"])
def test_rdma_is_switched_for_the_ranks_of_programs_too(form: str) -> None:
    """Ours get the variables of the driver on the head, those of `nanoray run` their own pod's."""
    pods = containers(build(KUBE_DIR / "overlays" / "rdma" / form))
    switches = [
        variable["value"]
        for pod in pods
        for variable in pod["env"]
        if variable["name"] == "NCCL_IB_DISABLE"
    ]
    assert switches == ["1", "1"], "of the head, and of the workers"


@pytest.mark.parametrize("folder", FOLDERS)
def test_deleting_a_folder_takes_nothing_from_other_jobs(folder: str) -> None:
    """What jobs share is in the kustomization that the folder's header names, and nowhere else."""
    header = (KUBE_DIR / folder / "kustomization.yaml").read_text()
    (before,) = re.findall(r"(?m)^# Before: .* -k kuberay/([a-z-]+) +\(once\)$", header)
    own, shared = build(KUBE_DIR / folder), build(KUBE_DIR / before)
    assert ("Namespace", "nanoray") in names_of(shared)
    assert names_of(own) & names_of(shared) == set()
    assert needs_of(own) - names_of(own) <= names_of(shared)
    of_everybody = {"Namespace", "PersistentVolume", "PersistentVolumeClaim", "NetworkPolicy"}
    of_everybody |= {"LocalQueue", "ClusterQueue", "ResourceFlavor"}
    assert {kind for kind, _ in names_of(own)} & of_everybody == set()

    # Its pods start in that namespace, and the nodes need one image
    is_privileged = "IPC_LOCK" in str(own)
    level = of_kind(shared, "Namespace")["metadata"]["labels"][POD_SECURITY]
    assert level == ("privileged" if is_privileged else "restricted")
    assert len({each["image"] for each in containers([*own, *shared])}) == 1


@pytest.mark.parametrize(
    ("overlay", "device", "level", "storage"),
    [
        ("cpu", "cpu", "restricted", "nanoray-hostpath"),
        ("laptop", "cpu", "restricted", None),
        ("rdma", "cuda", "privileged", "nanoray-hostpath"),
    ],
)
def test_render_has_the_namespace_of_its_overlay(
    overlay: str, device: str, level: str, storage: str | None
) -> None:
    config = kube_config(
        device=device, workers=8, global_batch_size=16, kube={"overlay": overlay, "namespace": "t"}
    )
    objects = render(config, 0.0)
    space = of_kind(objects, "Namespace")["metadata"]
    assert (space["name"], space["labels"][POD_SECURITY]) == ("t", level)
    assert of_kind(objects, "PersistentVolumeClaim")["spec"].get("storageClassName") == storage
    assert needs_of(objects) <= names_of(objects)
    (image,) = {each["image"] for each in containers(objects)}
    assert image.endswith("cpu" if device == "cpu" else "cuda")


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_job_holds_the_very_cluster(name: str) -> None:
    cluster, job = (build(KUBE_DIR / "overlays" / name / form) for form in ("cluster", "job"))
    assert (
        of_kind(job, "RayJob")["spec"]["rayClusterSpec"] == of_kind(cluster, "RayCluster")["spec"]
    )
    assert not [thing for thing in job if thing["kind"] == "RayCluster"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_that_ends_leaves_its_ranks_the_time_to_save(name: str) -> None:
    """Ray ends them when its drain is over, which by default is after 30 s, long before the grace
    period is.
    """
    from nanoray.launch.recovery.recover import SAVE_S

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


def test_the_dashboard_shows_metrics_that_exist() -> None:
    from nanoray.machine.metrics import METRICS

    text = (KUBE_DIR / "components" / "monitoring" / "dashboard.json").read_text()
    shown = set(re.findall(r"ray_nanoray_(\w+)", text))
    assert shown <= {name.replace("/", "_") for name in METRICS}
    assert {"train_loss", "perf_tok_per_sec", "comm_exposed_share", "fault_restarts"} <= shown
    assert all(panel["description"] for panel in json.loads(text)["panels"])


def _worker(job: Object) -> Object:
    return job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


# kubectl.


# nanoray kube render.


def kube_config(**values: Any) -> Any:
    kube = values.pop("kube", {})
    base = {"name": "My_Run", "workers": 2, "device": "cpu", "dataset": "shakespeare"}
    settings = base | values | {"kube": kube}
    return load_settings(None, "shakespeare-cpu", settings, elsewhere=True).config


def test_render_carries_the_configuration_along() -> None:
    objects = render(
        kube_config(lr=2e-3, max_steps=7, kube={"namespace": "team", "retries": 5, "ttl_s": 9}), 0.0
    )
    job = of_kind(objects, "RayJob")
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("my-run", "team")
    words = job["spec"]["entrypoint"].split()
    assert words[:4] == ["exec", "python", "-m", "nanoray.launch"]
    given = dict(zip(words[4::2], words[5::2], strict=True))
    assert given == {
        "--config": "/etc/nanoray/config.yaml",
        "--workers": "2",
        "--device": "cpu",
        "--placement_timeout_s": "300",
        "--out_dir": "/data/runs/my-run-19700101-000000",
        "--resume": "auto",
    }
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


@pytest.mark.parametrize(
    ("overlay", "device", "flags", "pods", "limits", "shm", "params"),
    [
        ("cpu", "cpu", {}, 4, {"cpu": "1", "memory": "4Gi"}, "1Gi", {"num-cpus": "1"}),
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


# Programs.


def test_a_program_is_unpacked_on_the_volume_and_run_by_nanoray_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's own command in a shell, whose python writes down what it gets."""
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "train.py").write_text("import lib.model")
    (project / "lib" / "model.py").touch()
    (project / "weights.bin").write_bytes(os.urandom(2**20 + 1))
    (project / ".gitignore").write_text("*.bin")
    monkeypatch.chdir(project)
    flags = ["--workers", "4", "--device", "cpu", "--ranks_per_pod", "2", "--tee", "all"]
    assert main(["render", *flags, "--", "train.py", "--lr", "0.1", "a b"]) == 0
    out, error = capsys.readouterr()
    assert f"send   {project}: 2 files" in error
    objects = list(yaml.safe_load_all(out))
    assert problems(objects) == []
    assert "Job" not in [thing["kind"] for thing in objects], "it downloads Shakespeare"
    job = of_kind(objects, "RayJob")
    assert _worker(job)["replicas"] == 2

    (files,) = [o["binaryData"] for o in objects if o["metadata"]["name"] == "train-config"]
    for name, content in files.items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    command = job["spec"]["entrypoint"].replace("/etc/nanoray", str(tmp_path))
    (tmp_path / "python").write_text('#!/bin/sh\npwd; find * -type f | sort; printf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    command = command.replace("/data", str(tmp_path / "data"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True)
    folder, *lines = done.stdout.splitlines()
    assert folder.startswith(f"{tmp_path}/data/code/train-"), done.stderr
    assert lines[:5] == ["lib/model.py", "train.py", "-m", "nanoray", "run"]
    run = ProgramCommand.parse(lines[5:])
    assert (run.kind, run.words) == ("script", ["train.py", "--lr", "0.1", "a b"])
    assert (run.config.workers, run.config.device, run.tee) == (4, "cpu", "all")
    assert run.config.out_dir == folder.replace("/code/", "/runs/")


# Scripts.


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


def test_a_password_in_the_proxy_is_refused(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HTTPS_PROXY": "http://me:secret@proxy:3128"}
    command = ["bash", str(KUBE_DIR / "scripts" / "install.sh"), "--dry-run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "holds a password" in done.stderr
    assert "secret" not in done.stdout + done.stderr


# The image's recipe.
