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
from nanoray.faults.cause import outcome_of, read_reports


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
        else:
            lines += _format_fault(event)

    faults = [event for event in events if event["event"] == "fault"]
    if not faults:
        lines.append("no rank failed because of it" if events else "no rank failed")
        return lines
    counts = Counter(fault["recovery"] or "interrupted" for fault in faults)
    recoveries = ", ".join(f"{count} x {name}" for name, count in counts.items())
    total = f"total     {len(faults)} fault(s): {recoveries}"
    # The steps of a program with a loop of its own are not known.
    if any(fault["phase"] for fault in faults):
        lost_s = sum((fault["detect_s"] or 0.0) + (fault["recover_s"] or 0.0) for fault in faults)
        repeated = sum(fault["steps_repeated"] or 0 for fault in faults)
        total += f"; {lost_s:.1f} s without training, {repeated} steps repeated"
    lines.append(total)
    return lines


def _format_planned(event: dict[str, Any]) -> str:
    return (
        f"{_format_time(event)}  planned   {event['kind']} fires: rank {event['rank']}, "
        f"{event['phase']} of step {event['step']}"
    )


def _format_fault(event: dict[str, Any]) -> list[str]:
    lines = [f"{_format_time(event)}  {event['cause']:<9} {event['title']}"]
    lines += [f"            {line}" for line in event["log_tail"][-3:]]
    lines += [f"          then      {line}" for line in event["consequences"]]
    if event["recovery"] == "none":
        lines.append("          gave up")
    elif not event["phase"]:
        lines.append("          restart   all ranks started again")
    elif event["recover_s"] is None:
        lines.append("          interrupted by the next fault, before a new step was completed")
    else:
        lines.append(f"          {event['recovery']:<9} {outcome_of(event)}")
    return lines


def _format_time(event: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event["time"]))


if __name__ == "__main__":
    raise SystemExit(main())
