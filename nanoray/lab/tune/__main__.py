"""`nanoray tune`: find the fastest way to train a recipe on this machine or cluster, by measuring."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from nanoray.cli import Page, Parser, exit_code_of, name_program, parse_args
from nanoray.errors import ConfigError
from nanoray.lab.tune.command import BUDGET_S, start

PAGE = Page(
    "Find the fastest way to train a recipe here: real steps of many settings, side by side. Losses "
    "stay as they are, up to rounding.",
    (
        ("{prog} shakespeare-cpu", "on the ranks that `python -m nanoray.launch` would take"),
        ("{prog} gpt2-124m --workers 8 --budget_s 600", "also how eight ranks share the work"),
        ("{prog} my.yaml --only micro_batch,threads", "these settings alone"),
        (
            "python -m nanoray.launch --config runs/..._tune-gpt2-124m/tuned.yaml",
            "train with what was found",
        ),
    ),
    sections=(
        (
            "of the search",
            (
                ("--budget_s N", f"when to stop, in seconds [{BUDGET_S:g}]"),
                ("--only A,B", "what may change, as docs/tune.md names it [all of it]"),
                ("--may_differ", "also with other masks of dropout, or statistics of batch norms"),
                ("--write FILE", "copy tuned.yaml to a file"),
            ),
        ),
    ),
    usage="[RECIPE] [flags of the search] [flags of the run]",
    more="RECIPE is a preset or a YAML file. The flags of a run, such as --workers, are those of "
    "`python -m nanoray.launch`; --help all prints them.",
)


def main(argv: list[str] | None = None) -> int:
    """Search, print the table, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: _run(words))


def _run(argv: list[str]) -> int:
    started = time.time()
    prog = name_program("tune")
    own = Parser(prog, add_help=False, allow_abbrev=False)
    own.add_argument("--budget_s", type=float, default=BUDGET_S)
    own.add_argument("--only", default="")
    own.add_argument("--may_differ", action="store_true")
    own.add_argument("--write", type=Path)
    args, flags = own.parse_known_args(argv)
    loaded = parse_args(with_recipe(flags), prog, PAGE)

    # Imported late: --help must not wait for torch.
    from nanoray.lab.tune.knobs import KNOBS
    from nanoray.lab.tune.program import Tuning

    only = args.only.split(",") if args.only else KNOBS
    for name in only:
        if name not in KNOBS:
            raise ConfigError(f"only = {name} is unknown; known: {', '.join(KNOBS)}")
    label = loaded.config.name.removeprefix("tune-")
    code, folder = start(loaded, started, Tuning(label, args.budget_s, args.may_differ, only))
    if args.write and not code:
        shutil.copyfile(folder / "tuned.yaml", args.write)
    return code


def with_recipe(flags: list[str]) -> list[str]:
    """Return flags of a run, with the flag of the recipe that the first word may name."""
    if not flags or flags[0].startswith("-"):
        return flags
    is_file = Path(flags[0]).suffix in (".yaml", ".yml", ".json")
    return ["--config" if is_file else "--preset", *flags]


if __name__ == "__main__":
    raise SystemExit(main())
