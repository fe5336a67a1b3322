"""A Kubernetes cluster: apply objects, follow and stop a job, and report what is wrong in one line.

Kubernetes is called through the official client, and Ray's jobs API through the API server's proxy.
So a kubeconfig is enough: no port-forward, no ingress. Ray's token travels in X-Ray-Authorization,
because the API server consumes the Authorization header.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from nanoray.errors import NanorayError
from nanoray.kube.kustomize import Object

KUBERAY = "1.7.0"
OLDEST_KUBERAY = (1, 6)  # the first with authOptions for RayJobs in HTTPMode
INSTALL = (
    "helm repo add kuberay https://ray-project.github.io/kuberay-helm/ && helm install "
    "kuberay-operator "
    f"kuberay/kuberay-operator --version {KUBERAY} --namespace kuberay-system --create-namespace"
)
# Helm labels the operator kuberay-operator, the kustomize installation kuberay.
OPERATOR = "app.kubernetes.io/name in (kuberay-operator,kuberay)"
MANAGER = "nanoray"  # field manager of server-side apply
# kind -> (path of its API, plural, lives in a namespace)
KINDS = {
    "Namespace": ("/api/v1", "namespaces", False),
    "ServiceAccount": ("/api/v1", "serviceaccounts", True),
    "ConfigMap": ("/api/v1", "configmaps", True),
    "Service": ("/api/v1", "services", True),
    "PersistentVolume": ("/api/v1", "persistentvolumes", False),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims", True),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies", True),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets", True),
    "Job": ("/apis/batch/v1", "jobs", True),
    "Deployment": ("/apis/apps/v1", "deployments", True),
    "StatefulSet": ("/apis/apps/v1", "statefulsets", True),
    "RayCluster": ("/apis/ray.io/v1", "rayclusters", True),
    "RayJob": ("/apis/ray.io/v1", "rayjobs", True),
    "PodMonitor": ("/apis/monitoring.coreos.com/v1", "podmonitors", True),
    "PrometheusRule": ("/apis/monitoring.coreos.com/v1", "prometheusrules", True),
    "ResourceFlavor": ("/apis/kueue.x-k8s.io/v1beta1", "resourceflavors", False),
    "ClusterQueue": ("/apis/kueue.x-k8s.io/v1beta1", "clusterqueues", False),
    "LocalQueue": ("/apis/kueue.x-k8s.io/v1beta1", "localqueues", True),
}
TERMINAL = ("Complete", "Failed", "ValidationFailed")
SILENCE_S = 60.0  # of a command that runs in a pod: a long one may take as long as its output comes
_CLOSE = 8  # the websocket's last frame


class KubeError(NanorayError):
    """The cluster refused or failed an operation."""

    exit_code = 4


class ApiError(KubeError):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the cluster answered {status}: {message}")
        self.status, self.message = status, message


class Api:
    """The API server of KUBECONFIG's current context. Raises KubeError when there is none."""

    def __init__(self, context: str | None = None) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise KubeError(
                "the kubernetes client is not installed; pip install 'nanoray[kube]'"
            ) from None
        try:
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"), context=context)
        except Exception as error:
            try:
                config.load_incluster_config()
            except Exception:
                raise KubeError(
                    f"no cluster: {error}; set KUBECONFIG, or make one with "
                    "kuberay/scripts/install.sh"
                ) from None
        self._client = client.ApiClient()
        self._client.configuration.retries = 1

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: tuple[tuple[str, str], ...] = (),
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Return the decoded answer (text if it is not JSON). Raises ApiError, or KubeError without
        an answer.
        """
        sent = {"Accept": "application/json", "Content-Type": "application/json"} | (headers or {})
        serialize = self._client.param_serialize
        request = serialize(
            method, path, None, list(query), sent, body, auth_settings=["BearerToken"]
        )
        try:
            response = self._client.call_api(*request, _request_timeout=(5, 30))
            text = (response.read() or b"").decode("utf-8", "replace")
        except Exception as error:  # urllib3's and ssl's classes
            host = self._client.configuration.host
            raise KubeError(
                f"no answer from the cluster at {host}: {_short(error)}; check KUBECONFIG and VPN"
            ) from None
        if response.status >= 400:
            raise ApiError(response.status, _message(text) or str(response.reason))
        try:
            return json.loads(text)
        except ValueError:
            return text

    def get(self, kind: str, namespace: str, name: str = "", selector: str = "") -> Any:
        """Return one object, or with an empty name the list of them. Raises ApiError."""
        query = (("labelSelector", selector),) if selector else ()
        return self.call("GET", path_of(kind, namespace, name), query=query)

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return one object, None if it does not exist. Raises ApiError."""
        try:
            found: Object = self.get(kind, namespace, name)
            return found
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object, if it exists, and what it owns. Raises ApiError."""
        if self.find(kind, namespace, name) is not None:
            query = (("propagationPolicy", "Background"),)
            self.call("DELETE", path_of(kind, namespace, name), query=query)

    def apply(self, thing: Object) -> None:
        """Create or update one object (server-side apply). Raises KubeError with a remedy."""
        namespace, name = thing["metadata"].get("namespace", ""), thing["metadata"]["name"]
        query = (("fieldManager", MANAGER), ("force", "true"))
        try:
            path = path_of(thing["kind"], namespace, name)
            self.call("PATCH", path, thing, query, {"Content-Type": "application/apply-patch+yaml"})
        except ApiError as error:
            raise KubeError(_refusal(thing["kind"], name, namespace, error)) from None

    def annotate(self, kind: str, namespace: str, name: str, values: dict[str, str]) -> None:
        """Set annotations of an object and leave all else as it is. Raises ApiError."""
        patch = {"metadata": {"annotations": values}}
        kind_of_patch = {"Content-Type": "application/merge-patch+json"}
        self.call(
            "PATCH",
            path_of(kind, namespace, name),
            patch,
            (("fieldManager", MANAGER),),
            kind_of_patch,
        )

    def run_in(
        self, pod: str, namespace: str, command: list[str], into: BinaryIO | None = None
    ) -> str:
        """Run a command in a pod and return its standard output, or write it to `into` as it comes.

        Raises KubeError with the command's error output, or when nothing came for SILENCE_S.
        """
        from kubernetes import client, stream
        from websocket import WebSocketTimeoutException

        what = f"{' '.join(command)} in pod {pod}"
        # By the first byte of each message. The end is there only when the command has ended, after
        # all of its output.
        out, err, end = io.BytesIO(), io.BytesIO(), io.BytesIO()
        channels: dict[bytes, BinaryIO] = {b"\x01": into or out, b"\x02": err, b"\x03": end}
        try:
            socket = stream.stream(
                client.CoreV1Api(self._client).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                command=command,
                stdout=True,
                stderr=True,
                stdin=False,
                tty=False,
                _preload_content=False,
            ).sock
        except Exception as error:  # the client's classes
            raise KubeError(f"{what}: {_short(error)}; needs create on pods/exec") from None
        try:
            socket.settimeout(SILENCE_S)
            while (received := socket.recv_data_frame())[0] != _CLOSE:
                data = received[1].data
                if data[:1] in channels:
                    channels[data[:1]].write(data[1:])
            broken = "" if end.getvalue() else "the connection was closed"
        except WebSocketTimeoutException:
            broken = f"nothing came for {SILENCE_S:g} s"
        except Exception as error:  # websocket's and ssl's classes, a full disk
            broken = _short(error)
        finally:
            socket.shutdown()
        if broken:
            raise KubeError(f"{what}: {broken}, so its output is not complete; try again")
        if (result := json.loads(end.getvalue()))["status"] != "Success":
            causes = result.get("details", {}).get("causes") or [{"message": "no code"}]
            said = err.getvalue().decode("utf-8", "replace") or result.get("message", "")
            raise KubeError(f"{what} ended with {causes[0]['message']}: {_short(said)}")
        return out.getvalue().decode("utf-8", "replace")


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return the URL path of an object, or of all of its kind in the namespace."""
    plural = {"Pod": "pods", "Secret": "secrets", "Event": "events"}.get(kind)
    api, plural, spaced = ("/api/v1", plural, True) if plural else KINDS[kind]
    middle = f"/namespaces/{namespace}" if spaced else ""
    return f"{api}{middle}/{plural}" + (f"/{name}" if name else "")


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return _short(body)


