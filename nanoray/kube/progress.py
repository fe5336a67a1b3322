"""How far a run on the cluster's volume is, read by a command in TensorBoard's pod.

That pod lives as long as the volume and mounts it read-only. The command runs through the API
server, so nothing but a kubeconfig is needed.
"""

from __future__ import annotations

import json

from nanoray.kube.cluster import Api, KubeError
from nanoray.kube.kustomize import Object
from nanoray.kube.render import out_dir_of
from nanoray.observe.watch.observers import progress

# The newest run's name, its last record and its configuration, each from a line of its own; nothing
# before the run has them.
_NEWEST = """[ -d "$0" ] || exit 0
cd "$0" && run=$(ls -1 | sort | tail -n 1) || exit
[ -n "$run" ] && [ -f "$run/metrics.jsonl" ] && [ -f "$run/config.json" ] || exit 0
printf '%s\\n' "$run" && tail -n 1 "$run/metrics.jsonl" && cat "$run/config.json"
"""
SELECTOR = "app.kubernetes.io/name=nanoray-tensorboard"


def progress_of(api: Api, namespace: str, job: Object) -> dict[str, str]:
    """Return the progress of the newest run in a RayJob's folder. Raises KubeError."""
    out_dir = out_dir_of(job)
    if not out_dir:
        raise KubeError("the job's entrypoint names no --out_dir")
    pod = _find_reader(api, namespace)
    command = ["sh", "-c", _NEWEST, out_dir]
    output = api.run_in(pod, namespace, command, purpose=f"reading the newest run of {out_dir}")
    try:
        run_name, record, config = output.split("\n", 2)
        max_steps = json.loads(config)["max_steps"]
        return {"folder": f"{out_dir}/{run_name}"} | progress(json.loads(record), max_steps)
    except (ValueError, KeyError):
        raise KubeError(f"{out_dir} has no run with a record yet") from None


def _find_reader(api: Api, namespace: str) -> str:
    """Return the name of a running pod that mounts the volume. Raises KubeError."""
    pods = api.get("Pod", namespace, selector=SELECTOR)["items"]
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Running":
            return str(pod["metadata"]["name"])
    raise KubeError(
        f"no TensorBoard pod runs in {namespace}, and files are read through it; see kubectl get "
        "pods"
    )
