"""Re-enact steps of a run from a checkpoint: in one process that plays all ranks, or by as many
local processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoray.checkpoint.run_folder import RunSpec, write_attempt
from nanoray.config import Config, batch_for, resolve_batch
from nanoray.config.layout import DIVISIONS, Layout
from nanoray.data.prepare import prepare
from nanoray.data.verify import verify
from nanoray.errors import ConfigError, DataError, NanorayError
from nanoray.lab.replay.player import OneProcess, Witness
from nanoray.lab.replay.recorded import RecordedRun, read_recorded
from nanoray.machine.atomic import write_json
from nanoray.machine.interfaces import LOOPBACK
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import open_store
from nanoray.train.agree import code_hash
from nanoray.train.elastic import TrainingGroup
from nanoray.train.hardware import cpu_kernels, hardware
from nanoray.train.model import use_products
from nanoray.train.out_of_memory import Shortage

# What a re-enactment does otherwise than its run: it records every step, and leaves out what
# changes no weight.
QUIETLY: dict[str, Any] = {
    "log_every": 1, "hash_every": 1, "eval_every": 0, "target_loss": 0.0, "checkpoint_every": 0, "comm_trace": "off",
    "statistics_every": 0, "profile": "", "audit_every": 0,
    "faults": "", "tensorboard": False, "sample_tokens": 0, "checkpoint_mode": "sync", "resume": "none",
}  # fmt: skip


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


def refuse(run: RecordedRun, steps: range) -> None:
    """Raise ConfigError when one process cannot play the ranks of a run in these steps."""
    for group in _groups(run, steps):
        config = group["config"]
        what = ""
        if config["model"] != "gpt":
            # Batch statistics and loaders of each rank are state as well
            what = f"model = {config['model']}"
        elif group["ranks"] > 1:
            # Older runs have not recorded all of these.
            cut = [f"{axis} = {config[axis]}" for axis in DIVISIONS if config.get(axis, 1) > 1]
            if config["grad_compress"] != "none":
                cut.append(f"grad_compress = {config['grad_compress']}")
            if config["fsdp_gather"] != "fp32":
                cut.append(f"fsdp_gather = {config['fsdp_gather']}")
            what = " and ".join(cut)
        if config["model"] == "own":
            raise ConfigError(
                f"{what}: a script brings the model, so only that script can do its steps again"
            )
        if what:
            raise ConfigError(
                f"{what}: one process cannot play {group['ranks']} rank(s) of it; add --processes: "
                "it does the steps again with as many local ranks as the run had"
            )


def doubts(run: RecordedRun, steps: range, processes: bool) -> list[str]:
    """Return why a re-enactment here may differ from the run in its last bits.

    Empty if equal bits are promised.
    """
    found = []
    for group in _groups(run, steps):
        config, ranks = Config(**group["config"]), group["ranks"]
        device = _device(group)
        here = {
            "hardware": hardware(_mesh(device)),
            "kernels": cpu_kernels(),
            "torch": str(torch.__version__),
            "code": code_hash(),
        }
        found += [
            f"the run had {key} {group[key]}, here is {value}"
            for key, value in here.items()
            if group[key] != value
        ]
        if ranks > 1 and not processes:
            # Two numbers have one sum in any order; three or more do not.
            if ranks > 2 and config.dp_mode == "ddp":
                found.append(
                    f"{ranks} ranks of dp_mode ddp, whose sums follow the backend's order "
                    "(--processes has it)"
                )
            if config.dp_mode == "fsdp" and (config.optimizer != "sgd" or config.momentum):
                found.append(
                    f"fsdp with {config.optimizer}, whose kernel rounds the end of a slice "
                    "otherwise"
                )
    return [*dict.fromkeys(found)]


def reenact(
    run: RecordedRun,
    start: int,
    last: int,
    folder: Path,
    processes: bool = False,
    witness: Witness | None = None,
) -> RecordedRun:
    """Do the steps after `start` up to `last` again in `folder`, and return their records.

    `start` is 0, or the step of a checkpoint. Raises NanorayError.
    """
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
        play = _by_processes if processes else _in_one_process
        newest = read_recorded(play(run.spec, config, group, source, into, witness))
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


def _device(group: dict[str, Any]) -> torch.device:
    if group["device"] == "cuda" and torch.cuda.is_available():
        return torch.device("cuda:0")
    return torch.device("cpu")


def _mesh(device: torch.device) -> Mesh:
    return Mesh(0, 1, 0, device, "none", "one process plays all ranks")


def _in_one_process(
    spec: RunSpec,
    config: Config,
    group: dict[str, Any],
    source: Path | None,
    folder: Path,
    witness: Witness | None,
) -> Path:
    data = spec.dataset
    # Other tokens would give another loss, which would look like an error of the machine.
    if data.path.exists():
        verify(data)
    elif prepare(config).tokens_sha256 != data.tokens_sha256:
        raise DataError(
            f"the tokens of {config.dataset} are no longer those of the run; put the old file back"
        )
    # The number of threads changes the order of sums on a CPU, and thus the last bits.
    torch.set_num_threads(group["threads"])
    mesh = _mesh(_device(group))
    # Gradients of several ranks lie side by side
    config = config.model_copy(update={"compile": bool(config.compile)})
    use_products(mesh.device, config.precision)
    spec = replace(
        spec, config=config, folder=folder, started=time.time(), resume=str(source or ""), attempt=0
    )
    # No driver runs here, so nothing else makes these folders.
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(exist_ok=True)
    write_json(folder / "run.json", spec.to_dict())
    write_attempt(spec)
    fitted = Shortage(group["limit"])
    players = TrainingGroup(spec, mesh, memory=fitted)
    recipe = OneProcess(players, group, witness)
    recipe.observers.open(0, 0)
    try:
        recipe.build(players).fit()
    finally:
        recipe.close()
    return folder


def _by_processes(
    spec: RunSpec,
    config: Config,
    group: dict[str, Any],
    source: Path | None,
    folder: Path,
    witness: Witness | None,
) -> Path:
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
        "scaling": "none",
        "num_epochs": 0,
        "out_dir": str(folder),
        "resume": str(source or "none"),
    }
    config_json = config.model_copy(update=shared).to_json()
    (folder / "config.json").write_text(config_json, encoding="utf-8")

    # The ranks meet as under torchrun, in a store of this process.
    store = open_store(LOOPBACK, ranks, config.init_timeout_s) if ranks > 1 else None
    command = [sys.executable, "-m", "nanoray.train", "--config", str(folder / "config.json")]
    world: dict[str, str] = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if store:
        world |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {}
            if store:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | world
            with (folder / f"rank{rank}.txt").open("w", encoding="utf-8") as file:
                started.append(
                    subprocess.Popen(command, env=os.environ | own, stdout=file, stderr=file)
                )
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        said = (folder / f"rank{failed[0]}.txt").read_text(encoding="utf-8").strip().splitlines()
        raise NanorayError(
            f"rank {failed[0]} of the re-enactment ended with {codes[failed[0]]}: "
            f"{said[-1:] or 'nothing said'}"
        )
    # The processes choose the name of the folder, so it is found by its run.json.
    (made,) = [path.parent for path in folder.glob("*/run.json")]
    return made
