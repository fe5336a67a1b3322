"""Which run a command is about: every command that takes a run finds it here."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanoray.errors import ConfigError
from nanoray.machine.atomic import read_json

RUNS = Path("runs")  # the default of out_dir


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument `run`, for `find_run_folder`."""
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=RUNS,
        metavar="RUN",
        help="folder of a run, or of several: the newest of them [runs]",
    )


def find_run_folder(path: Path) -> Path:
    """Return `path`, if it is the folder of a run, else the newest run in it.

    Raises ConfigError when there is none.
    """
    path = path.expanduser()
    if is_run_folder(path):
        return path
    runs = [folder for folder in path.glob("[!.]*") if is_run_folder(folder)]
    if not runs:
        raise ConfigError(
            f"no run in {path}; give the folder of a run, such as runs/2026-..., or the folder of "
            "several, whose newest is taken"
        )
    return max(runs, key=age_key)


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is that of a run, or of a program that `nanoray run` has run."""
    return (path / "run.json").is_file() or (path / "program.json").is_file()


def age_key(run: Path) -> tuple[float, str]:
    """Return when the newest command on a run started, and the run's name: a key to sort by."""
    spec = read_json(run / "run.json") or read_json(run / "program.json")
    return float(spec.get("started", 0.0)), run.name
