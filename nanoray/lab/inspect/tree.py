"""The dump of a model as plain data: what is known of it, and its modules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from nanoray import __version__
from nanoray.checkpoint.state.optimizers import name_of
from nanoray.cli.forecast.probe import Seen, WatchedForward, probe_on_fakes
from nanoray.lab.inspect.target import InspectTarget
from nanoray.machine.script_errors import one_line


def dump(target: InspectTarget) -> dict[str, Any]:
    """Return a description of a model without computing anything."""
    config = target.config
    notes = [*target.notes]

    # Shapes and counts come from a forward on fake tensors, where one is possible.
    watched = None
    try:
        watched = probe_on_fakes(target.model, target.loss, *target.example, config.precision)
    except Exception as error:
        # Any exception: a model that reads values, such as `.item()`, fails on fake tensors.
        # It may still run on real ones, so the dump goes on without what the forward gives.
        notes.append(
            f"tree without shapes and counts: a forward on fake tensors failed ({one_line(error)}); "
            "--verify has them"
        )

    # A script brings its optimizer as an object; any other model's is a name.
    optimizer: str = config.optimizer
    if target.optimizer:
        optimizer = name_of(target.optimizer)
    checkpoint = None
    if target.checkpoint:
        checkpoint = str(target.checkpoint)
    step = None
    if target.state:
        step = target.state.meta["step"]

    # The keys are the JSON's; scripts of users read them.
    return {
        "nanoray": __version__,
        "subject": target.title,
        "checkpoint": checkpoint,
        "step": step,
        "model": type(target.model).__name__,
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "precision": config.precision,
        "why_precision": target.why,
        "optimizer": optimizer,
        "micro_batch_size": target.micro,
        "modules": modules_of(target.model, watched),
        "notes": notes,
        # Sections that a flag asks for, or that only a run has.
        "verify": None,
        "statistics": None,
    }


def modules_of(model: nn.Module, watched: WatchedForward | None) -> list[dict[str, Any]]:
    """Return the modules in the model's order, each with what a forward has recorded of it."""
    rows = []
    for name, module in model.named_modules():
        # Only a module's direct parameters, so that the rows add up to the model.
        own = dict(module.named_parameters(recurse=False))
        depth = 0  # of the model itself, whose name is empty
        if name:
            depth = 1 + name.count(".")
        row: dict[str, Any] = {
            "name": name,
            "type": type(module).__name__,
            "depth": depth,
            "layer": layer_of(name),
            "parameters": sum(p.numel() for p in own.values()),
            "weights": {key: [*p.shape] for key, p in own.items()},
        }
        # Without a forward the row has the same keys, with empty values.
        seen = watched.seen[name] if watched else Seen()
        rows.append(row | asdict(seen))
    return rows


def layer_of(name: str) -> str:
    """Return the layer of a list that a module belongs to, such as blocks.3; "" for any other."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdigit() else ""
