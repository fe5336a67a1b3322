"""What a run is on disk and on the wire: its folder, the `RunSpec` that every rank gets, and its summary.

runs/2026-11-21_101500_shakespeare-cpu/
    config.json      the configuration; `--config` reads it
    run.json         the RunSpec: dataset, versions, command
    metrics.jsonl    one record per logged step, the truth
    summary.json     how it ended
    checkpoints/step_00000250/ ...
    tb/              TensorBoard
    comm/            with --comm_trace: every collective, and the timeline
    faults.jsonl     what failed, and what came of it;  `nanoray faults` tells the story
    logs/rank0.log   what each rank said;  rank0.stamp: where it was last;  rank0.death: how its process ended
    attempt          which attempt, of the command of which moment, may write checkpoints
    lock             held by the process that uses the run, whose pid and host it names
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoray import __version__
from nanoray.config import Config
from nanoray.data import DatasetInfo
from nanoray.errors import CheckpointError, ConfigError

LOCK_WAIT_S = 2.0  # a process that was killed takes a moment to go


class RunLock:
    """The open file whose flock keeps a run folder for one process; the kernel lets go of it when the process dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)


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
    lock: RunLock | None = field(default=None, repr=False, compare=False)  # stays in the process that opened the run

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
            "nanoray": __version__,
            "command": sys.argv,
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
        )

    def next_attempt(self) -> RunSpec:
        """Return the spec of a restart; it starts from the run's own newest checkpoint, if there is one by then."""
        return replace(self, attempt=self.attempt + 1, notes=())

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log file."""
        return self.folder / "logs" / f"rank{rank}.log"

    def stamp(self, rank: int) -> Path:
        """Return the path of a rank's progress stamp."""
        return self.folder / "logs" / f"rank{rank}.stamp"

    def death(self, rank: int) -> Path:
        """Return the path of a rank's death record."""
        return self.folder / "logs" / f"rank{rank}.death"


def recovers_in_place(config: Config, backend: str, ranks: int) -> bool:
    """Whether a lost rank of `ranks` alone is replaced. Driver and ranks ask alike, so that nobody waits in vain.

    NCCL's survivors see no error before the timeout, and then their processes are torn down. A hand-written all-reduce
    has a thread that may be waiting for a peer and holds its group open.
    """
    return config.recovery != "restart" and ranks > 1 and backend == "gloo" and config.allreduce == "backend"


def open_run(config: Config, dataset: DatasetInfo, started: float) -> RunSpec:
    """Make the run's folder, or find the one to continue, and write config.json and run.json. (one process)

    `--resume auto` and the folder of a run under out_dir continue in that folder; a single checkpoint, or a run that
    lives elsewhere, starts a new folder from it. The run is locked for as long as the spec lives, or this process.
    Raises CheckpointError when there is nothing to resume at a PATH, ConfigError when another process uses that run.
    """
    out_dir = Path(config.out_dir).expanduser().resolve()
    resume, notes, folder = "", [], None
    if config.resume != "none":
        from nanoray.checkpoint import find_run  # imports torch, which a fresh run's driver can do without
        from nanoray.model import ModelShape

        shape = ModelShape.of(config, dataset.vocab_size).to_dict()
        found = find_run(out_dir, config.resume, shape)
        if found is None:
            notes.append(f"resume  nothing to resume in {out_dir}: starting afresh")
        else:
            notes += [f"resume  {note}" for note in found.notes]
            asked_for_step = (Path(config.resume).expanduser() / "state.json").exists()
            own = found.run_dir.resolve().parent == out_dir and not asked_for_step
            folder = found.run_dir.resolve() if own else None
            resume = str(found.run_dir.resolve() if own else found.path.resolve())
    folder = folder or _new_folder(out_dir, config.name)
    lock, warning = lock_run(folder)
    notes += [warning] if warning else []
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)  # how an earlier part of the run ended is no longer true
    spec = RunSpec(config, dataset, folder, started, resume, 0, tuple(notes), lock)
    write_attempt(spec)
    write_json(folder / "config.json", config.model_dump())
    write_json(folder / "run.json", spec.to_dict())
    return spec


