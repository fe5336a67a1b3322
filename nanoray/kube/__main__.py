"""`nanoray kube render|submit|status|logs|stop|fetch`: run a configuration on Kubernetes with KubeRay.

render   check the objects and write them to stdout, without a cluster
submit   apply them, follow status and the driver's log until the job ends; exit with its result
status   the job, its step, loss and ETA, its pods, and what keeps them from running
logs     the driver's log; --follow until the job ends
stop     stop the job, which writes a checkpoint; --delete also removes its objects
fetch    copy a run folder from the volume to this machine
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from nanoray.cli import Loaded, run_command, run_subcommand
from nanoray.config import Kube, make_config
from nanoray.errors import ConfigError
from nanoray.kube.cluster import (
    TERMINAL,
    Api,
    Follower,
    KubeError,
    attempts,
    check_operator,
    ray_api,
    troubles,
)
from nanoray.kube.fetch import fetch, progress_of
from nanoray.kube.fit import compare
from nanoray.kube.kustomize import to_yaml
from nanoray.kube.render import job_name, render

STOP_S = 120.0


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "render": partial(_make, "render", _render),
        "submit": partial(_make, "submit", _submit),
        "status": _status,
        "logs": _logs,
        "stop": _stop,
        "fetch": _fetch,
    }
    return run_subcommand(commands, argv, __doc__)


def _make(name: str, command: Callable[[Loaded, float], int], argv: list[str]) -> int:
    """Run a command that takes the flags of a run and those of Kube."""
    what = f"{name} a training run on Kubernetes; takes every flag of nanoray.launch, too"
    own, rest = _kube_flags(name, argv)
    return run_command(
        lambda loaded, started: command(_with(loaded, own), started),
        rest,
        f"nanoray kube {name}",
        what,
    )


def _kube_flags(command: str, argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the flags of Kube and the rest, which are the run's."""
    parser = argparse.ArgumentParser(
        prog=f"nanoray kube {command}",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for key, spec in Kube.model_fields.items():
        doc = " ".join((spec.description or "").split()).replace("%", "%%")
        parser.add_argument(f"--{key}", metavar="X", help=f"{doc} [{spec.default}]")
    if {"-h", "--help"} & set(argv):
        print(f"the YAML key `kube`, or\n{parser.format_help()}\nand the flags of the run:\n")
    own, rest = parser.parse_known_args(argv)
    return vars(own), rest


def _with(loaded: Loaded, own: dict[str, str]) -> Loaded:
    """Override the file's `kube:` by the flags of Kube. Raises ConfigError for flags that predict
    or hide a run.
    """
    if loaded.quiet:
        raise ConfigError(
            "quiet would be ignored: `nanoray kube` shows a job's log as it is; drop --quiet"
        )
    if loaded.scale:
        raise ConfigError(
            f"world_size = {loaded.scale.world_size} would be ignored: `nanoray kube` predicts "
            "nothing; use "
            "`python -m nanoray.launch --dry_run --world_size ...`"
        )
    kube = make_config(
        loaded.config.model_dump() | {"kube": loaded.config.kube.model_dump() | own}
    ).kube
    return replace(loaded, config=loaded.config.model_copy(update={"kube": kube}))


def _render(loaded: Loaded, started: float) -> int:
    print(to_yaml(render(loaded.config, _timestamp(started))), end="")
    return 0


def _submit(loaded: Loaded, started: float) -> int:
    objects = render(loaded.config, _timestamp(started))
    name, namespace = job_name(loaded.config.name), loaded.config.kube.namespace
    if loaded.dry_run:
        print("\n".join(f"would apply {o['kind']} {o['metadata']['name']}" for o in objects))
        print("\n".join(compare(objects)))
        return 0
    api = Api()
    print(check_operator(api))
    _refuse_running(api, namespace, name)
    for thing in objects:
        if thing["kind"] == "Job":  # Jobs are immutable, and an old one may have another image
            _delete(api, namespace, "Job", thing["metadata"]["name"])
        api.apply(thing)
        print(f"apply  {thing['kind']} {thing['metadata']['name']}")
    job = next(thing for thing in objects if thing["kind"] == "RayJob")
    print(f"folder {job['spec']['entrypoint'].partition('--out_dir ')[2].split()[0]} on the volume")
    status = Follower(api, namespace, name, say=lambda line: print(line, flush=True)).run()
    return _verdict(status)


def _refuse_running(api: Api, namespace: str, name: str) -> None:
    """Delete a finished RayJob of this name. Raises KubeError when it still runs."""
    job = api.find("RayJob", namespace, name)
    if job is None:
        return
    status = job.get("status", {})
    if status.get("jobDeploymentStatus") not in TERMINAL:
        raise KubeError(
            f"RayJob {name} runs already; follow it with `nanoray kube logs {name} --follow`, or "
            "give --name another"
        )
    _delete(api, namespace, "RayJob", name)


def _timestamp(started: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))


def _verdict(status: dict[str, Any]) -> int:
    state = status.get("jobStatus")
    if state == "SUCCEEDED":
        return 0
    message = status.get("message") or status.get("reason") or "no reason given"
    print(
        f"error: the job ended {state or status['jobDeploymentStatus']}: {message}", file=sys.stderr
    )
    return 143 if state == "STOPPED" else 1


