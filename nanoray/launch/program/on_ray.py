"""Takes devices on Ray, runs a program on them as ranks, and gives everything back."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ray.util.placement_group import remove_placement_group

from nanoray.checkpoint.run_folder import lock_run, new_folder
from nanoray.config import Config
from nanoray.launch.caller import lasting_out_dir, ray_address
from nanoray.launch.connection import bounded, connected
from nanoray.launch.placement import Placement, slots_here
from nanoray.launch.program.driver import ProgramDriver, RankProgram
from nanoray.launch.program.files import write_outcome, write_program
from nanoray.launch.program.flags import KEYS
from nanoray.launch.program.forked import ForkServer
from nanoray.launch.signals import catch_signals
from nanoray.machine.launchers import refuse_many_starts
from nanoray.machine.output import say
from nanoray.machine.slots import Slots

STOPPING = b"\nSIGTERM to all ranks, which may save and end (Ctrl-C once more: end them now)\n"


def launch(
    config: Config, program: RankProgram, dry_run: bool, server: ForkServer | None = None
) -> int:
    """Take devices, run a program on them, and give everything back; return its exit code.

    server: from which the programs of ranks on this machine are forked.
    """
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
            driver = ProgramDriver(program, place, stop, server)
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
