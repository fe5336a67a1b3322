"""Call a Kubernetes cluster: read, apply and delete objects, and run commands in pods.

Kubernetes is called through the official client, so a kubeconfig is enough. Each error is one line
with its remedy.
"""

from __future__ import annotations

import io
import json
import os
from typing import Any, BinaryIO

from nanoray.errors import NanorayError
from nanoray.kube.kustomize import Object

KUBERAY = "1.7.0"
INSTALL = (
    "helm repo add kuberay https://ray-project.github.io/kuberay-helm/ && "
    f"helm install kuberay-operator kuberay/kuberay-operator --version {KUBERAY} "
    "--namespace kuberay-system --create-namespace"
)
MANAGER = "nanoray"  # field manager of server-side apply
# Kind -> (path of its API, plural, whether it lives in a namespace). nanoray reads the first two
# and applies the others.
KINDS = {
    "Pod": ("/api/v1", "pods", True),
    "Event": ("/api/v1", "events", True),
    "Namespace": ("/api/v1", "namespaces", False),
    "ServiceAccount": ("/api/v1", "serviceaccounts", True),
    "ConfigMap": ("/api/v1", "configmaps", True),
    "Service": ("/api/v1", "services", True),
    "PersistentVolume": ("/api/v1", "persistentvolumes", False),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims", True),
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1", "resourceclaimtemplates", True),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies", True),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets", True),
    "Job": ("/apis/batch/v1", "jobs", True),
    "Deployment": ("/apis/apps/v1", "deployments", True),
    "StatefulSet": ("/apis/apps/v1", "statefulsets", True),
    "RayCluster": ("/apis/ray.io/v1", "rayclusters", True),
    "RayJob": ("/apis/ray.io/v1", "rayjobs", True),
    "PodMonitor": ("/apis/monitoring.coreos.com/v1", "podmonitors", True),
    "PrometheusRule": ("/apis/monitoring.coreos.com/v1", "prometheusrules", True),
    "ResourceFlavor": ("/apis/kueue.x-k8s.io/v1beta2", "resourceflavors", False),
    "ClusterQueue": ("/apis/kueue.x-k8s.io/v1beta2", "clusterqueues", False),
    "LocalQueue": ("/apis/kueue.x-k8s.io/v1beta2", "localqueues", True),
}
# Longest silence of a command in a pod. A long command may run on as long as its output comes.
SILENCE_S = 60.0
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
# The first byte of each message of a command in a pod names its channel.
_STDOUT = b"\x01"
_STDERR = b"\x02"
_STATUS = b"\x03"  # the command's exit, as a JSON Status
_CLOSE = 8  # opcode of the websocket's last frame


class KubeError(NanorayError):
    """The cluster refused or failed an operation."""

    exit_code = 4


class ApiError(KubeError):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the cluster answered {status}: {message}")
        self.status = status
        self.message = message


