"""Start a search: on Ray as `nanoray launch` starts a run, or here, alone or as a launcher's rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.base.atomic import read_json
from nanoray.base.clock import unix_time
from nanoray.cli import Loaded
from nanoray.errors import ConfigError, WorkerFailed
from nanoray.host.launchers import place_of
from nanoray.launch.own import refuse_both
from nanoray.own.settings import loaded_of, refuse_while_spawned
from nanoray.tune.may import KNOB_NAMES, MAY
from nanoray.tune.program import Tuning

BUDGET_S = 300.0
# A search is a run of another kind: it draws nothing, and can be resumed by its own file only
OF_A_SEARCH = {"tensorboard": False, "track": "none", "resume": "none", "faults": ""}


def tune_own(
    main: Callable[[Any], Any],
    config: Mapping[str, Any],
    budget_s: float,
    may: Sequence[str],
    ray: bool,
) -> Tuned:
    """Search for the fastest way to train a script's model. Raises NanorayError."""
    refuse_while_spawned()
    loaded = loaded_of(config)
    if ray:
        from nanoray.launch.__main__ import lasting_out_dir

        # As launch does, which does not say where it has searched
        out_dir = lasting_out_dir(loaded.config)
        loaded = loaded.set({"out_dir": out_dir}, "a Ray job's folder does not last")
    require_words(may)
    label = loaded.config.name
    program = Tuning(label, budget_s, tuple(may), main=main, given=loaded.given)
    started = unix_time()
    code = start(loaded, started, program, ray)
    folder = program.folders[0] if program.folders else folder_of(loaded, started)
    if code:
        kept = f", and what it has measured is in {folder}" if folder else ""
        raise WorkerFailed(f"the search ended with exit code {code}; its last lines say why{kept}")
    if folder is None:
        raise WorkerFailed(
            f"the search has ended well, but its folder in {loaded.config.out_dir} is gone; search again"
        )
    return read_tuned(folder)


def start(loaded: Loaded, started: float, program: Tuning, ray: bool = True) -> int:
    """Run a search on its ranks; return the exit code. Raises NanorayError."""
    if loaded.dry_run or loaded.scale:
        raise ConfigError("a search has no dry run; leave --dry_run to the run itself")
    loaded = loaded.set(OF_A_SEARCH | {"name": f"tune-{program.label}"}, "tune")
    place = place_of(os.environ)
    if place and ray:
        refuse_both(place, loaded.config, loaded.given)
    if place or not ray or _is_one_rank(loaded):
        # It imports torch, which the driver does without.
        from nanoray.train.__main__ import run_here

        return run_here(loaded, started, program)
    from nanoray.launch.__main__ import launch

    return launch(loaded, started, program)


def _is_one_rank(loaded: Loaded) -> bool:
    """Return whether a search needs no Ray: one rank, on this machine."""
    return (
        loaded.config.workers == 1
        and "ray_address" not in loaded.given
        and "RAY_ADDRESS" not in os.environ
    )


def require_words(may: Sequence[str] = (), leave: Sequence[str] = ()) -> None:
    """Raise ConfigError for an unknown word of --may or --leave."""
    for word in may:
        if word not in MAY:
            known = "; ".join(f"{known}: {what}" for known, what in MAY.items())
            raise ConfigError(f"may = {word} is none of the changes of a result: {known}")
    for word in leave:
        if word not in KNOB_NAMES:
            raise ConfigError(
                f"leave = {word} is nothing that a search changes: {', '.join(KNOB_NAMES)}"
            )


def folder_of(loaded: Loaded, started: float) -> Path | None:
    """Return the folder of the search that this process began at `started`."""
    for folder in sorted(Path(loaded.config.out_dir).glob("*_tune-*"), reverse=True):
        record = folder / "run.json"
        if record.is_file() and read_json(record).get("started") == started:
            return folder
    return None


# What a search has found, for a script that goes on with it.


@dataclass(frozen=True)
class Tuned:
    """What a search has found."""

    settings: dict[str, Any]
    """keys of the configuration to set, as users write them; {} where nothing is faster"""

    speedup: float
    """how many times as fast as the present setting, the median of turns that measured both; 1.0
    where nothing is faster"""

    folder: Path
    """the folder of the search: tuned.yaml, tune.json (all choices), report.html"""

    table: list[dict[str, Any]]
    """the rows of tune.json, the fastest first"""


def read_tuned(folder: Path) -> Tuned:
    """Return what a search has written into its folder."""
    table = read_json(folder / "tune.json")
    best = bool(table["tuned"])
    return Tuned(
        table["tuned"],
        table["verdict"]["median"] if best else 1.0,
        folder,
        table["rows"],
    )
