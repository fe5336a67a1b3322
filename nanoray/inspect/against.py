"""How far two checkpoints are apart, tensor by tensor: `nanoray inspect A --against B`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoray.checkpoint.find import find_run
from nanoray.errors import CheckpointError
from nanoray.state import StateDict


def against(own: StateDict | None, path: Path) -> dict[str, Any]:
    """Compare the weights of a checkpoint with those of another one, which may be a run's newest.

    For each tensor, `relative` is RMS(own - other) / RMS(own); None where the other one has it in
    another shape, or not at all. Raises CheckpointError.
    """
    if own is None:
        raise CheckpointError(
            f"there are no weights to compare with {path}; name a run with a checkpoint, or one of "
            "them"
        )
    found = find_run(path, str(path), {})
    assert found, "find_run raises for a path without a checkpoint"
    other, rows = found.state, []
    for name, tensor in own.model.items():
        theirs, ours = other.model.get(name), tensor.double()
        row: dict[str, Any] = {
            "name": name,
            "shape": [*tensor.shape],
            "rms": ours.square().mean().sqrt().item(),
        }
        if theirs is None or theirs.shape != tensor.shape:
            row |= {"difference": None, "relative": None, "equal": False}
        else:
            apart = (ours - theirs.double()).square().mean().sqrt().item()
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
