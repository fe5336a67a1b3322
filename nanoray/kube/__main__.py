"""`nanoray kube render|submit|status|logs|stop|fetch`: train on Kubernetes with KubeRay.

    nanoray kube submit --workers 4 --device cpu -- train.py --lr 0.1    a program, with its folder
    nanoray kube submit --config run.yaml                                a configuration of nanoray

After -- stands what follows `nanoray run`: a script, -m MODULE, or -- COMMAND.

render   build the objects with kubectl and write them to stdout, without a cluster
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
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from nanoray.cli import (
    Loaded,
    Page,
    Parser,
    name_program,
    run_command,
    run_subcommand,
    tool_parser,
)
from nanoray.config import Config, Kube
from nanoray.config.settings import FLAG
from nanoray.errors import ConfigError
from nanoray.kube.cluster import Api, KubeError, require_operator
from nanoray.kube.fetch import fetch, progress_of
from nanoray.kube.follow import STARTED, Follower
from nanoray.kube.gpus import claims_template, template_name
from nanoray.kube.kustomize import Object, to_yaml
from nanoray.kube.pods import read_warnings, troubles
from nanoray.kube.program import PodProgram
from nanoray.kube.ray_jobs import TERMINAL, attempts, read_log, stop
from nanoray.kube.render import job_name, out_dir_of, render

# An old one may have another image or another number of GPUs, and neither can be changed.
REPLACED = ("Job", "ResourceClaimTemplate")
STOP_S = 120.0  # for a step, its checkpoint, and the end of the pods
POLL_S = 1.0


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


def _make(name: str, command: Callable[[Rendered], int], argv: list[str]) -> int:
    """Run a command that takes the flags of a run and those of Kube; after -- a program."""
    if "--" in argv:
        at = argv.index("--")
        kube_flags, run_flags = _split_flags(name, argv[:at])
        words = [*run_flags, *argv[at + 1 :]]
        return command(Rendered.of_program(PodProgram.of(words, {"kube": kube_flags})))
    for before, word in pairwise(["", *argv]):
        if word.endswith(".py") and not before.startswith("--"):
            raise ConfigError(f"{word} is a program; write `nanoray kube {name} [flags] -- {word}`")
    kube_flags, run_flags = _split_flags(name, argv)

    def run(loaded: Loaded, started: float) -> int:
        loaded = _with(loaded, kube_flags)
        objects = render(loaded.config, started)
        return command(Rendered(objects, loaded.config, loaded.dry_run))

    about = Page(
        f"{name.capitalize()} a training run on Kubernetes.",
        sections=(("of the cluster, also the YAML key kube", _flags_of_kube()),),
        usage="[flags of the cluster] [flags of the run] [-- a program, as after `nanoray run`]",
        more="The flags of the run are those of `python -m nanoray.launch`, and before a program "
        "those of `nanoray run`; --help all prints the first.",
    )
    return run_command(run, run_flags, name_program(f"kube {name}"), about, elsewhere=True)


@dataclass(frozen=True)
class Rendered:
    """The objects of a run, and what they were made of."""

    objects: list[Object]
    config: Config
    dry_run: bool
    shipped: str = ""  # what travels with a program

    @classmethod
    def of_program(cls, program: PodProgram) -> Rendered:
        """Render a program. Raises ConfigError."""
        objects = render(program.config, time.time(), program)
        return cls(objects, program.config, program.dry_run, program.shipped)


def _flags_of_kube() -> tuple[tuple[str, str], ...]:
    """Return a flag for each key of Kube, and what it is."""
    flags = []
    for key, spec in Kube.model_fields.items():
        text = " ".join((spec.description or "").split())
        default = f" [{spec.default}]" if spec.default else ""
        flags.append((f"--{key} X", f"{text}{default}"))
    return tuple(flags)


def _split_flags(command: str, argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the flags of Kube and the rest, which are the run's."""
    # Without a help of its own: the run's parser prints both
    parser = Parser(
        prog=name_program(f"kube {command}"),
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # only flags that were given override the file
    )
    for flag, text in _flags_of_kube():
        name, metavar = flag.split()
        parser.add_argument(name, metavar=metavar, help=text.replace("%", "%%"))
    kube_flags, run_flags = parser.parse_known_args(argv)
    return vars(kube_flags), run_flags


