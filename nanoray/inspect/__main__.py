"""`nanoray inspect TARGET`: the dump of a model, checked by one batch with --verify.

TARGET is the folder of a run, one of its checkpoints, a YAML file, the name of a preset, or a
script with its own model. Flags of `nanoray train --help` change the configuration: `nanoray
inspect gpt2-124m --tp 2 --world_size 8`. With --live: what a run does now, from the files in its
folder; nothing else goes with it. Exit code 1: --verify found something wrong.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nanoray.atomic import replace_text
from nanoray.cli import exit_code_of, tool_parser, writing
from nanoray.errors import ConfigError
from nanoray.run import newest_record


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray inspect` and return the exit code."""
    parser = tool_parser("nanoray inspect", __doc__)
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
        help="ranks to lay out [the run's; else workers, or tp*pp*ep]",
    )
    parser.add_argument(
        "--function", default="main", help="of a script: what nanoray.launch would call [main]"
    )
    return exit_code_of(lambda: _run(*parser.parse_known_args(argv)))


def _run(args: argparse.Namespace, flags: list[str]) -> int:
    if args.live:
        from nanoray.inspect import live

        given = [
            f"--{key}"
            for key in ("verify", "against", "json", "html", "world_size")
            if getattr(args, key)
        ] + flags
        if given:
            raise ConfigError(
                f"--live shows a run as it is, so {given[0]} would be ignored; drop one of the two"
            )
        print("\n".join(live.lines(Path(args.target).expanduser())))
        return 0
    from nanoray.checkpoint.tensorfile import plain
    from nanoray.inspect.against import against
    from nanoray.inspect.page import page
    from nanoray.inspect.subject import find_subject
    from nanoray.inspect.text import lines
    from nanoray.inspect.tree import dump
    from nanoray.inspect.verify import verify
    from nanoray.report.memory import read_memory

    if args.world_size is not None and args.world_size < 1:
        raise ConfigError(
            f"world_size = {args.world_size} is not a whole number above 0; give the ranks to lay "
            "out"
        )
    subject = find_subject(args.target, flags, args.world_size, args.function, args.verify)
    description: dict[str, Any] = dump(subject)
    description["verify"] = verify(subject, description) if args.verify else None
    description["statistics"] = newest_statistics(args.target)
    description["memory_timeline"] = [
        of_rank for folder in folders_of(args.target) for of_rank in read_memory(folder)
    ]
    description["against"] = against(subject.state, args.against) if args.against else None
    print("\n".join(lines(description)))
    _write(
        args.json, lambda: json.dumps(plain(description, "dump"), indent=1, allow_nan=False) + "\n"
    )
    _write(args.html, lambda: page(description))
    return 0 if not description["verify"] or description["verify"]["ok"] else 1


def newest_statistics(target: str) -> dict[str, Any] | None:
    """Return the newest statistics of the run that a run's or step's folder belongs to; None where
    there are none.
    """
    from nanoray.train.watch.dangers import FILE

    return next(
        (record for folder in folders_of(target) if (record := newest_record(folder, FILE))), None
    )


def folders_of(target: str) -> list[Path]:
    """Return the folder of the run that a run's or step's folder belongs to, in a list; empty for
    other targets.
    """
    path = Path(target).expanduser()
    return [folder for folder in (path, path.parent.parent) if (folder / "config.json").is_file()][
        :1
    ]


def _write(path: Path | None, text: Any) -> None:
    if path is None:
        return
    with writing(path, "give another path"):
        replace_text(path, text())
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
