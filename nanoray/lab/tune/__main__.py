"""`nanoray tune`: find the fastest way to train a recipe on this machine or cluster, by measuring."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

from nanoray.cli import Page, Parser, exit_code_of, name_program, parse_args
from nanoray.errors import ConfigError
from nanoray.lab.tune.command import BUDGET_S, require_words, start
from nanoray.lab.tune.program import Tuning
from nanoray.lab.tune.request import KNOB_NAMES, MAY

PAGE = Page(
    "Find the fastest way to train a recipe here: real steps of many settings, side by side. Losses "
    "stay as they are, up to rounding.",
    (
        ("{prog} shakespeare-cpu", "on the ranks that `python -m nanoray.launch` would take"),
        ("{prog} gpt2-124m --workers 8 --budget 10m", "also how eight ranks share the work"),
        ("{prog} my.yaml --may precision,masks", "also what changes the losses"),
        ("{prog} my.yaml --micro_batch_size auto", "the micro batch alone"),
        (
            "python -m nanoray.launch --config runs/..._tune-gpt2-124m/tuned.yaml",
            "train with what was found",
        ),
    ),
    sections=(
        (
            "of the search",
            (
                ("--budget 5m", "when to stop: seconds, or with s, m or h [5m]"),
                ("--may A,B", f"what else may change: {', '.join(MAY)} [nothing]"),
                ("--leave A,B", f"what stays as it is, of {', '.join(KNOB_NAMES)}"),
                ("--write FILE", "copy tuned.yaml to a file"),
            ),
        ),
    ),
    usage="[RECIPE] [flags of the search] [flags of the run]",
    more="RECIPE is a preset or a YAML file. The flags of a run, such as --workers, are those of "
    "`python -m nanoray.launch`; --help all prints them.",
)
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def main(argv: list[str] | None = None) -> int:
    """Search, print the table, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: _run(words))


def _run(argv: list[str]) -> int:
    started = time.time()
    prog = name_program("tune")
    own = Parser(prog, add_help=False, allow_abbrev=False)
    own.add_argument("--budget", default=f"{BUDGET_S:g}")
    own.add_argument("--may", default="")
    own.add_argument("--leave", default="")
    own.add_argument("--write", type=Path)
    args, flags = own.parse_known_args(argv)
    budget_s = seconds_of(args.budget)
    may, leave = (tuple(filter(None, text.split(","))) for text in (args.may, args.leave))
    require_words("may", may, MAY)
    require_words("leave", leave, KNOB_NAMES)

    loaded = parse_args(with_recipe(flags), prog, PAGE)
    program = Tuning(loaded.config.name.removeprefix("tune-"), budget_s, may, leave)
    code, folder = start(loaded, started, program)
    if args.write and not code:
        shutil.copyfile(folder / "tuned.yaml", args.write)
    return code


def with_recipe(flags: list[str]) -> list[str]:
    """Return flags of a run, with the flag of the recipe that the first word may name."""
    if not flags or flags[0].startswith("-"):
        return flags
    is_file = Path(flags[0]).suffix in (".yaml", ".yml", ".json")
    return ["--config" if is_file else "--preset", *flags]


def seconds_of(text: str) -> float:
    """Return the seconds of a budget such as 90, 90s, 5m or 1h. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or not float(match[1]) > 0:
        raise ConfigError(f"budget = {text} is no time; give 90s, 5m or 1h")
    return float(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    raise SystemExit(main())
