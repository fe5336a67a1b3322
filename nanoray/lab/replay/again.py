"""Do steps of a run again from a checkpoint, by as many processes on this machine as it had ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanoray.config import Config, batch_for, resolve_batch
from nanoray.config.layout import Layout
from nanoray.data.prepare import prepare
from nanoray.data.verify import verify
from nanoray.errors import ConfigError, DataError, NanorayError
from nanoray.lab import local_ranks
from nanoray.lab.replay.recorded import RecordedRun, read_recorded
from nanoray.machine.interfaces import LOOPBACK
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import open_store
from nanoray.train.agree import code_hash
from nanoray.train.hardware import cpu_kernels, hardware
from nanoray.train.loop_arm import QUIET

POLL_S = 0.01  # how often is looked whether a rank has ended

# What a re-enactment does otherwise than its run: it records every step, and leaves out what changes
# no weight, and what others would see. Of the run's own keys those stay that a step depends on.
OF_THE_RUN = ("max_steps", "seq_warmup_steps", "on_nan")
QUIETLY: dict[str, Any] = {key: QUIET[key] for key in QUIET if key not in OF_THE_RUN} | {
    "log_every": 1,
    "hash_every": 1,
    "statistics_every": 0,
    "audit_every": 0,
    "checkpoint_mode": "sync",
}


def start_before(run: RecordedRun, step: int) -> int:
    """Return the step of the newest checkpoint before `step`, or 0 for a run that began there.
    Raises ConfigError.
    """
    if not run.begun < step <= run.last:
        raise ConfigError(
            f"--step {step}: {run.folder} has done steps {run.begun + 1} to {run.last}; give one "
            "of them"
        )
    # The newest start leaves the fewest steps to do again.
    starts = [at for at in run.starts if at < step]
    if not starts:
        oldest = min(run.checkpoints, default=run.last)
        raise ConfigError(
            f"--step {step}: the oldest checkpoint of {run.folder} is of step {oldest}, and that "
            f"of step {run.begun}, "
            "from which it began, is gone or not known; give a later step, or train with a larger "
            "--keep_checkpoints"
        )
    return max(starts)


def doubts(run: RecordedRun, steps: range) -> list[str]:
    """Return why a re-enactment here may differ from the run in its last bits.

    Empty if equal bits are promised.
    """
    found = []
    for group in _groups(run, steps):
        on_gpu = group["device"] == "cuda" and torch.cuda.is_available()
        device = torch.device("cuda:0" if on_gpu else "cpu")
        here = {
            "hardware": hardware(Mesh(0, 1, 0, device, "none", "of this machine")),
            "kernels": cpu_kernels(),
            "torch": str(torch.__version__),
            "code": code_hash(),
        }
        found += [
            f"the run had {key} {group[key]}, here is {value}"
            for key, value in here.items()
            if group[key] != value
        ]
    return [*dict.fromkeys(found)]


def reenact(run: RecordedRun, start: int, last: int, folder: Path) -> RecordedRun:
    """Do the steps after `start` up to `last` again in `folder`, and return their records.

    `start` is 0, or the step of a checkpoint. Raises NanorayError.
    """
    config = run.spec.config
    if config.model == "own":
        raise ConfigError(
            "model = own: a script brings the model, so only that script can do its steps again"
        )
    # Other tokens would give another loss, which would look like an error of the machine.
    data = run.spec.dataset
    if data.path.exists():
        verify(data)
    elif prepare(config).tokens_sha256 != data.tokens_sha256:
        raise DataError(
            f"the tokens of {config.dataset} are no longer those of the run; put the old file back"
        )
    source = run.checkpoints.get(start) or (run.origin if start else None)
    found: RecordedRun | None = None
    for group in _groups(run, range(start + 1, last + 1)):
        # A step can belong to one group only, so each part stops where the next group begins.
        ends = [
            other["group"] for other in run.state_hashes.groups if other["group"] > group["group"]
        ]
        config = Config(**group["config"]).model_copy(
            update={**QUIETLY, "stop_at": min([last, *ends])}
        )
        into = folder / f"from_{found.last if found else start}"
        into.mkdir(parents=True, exist_ok=True)
        newest = read_recorded(_train(config, group, source, into))
        if found:
            # Each part has a folder of its own, so the result is merged part by part.
            newest.records = found.records | newest.records
            newest.state_hashes.states = found.state_hashes.states | newest.state_hashes.states
        found, source = newest, newest.checkpoints[newest.last]
    assert found
    return found


def _groups(run: RecordedRun, steps: range) -> list[dict[str, Any]]:
    """Return the record of each group of ranks that did some of these steps."""
    groups: list[dict[str, Any]] = []
    for step in steps:
        group = run.group_of(step)
        if not groups or group is not groups[-1]:
            groups.append(group)
    return groups


def _train(config: Config, group: dict[str, Any], source: Path | None, folder: Path) -> Path:
    """Train from `source` as a group of ranks did; return the folder of that run."""
    # The configuration of the run, with what was derived when it ran.
    ranks = group["ranks"]
    slots = group["slots"]
    ranks_per_replica = config.replica_ranks
    dp = ranks // ranks_per_replica
    full = slots // ranks_per_replica
    batch = batch_for(config, full, dp, group["limit"]) or resolve_batch(config, dp)
    shared: dict[str, Any] = {
        "micro_batch_size": batch.micro,
        "grad_accum_steps": batch.accum,
        "global_batch_size": batch.global_size,
        "workers": ranks,
        "replicas": Layout.of(config, ranks, slots).replicas,
        "cpus_per_worker": group["threads"],
        "num_epochs": 0,
        "out_dir": str(folder),
        "resume": str(source or "none"),
    }
    config_json = config.model_copy(update=shared).to_json()
    (folder / "config.json").write_text(config_json, encoding="utf-8")

    # The ranks meet as under torchrun, in a store of this process, and stop without it as they do
    # there (train/launcher_watch.py).
    store = open_store(LOOPBACK, ranks, config.init_timeout_s)
    command = [sys.executable, "-m", "nanoray.train"]
    command += ["--config", str(folder / "config.json")]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, variables in enumerate(local_ranks.variables_of_ranks(store, ranks)):
            with (folder / f"rank{rank}.txt").open("w", encoding="utf-8") as file:
                process = local_ranks.start_process(
                    command,
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            started.append(process)
        failed = _first_failed(started)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
    if failed is not None:
        code = started[failed].returncode
        said = (folder / f"rank{failed}.txt").read_text(encoding="utf-8").strip().splitlines()
        raise NanorayError(
            f"rank {failed} of the re-enactment ended with {code}: {said[-1:] or 'nothing said'}"
        )
    # The processes choose the name of the folder, so it is found by its run.json.
    (made,) = [path.parent for path in folder.glob("*/run.json")]
    return made


def _first_failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all processes have ended, or one has failed; return its rank.

    The others fail after it, because of it, or wait for it without an end.
    """
    running = dict(enumerate(processes))
    while running:
        time.sleep(POLL_S)
        for rank, process in [*running.items()]:
            code = process.poll()
            if code:
                return rank
            if code == 0:
                del running[rank]
    return None
