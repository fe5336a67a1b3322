"""What is done with the trained model when a run has finished: a sample of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from nanoray.checkpoint.resume import newest_valid
from nanoray.errors import NanorayError
from nanoray.train.tasks import Task


def sample_of(
    task: Task, model: nn.Module | None, checkpoints: Path, note: Callable[[str], None]
) -> str | None:
    """Return a sample of the trained model, where the task has one. (rank 0 only)

    model: with all weights; None: it is read from the newest of the run's checkpoints.
    """

    def whole_model() -> nn.Module:
        if model is not None:
            return model
        newest, _ = newest_valid(checkpoints)
        assert newest, "a run saves before it ends"
        read = task.model()
        read.load_state_dict(newest.state.model)
        return read

    try:
        return task.closing(whole_model)
    except NanorayError as error:
        # Training is done and saved; the sample is optional.
        note(f"warning  no sample of text: {error}")
        return None
