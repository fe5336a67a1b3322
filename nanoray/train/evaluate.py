"""The validation loss: a mean over the same samples at every number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nanoray.checkpoint.state.train_state import TrainState
from nanoray.data.order import validation_batches
from nanoray.data.tokens import MicroBatches
from nanoray.errors import TrainingDiverged
from nanoray.models.weighted import Weighted, mean_of, weight_of
from nanoray.models.workload import Workload
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan
from nanoray.train.read_vote import ReadVote


@torch.no_grad()
def evaluate(
    mesh: Mesh,
    par: Plan,
    state: TrainState,
    batches: MicroBatches,
    workload: Workload,
    most_samples: int,
    phase: Callable[[str], None],
    reading: ReadVote | None = None,
) -> dict[str, float]:
    """Return the mean loss, other scores, and time/eval_s, of at most `most_samples`. (all ranks)

    Stores the loss in `state`. `phase` is called with "eval" before each batch. `reading`: for data
    of a script; without scores where a rank could not read them. Raises TrainingDiverged when the
    loss is not finite.
    """
    start = time.perf_counter()

    # Training must not depend on an evaluation: its passes do not count in a module's buffers.
    try:
        with evaluation_mode(state.model), par.undisturbed():
            sums = sum_of_scores(par, batches, workload, most_samples, phase, reading)
    finally:
        par.forget_gathered()

    # (all ranks) A rank that could not read has evaluated other samples.
    if reading and reading.fails_in_evaluation():
        return {"time/eval_s": time.perf_counter() - start}

    # (all ranks) One small all-reduce: the sums of all ranks.
    *totals, count = mesh.all_reduce(sums.to(mesh.device), "eval").tolist()

    # A loss over no targets at all is 0, as in training.
    means = [total / (count or 1.0) for total in totals]
    loss = means[0]
    state.scalars.val_loss = loss
    state.session.evaluated = state.step
    if not math.isfinite(loss):
        raise TrainingDiverged(f"at step {state.step} the validation loss is {loss}; lower lr")
    state.scalars.best_val_loss = min(loss, state.scalars.best_val_loss or math.inf)

    scores = dict(zip(workload.score_names, means, strict=True))
    return scores | {"time/eval_s": time.perf_counter() - start}


def sum_of_scores(
    par: Plan,
    batches: MicroBatches,
    workload: Workload,
    most_samples: int,
    phase: Callable[[str], None],
    reading: ReadVote | None,
) -> Tensor:
    """Return the sums of the scores over this rank's windows, and the number of these or their weight.

    (all ranks)
    """
    windows = batches.data.val_windows(most_samples)
    at_once = reading.windows_at_once if reading else batches.batch.micro

    total = torch.zeros(len(workload.score_names) + 1, dtype=torch.float64)
    for starts, counts in validation_batches(windows, batches.rank, batches.batch.dp, at_once):
        phase("eval")  # a long evaluation must show progress
        x, y = batches.val_batch(starts)
        scores = workload.score(par.flow.whole, x, y)
        if not counts or not par.flow.has_loss:
            continue

        # A mean counts once for each window; a loss with a weight has its own.
        values = [mean_of(score) for score in scores]
        weight = torch.full_like(values[0], len(starts))
        if isinstance(scores[0], Weighted):
            weight = weight_of(scores[0])
        total = total.to(weight.device) + torch.stack([*(v * weight for v in values), weight])
    return total


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Let the modules be in evaluation mode inside, and afterwards in their own."""
    # A script may have frozen some modules, which stay in evaluation mode.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
