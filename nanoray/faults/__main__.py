"""What failed in a run, why, how it recovered, and what that cost.

nanoray faults RUN       RUN is a run folder, or an out_dir: its newest run
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

from nanoray.cli import exit_code_of
from nanoray.errors import ConfigError
from nanoray.faults.cause import FaultReport, read_reports


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray faults` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="nanoray faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("run", help="run folder, or an out_dir: its newest run")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: print("\n".join(story(_folder(Path(args.run))))))


def _folder(path: Path) -> Path:
    runs = (
        [path]
        if (path / "run.json").exists()
        else sorted(p.parent for p in path.glob("*/run.json"))
    )
    if not runs:
        raise ConfigError(
            f"no run in {path}; give a run folder, such as runs/2026-..., or the folder of several"
        )
    return runs[-1]


def story(folder: Path) -> list[str]:
    """Return the faults of a run as lines of text, oldest first."""
    events = read_reports(folder)
    lines = [f"run       {folder.resolve().name}"]
    for event in events:
        lines += _planned(event) if event["event"] == "injected" else _fault(event)
    faults = [event for event in events if event["event"] == "fault"]
    if not faults:
        return [*lines, "no rank failed" if not events else "no rank failed because of it"]
    lost = sum((f["detect_s"] or 0.0) + (f["recover_s"] or 0.0) for f in faults)
    how = ", ".join(
        f"{n} x {name}"
        for name, n in Counter(f["recovery"] or "interrupted" for f in faults).items()
    )
    repeated = sum(f["steps_repeated"] or 0 for f in faults)
    return [
        *lines,
        f"total     {len(faults)} fault(s): {how}; {lost:.1f} s without training, {repeated} steps "
        "repeated",
    ]


def _planned(event: dict[str, Any]) -> list[str]:
    where = f"rank {event['rank']}, {event['phase']} of step {event['step']}, attempt {event['attempt']}"
    return [f"{_clock(event)}  planned   {event['kind']} fires: {where}"]


def _fault(event: dict[str, Any]) -> list[str]:
    report = FaultReport(
        **{k: v for k, v in event.items() if k not in ("event", "time", "monotonic")}
    )
    lines = [f"{_clock(event)}  {report.cause:<9} {report.title}"]
    lines += [f"            {line}" for line in report.log_tail[-3:]]
    lines += [f"          then      {line}" for line in report.consequences]
    if report.recovery == "none":
        return [*lines, "          gave up"]
    if report.recover_s is None:
        return [*lines, "          interrupted by the next fault, before a new step was completed"]
    return [*lines, f"          {report.recovery:<9} {report.outcome()}"]


def _clock(event: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event["time"]))


if __name__ == "__main__":
    raise SystemExit(main())