def _with(loaded: Loaded, kube_flags: dict[str, str]) -> Loaded:
    """Override the file's `kube:` by the flags of Kube.

    Raises ConfigError for a flag that would be ignored: one that predicts or hides a run.
    """
    if loaded.quiet:
        raise ConfigError(
            "quiet would be ignored: `nanoray kube` shows a job's log as it is; drop --quiet"
        )
    if loaded.verbose:
        raise ConfigError(
            "verbose would be ignored: `nanoray kube` renders objects; `python -m nanoray.launch "
            "--dry_run --verbose` lists who has set each key"
        )
    if loaded.scale:
        raise ConfigError(
            f"world_size = {loaded.scale.world_size} would be ignored: `nanoray kube` predicts "
            "nothing; use `python -m nanoray.launch --dry_run --world_size ...`"
        )
    return loaded.set({"kube": loaded.config.kube.model_dump() | kube_flags}, FLAG)


def _render(run: Rendered) -> int:
    if run.shipped:
        print(f"send   {run.shipped}", file=sys.stderr)
    print(to_yaml(run.objects), end="")
    return 0


def _submit(run: Rendered) -> int:
    objects = run.objects
    name = job_name(run.config.name)
    namespace = run.config.kube.namespace
    if run.shipped:
        _print_now(f"send   {run.shipped}")
    if run.dry_run:
        for thing in objects:
            print(f"would apply {_title(thing)}")
        print(
            "dry run: nothing was applied; kubectl apply --dry-run=server checks what render prints"
        )
        return 0

    # Nothing is applied before these checks have passed.
    api = Api()
    require_operator(api)
    _delete_finished_job(api, namespace, name)

    for thing in objects:
        kind = thing["kind"]
        thing_name = thing["metadata"]["name"]
        if kind in REPLACED:
            _delete(api, namespace, kind, thing_name)
        api.apply(thing)
        print(f"apply  {_title(thing)}")
    job = next(thing for thing in objects if thing["kind"] == "RayJob")
    print(f"folder {out_dir_of(job)} on the volume")

    status = Follower(api, namespace, name, print_line=_print_now).run()
    return _report_end(status)


def _title(thing: Object) -> str:
    return f"{thing['kind']} {thing['metadata']['name']}"


def _print_now(line: str) -> None:
    # The output may be a pipe, and a job takes hours.
    print(line, flush=True)


def _delete_finished_job(api: Api, namespace: str, name: str) -> None:
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


def _report_end(status: dict[str, Any]) -> int:
    """Print how a job ended unless it succeeded, and return the exit code."""
    job_status = status.get("jobStatus")
    if job_status == "SUCCEEDED":
        return 0
    # Without a Ray job, as after a validation error, only the other status is set.
    state = job_status or status["jobDeploymentStatus"]
    message = status.get("message") or status.get("reason") or "no reason given"
    print(f"error: the job ended {state}: {message}", file=sys.stderr)
    return 143 if job_status == "STOPPED" else 1  # 143: ended by SIGTERM


# Commands that take the name of a job.


def _parser(command: str, text: str) -> Parser:
    parser = tool_parser(name_program(f"kube {command}"), text)
    parser.add_argument("name", help="the job's name: the configuration's name")
    parser.add_argument("--namespace", default=Kube().namespace)
    return parser


def _status(argv: list[str]) -> int:
    parser = _parser("status", "show a job, its pods, and what keeps them from running")
    args = parser.parse_args(argv)
    api = Api()
    name = job_name(args.name)
    job = _find_job(api, args.namespace, name)
    status = job.get("status", {})

    # The job.
    line = f"job    {name} {status.get('jobDeploymentStatus', 'accepted')}"
    if status.get("jobStatus"):
        line += f"/{status['jobStatus']}"
    attempt = attempts(status)
    if attempt > 1:
        line += f", attempt {attempt}"
    print(line)
    if status.get("message"):
        print(f"       {status['message']}")

    # Its pods.
    pods: list[Object] = []
    cluster = status.get("rayClusterName", "")
    if cluster:
        pods = api.get("Pod", args.namespace, selector=f"ray.io/cluster={cluster}")["items"]
    for pod in pods:
        pod_name = pod["metadata"]["name"]
        phase = pod.get("status", {}).get("phase", "?")
        node = pod["spec"].get("nodeName", "no node yet")
        print(f"pod    {pod_name} {phase} on {node}")
    found = troubles(pods)
    # Until the job runs, some of its pods may be missing: its events say why.
    owners = []
    has_ended = status.get("jobDeploymentStatus") in TERMINAL
    if not has_ended and (not pods or status.get("jobStatus") not in STARTED):
        owners = [name, cluster] if cluster else [name]
    try:
        found += read_warnings(api, args.namespace, owners, pods, found)
    except KubeError as error:
        print(f"       its events cannot be read: {error}")
    for trouble in found:
        print(f"       {trouble.pod} {trouble.text}")
    sys.stdout.flush()

    # Its run comes last: Ray may take long to answer. Before the operator has submitted the Ray job
    # there is none.
    if status.get("jobId"):
        try:
            progress = progress_of(api, args.namespace, job)
            print("run    " + " · ".join(f"{key} {value}" for key, value in progress.items()))
        except KubeError as error:
            print(f"run    steps unknown: {error}")
    return 0


