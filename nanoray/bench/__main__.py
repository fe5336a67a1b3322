"""`python -m nanoray.bench NAME`: measure, print a table and verdicts, write JSON and a figure.

Every benchmark is a module with `add_flags(parser)`, `measure(args, report)`, `draw(report, path)` and
`paste(report)`, the lines for a README. Exit code 0: every arm ran and every target was met; 1: not; 2: wrong flags.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoray.bench.report import Report, conditions, load_average
from nanoray.errors import ConfigError, NanorayError

BENCHES = {
    "train": (
        "nanoray.bench.train",
        "the same recipe under python, torchrun, nanoray on Ray, and Ray's TorchTrainer",
    ),
}
FIGURES = (".png", ".svg", ".pdf")


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m nanoray.bench NAME [--json FILE] [--figure FILE] [--quick] [flags]\n")
        print("\n".join(f"  {name:<12}{text}" for name, (_, text) in BENCHES.items()))
        print("\npython -m nanoray.bench NAME --help shows the flags of one")
        return 0 if argv else 2
    try:
        if argv[0] not in BENCHES:
            raise ConfigError(f"unknown bench {argv[0]}; {_hint(argv[0], list(BENCHES))}")
        return _run(argv[0], argv[1:])
    except NanorayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(name: str, argv: list[str]) -> int:
    module: Any = importlib.import_module(BENCHES[name][0])
    args = _parse(module, name, argv)
    report = Report(name, conditions(name, argv))
    if args.quick:
        report.conditions["quick"] = "few, short rounds: shows that it runs and which way it points, no more"
    try:
        with interruptible():
            module.measure(args, report)
    except KeyboardInterrupt as stop:
        print("interrupted: everything that was started is ended, nothing was written", file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    report.conditions["load"]["after"] = load_average()
    if args.json:
        report.write(args.json)
    if args.figure:
        module.draw(report, args.figure)
    print("\n".join([*module.paste(report), "", *report.lines()]), flush=True)
    return int(report.failed)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(module: Any, name: str, argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"python -m nanoray.bench {name}", description=BENCHES[name][1], allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions, rows and verdicts")
    parser.add_argument("--figure", type=Path, metavar="FILE", help=f"draw them ({', '.join(FIGURES)})")
    parser.add_argument("--quick", action="store_true", help="few and short rounds; targets are shown, not judged")
    module.add_flags(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(f"unknown flag {unknown[0]}; {_hint(unknown[0].split('=')[0], flags)}")
    for path in filter(None, (args.json, args.figure)):  # now, and not after minutes of measuring
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"cannot write {path}: its folder is missing or read-only; make it first")
    if args.figure and args.figure.suffix not in FIGURES:
        raise ConfigError(f"figure = {args.figure}: unknown kind of file; end it in {', '.join(FIGURES)}")
    return args


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into KeyboardInterrupt(signal); ignore more of them while things are ended."""

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
    raise SystemExit(main())
