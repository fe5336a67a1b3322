"""`nanoray inspect RUN --live`: what a running job does now, from the files in its folder, /proc
and NVML. No torch.

A rank's process is known on its own host only: its ledger's name has the process id, and the
process has the rank's progress file mapped. Elsewhere its position is shown, and `?` for the rest.
GPUs and slices are this host's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nanoray.devices.gpus import gpu_loads
from nanoray.errors import ConfigError
from nanoray.faults.proc import cpu_seconds, resident_bytes, stat_of
from nanoray.faults.progress import ProgressFile
from nanoray.run import newest_record, read_attempt
from nanoray.train.guard.certificate import read
from nanoray.train.watch.observers import clock, progress

SAMPLE_S = 0.5  # over which CPU time is measured
COLUMNS = ("rank", "step", "phase", "since", "pid", "memory", "cpu")
GPU_COLUMNS = ("gpu", "name", "busy", "memory", "power", "ranks")
UNKNOWN = "unknown"


def lines(folder: Path, nvml: Any = None) -> list[str]:
    """Return what the run in `folder` does now. Takes SAMPLE_S. Raises ConfigError where there is
    no run.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigError(
            f"{folder} is no folder of a run (no config.json); give one such as runs/2026-..."
        ) from None
    slots = [group["slots"] for group in read(folder).groups if "slots" in group] or [float("inf")]
    # Also those of an earlier command, which had more ranks
    there = folder.glob("logs/rank*.progress")
    files = sorted(
        (path for path in there if _rank_of(path) < slots[-1] or process_of(path)), key=_rank_of
    )
    pids = {path: pid for path in files if (pid := process_of(path))}
    before, began = {path: stat_of(pid) for path, pid in pids.items()}, time.monotonic()
    time.sleep(SAMPLE_S if pids else 0.0)
    passed_s = time.monotonic() - began
    record, now = newest_record(folder), time.time()
    found = [f"{'run':<6} {folder.resolve().name}, {_state(folder, bool(pids))}"]
    if record:
        told = " · ".join(
            f"{key} {value}" for key, value in progress(record, config["max_steps"]).items()
        )
        found.append(f"{'newest':<6} {told} · recorded {clock(now - record['time'])} ago")
    rows = [[*COLUMNS]]
    for path in files:
        step, phase, _, written_at = ProgressFile.read_all(path) or ("?", "?", 0, 0.0)
        row = [str(_rank_of(path)), str(step), phase]
        earlier, later = before.get(path), stat_of(pids[path]) if path in pids else None
        if earlier and later:
            busy = 100 * (cpu_seconds(later) - cpu_seconds(earlier)) / passed_s
            age_s = max(0.0, time.monotonic() - written_at)
            row += [
                f"{age_s:.1f} s",
                str(pids[path]),
                f"{resident_bytes(later) / 2**30:.2f} GiB",
                f"{busy:.0f} %",
            ]
        rows.append(row + ["?"] * (len(COLUMNS) - len(row)))
    gpus = (
        _gpus({_rank_of(path): pid for path, pid in pids.items()}, nvml)
        if config.get("device") != "cpu"
        else []
    )
    return found + _table(rows) + (_table([[*GPU_COLUMNS], *gpus]) if gpus else [])


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip()
        for r in rows
    ]


def _gpus(pids: dict[int, int], nvml: Any) -> list[list[str]]:
    """Return a row for each GPU and slice of this host. A slice is called 0/2: GPU 0, slice 2.

    `pids`: rank -> its process. Where NVML names none of them, it may count processes as the host
    does: no rank's GPU is known then.
    """
    loads, rows = gpu_loads(nvml), []
    number = {
        load.device.uuid: str(load.device.index) for load in loads if load.device.kind == "cuda"
    }
    named = {pid for load in loads for pid in load.pids or ()} & {*pids.values()}
    for device, busy, used, watts, on_it in (
        (x.device, x.busy, x.used_bytes, x.watts, x.pids) for x in loads
    ):
        ranks = " ".join(str(rank) for rank, pid in pids.items() if pid in (on_it or ())) or "none"
        of_gpu = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else UNKNOWN
        rows.append([
            number[device.uuid] if device.kind == "cuda" else f"{number.get(device.parent_uuid, '?')}/{device.index}",
            device.name,
            UNKNOWN if busy is None else f"{busy} %",
            UNKNOWN if used is None else f"{used / 2**30:.1f} of {of_gpu}",
            UNKNOWN if watts is None else f"{watts:.0f} W",
            ranks if named and on_it is not None else UNKNOWN,
        ])  # fmt: skip
    return rows


def _state(folder: Path, here: bool) -> str:
    """Return whether the run goes on, and in which attempt."""
    attempt, summary = read_attempt(folder), folder / "summary.json"
    number = f", attempt {attempt[0]}" if attempt else ""
    if here:
        return f"running{number}"
    if summary.exists() and summary.stat().st_mtime >= (attempt[1] if attempt else 0.0):
        try:
            return f"ended: {json.loads(summary.read_text(encoding='utf-8'))['exit_reason']}"
        except (OSError, ValueError, KeyError):
            return "ended, and its summary.json is damaged"
    return f"no process of it on this host{number}"


def process_of(path: Path) -> int | None:
    """Return the process on this host that has a rank's progress file mapped; None if there is
    none.
    """
    ledgers = path.parent.glob(f"{path.stem}.*.ledger")
    for ledger in sorted(ledgers, key=lambda ledger: ledger.stat().st_mtime, reverse=True):
        pid = ledger.stem.rpartition("-")[2]
        try:
            if str(path.resolve()) in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"):
                return int(pid)
        except OSError:  # it has ended, or is another user's, or on another host
            continue
    return None


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))