def _logs(argv: list[str]) -> int:
    parser = _parser("logs", "print the driver's log, which contains the lines of all ranks")
    parser.add_argument(
        "--follow", action="store_true", help="follow until the job ends, and exit with its result"
    )
    args = parser.parse_args(argv)
    api, name, status = _find_status(args)
    if args.follow:
        return _report_end(Follower(api, args.namespace, name, print_line=_print_now).run())
    if not (status.get("jobId") and status.get("jobStatus")):
        raise KubeError(f"RayJob {name} has no log yet; nanoray kube status {name} says why")
    try:
        print(read_log(api, args.namespace, status).rstrip("\n"))
    except KubeError as error:
        raise KubeError(
            f"the driver's log is out of reach: {error}. Each rank's log is in the run's folder: "
            f"nanoray kube fetch {name}"
        ) from None
    return 0


def _stop(argv: list[str]) -> int:
    parser = _parser("stop", "stop a job: it finishes its step and writes a checkpoint")
    parser.add_argument(
        "--delete", action="store_true", help="and delete the RayJob, and with it its cluster"
    )
    args = parser.parse_args(argv)
    api, name, status = _find_status(args)

    def read_job_status() -> str | None:
        job_status: str | None = _find_job(api, args.namespace, name)["status"].get("jobStatus")
        return job_status

    if status.get("jobStatus") == "RUNNING":
        # Ray sends SIGTERM to the driver, which writes a checkpoint before it ends.
        stop(api, args.namespace, status)
        _wait(lambda: read_job_status() not in ("RUNNING", "PENDING"), STOP_S)
        print(f"job    {name} {read_job_status()}")
    elif not args.delete:
        print(f"job    {name} is not running: {status.get('jobDeploymentStatus', 'accepted')}")
    if args.delete:
        job = _find_job(api, args.namespace, name)
        _delete(api, args.namespace, "RayJob", name)
        _delete(api, args.namespace, "ConfigMap", f"{name}-config")
        # Only where the job has one: accounts that never use DRA may lack the right.
        if claims_template(job, template_name(name)):
            _delete(api, args.namespace, "ResourceClaimTemplate", template_name(name))
        _delete(api, args.namespace, "PodDisruptionBudget", name)
        print(f"job    {name} deleted; its runs and checkpoints are still on the volume")
    return 0


def _fetch(argv: list[str]) -> int:
    parser = _parser(
        "fetch", "copy the newest run folder of a job, with its checkpoints, to this machine"
    )
    parser.add_argument("-o", "--out_dir", default="runs", help="parent of the copy [runs]")
    parser.add_argument("--run", default="", help="the run folder's name [the newest of the job]")
    args = parser.parse_args(argv)
    folder = fetch(Api(), args.namespace, job_name(args.name), args.run, args.out_dir)
    print(f"files  {folder}")
    return 0


def _find_status(args: argparse.Namespace) -> tuple[Api, str, dict[str, Any]]:
    """Return the API, the job's name on the cluster, and its status. Raises KubeError."""
    api = Api()
    name = job_name(args.name)
    job = _find_job(api, args.namespace, name)
    return api, name, job.get("status", {})


def _find_job(api: Api, namespace: str, name: str) -> Object:
    """Return a RayJob. Raises KubeError with the existing ones if it does not exist."""
    job = api.find("RayJob", namespace, name)
    if job is not None:
        return job
    others = api.get("RayJob", namespace).get("items", ())
    names = ", ".join(other["metadata"]["name"] for other in others)
    raise KubeError(f"there is no RayJob {name} in {namespace}; there: {names or 'none'}")


def _delete(api: Api, namespace: str, kind: str, name: str) -> None:
    """Delete an object and what it owns, if it exists, and wait until it is gone."""
    api.delete(kind, namespace, name)
    _wait(lambda: api.find(kind, namespace, name) is None, STOP_S)


def _wait(is_done: Callable[[], bool], timeout_s: float) -> None:
    """Poll until `is_done` returns True. Raises KubeError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise KubeError(
                f"the cluster did not finish within {timeout_s:g} s; see kubectl describe rayjob"
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
