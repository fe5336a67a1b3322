"""The pods, commands and services of KubeRay's operator, worked out by hand from v1.7.0.

Tests start exactly this. Source: ray-operator/controllers/ray/common/pod.go (BuildPod,
setMissingRayStartParams, generateRayStartCommand, setContainerEnvVars) and its token
authentication.
"""

from __future__ import annotations

import base64
import json
import shlex
import threading
import urllib.request
from dataclasses import dataclass
from typing import Any

import yaml

from nanoray.kube.kustomize import quantity
from tests.harness.kube_rules import cluster_spec
from tests.harness.kube_server import ApiServer
from tests.harness.pods import Machine

HEAD_PORT, DASHBOARD_PORT, METRICS_PORT, AGENT_PORT = 6379, 8265, 8080, 52365
TOKEN = "a-token-that-the-operator-would-have-drawn"


@dataclass(frozen=True)
class Pod:
    """One pod as the kubelet would get it: its first container, and what /dev/shm may hold."""

    name: str
    group: str  # "head", or the worker group's name
    command: str  # for bash -c
    env: dict[str, str]
    shm_bytes: int
    memory_bytes: int
    grace_s: float  # between SIGTERM and SIGKILL
    pre_stop: str  # the command of its hook; empty without one


def head_service(cluster: str, namespace: str) -> str:
    """Return the name under which workers find the head."""
    return f"{cluster}-head-svc.{namespace}.svc.cluster.local"


def pods_of(
    name: str,
    namespace: str,
    thing: dict[str, Any],
    config_maps: dict[str, dict[str, str]],
) -> list[Pod]:
    """Return the pods of a RayJob or RayCluster, the head first."""
    spec = cluster_spec(thing)
    assert spec
    # The operator copies a RayJob's annotations to its cluster.
    kept = thing["metadata"].get("annotations", {}).get("ray.io/overwrite-container-cmd") == "true"
    pods = [_pod(f"{name}-head", "head", spec["headGroupSpec"], name, namespace, config_maps, kept)]
    for group in spec["workerGroupSpecs"]:
        for i in range(group["replicas"]):
            pod = f"{name}-{group['groupName']}-worker-{i}"
            pods.append(_pod(pod, group["groupName"], group, name, namespace, config_maps, kept))
    return pods


