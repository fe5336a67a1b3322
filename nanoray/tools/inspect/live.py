"""`nanoray inspect RUN --live`: the state of a running job, from its folder, /proc and NVML. No
torch.

A rank's process is known on its own host only: its ledger's name has the process id, and the
process has the rank's progress file mapped. Elsewhere its position is shown, and `?` for the rest.
GPUs and slices are this host's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nanoray.base.atomic import json_mapping, read_json
from nanoray.base.proc import cpu_seconds, resident_bytes, stat_of
from nanoray.base.text import aligned, clock
from nanoray.checkpoint.run import newest_record, read_attempt
from nanoray.errors import ConfigError
from nanoray.faults.progress import ProgressFile
from nanoray.host.gpus import gpu_loads
from nanoray.train.guard.certificate import read
from nanoray.train.watch.observers import progress

SAMPLE_S = 0.5  # over which CPU time is measured
COLUMNS = ("rank", "step", "phase", "since", "pid", "memory", "cpu")
GPU_COLUMNS = ("gpu", "name", "busy", "memory", "power", "ranks")
UNKNOWN = "unknown"


def lines(folder: Path, nvml: Any = None) -> list[str]:
    """Return the current state of the run in `folder`. Takes SAMPLE_S.

    Raises ConfigError where there is no run.
    """
    try:
        config = json_mapping((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigError(
            f"{folder} is no folder of a run (no config.json); give one such as runs/2026-..."
        ) from None
    files = _progress_files(folder)
    pids = {}
    for path in files:
        pid = process_of(path)
        if pid:
            pids[path] = pid

    # CPU time is a difference, so the processes are read twice.
    earlier = {path: stat_of(pid) for path, pid in pids.items()}
    begun_s = time.monotonic()
    time.sleep(SAMPLE_S if pids else 0.0)
    passed_s = time.monotonic() - begun_s

    report = [f"{'run':<6} {folder.resolve().name}, {_state(folder, bool(pids))}"]
    record = newest_record(folder)
    if record:
        figures = progress(record, config["max_steps"])
        text = " · ".join(f"{key} {value}" for key, value in figures.items())
        age_s = time.time() - record["time"]
        age = f"{clock(age_s)} ago"
        if age_s < 0:  # of another host, or this one's clock was set back
            age = f"{clock(-age_s)} later than the clock of this host shows"
        report.append(f"{'newest':<6} {text} · recorded {age}")

    rows = [[*COLUMNS]]
    for path in files:
        rows.append(_rank_row(path, pids.get(path), earlier.get(path), passed_s))
    report += aligned(rows)
    if config.get("device") != "cpu":
        gpus = _gpus({_rank_of(path): pid for path, pid in pids.items()}, nvml)
        if gpus:
            report += aligned([[*GPU_COLUMNS], *gpus])
    return report


def _progress_files(folder: Path) -> list[Path]:
    """Return the progress files of the run's newest group of ranks, by rank.

    The folder also has those of an earlier command with more ranks; they count only while a
    process has them mapped.
    """
    slots = float("inf")
    for group in read(folder).groups:
        slots = group.get("slots", slots)
    files = [
        path
        for path in folder.glob("logs/rank*.progress")
        if _rank_of(path) < slots or process_of(path)
    ]
    return sorted(files, key=_rank_of)


def _rank_row(path: Path, pid: int | None, earlier: Any, passed_s: float) -> list[str]:
    """Return the row of a rank: its position and, if its process is on this host, what it uses."""
    step, phase, _, written_at = ProgressFile.read_all(path) or ("?", "?", 0, 0.0)
    row = [str(_rank_of(path)), str(step), phase]
    later = stat_of(pid) if pid else None
    if earlier and later:
        age_s = max(0.0, time.monotonic() - written_at)
        busy = 100 * (cpu_seconds(later) - cpu_seconds(earlier)) / passed_s
        row.append(f"{age_s:.1f} s")
        row.append(str(pid))
        row.append(f"{resident_bytes(later) / 2**30:.2f} GiB")
        row.append(f"{busy:.0f} %")
    # The process may be on another host, or may have ended between the two readings.
    missing = len(COLUMNS) - len(row)
    return row + ["?"] * missing


def _gpus(pids: dict[int, int], nvml: Any) -> list[list[str]]:
    """Return a row for each GPU and slice of this host. A slice is called 0/2: GPU 0, slice 2.

    `pids`: rank -> its process. Where NVML names none of them, it may count processes as the host
    does: no rank's GPU is known then.
    """
    loads = gpu_loads(nvml)
    numbers = {}
    named: set[int] = set()
    for load in loads:
        if load.device.kind == "cuda":
            numbers[load.device.uuid] = str(load.device.index)
        named.update(load.pids or ())
    # In a container NVML may report process ids of the host, which match none of ours.
    names_ranks = not named.isdisjoint(pids.values())

    rows = []
    for load in loads:
        device = load.device
        number = numbers.get(device.parent_uuid, "?")
        if device.kind != "cuda":
            number = f"{number}/{device.index}"
        capacity = UNKNOWN
        if device.memory_bytes:
            capacity = f"{device.memory_bytes / 2**30:.1f} GiB"
        ranks = UNKNOWN
        if names_ranks and load.pids is not None:
            on_it = [str(rank) for rank, pid in pids.items() if pid in load.pids]
            ranks = " ".join(on_it) or "none"
        row = [number, device.name, UNKNOWN, UNKNOWN, UNKNOWN, ranks]
        if load.busy is not None:
            row[2] = f"{load.busy} %"
        if load.used_bytes is not None:
            row[3] = f"{load.used_bytes / 2**30:.1f} of {capacity}"
        if load.watts is not None:
            row[4] = f"{load.watts:.0f} W"
        rows.append(row)
    return rows


def _state(folder: Path, here: bool) -> str:
    """Return whether the run goes on, and in which attempt. `here`: on this host."""
    number = ""
    begun = 0.0
    attempt = read_attempt(folder)
    if attempt:
        number = f", attempt {attempt[0]}"
        begun = attempt[1]
    if here:
        return f"running{number}"
    # An older summary is of an earlier attempt.
    summary = folder / "summary.json"
    if summary.exists() and summary.stat().st_mtime >= begun:
        reason = read_json(summary).get("exit_reason")
        return f"ended: {reason}" if reason else "ended, and its summary.json is damaged"
    return f"no process of it on this host{number}"


def process_of(path: Path) -> int | None:
    """Return the process on this host that has a rank's progress file mapped, if there is one."""
    ledgers = path.parent.glob(f"{path.stem}.*.ledger")
    for ledger in sorted(ledgers, key=lambda ledger: ledger.stat().st_mtime, reverse=True):
        # A process id can be used again after its process ended, so the mapping is checked.
        pid = ledger.stem.rpartition("-")[2]
        try:
            if str(path.resolve()) in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"):
                return int(pid)
        except OSError:  # it has ended, or is another user's, or on another host
            continue
    return None


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))
