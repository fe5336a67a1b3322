"""Start a search: on Ray as `python -m nanoray.launch` starts a run, or here, alone or as a launcher's rank."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.cli import Loaded
from nanoray.errors import ConfigError, WorkerFailed
from nanoray.launch.from_script import refuse_both
from nanoray.machine.atomic import read_json
from nanoray.machine.launchers import place_of
from nanoray.script.settings import loaded_of, refuse_while_spawned

if TYPE_CHECKING:
    from nanoray.lab.tune.program import Tuning

BUDGET_S = 300.0
# A search is a run of another kind: it draws nothing, and is never resumed
OF_A_SEARCH = {"tensorboard": False, "track": "none", "resume": "none", "faults": ""}


def tune(
    main: Callable[[Any], Any],
    config: Mapping[str, Any] | None = None,
    budget_s: float = 300.0,
    may_differ: bool = False,
    ray: bool = True,
) -> dict[str, Any]:
    """Find the fastest settings for the model of `main(run)`, with the same result.

    `main`, `config` and `ray` are those of nanoray.launch. `main` is called up to its `fit` for
    each block of steps that is measured. `budget_s`: the seconds after which the best one so
    far counts. `may_differ`: also another micro batch, with which a model that draws random
    numbers or has batch norms has other losses. Returns the keys to set in the configuration of
    nanoray.launch; {} where nothing is faster. Raises NanorayError.
    """
    from nanoray.lab.tune.program import Tuning

    refuse_while_spawned()
    loaded = loaded_of(config or {})
    label = loaded.config.name
    program = Tuning(label, budget_s, may_differ, main=main, given=loaded.given)
    code, folder = start(loaded, time.time(), program, ray)
    if code:
        raise WorkerFailed(f"the search ended with exit code {code}; its last lines say why")
    found: dict[str, Any] = read_json(folder / "tune.json")["settings"]
    return found


def start(loaded: Loaded, started: float, program: Tuning, ray: bool = True) -> tuple[int, Path]:
    """Run a search on its ranks; return the exit code and its folder. Raises NanorayError."""
    if loaded.dry_run or loaded.scale:
        raise ConfigError("a search has no dry run; leave --dry_run to the run itself")
    if not 0 < program.budget_s < math.inf:
        raise ConfigError(f"budget_s = {program.budget_s:g}; give a number of seconds above 0")
    loaded = loaded.set(OF_A_SEARCH | {"name": f"tune-{program.label}"}, "tune")
    config = loaded.config
    place = place_of(os.environ)
    if place and ray:
        refuse_both(place, config, loaded.given)

    # One rank on this machine needs no Ray.
    asks_for_ray = "ray_address" in loaded.given or "RAY_ADDRESS" in os.environ
    if place or not ray or (config.workers == 1 and not asks_for_ray):
        # It imports torch, which the driver does without.
        from nanoray.train.__main__ import run_here

        code = run_here(loaded, started, program)
        return code, program.folders[0] if program.folders else Path()
    from nanoray.launch.__main__ import launch
    from nanoray.launch.caller import lasting_out_dir

    out_dir = lasting_out_dir(config)
    loaded = loaded.set({"out_dir": out_dir}, "a Ray job's folder does not last")
    code = launch(loaded, started, program)
    # The ranks have searched in other processes: its folder is the one that this command has begun.
    records = Path(out_dir).glob("*_tune-*/run.json")
    ours = [path.parent for path in records if read_json(path).get("started") == started]
    return code, ours[0] if ours else Path()
