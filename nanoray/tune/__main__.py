"""`nanoray tune`: find the fastest way to train a recipe on this machine or cluster, by measuring."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nanoray.base.clock import unix_time
from nanoray.cli import Page, Parser, exit_code_of, name_program, parse_args
from nanoray.config.load import run_folder_of
from nanoray.errors import ConfigError
from nanoray.tune.command import BUDGET_S, require_words, start
from nanoray.tune.may import KNOB_NAMES, MAY
from nanoray.tune.program import Tuning

PAGE = Page(
    "Find the fastest way to train a recipe here: real steps of many settings, side by side. Losses "
    "stay as they are, up to rounding.",
    (
        ("{prog} shakespeare-cpu", "on the ranks that `nanoray launch` would take"),
        ("{prog} gpt2-124m --workers 8 --budget 10m", "also how eight ranks share the work"),
        ("{prog} my.yaml --may precision,masks", "also what changes the losses"),
        ("{prog} --resume runs/..._tune-gpt2-124m", "go on with a search, with another budget"),
        ("nanoray launch --config runs/..._tune-gpt2-124m/tuned.yaml", "train with what was found"),
    ),
    sections=(
        (
            "of the search",
            (
                ("--budget 5m", "when to stop: seconds, or with s, m or h [5m]"),
                ("--may A,B", f"what else may change: {', '.join(MAY)} [nothing]"),
                ("--leave A,B", f"what stays as it is, of {', '.join(KNOB_NAMES)}"),
                ("--resume auto|FOLDER", "go on with the newest search for this run, or with one"),
            ),
        ),
    ),
    usage="[RECIPE] [flags of the search] [flags of the run]",
    more="RECIPE is a preset or a YAML file. The flags of a run, such as --workers, are those of "
    "`python -m nanoray.launch`; --help all prints them.",
)
AUTO = "auto"  # of --resume: the newest search of this name, if it was for the same run
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def main(argv: list[str] | None = None) -> int:
    """Search, print the table, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: _run(words))


def _run(argv: list[str]) -> int:
    started = unix_time()
    prog = name_program("tune")
    own = Parser(prog, add_help=False, allow_abbrev=False)
    own.add_argument("--budget", default=f"{BUDGET_S:g}")
    own.add_argument("--may", default="")
    own.add_argument("--leave", default="")
    own.add_argument("--resume", default="")
    args, flags = own.parse_known_args(argv)
    budget_s = seconds_of(args.budget)
    may = tuple(word for word in args.may.split(",") if word)
    leave = tuple(word for word in args.leave.split(",") if word)
    require_words(may, leave)
    loaded = parse_args([*recipe_of(flags, args.resume), *rest_of(flags)], prog, PAGE)
    label = loaded.config.name.removeprefix("tune-")
    earlier = args.resume
    if earlier == AUTO:
        earlier = newest_search(Path(loaded.config.out_dir), label)
    earlier = str(Path(earlier).resolve()) if earlier else ""
    program = Tuning(label, budget_s, may, leave, earlier, if_same=args.resume == AUTO)
    return start(loaded, started, program)


def recipe_of(flags: list[str], resume: str) -> list[str]:
    """Return the flags of the recipe that the first word names, or of the search that goes on."""
    if resume and resume != AUTO:
        folder = run_folder_of(resume)
        if folder is None or not (folder / "tune.jsonl").is_file():
            raise ConfigError(f"resume = {resume} is no folder of a search; give runs/..._tune-...")
        return ["--config", str(folder / "config.json")]
    if not flags or flags[0].startswith("-"):
        return []
    if Path(flags[0]).suffix in (".yaml", ".yml", ".json"):
        return ["--config", flags[0]]
    return ["--preset", flags[0]]


def newest_search(out_dir: Path, label: str) -> str:
    """Return the folder of the newest search for runs of this name; "" without one."""
    found = sorted(path.parent for path in out_dir.glob(f"*_tune-{label}*/tune.jsonl"))
    return str(found[-1]) if found else ""


def rest_of(flags: list[str]) -> list[str]:
    """Return the flags behind the recipe."""
    return flags[1:] if flags and not flags[0].startswith("-") else flags


def seconds_of(text: str) -> float:
    """Return the seconds of a budget such as 90, 90s, 5m or 1h. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or not float(match[1]) > 0:
        raise ConfigError(f"budget = {text} is no time; give 90s, 5m or 1h")
    return float(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    raise SystemExit(main())
