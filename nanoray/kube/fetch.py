"""Read runs on the cluster's volume, by running `tar` and `tail` in TensorBoard's pod through the
API server.

That pod lives as long as the volume and mounts it read-only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from nanoray.errors import ConfigError
from nanoray.kube.cluster import Api, KubeError, told_by_job
from nanoray.kube.kustomize import Object
from nanoray.train.watch.observers import progress

# tar ends with 1 when a file grew while it was read: the run may be training.
_PACK = 'tar -czf - -C "/data/runs/$0" "$1" || [ $? = 1 ]'
SELECTOR = "app.kubernetes.io/name=nanoray-tensorboard"


def fetch(api: Api, namespace: str, name: str, run: str, out_dir: str) -> Path:
    """Copy run folder `run` (else the newest of job `name`) into `out_dir` and return its path.

    The folder appears whole or not at all, and an existing one is never overwritten. Raises
    KubeError.
    """
    if "/" in run or run.startswith("."):
        raise ConfigError(
            f"run = {run!r} is no folder's name; take one that `nanoray kube fetch {name}` lists"
        )
    pod = _reader(api, namespace)
    find = [
        "find",
        "/data/runs",
        "-mindepth",
        "2",
        "-maxdepth",
        "2",
        "-type",
        "d",
        "-printf",
        "%P\\n",
    ]
    runs = sorted(api.run_in(pod, namespace, find).split(), key=lambda r: r.partition("/")[2])
    own = [
        r
        for r in runs
        if r.endswith(f"/{run}")
        or (not run and re.match(rf"{re.escape(name)}(-\d{{8}}-\d{{6}})?/", r))
    ]
    if not own:
        raise KubeError(
            f"no run {run or f'of {name}'} on the volume; there: {', '.join(runs) or 'none'}"
        )
    folder, _, newest = own[-1].partition("/")
    target = Path(out_dir).expanduser() / newest
    if target.exists():
        raise KubeError(f"{target} is there already; move it away, or give --out_dir another")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        with tempfile.TemporaryFile(dir=aside) as packed:
            api.run_in(pod, namespace, ["sh", "-c", _PACK, folder, newest], packed)
            packed.seek(0)
            with tarfile.open(fileobj=packed, mode="r:gz") as archive:
                # No absolute path, no link out of the folder, no device
                archive.extractall(aside, filter="data")
        os.replace(aside / newest, target)
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise KubeError(f"cannot unpack the archive of {own[-1]}: {error}; try again") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _reader(api: Api, namespace: str) -> str:
    """Return the name of a pod that runs and mounts the volume. Raises KubeError."""
    pods = api.get("Pod", namespace, selector=SELECTOR)["items"]
    ready = [p["metadata"]["name"] for p in pods if p.get("status", {}).get("phase") == "Running"]
    if not ready:
        raise KubeError(
            f"no TensorBoard pod runs in {namespace}, and files are read through it; see kubectl "
            "get pods"
        )
    return str(ready[0])


_NEWEST = """cd "$0" && run=$(ls -1 | sort | tail -n 1) && printf '%s\\n' "$run" &&
tail -n 1 "$run/metrics.jsonl" && cat "$run/config.json\""""


def progress_of(api: Api, namespace: str, job: Object) -> dict[str, str]:
    """Return how far a RayJob's run is: from its Ray job while it runs, else from the volume.
    Raises KubeError.
    """
    status = job.get("status", {})
    if status.get("jobStatus") == "RUNNING":
        with suppress(KubeError, AttributeError):
            if told := told_by_job(api, namespace, status):
                return told
    out_dir = (
        job.get("spec", {})
        .get("entrypoint", "")
        .partition("--out_dir ")[2]
        .partition(" ")[0]
        .strip()
    )
    if not out_dir:
        raise KubeError("the job's entrypoint names no --out_dir")
    found = api.run_in(_reader(api, namespace), namespace, ["sh", "-c", _NEWEST, out_dir]).split(
        "\n", 2
    )
    try:
        (run, line, config) = found
        return {"folder": f"{out_dir}/{run}"} | progress(
            json.loads(line), json.loads(config)["max_steps"]
        )
    except (ValueError, KeyError):
        raise KubeError(f"{out_dir} has no run with a record yet") from None
