"""`nanoray run [flags] train.py ...`: run any program as ranks on Ray, with what torchrun would give it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from ray.util.placement_group import remove_placement_group

from nanoray.base.output import say
from nanoray.checkpoint.run import new_folder
from nanoray.cli import exit_code_of
from nanoray.config import Config, make_config
from nanoray.config.run import name_of_file
from nanoray.config.variables import values_of
from nanoray.errors import ConfigError
from nanoray.host.gpus import discover_gpus
from nanoray.host.host import available_cpus
from nanoray.host.launchers import refuse_many_starts
from nanoray.host.slots import Slots, local_slots
from nanoray.launch.caller import (
    caller_address,
    in_copy_of_job,
    lasting_out_dir,
    ray_address,
)
from nanoray.launch.connection import bounded, connected, using
from nanoray.launch.placement import Placement
from nanoray.launch.program.driver import ProgramDriver, RankProgram
from nanoray.launch.signals import catch_signals
from nanoray.own.settings import DEFAULTS

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


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(words))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags before the program."""
    parser = argparse.ArgumentParser(
        "nanoray run",
        usage="nanoray run [flags] train.py [its arguments]\n"
        "       nanoray run [flags] -m package.module [its arguments]\n"
        "       nanoray run [flags] -- command [its arguments]",
        description=ABOUT,
        allow_abbrev=False,
    )
    for key in KEYS:
        about = Config.model_fields[key].description
        parser.add_argument(f"--{key}", default=argparse.SUPPRESS, help=about)
    parser.add_argument(
        "--hang_timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds in which no rank prints or computes, until all start again; 0: for ever",
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
    parser.add_argument("--dry_run", action="store_true", help="show what would run, and end")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser


def run(argv: list[str]) -> int:
    """Run a program as a command line says, and return its exit code. Raises NanorayError."""
    args = vars(build_parser().parse_args(argv))
    words: list[str] = args.pop("program")
    kind = "module" if args.pop("module") else "script"
    if words[:1] == ["--"]:
        kind, words = "command", words[1:]
    if not words:
        raise ConfigError("no program; give a script, -m MODULE, or -- COMMAND")
    if kind == "script":
        path = Path(words[0])
        if not path.is_file():
            raise ConfigError(
                f"{words[0]} is no file; for a command write `nanoray run -- {words[0]}`"
            )
        # Of a Ray job each node has a copy of the folder, in which the same relative path holds.
        if not in_copy_of_job() or path.is_absolute():
            words = [str(path.resolve()), *words[1:]]
    keys = {key: args[key] for key in KEYS if key in args}
    keys.setdefault("name", name_of_file(words[0]))
    config = make_config(DEFAULTS | {"max_failures": 3} | keys)
    program = RankProgram(
        kind,
        words,
        Path(),
        values_of(config.env, os.environ, started=False),
        config.max_failures,
        args["hang_timeout"],
        args["grace"],
        args["tee"],
    )
    return launch(config, program, args["dry_run"])


def launch(config: Config, program: RankProgram, dry_run: bool) -> int:
    """Take devices, run a program on them, and give everything back; return its exit code."""
    refuse_many_starts(os.environ, "`nanoray run`")
    attached = caller_address(config)
    address = attached or ray_address(config)
    slots = None
    if address == "local":
        wanted = None if config.workers == "auto" else config.workers
        slots = local_slots(config.device, wanted, discover_gpus(), available_cpus())
        config = config.model_copy(update={"workers": slots.workers})
    what = " ".join([Path(program.words[0]).name, *program.words[1:]])
    if dry_run:
        say(f"run    {what}\n{_placement_line(config, address, slots)}")
        return 0

    begun = time.monotonic()
    session = using(attached) if attached else connected(address, slots, dashboard=False)
    with session, catch_signals() as stop:
        place = Placement.make(config, stop.check)
        try:
            folder = new_folder(Path(lasting_out_dir(config)).absolute(), config.name)
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            say(
                f"run    {what}: {place.workers} rank(s) on {place.kind}, output in {folder}/logs\n"
            )
            code = ProgramDriver(replace(program, folder=folder), place, stop).run()
        finally:
            bounded(lambda: remove_placement_group(place.group))
    say(f"\nend    exit code {code} after {time.monotonic() - begun:.1f} s")
    return code


def _placement_line(config: Config, address: str, slots: Slots | None) -> str:
    if slots:
        return f"where  {slots.workers} x {slots.kind} on this machine ({slots.reason})"
    return f"where  {config.workers} rank(s) on the cluster at {address}"


if __name__ == "__main__":
    raise SystemExit(main())