def _short(what: Any) -> str:
    return " ".join(str(what).split())[:300]


def _refusal(kind: str, name: str, namespace: str, error: ApiError) -> str:
    text = f"{kind} {name}: {error.message}"
    if error.status == 403 and "exceeded quota" in error.message:
        return f"{text}; ask for fewer pods or smaller ones (--workers, --cpus, --memory_gib), or raise the quota"
    if error.status == 403:
        return f"{text}; your account lacks the right: ask for patch on {KINDS[kind][1]} in namespace {namespace}"
    if error.status == 404 and kind in ("RayJob", "RayCluster"):
        return f"KubeRay is not installed in this cluster; {INSTALL}"
    if error.status == 404:
        return f"{text}; the cluster does not know {kind}: install what brings it, or take it out of the overlay"
    return text


def check_operator(api: Api) -> str:
    """Return a line with KubeRay's version, if it may be read. Raises KubeError when KubeRay is
    missing or too old.
    """
    try:
        api.call("GET", "/apis/ray.io/v1")
    except ApiError as error:
        if error.status == 404:
            raise KubeError(f"KubeRay is not installed in this cluster; {INSTALL}") from None
    try:
        query = (("labelSelector", OPERATOR),)
        found = api.call("GET", "/apis/apps/v1/deployments", query=query)["items"]
    except ApiError as error:
        return f"kuberay: version unknown ({error.message})"
    images = [c["image"] for d in found for c in d["spec"]["template"]["spec"]["containers"]]
    versions = [m.group(1) for image in images if (m := re.search(r":v?(\d+\.\d+[\w.-]*)$", image))]
    for version in versions:
        if tuple(int(p) for p in version.split(".")[:2]) < OLDEST_KUBERAY:
            raise KubeError(
                f"KubeRay {version} is too old: it knows no token authentication for RayJobs; "
                f"helm upgrade kuberay-operator kuberay/kuberay-operator --version {KUBERAY}"
            )
    return f"kuberay: {versions[0] if versions else 'version unknown'}"


