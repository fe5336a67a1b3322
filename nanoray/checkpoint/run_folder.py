"""A run's folder, the `RunSpec` that every rank gets, and the run's summary.

runs/2026-11-21_101500_shakespeare-cpu/    (UTC)
    config.json      the configuration; `--config` reads it
    run.json         the RunSpec: dataset, versions, command, its launcher and its working folder,
                     and who has set each key of config.json
    metrics.jsonl    one record per logged step
    statistics.jsonl  with statistics_every: what each layer is like
    profile/         with profile: the operations of some steps on each rank
    hashes.jsonl     the hashes of its states, and its groups of ranks;  `nanoray replay` and `bisect` compare them
    summary.json     how it ended
    checkpoints/step_00000250/ ...
    tb/              TensorBoard
    comm/            with --comm_trace: every collective, and the timeline
    faults.jsonl     failures and recoveries;  `nanoray faults` explains them
    logs/rank0.log   each rank's log;  rank0.progress: its last step and phase, and how it ended
    logs/rank0.*.ledger    the seconds of each of its processes, by account;  `nanoray report ledger` adds them up
    attempt          the attempt that may write checkpoints, and when its command started
    lock             held by the process that uses the run; contains its pid and host
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakValueDictionary

from nanoray import __version__
from nanoray.config import Config
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.atomic import replace_text, write_json
from nanoray.machine.environment import working_folder
from nanoray.machine.launchers import describe_start
from nanoray.machine.script_errors import exit_code_after
from nanoray.parallel.backends import reports_lost_peers

log = logging.getLogger("nanoray.rank")
LOCK_WAIT_S = 2.0  # a killed process may take a moment to exit


# The lock files that this process holds, by the run's folder. The pid and host in the file do not
# identify a process: two containers may both have a process 1, and the same hostname.
_HELD: WeakValueDictionary[Path, TextIO] = WeakValueDictionary()


@dataclass(frozen=True)
class RunSpec:
    """Everything about a run that all ranks share. Plain data: it travels as JSON."""

    config: Config
    dataset: DatasetInfo
    folder: Path
    started: float  # Unix seconds of the command
    resume: str = ""  # a run folder or a step folder to start from
    attempt: int = 0
    notes: tuple[str, ...] = ()
    # Stays in the process that opened the run
    lock: TextIO | None = field(default=None, repr=False, compare=False)
    is_new: bool = field(default=False, compare=False)  # that process has made the folder
    # key of the configuration -> who has set it (config/settings.py)
    origins: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-safe dict; `from_dict` reads it back."""
        return {
            "config": self.config.model_dump(),
            "dataset": self.dataset.to_dict(),
            "folder": str(self.folder),
            "started": self.started,
            "resume": self.resume,
            "attempt": self.attempt,
            "notes": list(self.notes),
            "origins": dict(self.origins),
            "nanoray": __version__,
            "command": sys.argv,
            "launcher": describe_start(os.environ),
            "cwd": working_folder(),  # relative paths of the configuration begin here
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSpec:
        """Rebuild a RunSpec from `to_dict`."""
        return cls(
            config=Config(**values["config"]),
            dataset=DatasetInfo.from_dict(values["dataset"]),
            folder=Path(values["folder"]),
            started=values["started"],
            resume=values["resume"],
            attempt=values["attempt"],
            notes=tuple(values["notes"]),
            origins=values["origins"],
        )

    def next_attempt(self) -> RunSpec:
        """Return the spec of a restart; it starts from the run's newest checkpoint, if any."""
        return replace(self, attempt=self.attempt + 1, notes=())

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log file."""
        return self.folder / "logs" / f"rank{rank}.log"

    def progress(self, rank: int) -> Path:
        """Return the path of a rank's file: its position, then how its process ended."""
        return self.folder / "logs" / f"rank{rank}.progress"

    def ledger(self, rank: int) -> Path:
        """Return the path of this process' ledger, as the process of a rank in this attempt."""
        name = f"rank{rank}.{self.started:.3f}-{self.attempt}-{os.getpid()}.ledger"
        return self.folder / "logs" / name


def can_regroup(config: Config, backend: str, ranks: int) -> bool:
    """Whether ranks can leave a broken group and meet again, each with the state that it has.

    The driver and the ranks decide this separately, from the same values.
    """
    if config.recovery == "restart" or ranks <= 1:
        return False

    # A hand-written all-reduce has a thread that may wait for a peer and keep its group open.
    if config.allreduce != "backend":
        return False

    # With NCCL the survivors see no error: they abort by the driver's order where it is allowed.
    if not reports_lost_peers(backend):
        return config.abort_nccl and not config.sharded
    return True


def recovers_in_place(config: Config, backend: str, ranks: int) -> bool:
    """Whether a lost rank alone is replaced while the others keep running."""
    if not can_regroup(config, backend, ranks):
        return False

    # A lost rank's shard is on disk only, unless another rank mirrors it or has the same one.
    # Ranks with other parts of a sequence share the state as data replicas do.
    is_mirrored = config.mirrors() and ranks > config.model_ranks
    return not config.sharded or is_mirrored or config.replicated(ranks)


def new_folder(out_dir: Path, name: str) -> Path:
    """Create a run's folder, named by the time and `name`. Raises ConfigError."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        stem = (
            time.strftime("%Y-%m-%d_%H%M%S", time.gmtime()) + f"_{name}"
        )  # UTC: any zone reads it

        # Runs that start in the same second get a number.
        for n in range(1, 1000):
            folder = out_dir / (stem if n == 1 else f"{stem}_{n}")
            try:
                folder.mkdir(mode=0o700)  # losses, texts and paths are private
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise ConfigError(
            f"cannot make a run folder in out_dir = {out_dir}: {error.strerror}; give another --out_dir"
        ) from None
    raise ConfigError(
        f"out_dir = {out_dir} already has 999 runs of this second; use another --name"
    )


def lock_run(folder: Path) -> tuple[TextIO | None, str]:
    """Lock a run's folder for this process; return the lock, and a warning or an empty string.

    The lock is an open file: it lasts until its last reference goes, or this process. A process that
    already holds it gets None, and so does one on a file system without locks, with a warning.
    Raises ConfigError when another process holds it.
    """
    key = folder.resolve()
    if key in _HELD:
        return None, ""
    path = folder / "lock"
    lock = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = path.read_text(encoding="utf-8").strip() or "another process"
        except OSError as error:
            warning = f"{folder} cannot be locked ({error.strerror}): let only one command use it"
            return None, f"warning  {warning}"
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run {folder} is in use by {holder}; wait until it ends, or start a new run from "
                f"one of its checkpoints (--resume {folder}/checkpoints/step_...). If that "
                f"process and its host are gone, remove {path}"
            )
        time.sleep(0.1)  # it may be exiting

    # For the message of a process that finds the folder in use.
    lock.truncate(0)
    print(f"pid {os.getpid()} on {platform.node()}", file=lock, flush=True)
    _HELD[key] = lock
    return lock, ""


def is_locked(folder: Path) -> bool:
    """Whether a process of this host, or of one that shares the folder's locks, uses a run."""
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or no locks
        return False
    return False


def write_attempt(spec: RunSpec) -> None:
    """Allow only this attempt to write checkpoints.

    Called by the process that starts the attempt, before its ranks. On a full disk the file is
    overwritten in place, which needs no new block. Raises OSError if that fails, too.
    """
    path = spec.folder / "attempt"
    text = f"{spec.attempt} {spec.started!r}\n"
    try:
        replace_text(path, text)
    except OSError:
        if not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def read_attempt(folder: Path) -> tuple[int, float]:
    """Return the attempt that may write checkpoints, and when its command started (Unix s).

    Raises CheckpointError when its file cannot be read, as in a folder that was removed.
    """
    path = folder / "attempt"
    try:
        attempt, started = path.read_text(encoding="utf-8").split()
        return int(attempt), float(started)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot tell from {path} which attempt may write ({error}); start the command again"
        ) from None


