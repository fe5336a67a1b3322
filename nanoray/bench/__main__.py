"""`python -m nanoray.bench NAME`: measure, print a table and verdicts, write JSON, a figure and an
HTML report.

registry.py lists the benchmarks, harness/benchmark.py says what each implements. Exit code 0: every
arm ran, nothing was wrong and every target was met; 1: not; 2: wrong flags. `all` runs one after
the other and skips those that refuse its --workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from nanoray.base.atomic import write_json
from nanoray.base.text import aligned
from nanoray.bench.harness.benchmark import Benchmark, read_numbers
from nanoray.bench.harness.processes import interruptible
from nanoray.bench.harness.report import Report, Section, conditions, load_average
from nanoray.bench.registry import BENCHMARKS, Entry
from nanoray.cli import Parser, name_program, take_output
from nanoray.config import refuse_unknown
from nanoray.errors import ConfigError, NanorayError, PlacementError
from nanoray.host.launchers import set_torch_variables

FIGURES = (".png", ".svg", ".pdf")
# Flag -> a name to propose
FILES = {"json": "report.json", "figure": "report.png", "html": "report.html"}
USAGE = """\
usage: {program} NAME [--workers N] [--quick] [--json FILE] [--figure FILE] [--html FILE] [flags]

{benches}
  {all:<12}all but gpu, hybrid and speedrun in turn, with their defaults; --figure takes a folder

  --workers N   ranks                       --json FILE    conditions, rows and verdicts
  --quick       few and short rounds        --figure FILE  a picture ({figures})
                                            --html FILE    one page with all of it, which needs nothing else

