"""What a dry run tells of a script's own model: memory of a rank by part, with no rank started and
no device taken.

    main(run) ─► model, optimizer, data ─► RuntimeEngine.fit ─► these lines, and the script ends there

The state follows from the model's parameters and from a probe of the optimizer; activations from a
forward pass on fake tensors, which have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Batch, Config
from nanoray.forecast.dry_run import buckets_of, told_memory
from nanoray.forecast.memory import Sizes, state_memory
from nanoray.forecast.trial import trial_on_fakes
from nanoray.mesh.layout import Layout
from nanoray.state import PROBE, kept_alone


class DryRunEnded(BaseException):
    """Raised by `fit` when a dry run has told what it knows; a script's `except Exception` lets it
    pass.
    """


def own_lines(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any, Any], Tensor],
    batch: Batch,
    example: tuple[Any, Any],
    placement: str,
) -> list[str]:
    """Return the lines for a module: mesh, batch arithmetic, parameters, memory. `example` is one
    micro batch.
    """
    precision = "fp32" if config.precision == "auto" else config.precision
    sizes, notes = Sizes.of(model), []
    more = {"buffers": sum(buffer.nbytes for buffer in model.buffers())}
    try:
        more["activations"] = trial_on_fakes(model, loss, *example, precision).kept
    except Exception as error:
        notes.append(
            "memory     without activations: a forward on fake tensors failed "
            f"({first_line(error)})"
        )
    moments = kept_per_element(optimizer)
    if moments is None:
        notes.append(
            f"memory     without the state of {type(optimizer).__name__}, which could not be tried "
            "alone"
        )
    layout, total = Layout(dp=batch.dp), batch.global_size
    bucket_mb, mirrored = buckets_of(config)
    state = state_memory(config, sizes, batch.dp, batch.accum, bucket_mb, mirrored, moments or 0.0)
    frozen = (
        f", {sizes.params - sizes.trained:,} of them frozen" if sizes.params > sizes.trained else ""
    )
    return [
        f"mesh       {layout.world_size} rank(s) = {layout}",
        f"placement  {placement}",
        "data       of the script",
        f"batch      {batch.micro} samples × {batch.accum} accum × {batch.dp} dp = {total:,} "
        "samples/step, "
        f"{config.max_steps:,} steps = {total * config.max_steps:,} samples",
        f"model      {type(model).__name__}, {sizes.params:,} parameters{frozen}, "
        f"{type(optimizer).__name__}",
        told_memory(config, batch, precision, state | more),
        *notes,
        "dry run: nothing was started",
    ]


def kept_per_element(optimizer: torch.optim.Optimizer) -> float | None:
    """Return how many numbers an optimizer keeps for each element that it updates; None if it
    cannot be tried alone.
    """
    kept = kept_alone(optimizer)
    return (
        None
        if kept is None
        else sum(value.numel() for value in kept.values() if value.dim()) / prod(PROBE)
    )


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