def disk_used(folder: Path) -> dict[str, float]:
    """Return the share of a file system that is in use, as df counts it: without root's reserve.

    Empty where it cannot be read: no run ends because of that.
    """
    with suppress(OSError):
        disk = shutil.disk_usage(folder)
        return {"disk/used": 100 * disk.used / max(1, disk.used + disk.free)}
    return {}


@contextmanager
def summary_on_failure(spec: RunSpec) -> Iterator[None]:
    """Write summary.json also when the run ends in an exception, and raise that again."""
    try:
        yield
    except BaseException as error:
        reason = f"failed: {type(error).__name__}: {error}"
        ending = {"exit_reason": reason, "exit_code": exit_code_after(error)}
        write_summary(spec, ending, restarts=spec.attempt)
        raise


# The results that the outcome of a run may have: its summary has them, and its tracker
RESULTS = (
    "exit_reason",
    "val_loss",
    "train_loss",
    "loss_ema",
    "train_s",
    "tok_per_sec",
    "samples_per_sec",
    "step_ms",
    "first_step_s",
    "world_size",
    "backend",
    "precision",
    "device",
    "resumed_from",
    "torch",
)
# What a summary takes over; None where the run does not have it
_OF_OUTCOME = (
    *RESULTS,
    "exit_code",
    "steps_before",  # those before this command
    "backend_reason",
    "comm",
    "sample",
    "lines",  # of a program that has its own
)


def write_summary(spec: RunSpec, outcome: dict[str, Any], restarts: int) -> dict[str, Any]:
    """Write and return summary.json: the run's results, and why it ended. (one process)"""
    summary = {key: outcome.get(key) for key in _OF_OUTCOME} | {
        "steps": outcome.get("step"),
        # Of the complete recipe on this data set, if known
        "expected_val_loss": spec.config.expected_val_loss.get(spec.dataset.name),
        "total_s": round(time.time() - spec.started, 3),
        "restarts": restarts,
        "dataset": spec.dataset.name,
        "dataset_note": spec.dataset.note,
        "nanoray": __version__,
    }
    try:
        write_json(spec.folder / "summary.json", summary)
    except OSError as error:  # a full disk must not hide what has ended the run
        log.warning("summary.json was not written: %s", error)
    return summary