@dataclass
class Trouble:
    """A reason why a pod does not run, in one line; `fatal` when waiting will not help."""

    pod: str
    text: str
    fatal: bool


_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def troubles(pods: list[Object]) -> list[Trouble]:
    """Return what keeps these pods from running, read from their status."""
    found = []
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for condition in status.get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                text = (
                    f"cannot be scheduled: {condition.get('message', condition.get('reason', ''))}"
                )
                found.append(Trouble(name, text, fatal=False))
        for container in [
            *status.get("initContainerStatuses", ()),
            *status.get("containerStatuses", ()),
        ]:
            state = container.get("state", {})
            waiting, ended = state.get("waiting", {}), state.get("terminated") or {}
            last = (container.get("lastState") or {}).get("terminated") or {}
            if waiting.get("reason") in _IMAGE:
                remedy = "build and import it with kuberay/scripts/image.sh, or give --image"
                text = f"image {container.get('image', '?')} not found: {waiting.get('message', '')}; {remedy}"
                found.append(Trouble(name, text, fatal=True))
            elif waiting.get("reason") in (
                "CreateContainerConfigError",
                "CreateContainerError",
                "RunContainerError",
            ):
                found.append(
                    Trouble(name, f"{waiting['reason']}: {waiting.get('message', '')}", fatal=True)
                )
            elif waiting.get("reason") == "CrashLoopBackOff" or ended.get("exitCode"):
                end = ended or last
                reason = end.get("reason", "Error")
                remedy = "; raise --memory_gib" if reason == "OOMKilled" else ""
                found.append(
                    Trouble(
                        name, f"ended with {end.get('exitCode')} ({reason}){remedy}", fatal=False
                    )
                )
    return found