def ray_start(group: dict[str, Any], head: str | None) -> str:
    """Return the `ray start` of a pod; `head` is the service's name, None for the head itself."""
    params = dict(group.get("rayStartParams", {}))
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    if head:
        params.setdefault("address", f"{head}:{HEAD_PORT}")
    else:
        params.setdefault("dashboard-host", "0.0.0.0")
    params.setdefault("metrics-export-port", str(METRICS_PORT))
    params["block"] = "true"
    params.setdefault("dashboard-agent-listen-port", str(AGENT_PORT))
    params.setdefault("num-cpus", str(-int(-quantity(limits["cpu"]) // 1)))  # rounded up
    params.setdefault("memory", str(int(quantity(limits["memory"]))))
    for key, value in sorted(limits.items()):
        if key.endswith("gpu") or key.startswith("nvidia.com/mig-"):
            params.setdefault("num-gpus", str(value))
    words = ["ray start --head" if head is None else "ray start"]
    for key, value in sorted(params.items()):
        if value.lower() == "true" and key not in ("log-color", "include-dashboard"):
            words.append(f"--{key}")
        elif value.lower() != "false":
            words.append(f"--{key}={value}")
    return " ".join(words)


def _pod(
    name: str,
    which: str,
    group: dict[str, Any],
    cluster: str,
    namespace: str,
    config_maps: dict[str, dict[str, str]],
    keeps_command: bool,
) -> Pod:
    spec = group["template"]["spec"]
    container = spec["containers"][0]
    service = head_service(cluster, namespace)
    start = ray_start(group, None if which == "head" else service)
    # BuildPod leaves the command alone where the annotation of the cluster says so.
    command = f"ulimit -n 65536; {start}"
    if keeps_command:
        assert container["command"] == ["/bin/bash", "-c", "--"]
        (command,) = container["args"]
    else:
        assert not container.get("command"), "the operator would append its start to it"
        assert not container.get("args")
    env = {}
    for source in container.get("envFrom", ()):
        env |= config_maps[source["configMapRef"]["name"]]
    env |= {item["name"]: item["value"] for item in container.get("env", ())}
    env |= {
        "RAY_CLUSTER_NAME": cluster,
        "RAY_CLOUD_INSTANCE_ID": name,
        "RAY_NODE_TYPE_NAME": "headgroup" if which == "head" else which,
        "KUBERAY_GEN_RAY_START_CMD": start,
        "RAY_PORT": str(HEAD_PORT),
        "RAY_ADDRESS": f"{'127.0.0.1' if which == 'head' else service}:{HEAD_PORT}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
    }
    if which != "head":
        env |= {"FQ_RAY_IP": service, "RAY_IP": service.split(".")[0]}
    shm = next(
        v["emptyDir"]["sizeLimit"]
        for v in spec["volumes"]
        if v.get("emptyDir", {}).get("medium") == "Memory"
    )
    memory = container["resources"]["limits"]["memory"]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return Pod(
        name,
        which,
        command,
        env,
        int(quantity(shm)),
        int(quantity(memory)),
        float(spec.get("terminationGracePeriodSeconds", 30)),
        shlex.join(hook),
    )


class Operator:
    """Operator and kubelet at once: makes pods of RayJobs in an `ApiServer`, on a `Machine`.

    It does what HTTPMode does: waits for the pods, submits over HTTP with the cluster's token,
    copies the job's status, replaces workers that are gone, deletes everything with the RayJob. A
    thread; `errors` holds what it tripped over.
    """

    def __init__(self, server: ApiServer, machine: Machine) -> None:
        self.server, self.machine = server, machine
        self.errors: list[str] = []
        self._pods: dict[str, list[Pod]] = {}  # of each RayCluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.5):
                self._reconcile()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            raise

    def _reconcile(self) -> None:
        with self.server.lock:
            jobs = {key: job for key, job in self.server.objects.items() if key[0] == "rayjobs"}
        for (_, namespace, name), job in jobs.items():
            status = job.setdefault("status", {})
            cluster = status.setdefault("rayClusterName", f"{name}-abcde")
            if cluster not in self._pods:
                self._pods[cluster] = self._create(namespace, cluster, job)
                status |= {"jobDeploymentStatus": "Initializing"}
            if status["jobDeploymentStatus"] in ("Complete", "Failed"):
                continue
            self._replace(namespace, cluster)
            if "jobId" not in status:
                self._submit(job, namespace, cluster, status)
            else:
                self._observe(cluster, status)

    def _create(self, namespace: str, cluster: str, job: dict[str, Any]) -> list[Pod]:
        objects = self.server.objects
        maps = {
            key[2]: thing.get("data", {})
            for key, thing in objects.items()
            if key[:2] == ("configmaps", namespace)
        }
        config = objects.get(("configmaps", namespace, f"{job['metadata']['name']}-config"), {})
        for name, text in config.get("data", {}).items():
            (self.machine.config / name).write_text(text)
        for name, content in config.get("binaryData", {}).items():
            (self.machine.config / name).write_bytes(base64.b64decode(content))
        pods = pods_of(cluster, namespace, job, maps)
        secret = {
            "data": {"auth_token": base64.b64encode(TOKEN.encode()).decode()},
            "metadata": {"name": cluster},
        }
        objects["secrets", namespace, cluster] = secret
        for pod in pods:
            self._start(pod, namespace, cluster)
        return pods

    def _start(self, pod: Pod, namespace: str, cluster: str) -> None:
        aliases = (
            (head_service(cluster, namespace), f"{cluster}-head-svc") if pod.group == "head" else ()
        )
        running = self.machine.start(pod.name, pod.command, pod.env, pod.shm_bytes, aliases)
        if pod.group == "head":
            self.server.heads[cluster] = f"http://{running.address}:{DASHBOARD_PORT}"
        labels = {
            "ray.io/cluster": cluster,
            "ray.io/node-type": "head" if pod.group == "head" else "worker",
        }
        env = [
            {
                "name": "RAY_AUTH_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": cluster, "key": "auth_token"}},
            }
        ]
        self.server.objects["pods", namespace, pod.name] = {
            "metadata": {"name": pod.name, "namespace": namespace, "labels": labels},
            "spec": {"nodeName": "this-machine", "containers": [{"env": env}]},
            "status": {"phase": "Running"},
        }

    def delete_pod(self, name: str) -> float:
        """Delete a pod as `kubectl delete pod` does; return the seconds."""
        (pod,) = [pod for pods in self._pods.values() for pod in pods if pod.name == name]
        return self.machine.delete(name, pod.grace_s, pod.pre_stop)

    def _replace(self, namespace: str, cluster: str) -> None:
        for pod in self._pods[cluster]:
            if not self.machine.pods[pod.name].alive and pod.group != "head":
                self.machine.remove(pod.name)
                self._start(pod, namespace, cluster)

    def _submit(
        self, job: dict[str, Any], namespace: str, cluster: str, status: dict[str, Any]
    ) -> None:
        try:
            nodes = self._ray(cluster, "GET", "/nodes?view=summary")["data"]["summary"]
        except (OSError, ValueError, KeyError):
            return
        if sum(node["raylet"].get("state") == "ALIVE" for node in nodes) < len(self._pods[cluster]):
            return
        body = {
            "entrypoint": job["spec"]["entrypoint"],
            "submission_id": f"{job['metadata']['name']}-fghij",
            "runtime_env": yaml.safe_load(job["spec"].get("runtimeEnvYAML", "{}")),
        }
        self._ray(cluster, "POST", "/api/jobs/", body)
        status |= {
            "jobId": body["submission_id"],
            "jobStatus": "PENDING",
            "jobDeploymentStatus": "Running",
        }

    def _observe(self, cluster: str, status: dict[str, Any]) -> None:
        try:
            found = self._ray(cluster, "GET", f"/api/jobs/{status['jobId']}")
        except (OSError, ValueError):
            return
        status |= {"jobStatus": found["status"], "message": found.get("message") or ""}
        if found["status"] in ("SUCCEEDED", "STOPPED"):
            status["jobDeploymentStatus"] = "Complete"
        elif found["status"] == "FAILED":
            status["jobDeploymentStatus"] = "Failed"

    def _ray(self, cluster: str, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.server.heads[cluster] + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