def _new_folder(out_dir: Path, name: str) -> Path:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        stem = f"{time.strftime('%Y-%m-%d_%H%M%S')}_{name}"
        for suffix in ("", *(f"_{n}" for n in range(2, 1000))):
            folder = out_dir / (stem + suffix)
            try:
                folder.mkdir(mode=0o700)  # losses, texts and paths are nobody else's business
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise ConfigError(
            f"cannot make a run folder in out_dir = {out_dir}: {error.strerror}; give a writable --out_dir"
        ) from None
    raise ConfigError(f"out_dir = {out_dir} already has 999 runs of this second; use another --name")


def lock_run(folder: Path) -> tuple[RunLock | None, str]:
    """Lock a run's folder for this process; return the lock, and a warning where the file system knows no locks.

    A process that has it already gets None and goes on. Raises ConfigError when another one holds the lock.
    """
    path, own = folder / "lock", f"pid {os.getpid()} on {platform.node()}"
    lock = RunLock(fd := os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # closed with its last reference
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = path.read_text(encoding="utf-8").strip() or "another process"
        except OSError as error:
            return None, f"warning  {folder} cannot be locked ({error.strerror}): see to it that one command uses it"
        if holder == own:
            return None, ""
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run {folder} is in use by {holder}; wait for its end, or start a new run from one of its checkpoints "
                f"(--resume {folder}/checkpoints/step_...). If that process is gone, with its host, remove {path}"
            )
        time.sleep(0.1)  # it may just be dying
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{own}\n".encode(), 0)
    return lock, ""


def write_attempt(spec: RunSpec) -> None:
    """Let this attempt alone write checkpoints from now on. (whoever starts an attempt, before its ranks begin)"""
    _replace_text(spec.folder / "attempt", f"{spec.attempt} {spec.started!r}\n")


def read_attempt(folder: Path) -> tuple[int, float] | None:
    """Return which attempt may write checkpoints, and when its command started (Unix s); None where nobody said so.

    Raises CheckpointError when the file cannot be read.
    """
    path = folder / "attempt"
    try:
        attempt, started = path.read_text(encoding="utf-8").split()
        return int(attempt), float(started)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot tell from {path} which attempt may write ({error}); remove it") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader never sees half of it."""
    _replace_text(path, json.dumps(value, indent=2) + "\n")


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


@contextmanager
def summary_on_failure(spec: RunSpec) -> Iterator[None]:
    """Write summary.json also when the run ends in an exception, and pass that on."""
    try:
        yield
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        reason = f"failed: {type(error).__name__}: {error}"
        write_summary(spec, {"exit_reason": reason, "exit_code": code}, restarts=spec.attempt)
        raise


def write_summary(spec: RunSpec, outcome: dict[str, Any], restarts: int) -> dict[str, Any]:
    """Write and return summary.json: what the run came to, and why it ended. (one process)"""
    summary = {
        "exit_reason": outcome.get("exit_reason"),
        "exit_code": outcome.get("exit_code"),
        "steps": outcome.get("step"),
        "val_loss": outcome.get("val_loss"),
        "expected_val_loss": expected_loss(spec),
        "train_loss": outcome.get("train_loss"),
        "tok_per_sec": outcome.get("tok_per_sec"),
        "step_ms": outcome.get("step_ms"),
        "first_step_s": outcome.get("first_step_s"),
        "total_s": round(time.time() - spec.started, 3),
        "world_size": outcome.get("world_size"),
        "backend": outcome.get("backend"),
        "backend_reason": outcome.get("backend_reason"),
        "precision": outcome.get("precision"),
        "device": outcome.get("device"),
        "restarts": restarts,
        "resumed_from": outcome.get("resumed_from"),
        "dataset": spec.dataset.name,
        "dataset_note": spec.dataset.note,
        "comm": outcome.get("comm"),
        "sample": outcome.get("sample"),
        "nanoray": __version__,
        "torch": outcome.get("torch"),
    }
    write_json(spec.folder / "summary.json", summary)
    return summary


def expected_loss(spec: RunSpec) -> float | None:
    """Return the validation loss that the complete recipe should reach on this dataset, where it is known."""
    return spec.config.expected_val_loss.get(spec.dataset.name)
