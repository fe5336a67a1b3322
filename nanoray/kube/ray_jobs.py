"""Call Ray's jobs API on the head of a RayJob's cluster, through the API server's proxy.

So a kubeconfig is enough: no port-forward, no ingress. Ray's token is sent in X-Ray-Authorization,
because the API server consumes the Authorization header.
"""

from __future__ import annotations

import base64
from typing import Any

from nanoray.kube.cluster import Api, ApiError, path_of
from nanoray.kube.kustomize import Object

TERMINAL = ("Complete", "Failed", "ValidationFailed")  # of a RayJob's jobDeploymentStatus
_PREFIX = "nanoray_"  # of the driver's keys in the Ray job's metadata, which users may add to


def attempts(status: Object) -> int:
    """Return the number of a RayJob's current attempt, from 1; each attempt has its own cluster."""
    # The operator counts failed attempts, and counts the current one once it has failed.
    failed = int(status.get("failed") or 0)
    if status.get("jobDeploymentStatus") in ("Failed", "Retrying"):
        return max(1, failed)
    return max(1, failed + 1)


def job_progress(api: Api, namespace: str, status: Object) -> dict[str, str]:
    """Return the progress that a RayJob's driver has reported: state, folder, step, loss, eta.

    Raises ApiError.
    """
    job = ray_api(api, namespace, status, f"/api/jobs/{status['jobId']}")
    progress = {}
    for key, value in (job.get("metadata") or {}).items():
        if key.startswith(_PREFIX):
            progress[key.removeprefix(_PREFIX)] = value
    return progress


def ray_api(
    api: Api, namespace: str, status: Object, path: str, method: str = "GET", body: Any = None
) -> Any:
    """Call Ray's jobs API on the head of a RayJob; return the decoded answer. Raises ApiError."""
    cluster = status["rayClusterName"]
    service = path_of("Service", namespace, f"{cluster}-head-svc:8265")
    headers = {"X-Ray-Authorization": f"Bearer {_read_token(api, namespace, cluster)}"}
    return api.call(method, f"{service}/proxy{path}", body, headers=headers)


def _read_token(api: Api, namespace: str, cluster: str) -> str:
    """Return the cluster's token from the Secret that the head pod's environment refers to."""
    selector = f"ray.io/cluster={cluster},ray.io/node-type=head"
    heads = api.get("Pod", namespace, selector=selector)["items"]
    for head in heads:
        for variable in head["spec"]["containers"][0].get("env", ()):
            if variable["name"] == "RAY_AUTH_TOKEN" and "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                secret = api.get("Secret", namespace, reference["name"])
                return base64.b64decode(secret["data"][reference["key"]]).decode()
    raise ApiError(404, f"no head pod of {cluster} has a token")
