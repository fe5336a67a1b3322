"""Launch a script's own function: on Ray, or in this process, alone or as a launcher's rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from nanoray.cli import exit_code_of
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.machine.launchers import Place, describe_variables, place_of
from nanoray.machine.output import say
from nanoray.script.program import Program
from nanoray.script.settings import loaded_of, refuse_while_spawned


def launch_from_script(
    main: Callable[[Any], Any], config: Mapping[str, Any], ray: bool = True
) -> int:
    """Call `main(run)` on every rank of a new run, print errors, and return the exit code.

    A stop by Ctrl-C or SIGTERM returns its code, too, so the program that calls this goes on. A Ray
    that the program is connected to is used, and stays connected.

    `config` has keys of nanoray's configuration (`python -m nanoray.launch --help all`), such as workers,
    micro_batch_size, dp_mode, checkpoint_every, resume, and quiet. Under torchrun, srun or mpirun
    this process is one rank. Without `ray` it trains alone. With the key dry_run, `main` is called
    in this process and ends at `fit`, which prints the memory of a rank by part.
    """
    started = time.time()
    return exit_code_of(lambda: _launch(main, dict(config), ray, started))


def _launch(main: Callable[[Any], Any], config: dict[str, Any], ray: bool, started: float) -> int:
    refuse_while_spawned()
    loaded = loaded_of(config)
    place = place_of(os.environ)
    if place and ray:
        refuse_both(place, loaded.config, loaded.given)
    program = Program(main, loaded.given)
    if place or not ray:
        # It imports torch, which the driver does without.
        from nanoray.train.__main__ import run_here

        try:
            return run_here(loaded, started, program)
        except KeyboardInterrupt:  # the second Ctrl-C, or raised by the script itself
            say("stop     KeyboardInterrupt: ended at once, without a checkpoint of this step")
            return 130
    from nanoray.launch.__main__ import launch

    # In a program of the user's, such as a notebook, a stop ends the run and not the program.
    try:
        return launch(loaded, started, program)
    except SystemExit as stopped:
        return int(stopped.code or 0)


def refuse_both(place: Place, config: Config, given: frozenset[str]) -> None:
    """Raise ConfigError if a launcher has made this process a rank, and Ray is asked for, too.

    RANK and WORLD_SIZE = 1 are often left over: in a notebook that a torchrun started, in a pod.
    """
    asked_for = ""
    if "ray_address" in given and config.ray_address != "auto":
        asked_for = f"ray_address = {config.ray_address}"
    elif place.world_size == 1 and os.environ.get("RAY_ADDRESS"):
        asked_for = f"RAY_ADDRESS = {os.environ['RAY_ADDRESS']}"
    elif place.world_size == 1 and config.workers not in ("auto", 1):
        asked_for = f"workers = {config.workers}"
    if not asked_for:
        return
    variable = asked_for.split(" ")[0]
    raise ConfigError(
        f"{asked_for} asks for Ray, but {describe_variables(os.environ, place)} make this process "
        f"a rank; unset {place.launcher.rank} and {place.size_variable} to train on "
        f"Ray, or drop {variable} to train as that rank"
    )