@dataclass
class Follower:
    """Follow one RayJob to its end: print its status, its pods' troubles, and its driver's log."""

    api: Api
    namespace: str
    name: str
    say: Callable[[str], None] = print
    poll_s: float = 2.0
    start_timeout_s: float = 900.0
    annotate_s: float = 30.0
    # Give up following (not the job) when the API server is away for longer
    silence_s: float = 300.0
    _seen: set[str] = field(default_factory=set)
    _attempt: int = 0  # counts Ray jobs, from 1
    _job: tuple[str, str] = ("", "")  # RayCluster and Ray job of this attempt
    _shown: str = ""  # what of this attempt's log was printed
    _broken_log: bool = False
    _annotated_at: float = float("-inf")

    def run(self) -> Object:
        """Return the RayJob's status once it is terminal. Raises KubeError when it cannot start, or
        was deleted.
        """
        began, last, started = time.monotonic(), "", False
        admitted = began
        while True:
            status = self._status()
            state = (
                "/".join(filter(None, (status.get("jobDeploymentStatus"), status.get("jobStatus"))))
                or "accepted"
            )
            if status.get("jobId"):
                if (status.get("rayClusterName", ""), status["jobId"]) != self._job:
                    self._begin_attempt(status)
                for line in self.new_log(status):
                    self.say(line)
            if state != last:
                why = (
                    f": {_short(status.get('message', ''))}" if state.startswith("Retrying") else ""
                )
                self.say(f"job    {state} after {time.monotonic() - began:.0f} s{why}")
                last = state
            started = started or status.get("jobStatus") in (
                "RUNNING",
                "SUCCEEDED",
                "FAILED",
                "STOPPED",
            )
            if status.get("jobDeploymentStatus") in TERMINAL:
                return status
            # It waits in a queue
            if status.get("jobDeploymentStatus") in ("Suspending", "Suspended"):
                admitted = time.monotonic()
            self._pods(status, started, time.monotonic() - admitted)
            self._annotate(status)
            time.sleep(self.poll_s)

    def _status(self) -> Object:
        """Return the RayJob's status; while the API server is away, wait for it. Raises KubeError."""
        away = None
        while True:
            try:
                status: Object = self.api.get("RayJob", self.namespace, self.name).get("status", {})
                return status
            except KubeError as error:
                if getattr(error, "status", 0) == 404:
                    raise KubeError(
                        f"RayJob {self.name} was deleted while it was followed"
                    ) from None
                away = away or time.monotonic()
                if not self._passes(error) or time.monotonic() - away > self.silence_s:
                    raise
                time.sleep(self.poll_s)

    def _passes(self, error: KubeError) -> bool:
        """Whether the API server is only away for a while; says so."""
        if 0 < getattr(error, "status", 0) < 500:
            return False
        self._say_once(f"api    {error}; trying on")
        return True

    def _say_once(self, line: str) -> None:
        if line not in self._seen:
            self._seen.add(line)
            self.say(line)

    def _pods(self, status: Object, started: bool, waited_s: float) -> None:
        cluster = status.get("rayClusterName")
        try:
            pods = (
                self.api.get("Pod", self.namespace, selector=f"ray.io/cluster={cluster}")["items"]
                if cluster
                else []
            )
        except KubeError as error:
            if not self._passes(error):
                raise
            return  # the next look sees them
        found = troubles(pods)
        for trouble in found:
            self._say_once(f"pod    {trouble.pod} {trouble.text}")
        if started:
            return
        fatal = next((t for t in found if t.fatal), None)
        if fatal or waited_s > self.start_timeout_s:
            what = fatal or (found[0] if found else None)
            reason = f"{what.pod} {what.text}" if what else "no pod says why; see kubectl describe"
            raise KubeError(
                f"the job cannot start: {reason}. Its objects are still there: nanoray kube stop "
                f"{self.name} --delete"
            )

    def _annotate(self, status: Object) -> None:
        """Copy the run's progress to annotations of the RayJob; the operator does not, and pods
        have no token.
        """
        if (
            status.get("jobStatus") != "RUNNING"
            or time.monotonic() - self._annotated_at < self.annotate_s
        ):
            return
        self._annotated_at = time.monotonic()
        with suppress(KubeError, AttributeError):
            if told := told_by_job(self.api, self.namespace, status):
                values = {f"nanoray/{key}": value for key, value in told.items()}
                self.api.annotate("RayJob", self.namespace, self.name, values)

    def _begin_attempt(self, status: Object) -> None:
        """Name the Ray job that runs from now on; its log is read from the beginning."""
        self._attempt, self._shown = max(self._attempt + 1, attempts(status)), ""
        self._job = cluster, job = status.get("rayClusterName", ""), status["jobId"]
        self.say(f"try    {self._attempt}: Ray job {job} on RayCluster {cluster}")

    def new_log(self, status: Object) -> Iterator[str]:
        """Yield the new lines of the driver's log. After a failed request the next call reads them."""
        try:
            text = ray_api(
                self.api, self.namespace, status, f"/api/jobs/{status['jobId']}/logs"
            ).get("logs", "")
        except (KubeError, AttributeError) as error:
            if not self._broken_log and status.get("jobStatus") == "RUNNING":
                self.say(f"log    out of reach, trying on: {_short(error)}")
            self._broken_log = True
            return
        self._broken_log = False
        whole = (
            text if status.get("jobDeploymentStatus") in TERMINAL else text[: text.rfind("\n") + 1]
        )
        # The head was replaced, and the operator resubmitted the job
        if whole and not whole.startswith(self._shown):
            self._begin_attempt(status)
        fresh = whole[len(self._shown) :]
        self._shown += fresh
        yield from fresh.splitlines()


