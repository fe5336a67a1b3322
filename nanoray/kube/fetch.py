"""Read runs on the cluster's volume, by running `tar` and `tail` in TensorBoard's pod.

That pod lives as long as the volume and mounts it read-only. The commands run through the API
server, so nothing but a kubeconfig is needed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
import tempfile
from pathlib import Path

from nanoray.errors import ConfigError
from nanoray.kube.cluster import Api, KubeError
from nanoray.kube.kustomize import Object
from nanoray.kube.render import RUNS, is_folder_of, out_dir_of
from nanoray.observe.watch.observers import progress

# Prints FOLDER/NAME of each run.
_LIST_RUNS = "find /data/runs -mindepth 2 -maxdepth 2 -type d -printf '%P\\n'"
# tar ends with 1 when a file grew while it was read: the run may be training.
_PACK = 'tar -czf - -C "/data/runs/$0" "$1" || [ $? = 1 ]'
# The newest run's name, its last record and its configuration, each from a line of its own; nothing
# before the run has them.
_NEWEST = """[ -d "$0" ] || exit 0
cd "$0" && run=$(ls -1 | sort | tail -n 1) || exit
[ -n "$run" ] && [ -f "$run/metrics.jsonl" ] && [ -f "$run/config.json" ] || exit 0
printf '%s\\n' "$run" && tail -n 1 "$run/metrics.jsonl" && cat "$run/config.json"
"""
# The age of the newest run's summary in seconds, by the clock of that pod, and the summary.
_SUMMARY = """cd "$0" 2>/dev/null || exit 0
summary=$(ls -1 | sort | tail -n 1)/summary.json
[ -f "$summary" ] || exit 0
printf '%s\\n' "$(($(date +%s) - $(stat -c %Y "$summary")))" && cat "$summary"
"""
SELECTOR = "app.kubernetes.io/name=nanoray-tensorboard"


def fetch(api: Api, namespace: str, name: str, run: str, out_dir: str) -> Path:
    """Copy run folder `run` (else the newest of job `name`) into `out_dir` and return its path.

    The folder appears when it is complete, and an existing one is never overwritten. Raises
    ConfigError for a `run` that is no folder's name, and KubeError.
    """
    # The name becomes a part of a path on the volume and of one on this machine.
    if "/" in run or run.startswith("."):
        raise ConfigError(
            f"run = {run!r} is no folder's name; take one that `nanoray kube fetch {name}` lists"
        )
    pod = _find_reader(api, namespace)

    # A run is FOLDER/NAME, and the name begins with the time, so the last one is the newest.
    command = shlex.split(_LIST_RUNS)
    listing = api.run_in(pod, namespace, command, purpose="find in /data/runs").split()
    runs = sorted(listing, key=lambda path: path.partition("/")[2])
    if run:
        candidates = [path for path in runs if path.endswith(f"/{run}")]
    else:
        # A job that resumed the run of another one trains in that one's folder.
        job = api.find("RayJob", namespace, name) or {}
        own = out_dir_of(job).removeprefix(f"{RUNS}/")
        folders = [(path, path.partition("/")[0]) for path in runs]
        candidates = [
            path for path, folder in folders if folder == own or is_folder_of(name, folder)
        ]
    if not candidates:
        wanted = run or f"of {name}"
        raise KubeError(f"no run {wanted} on the volume; there: {', '.join(runs) or 'none'}")
    source = candidates[-1]
    folder, _, run_name = source.partition("/")

    target = Path(out_dir).expanduser() / run_name
    if target.exists():
        raise KubeError(f"{target} is there already; move it away, or give --out_dir another")
    target.parent.mkdir(parents=True, exist_ok=True)

    # Unpack into a folder on the same file system, and rename it when it is complete.
    temporary = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        with tempfile.TemporaryFile(dir=temporary) as packed:
            command = ["sh", "-c", _PACK, folder, run_name]
            api.run_in(pod, namespace, command, packed, purpose=f"tar of {source}")
            packed.seek(0)
            with tarfile.open(fileobj=packed, mode="r:gz") as archive:
                # The filter refuses absolute paths, links out of the folder and devices.
                archive.extractall(temporary, filter="data")
        os.replace(temporary / run_name, target)
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise KubeError(f"cannot unpack the archive of {source}: {error}; try again") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


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


def progress_of(api: Api, namespace: str, job: Object) -> dict[str, str]:
    """Return the progress of the newest run in a RayJob's folder. Raises KubeError."""
    out_dir, output = _read_newest(api, namespace, job, _NEWEST)
    try:
        run_name, record, config = output.split("\n", 2)
        max_steps = json.loads(config)["max_steps"]
        return {"folder": f"{out_dir}/{run_name}"} | progress(json.loads(record), max_steps)
    except (ValueError, KeyError):
        raise KubeError(f"{out_dir} has no run with a record yet") from None


def end_of_run(api: Api, namespace: str, job: Object, within_s: float) -> str:
    """Return why the newest run in a RayJob's folder ended, by its summary. Raises KubeError.

    An end more than `within_s` ago is another command's: one that is refused writes no summary.
    """
    out_dir, output = _read_newest(api, namespace, job, _SUMMARY)
    age_s, _, summary = output.partition("\n")
    # The pod counts whole seconds.
    if not output or float(age_s) > within_s + 1:
        raise KubeError(f"its run in {out_dir} has no summary")
    return " ".join(str(json.loads(summary)["exit_reason"]).split())


def _read_newest(api: Api, namespace: str, job: Object, script: str) -> tuple[str, str]:
    """Return a RayJob's folder and what a script prints of its newest run. Raises KubeError."""
    out_dir = out_dir_of(job)
    if not out_dir:
        raise KubeError("the job's entrypoint names no --out_dir")
    pod = _find_reader(api, namespace)
    command = ["sh", "-c", script, out_dir]
    purpose = f"reading the newest run of {out_dir}"
    return out_dir, api.run_in(pod, namespace, command, purpose=purpose)
