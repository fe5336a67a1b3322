"""`python -m nanoray.bench NAME`: measure, print a table and verdicts, write JSON, a figure and an
HTML report.

Every benchmark is a module with `add_flags(parser)`, `measure(args, report)`, `draw(report, path)`
and `paste(report)`, the lines for a README; one with a table or findings of its own has
`lines(report)` too, and one that counts something else than wrong elements says so in WRONG. Exit
code 0: every arm ran, nothing was wrong and every target was met; 1: not; 2: wrong flags. `all`
runs one after the other and skips those that refuse its --workers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoray.atomic import write_json
from nanoray.bench.harness.report import Report, Section, aligned, conditions, load_average
from nanoray.cli import Parser
from nanoray.config import refuse_unknown
from nanoray.errors import ConfigError, NanorayError, PlacementError

BENCHES = {
    "train": (
        "nanoray.bench.train",
        "the same recipe under python, torchrun, nanoray on Ray, and Ray's TorchTrainer",
    ),
    "collectives": (
        "nanoray.bench.collectives",
        "latency, algbw and busbw of every collective, and its wrong elements",
    ),
    "algorithms": (
        "nanoray.bench.algorithms",
        "hand-written ring, tree, ... all-reduces against the backend's own",
    ),
    "overlap": (
        "nanoray.bench.overlap",
        "bucket sizes of DDP: how much communication hides behind the backward pass",
    ),
    "strategies": (
        "nanoray.bench.strategies",
        "DDP, ZeRO and FSDP, with and without activation checkpointing: step time against memory",
    ),
    "pipeline": (
        "nanoray.bench.pipeline",
        "how long the stages of a pipeline wait under each schedule, and in theory",
    ),
    "compression": (
        "nanoray.bench.compression",
        "gradients in bf16, fp16, int8 and PowerSGD: bytes, step time and loss beside float32",
    ),
    "equivalence": (
        "nanoray.bench.equivalence",
        "every data-parallel mode against one process: losses, weights, bits",
    ),
    "scaling": (
        "nanoray.bench.scaling",
        "step time from 1 to 4096 ranks: a fitted model, checked at 3 and 4",
    ),
    "layouts": (
        "nanoray.bench.layouts",
        "steps that a dry run predicts for dp x tp, beside real ones at 2, 4 and 8 ranks",
    ),
    "step": (
        "nanoray.bench.step",
        "attention, optimizer, precision, compile, ...: what each gains a step on this CPU",
    ),
    "gpu": (
        "nanoray.bench.gpu",
        "the ladder of a step on a GPU: precision, attention, optimizer, compile, batch; MFU",
    ),
    "speedrun": (
        "nanoray.bench.speedrun",
        "seconds from a command to a validation loss on two CPU cores; all may join",
    ),
    "recovery": (
        "nanoray.bench.recovery",
        "how long training stands still when a rank is killed; goodput under kills",
    ),
    "precision": (
        "nanoray.bench.precision",
        "what 16 bits lose in training, by cause, what cures it, and time and memory of each mode",
    ),
    "mig": (
        "nanoray.bench.mig",
        "MIG slices: what is there, what would run where, and what it gains",
    ),
    "checkpoint": (
        "nanoray.bench.checkpoint",
        "what a checkpoint costs training: nanoray's two modes, torch.save and DCP, against the "
        "raw disk",
    ),
    "control": (
        "nanoray.bench.control",
        "the driver at 64 to 4000 ranks: heartbeats, CPU, memory, time to name a culprit",
    ),
    "soak": (
        "nanoray.bench.soak",
        "half an hour under random faults: the weights of a run without, nothing left behind",
    ),
}
# They take long, prove one thing each, and are asked for by name
NOT_IN_ALL = {"gpu", "soak", "speedrun"}
QUICK_IN_ALL = {
    "train": ["--arms", "plain,torchrun"],
    "recovery": ["--arms", "torchrun"],
    "step": ["--presets", "shakespeare-cpu"],
}  # its other arms start clusters, which takes minutes
FIGURES = (".png", ".svg", ".pdf")
# Flag -> a name to propose
FILES = {"json": "report.json", "figure": "report.png", "html": "report.html"}
USAGE = """\
usage: python -m nanoray.bench NAME [--workers N] [--quick] [--json FILE] [--figure FILE] [--html FILE] [flags]

