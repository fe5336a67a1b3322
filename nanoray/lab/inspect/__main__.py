"""`nanoray inspect [TARGET]`: a model module by module; with --verify what one batch does in it.

TARGET is the folder of a run, or of several (the newest of them), a checkpoint, a YAML file, the
name of a preset, or a script with its own model. Without one it is the newest run in runs. Flags of
`nanoray train --help all` change the configuration:
`nanoray inspect gpt2-124m --micro_batch_size 4`. Words after -- are a script's own. Exit code 1:
--verify found a loss or a gradient that is not finite, or a parameter without a gradient.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nanoray.cli import (
    RUNS,
    Parser,
    exit_code_of,
    find_run_folder,
    name_program,
    tool_parser,
    writing,
)
from nanoray.config.load import run_folder_of
from nanoray.machine.atomic import read_json_lines, replace_text, without_nan


def make_parser() -> Parser:
    """Return the parser of `nanoray inspect`."""
    parser = tool_parser(name_program("inspect"), __doc__)
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        default=str(RUNS),
        help="run folder, step folder, YAML file, preset, or script.py [the newest run in runs]",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run one batch on this CPU: weights, gradients and activations of each module",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray inspect` and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    args, flags = make_parser().parse_known_args(words[:split])
    return exit_code_of(lambda: _run(args, flags, words[split + 1 :]))


def _run(args: argparse.Namespace, flags: list[str], arguments: list[str]) -> int:
    # Imported late: --help must not wait for torch.
    from nanoray.lab.inspect.one_batch import run_batch
    from nanoray.lab.inspect.target import find_target
    from nanoray.lab.inspect.text import lines
    from nanoray.lab.inspect.tree import dump
    from nanoray.observe.watch.dangers import FILE

    # What is known without computing anything, then what the run's folder and --verify add.
    target = _choose_target(args.target)
    inspected = find_target(target, flags, args.verify, arguments)
    description = dump(inspected)
    run = run_folder_of(target) if Path(target).expanduser().is_dir() else None
    if run:
        description["statistics"] = next(reversed(read_json_lines(run / FILE)), None)
    if args.verify:
        description["verify"] = run_batch(inspected, description)

    print("\n".join(lines(description)))
    if args.json:
        text = json.dumps(without_nan(description), indent=1) + "\n"
        with writing(args.json, "give another path"):
            replace_text(args.json, text)
        print(args.json)
    batch = description["verify"]
    return 1 if batch and batch["problems"] else 0


def _choose_target(target: str) -> str:
    """Return the target; of a folder of several runs the newest run. Raises ConfigError."""
    folder = Path(target).expanduser()
    is_folder = folder.is_dir() or folder == RUNS
    if is_folder and run_folder_of(target) is None:
        return str(find_run_folder(folder))
    return target


if __name__ == "__main__":
    raise SystemExit(main())
