"""Call Ray's jobs API on the head of a RayJob's cluster.

proxy of the API server ─► service of the head ─► Ray    where the API server reaches the head's pod
exec in the head's pod ─► localhost ─► Ray               where a NetworkPolicy or a right forbids that

Either way a kubeconfig is enough: no port-forward, no ingress.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from nanoray.kube.cluster import Api, ApiError, KubeError, path_of, shorten
from nanoray.kube.kustomize import Object

TERMINAL = ("Complete", "Failed", "ValidationFailed")  # of a RayJob's jobDeploymentStatus
PROXY_TIMEOUT_S = 5.0  # then exec is tried, so that a policy that drops packets costs little time
_PREFIX = "nanoray_"  # of the driver's keys in the Ray job's metadata, which users may add to
_POLICY = (
    "the network policy must let in the API server's address at 8265: see `out of reach` in "
    "kuberay/README.md"
)
_RIGHTS = "kuberay/README.md lists the rights that `nanoray kube` needs"
# Prints the HTTP status and the answer; 0 and a reason when Ray does not answer. The environment of
# the head's container has the token, and may have a proxy, which is for the internet.
_ASK_RAY = """
import os, sys, urllib.error, urllib.request
method, url = sys.argv[1:]
headers = {"Authorization": "Bearer " + os.environ.get("RAY_AUTH_TOKEN", "")}
request = urllib.request.Request(url, method=method, headers=headers)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    answer = opener.open(request, timeout=20)
    status, content = answer.status, answer.read()
except urllib.error.HTTPError as error:
    status, content = error.status, error.read()
except OSError as error:
    status, content = 0, str(error).encode()
sys.stdout.buffer.write(b"%d\\n" % status + content)
"""


class RaySilentError(KubeError):
    """Ray does not answer in the head's own pod: it starts, or it has failed."""


