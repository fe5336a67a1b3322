"""Compare two checkpoints tensor by tensor: `nanoray inspect A --against B`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoray.checkpoint.find import find_run
from nanoray.errors import CheckpointError
from nanoray.state.state_dict import StateDict


def against(own: StateDict | None, path: Path) -> dict[str, Any]:
    """Compare the weights of a checkpoint with those at `path`, a checkpoint or a run.

    For each tensor, `relative` is RMS(own - other) / RMS(own). It is None where the other
    checkpoint lacks the tensor or holds it in another shape. Raises CheckpointError.
    """
    if own is None:
        raise CheckpointError(
            f"there are no weights to compare with {path}; name a run with a checkpoint, or one of "
            "them"
        )
    found = find_run(path, str(path), {})
    assert found, "find_run raises for a path without a checkpoint"
    other = found.state

    # In float64: the difference of two close bf16 tensors would otherwise round to 0.
    rows = []
    for name, tensor in own.model.items():
        ours = tensor.double()
        theirs = other.model.get(name)
        row: dict[str, Any] = {
            "name": name,
            "shape": [*tensor.shape],
            "rms": ours.square().mean().sqrt().item(),
        }
        if theirs is None or theirs.shape != tensor.shape:
            row |= {"difference": None, "relative": None, "equal": False}
        else:
            apart = (ours - theirs.double()).square().mean().sqrt().item()
            # A tensor of zeros, such as a new bias, has no relative distance.
            relative = apart / row["rms"] if row["rms"] else None
            row |= {
                "difference": apart,
                "relative": relative,
                "equal": bool((tensor == theirs).all()),
            }
        rows.append(row)

    missing = [name for name in other.model if name not in own.model]
    return {
        "path": str(found.path),
        "step": other.meta["step"],
        "tensors": rows,
        "only_there": missing,
    }
