"""`python -m nanoray.bench FAMILY [ARM]`: measure, print a table and verdicts, write JSON and a figure.

registry.py lists families and arms, harness/benchmark.py says what each arm implements. Exit code
0: every arm ran, nothing was wrong and every target was met; 1: not; 2: wrong flags. A family
without an arm, and `all`, run one arm after the other, each with its defaults.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from nanoray.bench.harness.benchmark import Benchmark, read_numbers
from nanoray.bench.harness.processes import interruptible
from nanoray.bench.harness.report import Report, conditions, load_average
from nanoray.bench.registry import BENCHMARKS, Entry
from nanoray.cli import Parser, name_program
from nanoray.config import refuse_unknown
from nanoray.errors import ConfigError, NanorayError
from nanoray.machine.atomic import write_json
from nanoray.machine.launchers import place_of
from nanoray.machine.text import aligned

FIGURES = (".png", ".svg", ".pdf")
# Flag -> a name to propose
FILES = {"json": "report.json", "figure": "report.png"}
USAGE = """\
usage: {program} FAMILY [ARM] [--quick] [--json FILE] [--figure FILE] [flags]

{benches}
  {all:<28}all but those with a * in turn, with their defaults; so does a family without an arm

  --quick        few and short rounds
  --json FILE    conditions, rows and verdicts
  --figure FILE  a picture of one ({figures})

{program} FAMILY ARM --help shows the flags of one"""


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark, or several, and return the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        benches = "\n".join(_usage_of(entry) for entry in BENCHMARKS.values())
        known = {"benches": benches, "all": "all", "figures": ", ".join(FIGURES)}
        print(USAGE.format(program=name_program("bench"), **known))
        return 0 if argv else 2

    return exit_code_of(lambda: _run(argv))


def _usage_of(entry: Entry) -> str:
    return f"  {entry.words + ('' if entry.in_all else ' *'):<28}{entry.summary}"


def exit_code_of(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code; print an error of nanoray and return that one's code."""
    try:
        return run()
    except NanorayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print(
            "interrupted: everything that was started is ended, no report was written",
            file=sys.stderr,
        )
        return 128 + _signal_of(stop)


def _signal_of(stop: KeyboardInterrupt) -> int:
    """Return the signal: `interruptible` raises with its number, Python itself without."""
    return int(stop.args[0]) if stop.args else signal.SIGINT


def _run(argv: list[str]) -> int:
    """Run what the first words of a command line name. Raises ConfigError for unknown ones."""
    family, *flags = argv
    if family == "all":
        return _run_several(family, BENCHMARKS, flags)
    arms = {name: entry for name, entry in BENCHMARKS.items() if entry.family == family}
    for name, entry in arms.items():
        words = entry.words.split()
        if argv[: len(words)] == words:
            return run_one(name, entry, argv[len(words) :])
    if not arms and family in BENCHMARKS:
        known = BENCHMARKS[family].words
        raise ConfigError(f"unknown bench {family}; did you mean bench {known}?")
    if not arms:
        families = dict.fromkeys(entry.family for entry in BENCHMARKS.values())
        refuse_unknown(family, [*families, "all"], "bench")
    if flags and not flags[0].startswith("-"):
        names = [entry.words.split()[1] for entry in arms.values()]
        refuse_unknown(flags[0], names, f"arm of bench {family}")
    return _run_several(family, arms, flags)


def run_one(name: str, entry: Entry, argv: list[str]) -> int:
    """Run one benchmark, print and write its report, and return the exit code."""
    benchmark, args = load(entry, argv)
    with interruptible():
        report = _new_report(name, entry, argv, args)
        signum = _measure(benchmark, args, report)

    _draw(benchmark, report, args.figure)
    print("\n".join(report.lines(benchmark.format_text(report))), flush=True)
    if args.json:
        report.write(args.json)
    return 128 + signum if signum else int(report.failed)


def _run_several(title: str, entries: Mapping[str, Entry], argv: list[str]) -> int:
    """Run those benchmarks that are in `all`, and print a table of their verdicts."""
    _refuse_launchers(title)
    text = "benchmarks in turn, each with its defaults"
    parser = _parser(name_program(f"bench {title}"), text, draws=False)
    args = _flags(parser, argv)
    reports: list[Report] = []
    signum = 0
    with interruptible():
        for name, entry in entries.items():
            if not entry.in_all:
                continue
            flags = ["--quick", *entry.quick_flags] if args.quick else []
            print(f"== {entry.words}", file=sys.stderr, flush=True)
            report, lines, signum = _attempt(name, entry, flags)
            print("\n".join([f"== {entry.words}", "", *lines, ""]), flush=True)
            reports.append(report)
            if signum:
                break

    rows = [("bench", "verdict", "seconds", ""), *(report.summary for report in reports)]
    print("\n".join(aligned(rows, right={2})))
    failed = [report.bench for report in reports if report.failed]
    verdict = f"FAILED  {', '.join(failed)}" if failed else f"OK  {len(reports)} benches"
    # Before files are written: a full disk must not take the result away
    print(verdict, flush=True)
    if args.json:
        dicts = [report.to_dict() for report in reports]
        write_json(args.json, {"bench": title, "reports": dicts, "ok": not failed})
    return 128 + signum if signum else int(bool(failed))