class RayApi:
    """Ray's jobs API of one namespace. `print_line` gets a line when it must take the other way."""

    def __init__(self, api: Api, namespace: str, print_line: Callable[[str], None] = print) -> None:
        self._api = api
        self._namespace = namespace
        self._print_line = print_line
        self._uses_exec = False
        self._explained = False
        self._tokens: dict[str, str] = {}  # cluster -> its token, which does not change

    def call(self, status: Object, path: str, method: str = "GET") -> Object:
        """Call Ray on the head of the RayJob with this status, and return the decoded answer.

        Raises ApiError for an error that Ray answered, and KubeError when no way leads to Ray.
        """
        cluster = status["rayClusterName"]
        if self._uses_exec:
            try:
                return self._call_by_exec(self._find_head(cluster), path, method)
            except KubeError:
                self._uses_exec = False  # the head may be a new one: the next call tries both
                raise

        try:
            return self._call_through_proxy(cluster, path, method)
        except KubeError as error:
            if not _is_of_the_way(error):
                raise
            refusal = error

        try:
            head = self._find_head(cluster)
        except KubeError as error:
            raise KubeError(f"{refusal}; {error}") from None
        lacks_right = getattr(refusal, "status", 0) == 403
        remedy = _RIGHTS if lacks_right else _POLICY
        pod = head["metadata"]["name"]
        try:
            answer = self._call_by_exec(head, path, method)
        except (ApiError, RaySilentError):
            raise  # the way is open, and this is what Ray says, or that it says nothing
        except KubeError as error:
            raise KubeError(f"{refusal}; {error}; {remedy}") from None
        # Ray may have started after the proxy was asked, and then the proxy leads to it now.
        if not lacks_right and self._proxy_opens(cluster):
            return answer
        self._uses_exec = True
        if not self._explained:
            self._explained = True
            self._print_line(f"ray    called by exec in pod {pod}, because {refusal}; {remedy}")
        return answer

    def read_log(self, status: Object) -> str:
        """Return the log of a RayJob's driver. Raises KubeError."""
        return str(self.call(status, f"/api/jobs/{status['jobId']}/logs").get("logs", ""))

    def read_progress(self, status: Object) -> dict[str, str]:
        """Return the progress that a RayJob's driver has reported: state, folder, step, loss, eta.

        Raises KubeError.
        """
        job = self.call(status, f"/api/jobs/{status['jobId']}")
        progress = {}
        for key, value in (job.get("metadata") or {}).items():
            if key.startswith(_PREFIX):
                progress[key.removeprefix(_PREFIX)] = value
        return progress

    def stop(self, status: Object) -> None:
        """Let Ray send SIGTERM to a RayJob's driver. Raises KubeError."""
        self.call(status, f"/api/jobs/{status['jobId']}/stop", "POST")

    def _proxy_opens(self, cluster: str) -> bool:
        """Return whether the proxy leads to Ray, or will once the head's pod is ready."""
        try:
            self._call_through_proxy(cluster, "/api/version", "GET")
        except KubeError as error:
            return not _is_of_the_way(error) or "no endpoints available" in str(error)
        return True

    def _call_through_proxy(self, cluster: str, path: str, method: str) -> Object:
        # Ray's token has a header of its own, because the API server consumes Authorization.
        if cluster not in self._tokens:
            self._tokens[cluster] = self._read_token(cluster)
        headers = {"X-Ray-Authorization": f"Bearer {self._tokens[cluster]}"}
        service = path_of("Service", self._namespace, f"{cluster}-head-svc:8265")
        answer = self._api.call(
            method, f"{service}/proxy{path}", headers=headers, read_timeout_s=PROXY_TIMEOUT_S
        )
        return _require_mapping(answer)

    def _call_by_exec(self, head: Object, path: str, method: str) -> Object:
        command = ["python", "-c", _ASK_RAY, method, f"http://localhost:8265{path}"]
        output = self._api.run_in(
            head["metadata"]["name"],
            self._namespace,
            command,
            container=head["spec"]["containers"][0].get("name", ""),
            purpose=f"a call of Ray at localhost:8265{path}",
        )
        code, _, answer = output.partition("\n")
        if not code.isdigit():
            raise KubeError(f"what answered is not Ray: {shorten(output)}")
        if code == "0":
            pod = head["metadata"]["name"]
            raise RaySilentError(f"Ray does not answer in pod {pod}: {shorten(answer)}")
        if int(code) >= 400:
            raise ApiError(int(code), shorten(answer))
        try:
            return _require_mapping(json.loads(answer))
        except ValueError:
            return _require_mapping(answer)

    def _find_head(self, cluster: str) -> Object:
        """Return the cluster's head pod. Raises KubeError when none runs."""
        for head in self._heads(cluster):
            if head.get("status", {}).get("phase") == "Running":
                return head
        raise KubeError(f"no head pod of RayCluster {cluster} runs")

    def _heads(self, cluster: str) -> list[Object]:
        selector = f"ray.io/cluster={cluster},ray.io/node-type=head"
        heads: list[Object] = self._api.get("Pod", self._namespace, selector=selector)["items"]
        return heads

    def _read_token(self, cluster: str) -> str:
        """Return the cluster's token from the Secret that the head's environment refers to."""
        for head in self._heads(cluster):
            for variable in head["spec"]["containers"][0].get("env", ()):
                if variable["name"] == "RAY_AUTH_TOKEN" and "valueFrom" in variable:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    secret = self._api.get("Secret", self._namespace, reference["name"])
                    return base64.b64decode(secret["data"][reference["key"]]).decode()
        raise ApiError(404, f"no head pod of {cluster} has a token")


def _is_of_the_way(error: KubeError) -> bool:
    """Return whether the proxy did not lead to Ray. Other errors are Ray's own, or no cluster's."""
    status = getattr(error, "status", 0)
    return status in (0, 403) or status >= 500


def _require_mapping(answer: Any) -> Object:
    """Return an answer that is a JSON object, as all of Ray's are. Raises KubeError."""
    if not isinstance(answer, dict):
        raise KubeError(f"what answered is not Ray: {shorten(answer)}")
    return answer


def attempts(status: Object) -> int:
    """Return the number of a RayJob's current attempt, from 1; each attempt has its own cluster."""
    # The operator counts failed attempts, and counts the current one once it has failed.
    failed = int(status.get("failed") or 0)
    if status.get("jobDeploymentStatus") in ("Failed", "Retrying"):
        return max(1, failed)
    return max(1, failed + 1)
