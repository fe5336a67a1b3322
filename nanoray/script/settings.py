"""The configuration of a script that brings its own model. Imports no torch: the driver uses it."""

from __future__ import annotations

import multiprocessing
import operator
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsIndex

from nanoray.cli import Loaded
from nanoray.config import Config
from nanoray.config.load import flatten
from nanoray.config.paths import expand_paths
from nanoray.config.run import name_of_file
from nanoray.errors import ConfigError

# A script brings its own model and optimizer, so these keys do not follow a recipe.
DEFAULTS = {
    "name": "own",
    "model": "own",
    "micro_batch_size": 32,
    "max_steps": 1000,
    "schedule": "constant",
    "warmup_steps": 0,
    "grad_clip": 0.0,
    "sample_tokens": 0,
}
# Keys that would move the rates of nanoray's own optimizers
RATES = ("lr", "min_lr", "schedule", "warmup_steps", "decay_fraction")


def loaded_of(config: Mapping[str, Any] | Config) -> Loaded:
    """Return a script's configuration, with the keys that it has set.

    Besides those of nanoray's configuration they are dry_run, quiet and verbose. Raises ConfigError.
    """
    if isinstance(config, Config):
        config = {key: getattr(config, key) for key in config.model_fields_set}
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the configuration is a {type(config).__name__}; give a dict or a nanoray.Config, or "
            "the run that nanoray.launch passes to your function"
        )
    keys = expand_paths(flatten(config))
    dry_run = bool(keys.pop("dry_run", False))
    quiet = bool(keys.pop("quiet", False))
    verbose = bool(keys.pop("verbose", False))
    # Another script of the same folder has runs of its own.
    defaults = dict(DEFAULTS)
    script = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    if script:
        defaults["name"] = name_of_file(script)
    values = defaults | keys
    if values["model"] != "own":
        raise ConfigError(f"model = {values['model']}, but the script brings its own; drop the key")
    rates = [key for key in RATES if key in keys]
    if rates:
        raise ConfigError(
            f"{', '.join(rates)} would have no effect: the rates are those of the script's optimizer; "
            "give RuntimeEngine(..., scheduler=...) a scheduler of torch, or a function from the step to "
            "a factor"
        )
    # A global batch that was given alone decides the micro batch, not the default above.
    if "global_batch_size" in keys and "micro_batch_size" not in keys:
        values["micro_batch_size"] = 0
    layers = [("the default of a script's run", defaults), ("script", keys)]
    loaded = Loaded.of(values, layers, frozenset(keys))
    return replace(loaded, dry_run=dry_run, quiet=quiet, verbose=verbose)


# The value of `_inheriting`, which is True in a process that multiprocessing has spawned, in a rank
BY_RANK = "by a rank"


class ReachedRun(BaseException):
    """A rank that runs its script's file has come to a run in it: there the file ends for the rank."""


def refuse_while_spawned() -> None:
    """Raise ConfigError in a process that multiprocessing has spawned, while it imports the script.

    It only needs the script's functions. A `fit` that it meets there would be a run of its own, in
    each such process. Raises ReachedRun in a rank on Ray that runs the script's file.
    """
    imports = getattr(multiprocessing.current_process(), "_inheriting", False)
    if not imports:
        return
    if imports == BY_RANK:
        raise ReachedRun
    raise ConfigError(
        "a process that multiprocessing has spawned imports this script, and came upon a run "
        "there; put what trains below `if __name__ == '__main__':`, or let processes fork"
    )


def steps_of(steps: SupportsIndex | None) -> int | None:
    """Return the steps that `fit` was given as an int. Raises ConfigError below 1."""
    number = None if steps is None else operator.index(steps)
    if number is not None and number < 1:
        raise ConfigError(f"steps = {number} of fit; at least one")
    return number


def with_steps(loaded: Loaded, steps: int | None) -> Loaded:
    """Return a configuration with this number of steps; None: with its own."""
    if steps is None:
        return loaded
    return loaded.set({"max_steps": steps}, "steps of fit")
