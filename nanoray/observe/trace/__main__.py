"""Draw the traced steps of a run: `nanoray report timeline [RUN]`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanoray.cli import (
    Parser,
    add_run,
    exit_code_of,
    find_run_folder,
    name_program,
    tool_parser,
    writing,
)
from nanoray.errors import ConfigError
from nanoray.machine.atomic import read_json_lines
from nanoray.observe.trace.timeline import draw, newest_window


def make_parser() -> Parser:
    """Return the parser of `nanoray report timeline`."""
    parser = tool_parser(
        name_program("report timeline"),
        "Draw traced steps of a run that was started with --comm_trace.",
    )
    add_run(parser)
    parser.add_argument("--step", type=int, help="last step to draw [the newest traced one]")
    parser.add_argument(
        "-o",
        "--figure",
        type=Path,
        metavar="FILE",
        help="picture to write [RUN/comm/timeline.svg]",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray report timeline [RUN] [--step S]`: draw a window of traced steps again."""
    return exit_code_of(lambda: _run(make_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    run = find_run_folder(args.run)
    steps = read_steps(run)
    # The window ends with --step; the newest one ends with the newest step.
    if args.step is not None:
        if args.step not in {s["step"] for s in steps}:
            known = ", ".join(str(s["step"]) for s in steps[-8:])
            raise ConfigError(
                f"step = {args.step} was not traced; the last traced ones are {known}"
            )
        steps = [s for s in steps if s["step"] <= args.step]
    figure = args.figure or run / "comm" / "timeline.svg"
    with writing(figure, "give another --figure"):
        draw(newest_window(steps), figure)
    print(figure)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the traced steps of a run. Raises ConfigError when there is none."""
    # A long run's later steps are written without their collectives.
    records = read_json_lines(run / "comm" / "steps.jsonl")
    steps = [record for record in records if "collectives" in record]
    if not steps:
        raise ConfigError(
            f"{run} has no traced steps; start a run with --comm_trace every=50, or always"
        )
    return steps


if __name__ == "__main__":
    raise SystemExit(main())
