"""`nanoray inspect TARGET`: the dump of a model, checked by one batch with --verify.

TARGET is the folder of a run, one of its checkpoints, a YAML file, the name of a preset, or a
script with its own model. Flags of `python -m nanoray.train --help all` change the configuration:
`nanoray inspect gpt2-124m --tp 2 --world_size 8`. With --live: what a run does now, from the files
in its folder; nothing else goes with it. Exit code 1: --verify found something wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from nanoray.base.atomic import replace_text
from nanoray.checkpoint.run import newest_record
from nanoray.cli import (
    Parser,
    exit_code_of,
    name_program,
    take_output,
    tool_parser,
    writing,
)
from nanoray.config.load import run_folder_of
from nanoray.config.mesh import AXES
from nanoray.errors import ConfigError


def make_parser() -> Parser:
    """Return the parser of `nanoray inspect`."""
    parser = tool_parser(name_program("inspect"), __doc__)
    parser.add_argument(
        "target", metavar="TARGET", help="run folder, step folder, YAML file, preset, or script.py"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="build the model, run one batch on this CPU, check everything",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="of a running job: step, loss, ETA, and what each rank does",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OTHER",
        help="run or checkpoint to compare the weights with",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all of it as JSON, with every rank's pieces",
    )
    parser.add_argument(
        "--html",
        type=Path,
        nargs="?",
        const=Path("inspect.html"),
        metavar="FILE",
        help="write a page [inspect.html]",
    )
    parser.add_argument(
        "--world_size",
        type=int,
        metavar="N",
        help="ranks to lay out [the run's; else workers, or "
        f"{'*'.join(axis.key for axis in AXES)}]",
    )
    parser.add_argument(
        "--function", default="main", help="of a script: what nanoray.launch would call [main]"
    )
    parser.add_argument(
        "-o", type=Path, metavar="FILE", help="the same as --html or --json, by the file's ending"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray inspect` and return the exit code."""

    def run() -> int:
        args, flags = make_parser().parse_known_args(argv)
        take_output(args, {"html": (".html",), "json": (".json",)})
        return _run(args, flags)

    return exit_code_of(run)


def _run_live(args: argparse.Namespace, flags: list[str]) -> int:
    """Print what the run does now. Raises ConfigError for any flag that would have no effect."""
    from nanoray.tools.inspect import live

    given = []
    for key in ("verify", "against", "json", "html", "world_size"):
        if getattr(args, key):
            given.append(f"--{key}")
    given += flags
    if given:
        raise ConfigError(
            f"--live shows a run as it is, so {given[0]} would be ignored; drop one of the two"
        )
    print("\n".join(live.lines(Path(args.target).expanduser())))
    return 0


def _run(args: argparse.Namespace, flags: list[str]) -> int:
    if args.live:
        return _run_live(args, flags)

    # Imported late: --live and --help must not wait for torch.
    from nanoray.checkpoint.tensorfile import plain
    from nanoray.tools.inspect.against import against
    from nanoray.tools.inspect.page import page
    from nanoray.tools.inspect.subject import find_subject
    from nanoray.tools.inspect.text import lines
    from nanoray.tools.inspect.tree import dump
    from nanoray.tools.inspect.verify import verify
    from nanoray.tools.report.memory import read_memory
    from nanoray.train.watch.dangers import FILE

    if args.world_size is not None and args.world_size < 1:
        raise ConfigError(
            f"world_size = {args.world_size} is not a whole number above 0; give the ranks to lay "
            "out"
        )

    # What is known without computing anything, then what the run's folder and each flag add.
    subject = find_subject(args.target, flags, args.world_size, args.function, args.verify)
    description = dump(subject)
    run = run_folder_of(args.target) if Path(args.target).expanduser().is_dir() else None
    if run:
        description["statistics"] = newest_record(run, FILE)
        description["memory_timeline"] = read_memory(run)
    if args.verify:
        description["verify"] = verify(subject, description)
    if args.against:
        description["against"] = against(subject.state, args.against)
    print("\n".join(lines(description)))
    _write(
        args.json, lambda: json.dumps(plain(description, "dump"), indent=1, allow_nan=False) + "\n"
    )
    _write(args.html, lambda: page(description))

    verified = description["verify"]
    failed = verified and not verified["ok"]
    return 1 if failed else 0


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    with writing(path, "give another path"):
        replace_text(path, text())
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
