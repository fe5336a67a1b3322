"""The command line of `nanoray run`: its flags, and the program after them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.cli.parsers import Parser
from nanoray.config import Config, make_config, refuse_unknown_key
from nanoray.config.run import name_of_file
from nanoray.errors import ConfigError
from nanoray.script.settings import DEFAULTS

# Keys of the configuration that are flags here, with the same words and the same checks
KEYS = (
    "workers",
    "cpus_per_worker",
    "device",
    "placement",
    "placement_timeout_s",
    "ray_address",
    "out_dir",
    "name",
    "env",
    "max_failures",
)
ABOUT = """Run an unmodified program as ranks on Ray: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT and the rest of what torchrun sets are in its environment."""


@dataclass(frozen=True)
class ProgramCommand:
    """What a command line of `nanoray run` asks for."""

    kind: str  # script | module | command
    words: list[str]  # the script, module or command as it was given, and its arguments
    config: Config
    hang_timeout_s: float
    grace_s: float
    tee: str
    trace_every: int  # 0: no trace
    dry_run: bool

    @classmethod
    def parse(cls, argv: list[str], besides: Mapping[str, Any] | None = None) -> ProgramCommand:
        """Read a command line. Raises ConfigError.

        besides: keys of the configuration that are no flags here.
        """
        known, unknown = build_parser().parse_known_args(argv)
        if unknown:
            flags = [*KEYS, *vars(known)]
            refuse_unknown_key(unknown[0].partition("=")[0], flags, "nanoray run --help")
        args = vars(known)
        words: list[str] = args["program"]
        kind = "module" if args["module"] else "script"
        if words[:1] == ["--"]:
            kind, words = "command", words[1:]
        if not words:
            raise ConfigError("no program; give a script, -m MODULE, or -- COMMAND")
        if args["trace"] and kind == "command":
            raise ConfigError(
                "--trace goes with a script or -m, not with a command: only a process of Python "
                "that `nanoray run` starts itself can be traced"
            )
        if args["trace_every"] < 1:
            raise ConfigError(
                f"trace_every = {args['trace_every']} but it is a number of steps from 1"
            )
        keys = {key: args[key] for key in KEYS if key in args}
        keys.setdefault("name", name_of_file(words[0]))
        config = make_config(DEFAULTS | {"max_failures": 3} | keys | dict(besides or {}))
        return cls(
            kind,
            words,
            config,
            args["hang_timeout"],
            args["grace"],
            args["tee"],
            args["trace_every"] if args["trace"] else 0,
            args["dry_run"],
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags before the program."""
    parser = Parser(
        "nanoray run",
        usage="nanoray run [flags] train.py [its arguments]\n"
        "       nanoray run [flags] -m package.module [its arguments]\n"
        "       nanoray run [flags] -- command [its arguments]",
        description=ABOUT,
        allow_abbrev=False,
    )
    for key in KEYS:
        about = Config.model_fields[key].description
        action = "append" if key == "env" else "store"
        parser.add_argument(f"--{key}", default=argparse.SUPPRESS, help=about, action=action)
    parser.add_argument(
        "--hang_timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds in which no rank prints, computes or, with --trace, ends a collective, until all "
        "start again; 0: for ever",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL",
    )
    parser.add_argument(
        "--tee",
        choices=["0", "all"],
        default="0",
        help="whose output is shown: rank 0's as it comes, or all lines with [rank]",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="note every collective of torch.distributed, by optimizer step (docs/run.md)",
    )
    parser.add_argument(
        "--trace_every",
        type=int,
        default=10,
        metavar="K",
        help="with --trace, after the first 20 steps: note two steps of K; 1: all",
    )
    parser.add_argument("--dry_run", action="store_true", help="show what would run, and end")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser


def require_script(path: str) -> None:
    """Raise ConfigError for a script that is no file."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} is no file; for a command write `nanoray run -- {path}`")