{benches}
  {all:<12}all but gpu, soak and speedrun in turn, with their defaults; --figure takes a folder

  --workers N   ranks                       --json FILE    conditions, rows and verdicts
  --quick       few and short rounds        --figure FILE  a picture ({figures})
                                            --html FILE    one page with all of it, which needs nothing else

python -m nanoray.bench NAME --help shows the flags of one"""


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark, or all, and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        benches = "\n".join(f"  {name:<12}{text}" for name, (_, text) in BENCHES.items())
        print(USAGE.format(benches=benches, all="all", figures=", ".join(FIGURES)))
        return 0 if argv else 2
    try:
        if argv[0] == "all":
            return _run_all(argv[1:])
        if argv[0] not in BENCHES:
            refuse_unknown(argv[0], [*BENCHES, "all"], "bench")
        return _run(argv[0], argv[1:])
    except NanorayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print(
            "interrupted: everything that was started is ended, no report was written",
            file=sys.stderr,
        )
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


def _run(name: str, argv: list[str]) -> int:
    module, args = _load(name, argv)
    with interruptible():
        report = _measure(module, args, name, argv)
    if _speaks():
        section = _section(module, report, args.figure, bool(args.html))
        print(
            "\n".join([*module.paste(report), "", *report.lines(section.lines or None)]), flush=True
        )
        if args.json:
            report.write(args.json)
        _write_html(args.html, [section])
    else:  # rank 0 writes the report, and may know of its own broken collective only
        for line in (line for failure in report.failures for line in failure.splitlines()):
            print(f"rank {os.environ['RANK']}: {line}", file=sys.stderr, flush=True)
    return int(report.failed)


def _run_all(argv: list[str]) -> int:
    if "RANK" in os.environ:
        raise ConfigError(
            "bench all starts its own ranks, but RANK is set; run it without torchrun"
        )
    parser = _parser("all", "every benchmark in turn, each with its defaults")
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
    found: list[Section] = []
    with interruptible():
        for name in (name for name in BENCHES if name not in NOT_IN_ALL):
            flags = [f"--workers={args.workers}"] if args.workers else []
            flags += ["--quick", *QUICK_IN_ALL.get(name, [])] if args.quick else []
            print(f"== {name}", file=sys.stderr, flush=True)
            found.append(_attempt(name, flags, args))
            print(
                "\n".join([f"== {name}", "", *found[-1].report.lines(found[-1].lines or None), ""]),
                flush=True,
            )
    reports = [section.report for section in found]
    failed = [report.bench for report in reports if report.failed]
    skipped = [report.bench for report in reports if report.skipped]
    print(
        "\n".join(
            aligned([("bench", "verdict", "seconds", ""), *(r.summary for r in reports)], right={2})
        )
    )
    words = f"OK  {len(reports) - len(skipped)} benches" + (
        f", skipped: {', '.join(skipped)}" if skipped else ""
    )
    if len(skipped) == len(reports):
        failed, words = skipped, f"FAILED  every bench refuses workers = {args.workers}"
    elif failed:
        words = f"FAILED  {', '.join(failed)}"
    print(words, flush=True)  # before files are written: a full disk takes no result away
    if args.json:
        write_json(
            args.json, {"bench": "all", "reports": [r.to_dict() for r in reports], "ok": not failed}
        )
    _write_html(args.html, found)
    return int(bool(failed))


def _attempt(name: str, flags: list[str], args: argparse.Namespace) -> Section:
    """Run one of all benchmarks; whatever it raises is its failure, and the next ones go on.

    One that refuses the number of ranks, which others can use, is skipped.
    """
    try:
        module, own = _load(name, flags)
        report = _measure(module, own, name, flags)
        path = args.figure / f"{name}.png" if args.figure else None
        return _section(module, report, path, bool(args.html))
    except Exception as error:
        report = Report(name, conditions(name, flags))
        if args.workers and isinstance(error, ConfigError | PlacementError):
            report.skipped = str(error)
        else:
            report.failures.append(_story(error))
        return Section(report)


def _measure(module: Any, args: argparse.Namespace, name: str, argv: list[str]) -> Report:
    """Measure, and keep what was measured before something broke."""
    report, start = Report(name, conditions(name, argv)), time.monotonic()
    if args.quick:
        report.conditions["quick"] = (
            "few, short rounds: shows that it runs and which way it points, no more"
        )
    try:
        module.measure(args, report)
    except Exception as error:
        refused = isinstance(error, NanorayError) and not report.rows  # before anything ran
        if refused or not _speaks():  # for another rank the only way to be heard
            raise
        report.failures.append(_story(error))
    report.conditions["seconds"] = round(time.monotonic() - start, 1)
    report.conditions["load"]["after"] = load_average()
    return report


def _story(error: Exception) -> str:
    if isinstance(error, NanorayError):
        return str(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


def _speaks() -> bool:
    """Return whether this process prints and writes: under torchrun every rank runs this program,
    and one may.
    """
    return os.environ.get("RANK", "0") == "0"


def _section(module: Any, report: Report, figure: Path | None, svg: bool) -> Section:
    """Draw the figures, and let the benchmark say what it found in its own words, if it has any."""
    drawn, own = _picture(module, report, figure, svg), getattr(module, "lines", None)
    return Section(report, drawn, own(report) if own else (), getattr(module, "WRONG", ""))


def _picture(module: Any, report: Report, figure: Path | None, svg: bool) -> str:
    """Draw the figure file, and the SVG text for the page. A figure that fails is a failure of the
    report.
    """
    if not any(row.values for row in report.rows):
        return ""
    try:
        if figure:
            module.draw(report, figure)
        if svg:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "figure.svg")
                module.draw(report, path)
                return path.read_text(encoding="utf-8")
    except Exception as error:
        report.failures.append(f"figure: {_story(error)}")
    return ""


def _write_html(path: Path | None, sections: list[Section]) -> None:
    if path:
        from nanoray.bench.harness.html import write

        write(path, sections, {name: text for name, (_, text) in BENCHES.items()})


def _parser(name: str, text: str) -> Parser:
    parser = Parser(prog=f"python -m nanoray.bench {name}", description=text, allow_abbrev=False)
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
    return parser


def _load(name: str, argv: list[str]) -> tuple[Any, argparse.Namespace]:
    module: Any = importlib.import_module(BENCHES[name][0])
    parser = _parser(name, BENCHES[name][1])
    module.add_flags(parser)
    args = _flags(parser, argv)
    if args.figure and args.figure.suffix not in FIGURES:
        raise ConfigError(
            f"figure = {args.figure}: unknown kind of file; end it in {', '.join(FIGURES)}"
        )
    return module, args


def _flags(parser: Parser, argv: list[str], folders: tuple[str, ...] = ()) -> argparse.Namespace:
    """Read the flags. Raises ConfigError for unknown ones, and for files that cannot be written."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        refuse_unknown(unknown[0].split("=")[0], flags, "flag")
    for flag in FILES if _speaks() else ():  # now, and not after minutes
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into KeyboardInterrupt(signal); ignore more of them while
    things are ended.
    """

    def interrupt(signum: int, frame: Any) -> None:
        for each in old:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signum)

    old = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in old:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    code = main()
    # A rank of torchrun: its report is written, and tearing down gloo's threads can hang
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)