def attempts(status: Object) -> int:
    """Return which attempt a RayJob is at: the operator counts the failed ones, each on a cluster
    of its own.
    """
    ended = status.get("jobDeploymentStatus") in ("Failed", "Retrying")
    return max(1, int(status.get("failed") or 0) + (not ended))


def told_by_job(api: Api, namespace: str, status: Object) -> dict[str, str]:
    """Return what a RayJob's driver last told of its run: state, folder, step, loss, eta. Raises
    ApiError.
    """
    metadata = ray_api(api, namespace, status, f"/api/jobs/{status['jobId']}").get("metadata") or {}
    return {
        key.removeprefix("nanoray_"): value
        for key, value in metadata.items()
        if key.startswith("nanoray_")
    }


def ray_api(
    api: Api, namespace: str, status: Object, path: str, method: str = "GET", body: Any = None
) -> Any:
    """Call Ray's jobs API on the head of a RayJob, through the API server's proxy. Raises ApiError."""
    cluster = status["rayClusterName"]
    service = path_of("Service", namespace, f"{cluster}-head-svc:8265")
    headers = {"X-Ray-Authorization": f"Bearer {_token(api, namespace, cluster)}"}
    return api.call(method, f"{service}/proxy{path}", body, headers=headers)


def _token(api: Api, namespace: str, cluster: str) -> str:
    """Return the cluster's token from the operator's Secret, which the head pod's environment
    names.
    """
    heads = api.get("Pod", namespace, selector=f"ray.io/cluster={cluster},ray.io/node-type=head")[
        "items"
    ]
    for head in heads:
        for item in head["spec"]["containers"][0].get("env", ()):
            if item["name"] == "RAY_AUTH_TOKEN" and "valueFrom" in item:
                ref = item["valueFrom"]["secretKeyRef"]
                return base64.b64decode(
                    api.get("Secret", namespace, ref["name"])["data"][ref["key"]]
                ).decode()
    raise ApiError(404, f"no head pod of {cluster} has a token")