{program} NAME --help shows the flags of one"""


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark, or all, and return the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        benches = "\n".join(f"  {name:<12}{entry.summary}" for name, entry in BENCHMARKS.items())
        print(
            USAGE.format(
                program=name_program("bench"),
                benches=benches,
                all="all",
                figures=", ".join(FIGURES),
            )
        )
        return 0 if argv else 2
    name, *flags = argv

    def run() -> int:
        # Under srun and mpirun, too, each process is a rank: benchmarks read torchrun's variables.
        set_torch_variables(os.environ)
        return _run_all(flags) if name == "all" else _run_named(name, flags)

    return exit_code_of(run)


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


def _run_named(name: str, argv: list[str]) -> int:
    if name not in BENCHMARKS:
        refuse_unknown(name, [*BENCHMARKS, "all"], "bench")
    return run_one(name, BENCHMARKS[name], argv)


def run_one(name: str, entry: Entry, argv: list[str]) -> int:
    """Run one benchmark, print and write its report, and return the exit code."""
    benchmark, args = _load(name, entry, argv)
    with interruptible():
        report = _new_report(name, entry, argv, args)
        signum = _measure(benchmark, args, report)

    # Under torchrun rank 0 writes the report. The others log their own failures, which rank 0 may
    # not have seen.
    if not _writes_report():
        for failure in report.failures:
            for line in failure.splitlines():
                print(f"rank {os.environ['RANK']}: {line}", file=sys.stderr, flush=True)
        return int(report.failed)

    section = _section(benchmark, report, args.figure, bool(args.html))
    lines = [*benchmark.format_markdown(report), "", *report.lines(section.lines or None)]
    print("\n".join(lines), flush=True)
    if args.json:
        report.write(args.json)
    _write_html(args.html, [section], {name: entry.summary})
    return 128 + signum if signum else int(report.failed)


def _run_all(argv: list[str]) -> int:
    """Run every benchmark that is in `all`, print a table of their verdicts, and write one page."""
    args = _flags_of_all(argv)
    sections: list[Section] = []
    signum = 0
    with interruptible():
        for name, entry in BENCHMARKS.items():
            if not entry.in_all:
                continue
            flags = [f"--workers={args.workers}"] if args.workers else []
            if args.quick:
                flags += ["--quick", *entry.quick_flags]
            print(f"== {name}", file=sys.stderr, flush=True)
            section, signum = _attempt(name, entry, flags, args)
            lines = [f"== {name}", "", *section.report.lines(section.lines or None), ""]
            print("\n".join(lines), flush=True)
            sections.append(section)
            if signum:
                break

    reports = [section.report for section in sections]
    rows = [("bench", "verdict", "seconds", ""), *(report.summary for report in reports)]
    print("\n".join(aligned(rows, right={2})))
    ok, verdict = _verdict_of_all(reports, args.workers)
    # Before files are written: a full disk must not take the result away
    print(verdict, flush=True)

    if args.json:
        dicts = [report.to_dict() for report in reports]
        write_json(args.json, {"bench": "all", "reports": dicts, "ok": ok})
    _write_html(args.html, sections, {name: entry.summary for name, entry in BENCHMARKS.items()})
    if signum:
        return 128 + signum
    return 0 if ok else 1


def _flags_of_all(argv: list[str]) -> argparse.Namespace:
    _refuse_torchrun("all")
    program = name_program("bench all")
    parser = _parser(program, "every benchmark in turn, each with its defaults")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="ranks of each [each one's default]"
    )
    args = _flags(parser, argv, folders=("figure",))
    if args.workers is not None and args.workers < 1:
        raise ConfigError(
            f"workers = {args.workers}; give 1 or more, or leave it out for each one's default"
        )
    if args.figure and not args.figure.is_dir():
        raise ConfigError(
            f"figure = {args.figure}: bench all draws several; name a folder that is there"
        )
    return args


def _verdict_of_all(reports: list[Report], workers: int | None) -> tuple[bool, str]:
    """Return whether `bench all` succeeded, and its last line."""
    failed = [report.bench for report in reports if report.failed]
    skipped = [report.bench for report in reports if report.skipped]
    # A number of ranks that no benchmark accepts is a mistake; one that some refuse is not
    if len(skipped) == len(reports):
        return False, f"FAILED  every bench refuses workers = {workers}"
    if failed:
        return False, f"FAILED  {', '.join(failed)}"
    verdict = f"OK  {len(reports) - len(skipped)} benches"
    if skipped:
        verdict += f", skipped: {', '.join(skipped)}"
    return True, verdict


def _attempt(
    name: str, entry: Entry, flags: list[str], args: argparse.Namespace
) -> tuple[Section, int]:
    """Run one of all benchmarks; turn what it raises into a failure of its report.

    A benchmark that refuses the number of ranks is skipped: others can use it. Returns its section,
    and the signal that interrupted it or 0.
    """
    try:
        benchmark, own_args = _load(name, entry, flags)
        report = _new_report(name, entry, flags, own_args)
        signum = _measure(benchmark, own_args, report)
        figure = args.figure / f"{name}.png" if args.figure else None
        return _section(benchmark, report, figure, bool(args.html)), signum
    except Exception as error:
        report = Report(name, conditions(name, flags, entry.command))
        if args.workers and isinstance(error, ConfigError | PlacementError):
            report.skipped = str(error)
        else:
            report.failures.append(_describe_error(error))
        return Section(report), 0


def _new_report(name: str, entry: Entry, argv: list[str], args: argparse.Namespace) -> Report:
    report = Report(name, conditions(name, argv, entry.command))
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
        refused = isinstance(error, NanorayError) and not report.rows  # before anything ran
        # A rank that writes no report must raise: its log is the only place for the error
        if refused or not _writes_report():
            raise
        report.failures.append(_describe_error(error))
    report.conditions["seconds"] = round(time.monotonic() - start, 1)
    report.conditions["load"]["after"] = load_average()
    return signum


def _describe_error(error: Exception) -> str:
    if isinstance(error, NanorayError):
        return str(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


def _writes_report() -> bool:
    """Return whether this process prints and writes: under torchrun every rank runs this program."""
    return os.environ.get("RANK", "0") == "0"


def _section(benchmark: Benchmark, report: Report, figure: Path | None, svg: bool) -> Section:
    """Draw the figures, and collect what a page shows of this report."""
    picture = _draw(benchmark, report, figure, svg)
    return Section(report, picture, benchmark.format_text(report), benchmark.wrong)


def _draw(benchmark: Benchmark, report: Report, figure: Path | None, svg: bool) -> str:
    """Draw the figure file, and return the SVG text for the page if `svg`.

    An error while drawing is a failure of the report: what was measured must still be printed.
    """
    if not any(row.values for row in report.rows):
        return ""
    try:
        if figure:
            benchmark.draw(report, figure)
        if svg:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "figure.svg")
                benchmark.draw(report, path)
                return path.read_text(encoding="utf-8")
    except Exception as error:
        report.failures.append(f"figure: {_describe_error(error)}")
    return ""


def _write_html(path: Path | None, sections: list[Section], summaries: dict[str, str]) -> None:
    if path:
        from nanoray.bench.harness.html import write

        write(path, sections, summaries)


def _parser(program: str, text: str) -> Parser:
    parser = Parser(prog=program, description=text, allow_abbrev=False)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write conditions, rows and verdicts"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help=f"draw them ({', '.join(FIGURES)}); all: a folder",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page with all of it, for any browser"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few and short rounds; targets are shown, not judged"
    )
    parser.add_argument(
        "-o", type=Path, metavar="FILE", help="one of these three, by the file's ending"
    )
    return parser


def _load(name: str, entry: Entry, argv: list[str]) -> tuple[Benchmark, argparse.Namespace]:
    """Import a benchmark and read its flags."""
    benchmark = entry.load()
    if not benchmark.joins_torchrun:
        _refuse_torchrun(name)
    parser = _parser(entry.command or name_program(f"bench {name}"), entry.summary)
    benchmark.add_flags(parser)
    for number in benchmark.numbers:
        number.add_to(parser)
    args = _flags(parser, argv)
    if args.figure and args.figure.suffix not in FIGURES:
        raise ConfigError(
            f"figure = {args.figure}: unknown kind of file; end it in {', '.join(FIGURES)}"
        )
    return benchmark, args


def _refuse_torchrun(name: str) -> None:
    if "RANK" in os.environ:
        raise ConfigError(
            f"bench {name} starts its own ranks, but RANK is set; run it without torchrun"
        )


def _flags(parser: Parser, argv: list[str], folders: tuple[str, ...] = ()) -> argparse.Namespace:
    """Read the flags. Raises ConfigError for unknown ones, and for files that cannot be written."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        refuse_unknown(unknown[0].split("=")[0], flags, "flag")
    take_output(args, {"json": (".json",), "html": (".html",), "figure": FIGURES})
    if not _writes_report():
        return args

    # Check the files now, and not after minutes of measuring
    for flag in FILES:
        path = getattr(args, flag)
        if path is None:
            continue
        if path.is_dir() and flag not in folders:
            raise ConfigError(
                f"{flag} = {path} is a folder; name a file in it: {path / FILES[flag]}"
            )
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"cannot write {path}: its folder is missing or read-only; make it first"
            )
    return args


if __name__ == "__main__":
    code = main()
    # A rank of torchrun: its report is written, and tearing down gloo's threads can hang
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)
