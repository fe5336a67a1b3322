"""The ways to start one training, and the measurements of one run.

They are read from the run's files and, for CPU time, from /proc.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from nanoray.bench.harness.processes import Child, ChildFailed
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.interfaces import free_port
from nanoray.machine.proc import all_processes

# The ways to start peers/plain_ddp.py: -> flags of `nanoray run`
SCRIPT_LAUNCHERS: dict[str, list[str]] = {
    "torchrun-script": [],
    "run": [],
    "run-trace": ["--trace"],
    "run-init": [],
}
RECIPE_LAUNCHERS = ("plain", "torchrun", "ray", "ray-init", "torchtrainer", "torchtrainer-init")
LAUNCHERS = (*RECIPE_LAUNCHERS, *SCRIPT_LAUNCHERS)
# Those on Ray that train nanoray's recipe
MODULES = {
    "ray": "nanoray.launch",
    "torchtrainer": "nanoray.bench.peers.ray_train",
    "torchft": "nanoray.bench.peers.torchft",
}
SCRIPT = Path(__file__).parents[1] / "peers" / "plain_ddp.py"
SAME_LOSS = 0.02  # relative: the arms sum gradients in another order, no more
RANK_PID = re.compile(r"attempt \d+, pid (\d+)")  # in the log of a rank
SAMPLE_S = 0.5  # between two looks at /proc: each takes a few milliseconds of a core


@dataclass(frozen=True)
class Moments:
    """How long each part of one run took. Field -> (metric, unit) in METRICS."""

    first_step_s: float
    whole_run_s: float
    step_ms: float
    imports_s: float  # interpreter, and the imports before main()
    # From main() to the moment when rank 0 begins to train: launcher, Ray, placement, dataset
    until_rank_s: float
    # From that moment to the end of the first optimizer step: process group, model, warm-up, step
    until_step_s: float
    after_s: float  # from the last record to the exit of the command: checkpoint, teardown
    last_loss: float
    # CPU time per step of all ranks together; None: too few steps to measure it
    rank_cpu_ms: float | None = None
    all_cpu_ms: float | None = None  # the same with the launcher's processes, and Ray's
    # The parts of until_step_s; None where the rank's log does not contain them.
    # Until the ranks have met
    group_s: float | None = None
    # From there until model, optimizer and data are ready, and equal on all ranks
    model_s: float | None = None
    warm_up_s: float | None = None
    one_step_s: float | None = None


METRICS = {
    "first_step_s": ("command to first step", "s"),
    "whole_run_s": ("whole run", "s"),
    "step_ms": ("step", "ms"),
    "imports_s": ("of it: interpreter and imports", "s"),
    "until_rank_s": ("of it: until rank 0 begins", "s"),
    "until_step_s": ("of it: group, model, first step", "s"),
    "group_s": ("group", "s"),
    "model_s": ("model", "s"),
    "warm_up_s": ("warm-up", "s"),
    "one_step_s": ("first step", "s"),
    "after_s": ("after the last step", "s"),
    "last_loss": ("loss of the last step", "nat/token"),
    "rank_cpu_ms": ("CPU time of a step, ranks", "ms"),
    "all_cpu_ms": ("CPU time of a step, all processes", "ms"),
}
MET = ("met the group", "built the model", "warmed up")  # lines of a rank's log, in their order
NOT_LOGGED = "its rank 0 does not log it"
TOO_SHORT = f"the steps took less than two looks at /proc, {SAMPLE_S:g} s apart"


def command(
    launcher: str,
    workers: int,
    flags: list[str],
    address: str,
    folder: Path,
    device: str = "auto",
    python_path: str = sys.executable,
    restarts: int = 0,
) -> list[str]:
    """Return the command line that trains as `launcher` does, in a run in `folder`.

    flags: of the recipe, or of the plain script. address: of the Ray that runs; a launcher named
    "-init" starts its own instead. restarts: of ranks by torchrun and `nanoray run`.
    """
    python = [python_path, "-m"]
    # Torchrun's default, the static rendezvous, because `--standalone` starts 0.4 s later. A free
    # port, because another program may use the default one.
    torchrun = [*python, "torch.distributed.run", f"--nproc-per-node={workers}"]
    torchrun += [f"--master-port={free_port()}", f"--max-restarts={restarts}"]
    if launcher == "plain":
        return [*python, "nanoray.train", *flags]
    if launcher == "torchrun":
        return [*torchrun, "-m", "nanoray.train", *flags]
    if launcher == "torchrun-script":
        # In torch 2.13 the store that torchrun lends its ranks keeps the addresses of the attempt
        # before: a script that takes it may fail, or wait for a rank that is gone for ever.
        if restarts:
            torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *torchrun, "--standalone"]
        return [*torchrun, str(SCRIPT), *flags]

    where = "local" if launcher.endswith("-init") else address
    placed = ["--ray_address", where, "--workers", str(workers)]
    if launcher in SCRIPT_LAUNCHERS:
        placed += ["--device", device, "--max_failures", str(restarts)]
        # Its own logs lie a folder deeper than the script's, which are read here.
        placed += ["--out_dir", str(folder / "launcher"), *SCRIPT_LAUNCHERS[launcher]]
        return [*python, "nanoray", "run", *placed, str(SCRIPT), *flags]
    module = MODULES[launcher.removesuffix("-init")]
    return [*python, module, *placed, *flags]


def run_once(
    argv: list[str],
    env: Mapping[str, str],
    folder: Path,
    timeout_s: float,
    steps: int,
    head: Child | None = None,
) -> Moments:
    """Run one command that trains `steps` steps into `folder`, and return its moments.

    Raises ChildFailed. `head` is the Ray head that starts its ranks, for launchers that use one.
    """
    folder.mkdir(parents=True)
    with Child([*argv, "--out_dir", str(folder)], env, folder / "output.log") as child:
        sessions = {child.process.pid}
        if head:
            sessions.add(head.process.pid)
        used = CpuTime(folder, sessions)
        whole_s = child.wait(timeout_s, used.look, SAMPLE_S)
        try:
            return moments(folder, child.started, whole_s, steps, used)
        except (LookupError, ValueError, OSError) as error:
            raise ChildFailed(
                f"it ended well, but left no readable run ({error!r})\n{child.tail()}"
            ) from None


class CpuTime:
    """The CPU time of a run's processes, sampled from /proc while it runs."""

    def __init__(self, folder: Path, sessions: set[int]) -> None:
        """Sample the ranks of the run in `folder` and every process of `sessions`.

        The run's logs name its ranks; the sessions are those of its launcher and of Ray.
        """
        self._folder = folder
        self._sessions = sessions
        self._used: dict[int, float] = {}  # CPU seconds by pid, also of processes that have ended
        # (Unix seconds, CPU seconds of the ranks, CPU seconds of all)
        self.samples: list[tuple[float, float, float]] = []

    def look(self) -> None:
        """Take a sample, once the ranks have begun their logs."""
        logs = [
            log.read_text(encoding="utf-8", errors="replace")
            for log in self._folder.glob("*/logs/rank*.log")
        ]
        ranks = {int(pid) for log in logs for pid in RANK_PID.findall(log)}
        for pid, (session, cpu_s) in all_processes().items():
            if session in self._sessions or pid in ranks:
                self._used[pid] = cpu_s

        # Before every rank has begun its log, some of their CPU time is unknown
        if logs and len(ranks) == len(logs):
            of_ranks = sum(self._used.get(pid, 0.0) for pid in ranks)
            self.samples.append((time.time(), of_ranks, sum(self._used.values())))

    def per_step(self, done: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
        """Return the milliseconds of CPU time per step, of the ranks and of all processes.

        `done` holds (Unix seconds, steps done) of the records; what is sampled outside of them is
        not training. None when fewer than two samples lie between the first record and the last.
        """
        inside = [sample for sample in self.samples if done[0][0] <= sample[0] <= done[-1][0]]
        if len(inside) < 2:
            return None
        first = inside[0]
        last = inside[-1]
        # How many steps were done at these moments, which lie between two records
        at, counts = zip(*done, strict=True)
        before, after = np.interp([first[0], last[0]], at, counts)
        steps = float(after - before)
        return 1e3 * (last[1] - first[1]) / steps, 1e3 * (last[2] - first[2]) / steps


def moments(
    out_dir: Path, started: float, whole_s: float, steps: int, used: CpuTime | None = None
) -> Moments:
    """Read the moments of the only run in `out_dir`, in seconds after `started` (Unix seconds).

    All clocks are this host's wall clock. Raises LookupError or ValueError when a run has other
    steps than asked for.
    """
    # A second run folder would be a restart, and its times those of a recovery
    (run,) = [path.parent for path in out_dir.glob("*/run.json")]
    records = read_json_lines(run / "metrics.jsonl")
    if records[0]["step"] != 1 or records[-1]["step"] != steps:
        raise ValueError(
            f"steps {records[0]['step']} to {records[-1]['step']} instead of 1 to {steps}"
        )

    # The moments, in their order: main(), rank 0 begins, (MET,) the first and the last step
    main_s = json.loads((run / "run.json").read_text())["started"] - started
    rank_s, *met = (at - started for at in _times(run / "logs" / "rank0.log"))
    first_s = records[0]["time"] - started
    last_s = records[-1]["time"] - started

    # The parts between rank 0's begin and the first step, if its log contains them
    if met:
        parts = [end - begin for begin, end in itertools.pairwise((rank_s, *met, first_s))]
    else:
        parts = [None] * (1 + len(MET))

    cpu_ms = None
    if used:
        cpu_ms = used.per_step([(record["time"], record["step"]) for record in records])
    return Moments(
        first_step_s=first_s,
        whole_run_s=whole_s,
        step_ms=statistics.median(r["time/step_ms"] for r in records[1:]),
        imports_s=main_s,
        until_rank_s=rank_s - main_s,
        until_step_s=first_s - rank_s,
        after_s=whole_s - last_s,
        last_loss=records[-1]["train/loss"],
        group_s=parts[0],
        model_s=parts[1],
        warm_up_s=parts[2],
        one_step_s=parts[3],
        rank_cpu_ms=cpu_ms[0] if cpu_ms else None,
        all_cpu_ms=cpu_ms[1] if cpu_ms else None,
    )


def _times(log: Path) -> list[float]:
    """Return the Unix seconds of the first line of a rank's log, and of MET if all are there.

    A line begins with local time: "2026-11-21 10:15:00,123 INFO met the group".
    """
    first, *others = log.read_text(encoding="utf-8").splitlines()
    # By their text; reversed, so that of equal lines the first one stays
    by_text = {line[29:]: line for line in reversed(others)}
    lines = [first]
    if all(text in by_text for text in MET):
        lines += [by_text[text] for text in MET]
    return [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
