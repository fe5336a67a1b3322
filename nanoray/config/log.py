"""Keys of logging, evaluation, checkpoints, and of when a command ends."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from nanoray.config.fields import Group, Natural, Positive, field

PROFILED = 50  # the largest number of steps in one profile; each has thousands of operations


class LogKeys(Group):
    """What a run records and writes, and where a command stops before the schedule ends."""

    # When a command ends before its schedule
    stop_at: Natural = field(0, "log")
    """write a checkpoint and exit 0 after this step (0 = run to max_steps)"""

    target_loss: float = field(0.0, "log", ge=0)
    """write a checkpoint and exit 0 after the first evaluation with a validation loss of at most
    this (0 = run to max_steps)"""

    # Instruments; none of them changes a bit of the training
    statistics_every: Natural = field(0, "log")
    """steps between statistics of each layer in statistics.jsonl: weights, gradients, updates,
    activations (0 = never)"""

    profile: str = field("", "log")
    """A:B: torch.profiler records operations and memory of the steps from A to B - 1"""

    comm_trace: str = field("off", "log")
    """measure each collective: off | every=K (steps K/2 + 1 and K/2 + 2 of every K steps) |
    always"""

    # Records
    log_every: Positive = field(10, "log")
    """steps between metric records; only logging synchronises with the device"""

    # Evaluation
    eval_every: Natural = field(250, "log")
    """steps between evaluations on the validation split (0 = never)"""

    eval_samples: Positive = field(240, "log")
    """validation sequences per evaluation, evenly spaced; the same ones at every world size"""

    # Checkpoints
    checkpoint_every: Natural = field(250, "log")
    """steps between checkpoints (0 = only at the end and when asked to stop)"""

    checkpoint_mode: Literal["async", "sync"] = field("async", "log")
    """async (training waits for a copy in host memory, and a thread writes it) | sync (training
    waits until the checkpoint is on disk)"""

    keep_checkpoints: Positive = field(2, "log")
    """newest checkpoints to keep, besides the best one"""

    # After training
    sample_tokens: Natural = field(300, "log")
    """tokens of text to generate at the end (0 = none)"""

    tensorboard: bool = field(True, "log")
    """write TensorBoard events to the run's tb/ folder"""

    track: Literal["none", "wandb", "mlflow"] = field("none", "log")
    """report the run to a tracker of experiments, too: none | wandb (Weights & Biases) | mlflow;
    each needs its package, pip install 'nanoray[wandb]', and reads its own variables, WANDB_* or
    MLFLOW_*"""

    # Set by presets alone; a change of the recipe drops it
    expected_val_loss: dict[str, float] = Field(
        {}, json_schema_extra={"group": "log", "flag": False}
    )
    """per dataset: the validation loss that the complete recipe should reach or beat"""

    def check(self) -> None:
        """Raise ValueError for a text that is none of its key's forms."""
        if not re.fullmatch(r"off|always|every=[1-9]\d*", self.comm_trace):
            raise ValueError(
                f"comm_trace = {self.comm_trace!r} is none of off, always, every=K; try every=50"
            )
        if self.profile:
            self._check_profile()

    def _check_profile(self) -> None:
        form = re.fullmatch(r"[1-9]\d*:[1-9]\d*", self.profile)
        if not form or not self.profiled:
            raise ValueError(
                f"profile = {self.profile!r} is not A:B with 1 <= A < B; for steps 5, 6 and 7 "
                "write 5:8"
            )
        if len(self.profiled) > PROFILED:
            raise ValueError(
                f"profile = {self.profile}: {len(self.profiled)} steps, each of which has "
                f"thousands of operations; use {PROFILED} at most"
            )

    @property
    def trace_every(self) -> int:
        """K of comm_trace every=K; 1 for always, 0 for off. Steps K/2 + 1 and K/2 + 2 are traced."""
        if self.comm_trace == "off":
            return 0
        if self.comm_trace == "always":
            return 1
        return int(self.comm_trace.removeprefix("every="))

    @property
    def profiled(self) -> range:
        """The steps of `profile`."""
        first, _, stop = self.profile.partition(":")
        return range(int(first or 0), int(stop or 0))