def _attempt(name: str, entry: Entry, flags: list[str]) -> tuple[Report, list[str], int]:
    """Run one of several benchmarks; turn what it raises into a failure of its report.

    Returns its report with its lines, and the signal that interrupted it or 0.
    """
    try:
        benchmark, own_args = load(entry, flags)
        report = _new_report(name, entry, flags, own_args)
        signum = _measure(benchmark, own_args, report)
        return report, report.lines(benchmark.format_text(report)), signum
    except Exception as error:
        report = Report(name, conditions(entry.program, flags))
        report.failures.append(_describe_error(error))
        return report, report.lines(), 0


def _new_report(name: str, entry: Entry, argv: list[str], args: argparse.Namespace) -> Report:
    report = Report(name, conditions(entry.program, argv))
    if args.quick:
        report.conditions["quick"] = (
            "few, short rounds: shows that it runs and which way it points, no more"
        )
    return report


def _measure(benchmark: Benchmark, args: argparse.Namespace, report: Report) -> int:
    """Measure, and keep what was measured before something broke or the user interrupted.

    Returns the signal of the interruption, or 0.
    """
    start = time.monotonic()
    signum = 0
    try:
        read_numbers(args, benchmark.numbers)
        benchmark.measure(args, report)
    except KeyboardInterrupt as stop:
        if not any(row.values for row in report.rows):
            raise
        signum = _signal_of(stop)
        report.failures.append(
            f"interrupted by {signal.Signals(signum).name} with {report.rounds} round(s) "
            "measured: everything that was started is ended, and the rows have those rounds"
        )
    except Exception as error:
        if isinstance(error, NanorayError) and not report.rows:  # refused before anything ran
            raise
        report.failures.append(_describe_error(error))
    report.conditions["seconds"] = round(time.monotonic() - start, 1)
    report.conditions["load"]["after"] = load_average()
    return signum


def _describe_error(error: Exception) -> str:
    if isinstance(error, NanorayError):
        return str(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


def _draw(benchmark: Benchmark, report: Report, figure: Path | None) -> None:
    """Draw the figure. An error is a failure of the report: what was measured is still printed."""
    if figure and any(row.values for row in report.rows):
        try:
            benchmark.draw(report, figure)
        except Exception as error:
            report.failures.append(f"figure: {_describe_error(error)}")


def _parser(program: str, text: str, draws: bool = True) -> Parser:
    parser = Parser(prog=program, description=text, allow_abbrev=False)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write conditions, rows and verdicts"
    )
    if draws:
        drawn = f"draw them ({', '.join(FIGURES)})"
        parser.add_argument("--figure", type=Path, metavar="FILE", help=drawn)
    parser.add_argument(
        "--quick", action="store_true", help="few and short rounds; targets are shown, not judged"
    )
    return parser


def load(entry: Entry, argv: list[str]) -> tuple[Benchmark, argparse.Namespace]:
    """Import a benchmark and read its flags."""
    benchmark = entry.load()
    _refuse_launchers(entry.words)
    parser = _parser(entry.command or name_program(f"bench {entry.words}"), entry.summary)
    benchmark.add_flags(parser)
    for number in benchmark.numbers:
        number.add_to(parser)
    args = _flags(parser, argv)
    if args.figure and args.figure.suffix not in FIGURES:
        raise ConfigError(
            f"figure = {args.figure}: unknown kind of file; end it in {', '.join(FIGURES)}"
        )
    return benchmark, args


def _refuse_launchers(name: str) -> None:
    """Raise ConfigError in a process of torchrun, srun or mpirun: each would start ranks."""
    if place_of(os.environ):
        raise ConfigError(
            f"bench {name} starts its own ranks, but a launcher has started this process as one; "
            "run it without torchrun, srun and mpirun; for several machines: --ray_address"
        )


def _flags(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError for unknown ones, and for files that cannot be written."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        refuse_unknown(unknown[0].split("=")[0], flags, "flag")
    # Check the files now, and not after minutes of measuring
    for flag in FILES:
        path = getattr(args, flag, None)
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(
                f"{flag} = {path} is a folder; name a file in it: {path / FILES[flag]}"
            )
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"cannot write {path}: its folder is missing or read-only; make it first"
            )
    return args


if __name__ == "__main__":
    raise SystemExit(main())
