"""Save a whole state as a checkpoint, in one call and without a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nanoray.checkpoint import files
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.writer import named_tensors


def save(
    folder: Path,
    state: StateDict,
    keep: int,
    attempt: str = "",
    fence: Callable[[], None] | None = None,
) -> Path:
    """Write `folder`/step_XXXXXXXX as a run's only writer does, and return its path."""
    draft = files.Draft(folder, state.meta["step"], attempt, fence)
    with draft.errors():
        draft.begin(sum(tensor.nbytes for tensor in named_tensors(state).values()))
    files.save(draft, state, 1, keep, lambda: None)
    return draft.final
