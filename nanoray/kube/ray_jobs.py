"""Call Ray's jobs API on the head of a RayJob's cluster.

exec in the head's pod ─► localhost:8265 ─► Ray

A kubeconfig with the right to exec is enough: no port-forward, no ingress, and no NetworkPolicy
between the API server and the head's port.
"""

from __future__ import annotations

import json
from typing import Any

from nanoray.kube.cluster import Api, KubeError, shorten
from nanoray.kube.kustomize import Object

TERMINAL = ("Complete", "Failed", "ValidationFailed")  # of a RayJob's jobDeploymentStatus
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


def read_log(api: Api, namespace: str, status: Object) -> str:
    """Return the log of the driver of the RayJob with this status. Raises KubeError."""
    answer = _call(api, namespace, status, f"/api/jobs/{status['jobId']}/logs", "GET")
    return str(answer.get("logs", ""))


def stop(api: Api, namespace: str, status: Object) -> None:
    """Let Ray send SIGTERM to the driver of the RayJob with this status. Raises KubeError."""
    _call(api, namespace, status, f"/api/jobs/{status['jobId']}/stop", "POST")


def attempts(status: Object) -> int:
    """Return the number of a RayJob's current attempt, from 1; each attempt has its own cluster."""
    # The operator counts failed attempts, and counts the current one once it has failed.
    failed = int(status.get("failed") or 0)
    if status.get("jobDeploymentStatus") in ("Failed", "Retrying"):
        return max(1, failed)
    return max(1, failed + 1)


def _call(api: Api, namespace: str, status: Object, path: str, method: str) -> dict[str, Any]:
    """Return Ray's answer. Raises KubeError for an error of Ray, and when no way leads to it."""
    head = _find_head(api, namespace, status["rayClusterName"])
    pod = head["metadata"]["name"]
    output = api.run_in(
        pod,
        namespace,
        ["python", "-c", _ASK_RAY, method, f"http://localhost:8265{path}"],
        container=head["spec"]["containers"][0].get("name", ""),
        purpose=f"a call of Ray at localhost:8265{path}",
    )
    code, _, answer = output.partition("\n")
    if code != "200":
        raise KubeError(f"Ray in pod {pod} answered {code}: {shorten(answer)}")
    values: dict[str, Any] = json.loads(answer)
    return values


def _find_head(api: Api, namespace: str, cluster: str) -> Object:
    """Return the cluster's head pod. Raises KubeError when none runs."""
    selector = f"ray.io/cluster={cluster},ray.io/node-type=head"
    heads: list[Object] = api.get("Pod", namespace, selector=selector)["items"]
    for head in heads:
        if head.get("status", {}).get("phase") == "Running":
            return head
    raise KubeError(f"no head pod of RayCluster {cluster} runs")