class Api:
    """The API server of KUBECONFIG's current context. Raises KubeError when there is none."""

    def __init__(self) -> None:
        # The client is an optional dependency, and slow to import.
        try:
            from kubernetes import client, config
        except ImportError:
            raise KubeError(
                "the kubernetes client is not installed; pip install 'nanoray[kube]'"
            ) from None

        # A pod of the cluster has no kubeconfig but a service account. Both failures are of many
        # classes, and the first one says more to a user.
        try:
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
        except Exception as error:
            try:
                config.load_incluster_config()
            except Exception:
                raise KubeError(
                    f"no cluster: {error}; set KUBECONFIG, or make one with "
                    "kuberay/scripts/install.sh"
                ) from None
        self._client = client.ApiClient()
        self._client.configuration.retries = 1  # the default repeats for longer than users wait

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: tuple[tuple[str, str], ...] = (),
        content_type: str = "application/json",
    ) -> Any:
        """Send one request and return the decoded JSON of the answer, or its text if it has none.

        Raises ApiError for an error status, and KubeError without an answer.
        """
        request = self._client.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            timeouts = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
            response = self._client.call_api(*request, _request_timeout=timeouts)
            answer = (response.read() or b"").decode("utf-8", "replace")
        except Exception as error:  # urllib3's and ssl's classes
            host = self._client.configuration.host
            raise KubeError(
                f"no answer from the cluster at {host}: {shorten(error)}; check KUBECONFIG and VPN"
            ) from None
        if response.status >= 400:
            raise ApiError(response.status, _error_message(answer) or str(response.reason))
        try:
            return json.loads(answer)
        except ValueError:
            return answer

    def get(self, kind: str, namespace: str, name: str = "", selector: str = "") -> Any:
        """Return one object, or with an empty name the list of them. Raises ApiError."""
        query: tuple[tuple[str, str], ...] = ()
        if selector:
            query = (("labelSelector", selector),)
        return self.call("GET", path_of(kind, namespace, name), query=query)

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return one object, None if it does not exist. Raises ApiError."""
        try:
            thing: Object = self.get(kind, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return thing

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object, if it exists, and what it owns. Raises ApiError."""
        if self.find(kind, namespace, name) is not None:
            query = (("propagationPolicy", "Background"),)
            self.call("DELETE", path_of(kind, namespace, name), query=query)

    def apply(self, thing: Object) -> None:
        """Create or update one object (server-side apply). Raises KubeError with the server's reason."""
        kind = thing["kind"]
        name = thing["metadata"]["name"]
        namespace = thing["metadata"].get("namespace", "")
        # force: a field that kubectl has set is taken over instead of refused as a conflict.
        query = (("fieldManager", MANAGER), ("force", "true"))
        path = path_of(kind, namespace, name)
        try:
            self.call("PATCH", path, thing, query, "application/apply-patch+yaml")
        except ApiError as error:
            message = f"{kind} {name}: {shorten(error.message)}"
            if error.status == 404:
                message += (
                    f"; this cluster has no {kind}: install what defines it, or take it out of the "
                    "overlay"
                )
            raise KubeError(message) from None

    def run_in(
        self,
        pod: str,
        namespace: str,
        command: list[str],
        into: BinaryIO | None = None,
        container: str = "",
        purpose: str = "",
    ) -> str:
        """Run a command in a pod and return its standard output, or write it to `into` as it comes.

        `container`: the pod's first one without it. Errors name the `purpose`, else the command.
        Raises KubeError with the command's error output, or after SILENCE_S without any output.
        """
        from websocket import WebSocketTimeoutException

        what = f"{purpose or ' '.join(command)} in pod {pod}"
        socket = self._open_exec(pod, namespace, command, container, what)

        # The status comes last, after all output. Without it the output is incomplete, even if the
        # connection was closed in good order.
        stdout = io.BytesIO()
        stderr = io.BytesIO()
        status = io.BytesIO()
        channels: dict[bytes, BinaryIO] = {
            _STDOUT: into or stdout,
            _STDERR: stderr,
            _STATUS: status,
        }
        try:
            socket.settimeout(SILENCE_S)
            while True:
                opcode, frame = socket.recv_data_frame()
                if opcode == _CLOSE:
                    break
                channel = frame.data[:1]
                if channel in channels:
                    channels[channel].write(frame.data[1:])
            broken = "" if status.getvalue() else "the connection was closed"
        except WebSocketTimeoutException:
            broken = f"nothing came for {SILENCE_S:g} s"
        except Exception as error:  # websocket's and ssl's classes, a full disk
            broken = shorten(error)
        finally:
            socket.shutdown()
        if broken:
            raise KubeError(f"{what}: {broken}, so its output is not complete; try again")

        result = json.loads(status.getvalue())
        if result["status"] != "Success":
            causes = result.get("details", {}).get("causes") or [{"message": "no code"}]
            exit_code = causes[0]["message"]
            output = stderr.getvalue().decode("utf-8", "replace") or result.get("message", "")
            raise KubeError(f"{what} ended with {exit_code}: {shorten(output)}")
        return stdout.getvalue().decode("utf-8", "replace")

    def _open_exec(
        self, pod: str, namespace: str, command: list[str], container: str, what: str
    ) -> Any:
        """Start a command in a pod and return its websocket. Raises KubeError."""
        from kubernetes import client, stream

        named = {"container": container} if container else {}
        try:
            return stream.stream(
                client.CoreV1Api(self._client).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                command=command,
                stdout=True,
                stderr=True,
                stdin=False,
                tty=False,
                _preload_content=False,
                **named,
            ).sock
        except Exception as error:  # the client's classes
            raise KubeError(f"{what}: {shorten(error)}; needs create on pods/exec") from None


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return the URL path of an object, or with an empty name that of all objects of its kind."""
    api, plural, in_namespace = KINDS[kind]
    path = api
    if in_namespace:
        path += f"/namespaces/{namespace}"
    path += f"/{plural}"
    if name:
        path += f"/{name}"
    return path


def shorten(value: Any) -> str:
    """Format an error or an output as one line of at most 300 characters."""
    return " ".join(str(value).split())[:300]


def _error_message(body: str) -> str:
    """Return the message of an error answer, which is a Status as JSON unless a proxy sent it."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return shorten(body)


def require_operator(api: Api) -> None:
    """Raise KubeError when the cluster does not know KubeRay's objects."""
    try:
        api.call("GET", "/apis/ray.io/v1")
    except ApiError as error:
        if error.status == 404:
            raise KubeError(f"KubeRay is not installed in this cluster; {INSTALL}") from None
