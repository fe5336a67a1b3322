"""The validation loss: a mean over the same samples at every number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from nanoray.checkpoint.state.train_state import TrainState
from nanoray.data.tokens import MicroBatches
from nanoray.errors import TrainingDiverged
from nanoray.faults.cause import is_out_of_memory
from nanoray.models.weighted import Weighted, mean_of, weight_of
from nanoray.models.workload import Workload
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan
from nanoray.train.out_of_memory import describe
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
    leave_out: Callable[[str], None],
    reading: ReadVote | None = None,
) -> dict[str, float]:
    """Return the mean loss, other scores, and time/eval_s, of at most `most_samples`. (all ranks)

    Stores the loss in `state`. `phase` is called with "eval" before each batch. `reading`: for data
    of a script. Without scores where a rank could not read its data, or has too little memory; then
    `leave_out` is called with the reason. Raises TrainingDiverged when the loss is not finite.
    """
    start = time.perf_counter()
    names = workload.score_names

    # Ranks take windows in turn. All run equally many batches, because sharded weights are gathered
    # in each forward; a rank that has run out of windows computes one whose score does not count.
    windows = batches.data.val_windows(most_samples)
    ranks = batches.batch.dp
    own_windows = windows[batches.rank :: ranks]
    longest = math.ceil(len(windows) / ranks)
    at_once = reading.windows_at_once if reading else batches.batch.micro

    # Sums of the scores; the number of windows, or the weight; and how many ranks have too little
    # memory. Float64 where the device has it.
    kind = torch.float64 if mesh.device.type == "cpu" else torch.float32
    total = torch.zeros(len(names) + 2, dtype=kind).to(mesh.device)
    shortage = ""

    # A script may have frozen some modules, which stay in evaluation mode afterwards.
    training = [module for module in state.model.modules() if module.training]
    state.model.eval()
    try:
        # Training must not depend on an evaluation: its passes do not count in a module's buffers.
        with par.undisturbed():
            first = 0
            while first < longest:
                starts = own_windows[first : first + at_once]
                counts = len(starts) > 0
                try:
                    phase("eval")  # a long evaluation must show progress
                    x, y = batches.val_batch(starts if counts else windows[:1])
                    scores = workload.score(par.flow.whole, x, y)
                except Exception as error:
                    # In a forward that communicates the others wait: see elastic.py
                    if par.forwards_communicate or not is_out_of_memory(error):
                        raise
                    if at_once == 1:
                        shortage = (
                            f"rank {mesh.rank} ran out of memory ({describe(error, mesh.device)})"
                        )
                        total[-1] = 1
                        break
                    at_once //= 2
                    continue
                first += at_once
                if not (counts and par.flow.has_loss):
                    continue

                # A mean counts once for each window; a loss with a weight has its own.
                values = [mean_of(score) for score in scores]
                weight = torch.full_like(values[0], len(starts))
                if isinstance(scores[0], Weighted):
                    weight = weight_of(scores[0])
                total[:-1] += torch.stack([*(value * weight for value in values), weight])
    finally:
        for module in training:
            module.training = True
        par.forget_gathered()

    # (all ranks) A rank that could not read has evaluated other samples.
    if reading and reading.fails_in_evaluation():
        return {"time/eval_s": time.perf_counter() - start}

    # One small all-reduce: the sums of all ranks.
    *sums, count, short = mesh.all_reduce(total, "eval").tolist()
    if short:
        # (all ranks) Training needs no evaluation.
        why = next(text for text in mesh.all_gather(shortage) if text)
        leave_out(why)
        return {"time/eval_s": time.perf_counter() - start}
    # A loss over no targets at all is 0, as in training.
    means = [score / (count or 1.0) for score in sums]
    loss = means[0]
    state.scalars.val_loss = loss
    state.session.evaluated = state.step
    if not math.isfinite(loss):
        raise TrainingDiverged(f"at step {state.step} the validation loss is {loss}; lower lr")
    state.scalars.best_val_loss = min(loss, state.scalars.best_val_loss or math.inf)

    scores_of_step = dict(zip(names, means, strict=True))
    return scores_of_step | {"time/eval_s": time.perf_counter() - start}
