"""`nanoray faults [RUN]`: what failed in a run, why, how it recovered, and what that cost."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from nanoray.cli import (
    Parser,
    add_run,
    exit_code_of,
    find_run_folder,
    name_program,
    tool_parser,
)
from nanoray.faults.cause import FaultReport, read_reports


def make_parser() -> Parser:
    """Return the parser of `nanoray faults`."""
    parser = tool_parser(name_program("faults"), __doc__)
    add_run(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray faults` and return the exit code."""

    def run() -> None:
        args = make_parser().parse_args(argv)
        print("\n".join(story(find_run_folder(args.run))))

    return exit_code_of(run)


def story(folder: Path) -> list[str]:
    """Return the faults of a run as lines of text, oldest first."""
    events = read_reports(folder)
    lines = [f"run       {folder.resolve().name}"]
    for event in events:
        if event["event"] == "injected":
            lines.append(_format_planned(event))
        elif event["event"] == "out_of_memory":
            lines.append(
                f"{_format_time(event)}  memory    {event['why']}: a micro batch has at most "
                f"{event['limit']} instead of {event['asked']} from step {event['step']} on"
            )
        elif event["event"] == "failure":
            lines.append(_format_failure(event))
        else:
            lines += _format_fault(event)

    failures = [event for event in events if event["event"] == "failure"]
    if failures:
        again = sum(event["again"] for event in failures)
        lines.append(f"total     {len(failures)} failure(s), {again} restart(s) of all ranks")
        return lines
    faults = [event for event in events if event["event"] == "fault"]
    if not faults:
        lines.append("no rank failed because of it" if events else "no rank failed")
        return lines
    lost_s = sum((fault["detect_s"] or 0.0) + (fault["recover_s"] or 0.0) for fault in faults)
    repeated = sum(fault["steps_repeated"] or 0 for fault in faults)
    counts = Counter(fault["recovery"] or "interrupted" for fault in faults)
    recoveries = ", ".join(f"{count} x {name}" for name, count in counts.items())
    lines.append(
        f"total     {len(faults)} fault(s): {recoveries}; {lost_s:.1f} s without training, "
        f"{repeated} steps repeated"
    )
    return lines


def _format_planned(event: dict[str, Any]) -> str:
    return (
        f"{_format_time(event)}  planned   {event['kind']} fires: rank {event['rank']}, "
        f"{event['phase']} of step {event['step']}, attempt {event['attempt']}"
    )


def _format_failure(event: dict[str, Any]) -> str:
    """Describe the failure of a program that `nanoray run` has run."""
    who = f"rank {event['rank']}" if event["rank"] >= 0 else "a rank"
    then = "all ranks started again" if event["again"] else "gave up"
    return f"{_format_time(event)}  failure   {who} {event['how']}; {then}"


def _format_fault(event: dict[str, Any]) -> list[str]:
    values = {key: event[key] for key in event if key not in ("event", "time", "monotonic")}
    report = FaultReport(**values)
    lines = [f"{_format_time(event)}  {report.cause:<9} {report.title}"]
    lines += [f"            {line}" for line in report.log_tail[-3:]]
    lines += [f"          then      {line}" for line in report.consequences]
    if report.recovery == "none":
        lines.append("          gave up")
    elif report.recover_s is None:
        lines.append("          interrupted by the next fault, before a new step was completed")
    else:
        lines.append(f"          {report.recovery:<9} {report.outcome()}")
    return lines


def _format_time(event: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event["time"]))


if __name__ == "__main__":
    raise SystemExit(main())
