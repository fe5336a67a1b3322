"""Compare what a checkpoint contains with the list of the model's tensors that was saved with it."""

from __future__ import annotations

from nanoray.state.state_dict import StateDict


def missing_from(state: StateDict) -> list[str]:
    """Return a line for each tensor of the model that a checkpoint lacks, or has otherwise.

    `state` is a whole checkpoint, as `files.load` returns it without pieces.
    """
    lines = []
    for name, (kind, dtype, shape) in state.meta.get("tensors", {}).items():
        tensor = state.model.get(name)
        if tensor is None:
            lines.append(f"{name} ({kind}, {dtype} {shape}) is missing")
            continue
        found = str(tensor.dtype).removeprefix("torch.")
        if found != dtype or list(tensor.shape) != shape:
            lines.append(f"{name} is {found} {list(tensor.shape)} instead of {dtype} {shape}")
    return lines


def is_listed(state: StateDict) -> bool:
    """Return whether a checkpoint lists the model's tensors; those of older versions do not."""
    return "tensors" in state.meta