# Commands that take the name of a job.


def _parser(command: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"nanoray kube {command}", description=text)
    parser.add_argument("name", help="the job's name: the configuration's name")
    parser.add_argument("--namespace", default=Kube().namespace)
    return parser


def _status(argv: list[str]) -> int:
    args = _parser("status", "show a job, its pods, and what keeps them from running").parse_args(
        argv
    )
    api, name, status = _found(args)
    state = f"{status.get('jobDeploymentStatus', 'accepted')}/{status.get('jobStatus', '')}".rstrip(
        "/"
    )
    print(
        f"job    {name} {state}" + (f", attempt {attempts(status)}" if attempts(status) > 1 else "")
    )
    if status.get("message"):
        print(f"       {status['message']}")
    if status.get("jobId"):
        try:
            told = progress_of(api, args.namespace, _job(api, args.namespace, name))
            print("run    " + " · ".join(f"{key} {value}" for key, value in told.items()))
        except KubeError as error:
            print(f"run    nothing known of its steps: {error}")
    cluster = status.get("rayClusterName", "")
    pods = (
        api.get("Pod", args.namespace, selector=f"ray.io/cluster={cluster}")["items"]
        if cluster
        else []
    )
    for pod in pods:
        where = pod["spec"].get("nodeName", "no node yet")
        print(
            f"pod    {pod['metadata']['name']} {pod.get('status', {}).get('phase', '?')} on {where}"
        )
    for trouble in troubles(pods):
        print(f"       {trouble.pod} {trouble.text}")
    return 0


def _logs(argv: list[str]) -> int:
    parser = _parser("logs", "print the driver's log, which has the lines of all ranks")
    parser.add_argument(
        "--follow", action="store_true", help="follow until the job ends, and exit with its result"
    )
    args = parser.parse_args(argv)
    api, name, status = _found(args)
    follower = Follower(api, args.namespace, name, say=lambda line: print(line, flush=True))
    if args.follow:
        return _verdict(follower.run())
    if not status.get("jobId"):
        raise KubeError(f"RayJob {name} has no log yet; nanoray kube status {name} says why")
    print("\n".join(follower.new_log(status)))
    return 0


def _stop(argv: list[str]) -> int:
    parser = _parser("stop", "stop a job: it finishes its step and writes a checkpoint")
    parser.add_argument(
        "--delete", action="store_true", help="and delete the RayJob, and with it its cluster"
    )
    args = parser.parse_args(argv)
    api, name, status = _found(args)
    if status.get("jobStatus") == "RUNNING":
        ray_api(api, args.namespace, status, f"/api/jobs/{status['jobId']}/stop", "POST")
        _wait(
            lambda: (
                _job(api, args.namespace, name)["status"].get("jobStatus")
                not in ("RUNNING", "PENDING")
            ),
            STOP_S,
        )
        print(f"job    {name} {_job(api, args.namespace, name)['status'].get('jobStatus')}")
    elif not args.delete:
        print(f"job    {name} is not running: {status.get('jobDeploymentStatus', 'accepted')}")
    if args.delete:
        _delete(api, args.namespace, "RayJob", name)
        _delete(api, args.namespace, "ConfigMap", f"{name}-config")
        _delete(api, args.namespace, "PodDisruptionBudget", name)
        print(f"job    {name} deleted; its runs and checkpoints are still on the volume")
    return 0


def _fetch(argv: list[str]) -> int:
    parser = _parser(
        "fetch", "copy the newest run folder of a job, with its checkpoints, to this machine"
    )
    parser.add_argument("--out_dir", default="runs", help="parent of the copy [runs]")
    parser.add_argument("--run", default="", help="the run folder's name [the newest of the job]")
    args = parser.parse_args(argv)
    path = fetch(Api(), args.namespace, job_name(args.name), args.run, args.out_dir)
    print(f"files  {path}")
    return 0


def _found(args: argparse.Namespace) -> tuple[Api, str, dict[str, Any]]:
    """Return the API, the job's name on the cluster, and its status. Raises KubeError."""
    api, name = Api(), job_name(args.name)
    return api, name, _job(api, args.namespace, name).get("status", {})


def _job(api: Api, namespace: str, name: str) -> dict[str, Any]:
    job = api.find("RayJob", namespace, name)
    if job is None:
        names = [j["metadata"]["name"] for j in api.get("RayJob", namespace).get("items", ())]
        raise KubeError(
            f"there is no RayJob {name} in {namespace}; there: {', '.join(names) or 'none'}"
        )
    return job


def _delete(api: Api, namespace: str, kind: str, name: str) -> None:
    """Delete an object and what it owns, if it exists, and wait until it is gone."""
    api.delete(kind, namespace, name)
    _wait(lambda: api.find(kind, namespace, name) is None, STOP_S)


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise KubeError(
                f"the cluster did not finish within {seconds:g} s; see kubectl describe rayjob"
            )
        time.sleep(1)


if __name__ == "__main__":
    raise SystemExit(main())
