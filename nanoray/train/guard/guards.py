"""Keep a step out of the weights when its gradient norm or loss is not finite.

    gradient norm, losses ─► check() ─► Verdict: go on, leave the update out, or roll back

After the all-reduce every rank holds the same gradients, so all ranks reach the same decision
without communication. On CPU the host reads the norm of each step. On a GPU it reads the norms on
logged steps, where it waits for the device anyway. Until then the device itself leaves out a bad
update; with `stop` and `rollback` it also leaves out later ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanoray.config import Batch, Config
from nanoray.errors import TrainingDiverged
from nanoray.models.precision import LossScaler
from nanoray.parallel.flow import MicroBatch

MOST_SKIPS = 10  # updates in a row that on_nan=skip leaves out before it gives up
MOST_ROLLBACKS = 3  # times that on_nan=rollback returns to one checkpoint
# Updates left out by the loss scaler, between two looks, that are worth a warning
MANY_OVERFLOWS = 5
# Factor over the median; norms in it; norms before the first
SPIKE, SPIKE_WINDOW, SPIKE_LEAST = 10.0, 100, 20


class BadStep(NamedTuple):
    """A step that was not finite, as this rank saw it."""

    step: int
    loss: float  # this rank's own
    norm: float


class Verdict(NamedTuple):
    """What to do with a step."""

    # On the device, 1: leave the update out; None: the host has read that it is good
    leave_out: Tensor | None = None
    roll_back: str | None = None  # why the run returns to its newest checkpoint; None: it does not
    warning: str | None = None  # what the user should know


class Guards:
    """Decides on each step from this rank's loss, the mean loss, and the norm. A part of the state."""

    def __init__(
        self, config: Config, batch: Batch, device: torch.device, scaler: LossScaler | None = None
    ) -> None:
        """Watch steps on `device`. With fp16 the `scaler` handles norms that are not finite."""
        self.on_nan = config.on_nan
        self._global_size = batch.global_size
        self._scaler = scaler
        self.reads_each_step = device.type == "cpu"  # no device to wait for
        # A replay is exact while the weights are those of the bad step
        self._sticky = config.on_nan != "skip"
        self._stuck = torch.zeros((), dtype=torch.float32, device=device)
        # Left out (0 or 1), own loss, gradient norm
        self._ring = torch.zeros(3, config.log_every + 1, dtype=torch.float32, device=device)
        self._steps: list[int] = []  # the steps in the ring's columns: those since the last read
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._counts = dict.fromkeys(("skipped", "rollbacks", "healed", "spikes"), 0)
        self._in_spike = False
        self._overflows = 0  # updates that the loss scaler had left out when they were last read
        self._row = 0  # updates left out in a row
        self._place = ""  # the checkpoint of the last rollback
        self._returns = 0  # how often it was used

    def metrics(self) -> dict[str, int]:
        """Return the counts since the run began, for a record."""
        names = {
            "skipped": "skipped_steps",
            "rollbacks": "rollbacks",
            "healed": "healed",
            "spikes": "grad_spikes",
        }
        return {f"fault/{names[key]}": count for key, count in self._counts.items()}

    def values(self) -> dict[str, Any]:
        """Return the values from which another rank makes the same decisions from here on."""
        columns = len(self._steps)
        return {
            "steps": self._steps[:],
            "ring": self._ring[:, :columns].tolist(),
            "stuck": self._stuck.item(),
            "norms": list(self._norms),
            "counts": dict(self._counts),
            "in_spike": self._in_spike,
            "row": self._row,
            "place": self._place,
            "returns": self._returns,
            "overflows": self._overflows,
        }

    def load_values(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned."""
        self._steps = list(values["steps"])
        # JSON has no NaN: a value that a checkpoint contains as null was not finite.
        ring = []
        for row in values["ring"]:
            ring.append([math.nan if value is None else value for value in row])
        self._ring[:, : len(self._steps)] = torch.tensor(ring, dtype=torch.float32)
        self._stuck.fill_(values["stuck"])
        self._norms = deque(values["norms"], maxlen=SPIKE_WINDOW)
        self._counts = dict(values["counts"])
        self._in_spike = values["in_spike"]
        self._row = values["row"]
        self._place = values["place"]
        self._returns = values["returns"]
        self._overflows = values["overflows"]

    def count_healed(self, ranks: int) -> None:
        """Count replicas that took over the majority's state."""
        self._counts["healed"] += ranks

    def check(
        self,
        step: int,
        norm: Tensor,
        own_loss: Tensor,
        mean_loss: Tensor | None,
        look: bool,
        explain: Callable[[BadStep], str],
        samples: int,
    ) -> Verdict:
        """Record a step whose gradients are ready, and decide on it. (all ranks)

        `own_loss` is this rank's loss; `mean_loss` is that of all ranks, or None. Only values that
        are equal on all ranks decide. The other arguments are those of `decide`. Waits for a GPU
        only with `look`.
        """
        while self._steps and self._steps[-1] >= step:  # an interrupted step, which is repeated
            self._steps.pop()

        # 1 where the update must not reach the weights, as a tensor: the host does not wait for it.
        if self._scaler:
            bad = self._scaler.bad_loss
        else:
            watched = [norm] if mean_loss is None else [norm, mean_loss]
            bad = (~torch.isfinite(torch.stack(watched)).all()).to(self._stuck.dtype)
        if self._sticky:
            bad = torch.maximum(self._stuck, bad)
            self._stuck = bad

        # Write the step into the ring, which `decide` reads.
        self._ring[:, len(self._steps)] = torch.stack([bad, own_loss.float(), norm.float()])
        self._steps.append(step)

        # On a CPU the host reads now that the step is good: then the optimizer gets no flag.
        leave_out: Tensor | None = bad
        if self.reads_each_step and not bad:
            leave_out = None
        return self.decide(look, explain, samples)._replace(leave_out=leave_out)

    def decide(
        self,
        look: bool,
        explain: Callable[[BadStep], str],
        samples: int,
    ) -> Verdict:
        """Decide on the updates left out since the last look. (all ranks: `explain` communicates)

        On a GPU it reads nothing without `look`. `explain` repeats a bad step and describes what
        all ranks found. `samples` is the number of samples before the newest step. Raises
        TrainingDiverged with on_nan=stop, and with on_nan=skip after too many updates left out in a
        row.
        """
        if not self._steps or not (look or self.reads_each_step):
            return Verdict()

        # Read the ring: on a GPU this waits for the device. Count the updates left out in a row.
        flags, losses, norms = self._ring[:, : len(self._steps)].tolist()
        steps = self._steps
        self._steps = []
        bad = []
        longest = 0
        for step, flag, loss, norm in zip(steps, flags, losses, norms, strict=True):
            if flag:
                bad.append(BadStep(step, loss, norm))
                self._row += 1
                longest = max(longest, self._row)
            else:
                self._row = 0
        if not bad:
            return Verdict(warning=self._watch(steps[-1], norms[-1], samples))

        # (all ranks) Repeat the first bad step, for a message that names layer and samples.
        self._stuck.zero_()
        why = explain(bad[0])
        if self.on_nan == "rollback":
            return Verdict(roll_back=why)
        if self.on_nan == "stop":
            raise TrainingDiverged(
                f"{why}. The update was left out: weights and checkpoints are good"
            )
        if longest > MOST_SKIPS:
            raise TrainingDiverged(
                f"{why}. More than {MOST_SKIPS} updates in a row were left out with on_nan skip"
            )
        self._counts["skipped"] += len(bad)
        more = f", and {len(bad) - 1} more after it" if len(bad) > 1 else ""
        return Verdict(warning=f"{why}. The update was left out{more}; training goes on")

    def rolled_back(self, path: str, why: str) -> None:
        """Count a rollback to the checkpoint at `path`, which is empty if there is none.

        Raises TrainingDiverged without a checkpoint, or after too many rollbacks to the same one.
        """
        if path != self._place:
            self._returns = 0
        self._returns += 1
        self._place = path
        if not path:
            raise TrainingDiverged(
                f"{why}. There is no checkpoint to roll back to; lower checkpoint_every"
            )
        if self._returns > MOST_ROLLBACKS:
            raise TrainingDiverged(
                f"{why}. {MOST_ROLLBACKS} rollbacks to {path} did not get past it"
            )
        self._counts["rollbacks"] += 1
        self._row = 0

    def watch_overflows(self, step: int, skipped: int) -> str | None:
        """Return a warning when the loss scaler left out many updates since the last call, or None.

        `skipped` counts all that were left out so far.
        """
        new = skipped - self._overflows
        self._overflows = skipped
        if new < MANY_OVERFLOWS:
            return None
        return (
            f"{new} updates up to step {step} were left out because fp16 gradients overflowed, "
            f"{skipped} in all"
        )

    def _watch(self, step: int, norm: float, samples: int) -> str | None:
        """Return a warning when the gradient norm far exceeds its running median, once per spike."""
        median = math.inf  # too few norms to judge by
        if len(self._norms) >= SPIKE_LEAST:
            median = statistics.median(self._norms)
        spike = 0 < SPIKE * median < norm < math.inf
        began = spike and not self._in_spike
        self._in_spike = spike
        self._counts["spikes"] += spike
        if math.isfinite(norm):  # with fp16 it may be infinite
            self._norms.append(norm)
        if not began:
            return None
        return (
            f"gradient norm {norm:.3g} at step {step} is {norm / median:.0f} times its median "
            f"{median:.3g} (samples {samples} to {samples + self._global_size - 1})"
        )


# What can refuse a step before its update: the audit, and the reading of a script's data.
#
#     micro batches ─► watch ─► forward, backward ─► refuses? ─► norm, update
#                                                       └─► no update on any rank
#
# The loop asks each check on all ranks. A plain run has none.


class StepCheck(Protocol):
    """Watches the forward and backward of a step."""

    def watch(
        self,
        micro_batches: Iterator[MicroBatch],
        step: int,
        samples: int,
        phase: Callable[[str], None],
    ) -> Iterator[MicroBatch]:
        """Return the micro batches of the step after `step`, which begins at `samples`. (all ranks)"""

    def refuses(self) -> bool:
        """Return whether the step must not update, now that backward has ended. (all ranks)"""

    def forget(self) -> None:
        """Release what was attached to the model for a step that broke."""
