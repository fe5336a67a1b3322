"""The ways to start one training, and the moments of a run: read from what it wrote, on the clock of its command."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from nanoray.bench.processes import Child, ChildFailed, free_port

LAUNCHERS = ("plain", "torchrun", "ray", "ray-init", "torchtrainer", "torchtrainer-init")
SAME_LOSS = 0.02  # relative: the arms sum gradients in another order, no more


@dataclass(frozen=True)
class Moments:
    """How long each part of one run took. Field -> (metric, unit) in METRICS."""

    first_step_s: float
    whole_run_s: float
    step_ms: float
    imports_s: float  # interpreter, and the imports before main()
    until_rank_s: float  # from there to the moment when rank 0 begins to train: launcher, Ray, placement, dataset
    until_step_s: float  # from there to the end of the first optimizer step: process group, model, warm-up, step
    after_s: float  # from the last record to the exit of the command: checkpoint, teardown
    last_loss: float

    def values(self) -> list[float]:
        return [getattr(self, f.name) for f in fields(self)]


METRICS = {
    "first_step_s": ("command to first step", "s"),
    "whole_run_s": ("whole run", "s"),
    "step_ms": ("step", "ms"),
    "imports_s": ("of it: interpreter and imports", "s"),
    "until_rank_s": ("of it: until rank 0 begins", "s"),
    "until_step_s": ("of it: group, model, first step", "s"),
    "after_s": ("after the last step", "s"),
    "last_loss": ("loss of the last step", "nat/token"),
}


def command(arm: str, workers: int, recipe: list[str], address: str) -> list[str]:
    """Return the command line that starts `recipe` in the way of `arm`."""
    python, ranks = [sys.executable, "-m"], ["--workers", str(workers)]
    if arm == "plain":
        return [*python, "nanoray.train", *recipe]
    if arm == "torchrun":
        # Static rendezvous, its default: `--standalone` starts 0.4 s later. The port: not the one others may use.
        port = f"--master-port={free_port()}"
        return [*python, "torch.distributed.run", f"--nproc-per-node={workers}", port, "-m", "nanoray.train", *recipe]
    module = "nanoray.launch" if arm.startswith("ray") else "nanoray.bench.ray_train_peer"
    where = "local" if arm.endswith("-init") else address
    return [*python, module, "--ray_address", where, *ranks, *recipe]


def run_once(argv: list[str], env: Mapping[str, str], folder: Path, timeout_s: float, steps: int) -> Moments:
    """Run one command that trains `steps` steps into `folder`; return its moments. Raises ChildFailed."""
    folder.mkdir(parents=True)
    with Child([*argv, "--out_dir", str(folder)], env, folder / "output.log") as child:
        whole_s = child.wait(timeout_s)
        try:
            return moments(folder, child.started, whole_s, steps)
        except (LookupError, ValueError, OSError) as error:
            raise ChildFailed(f"it ended well, but left no readable run ({error!r})\n{child.tail()}") from None


def moments(out_dir: Path, started: float, whole_s: float, steps: int) -> Moments:
    """Read the moments of the only run in `out_dir`, in seconds after `started` (Unix seconds of the command).

    All clocks are this host's wall clock. Raises LookupError or ValueError when a run has other steps than asked for.
    """
    (run,) = [path.parent for path in out_dir.glob("*/run.json")]
    records: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if records[0]["step"] != 1 or records[-1]["step"] != steps:
        raise ValueError(f"steps {records[0]['step']} to {records[-1]['step']} instead of 1 to {steps}")
    main_s = json.loads((run / "run.json").read_text())["started"] - started
    rank_s = _first_line_time(run / "logs" / "rank0.log") - started
    first_s, last_s = (records[i]["time"] - started for i in (0, -1))
    return Moments(
        first_step_s=first_s,
        whole_run_s=whole_s,
        step_ms=statistics.median(r["time/step_ms"] for r in records[1:]),
        imports_s=main_s,
        until_rank_s=rank_s - main_s,
        until_step_s=first_s - rank_s,
        after_s=whole_s - last_s,
        last_loss=records[-1]["train/loss"],
    )


def _first_line_time(log: Path) -> float:
    """Return the Unix seconds at which a rank began its log ("2026-11-21 10:15:00,123 INFO ...", local time)."""
    stamp = log.read_text(encoding="utf-8").splitlines()[0][:23]
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()
