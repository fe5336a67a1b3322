"""`nanoray run [flags] train.py ...`: run any program as ranks on Ray, with what torchrun would give it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ray.util.placement_group import remove_placement_group

from nanoray.checkpoint.run_folder import lock_run, new_folder
from nanoray.cli import exit_code_of
from nanoray.config import Config
from nanoray.config.variables import values_of
from nanoray.launch.caller import in_copy_of_job, lasting_out_dir, ray_address
from nanoray.launch.connection import bounded, connected
from nanoray.launch.placement import START_TIMEOUT_S, Placement, slots_here
from nanoray.launch.program.driver import ProgramDriver, RankProgram
from nanoray.launch.program.files import write_outcome, write_program
from nanoray.launch.program.flags import KEYS, ProgramCommand, require_script
from nanoray.launch.program.folder import ProgramFolder
from nanoray.launch.signals import catch_signals
from nanoray.machine.launchers import refuse_many_starts
from nanoray.machine.output import say
from nanoray.machine.slots import Slots

STOPPING = b"\nSIGTERM to all ranks, which may save and end (Ctrl-C once more: end them now)\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(words))


def run(argv: list[str]) -> int:
    """Run a program as a command line says, and return its exit code. Raises NanorayError."""
    command = ProgramCommand.parse(argv)
    config, words = command.config, command.words
    folder = None
    if command.kind == "script":
        require_script(words[0])
    # Of a Ray job each node has a copy of the folder, in which the same relative path holds.
    if not in_copy_of_job():
        folder = ProgramFolder.of(command.kind, words, config.out_dir)
    if command.kind == "script" and (folder or Path(words[0]).is_absolute()):
        words = [str(Path(words[0]).resolve()), *words[1:]]
    program = RankProgram(
        command.kind,
        words,
        Path(),
        values_of(config.env, os.environ, started=False),
        config.max_failures,
        command.hang_timeout_s,
        command.grace_s,
        command.tee,
        folder,
        trace_every=command.trace_every,
        start_timeout_s=max(START_TIMEOUT_S, config.placement_timeout_s),
    )
    return launch(config, program, command.dry_run)


def launch(config: Config, program: RankProgram, dry_run: bool) -> int:
    """Take devices, run a program on them, and give everything back; return its exit code."""
    refuse_many_starts(os.environ, "`nanoray run`")
    address = ray_address(config)
    slots = None
    if address == "local":
        slots = slots_here(config)
        config = config.model_copy(update={"workers": slots.workers})
    what = " ".join([Path(program.words[0]).name, *program.words[1:]])
    if dry_run:
        say(f"run    {what}\n{_placement_line(config, address, slots)}")
        return 0

    if slots:  # Ray's temporary folder goes with it, but not that of its programs
        variables = {"TMPDIR": tempfile.gettempdir()} | program.variables
        program = replace(program, variables=variables)
    begun = time.monotonic()
    with connected(address, slots, dashboard=False), catch_signals(STOPPING) as stop:
        place = Placement.make(config, stop.check)
        try:
            folder = new_folder(Path(lasting_out_dir(config)).absolute(), config.name)
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            _lock, _ = lock_run(folder)  # as long as the program runs: reports ask for it
            say(
                f"run    {what}: {place.workers} rank(s) on {place.kind}, output in {folder}/logs\n"
            )
            program = replace(program, folder=folder)
            write_program(program, config.model_dump(include=set(KEYS)))
            driver = ProgramDriver(program, place, stop)
            code = driver.run()
            write_outcome(driver, place.kind, code, time.monotonic() - begun)
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
