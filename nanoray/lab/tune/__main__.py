"""`nanoray tune`: find the fastest way to train a recipe on this machine or cluster, by measuring."""

from __future__ import annotations

import shutil
import sys
import time
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from nanoray.cli import Parser, exit_code_of, name_program, parse_args
from nanoray.errors import ConfigError
from nanoray.lab.tune.command import BUDGET_S, start

ABOUT = """Find the fastest way to train a recipe here: real steps of many settings, side by side. Losses
stay as they are, up to rounding. RECIPE is a preset or a YAML file.

  {prog} shakespeare-cpu
      on the ranks that `python -m nanoray.launch` would take
  {prog} gpt2-124m --workers 8 --budget_s 600
      also how eight ranks share the work
  {prog} my.yaml --only micro_batch,threads
      these settings alone
  python -m nanoray.launch --config runs/..._tune-gpt2-124m/tuned.yaml
      train with what was found
"""


def main(argv: list[str] | None = None) -> int:
    """Search, print the table, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: _run(words))


def _run(argv: list[str]) -> int:
    started = time.time()
    prog = name_program("tune")
    own = Parser(
        prog,
        usage=f"{prog} [RECIPE] [flags of the search] [flags of the run]",
        description=ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    own.add_argument(
        "--budget_s",
        type=float,
        default=BUDGET_S,
        metavar="N",
        help=f"when to stop, in seconds [{BUDGET_S:g}]",
    )
    own.add_argument(
        "--only",
        default="",
        metavar="A,B",
        help="what may change, as docs/tune.md names it [all of it]",
    )
    own.add_argument(
        "--may_differ",
        action="store_true",
        help="also with other masks of dropout, or statistics of batch norms",
    )
    own.add_argument("--write", type=Path, metavar="FILE", help="copy tuned.yaml to a file")
    args, flags = own.parse_known_args(argv)
    loaded = parse_args(with_recipe(flags), prog, own.format_help())

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
