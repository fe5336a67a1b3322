"""A dry run of a script's own model: the memory of a rank by part, with no rank started and no
device taken.

    main(run) ─► model, optimizer, data ─► RuntimeEngine.fit ─► these lines, and the script ends there

The state follows from the model's parameters and from a probe of the optimizer. Activations follow
from a forward pass on fake tensors, which have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.base.script_errors import one_line
from nanoray.config import Batch, Config
from nanoray.forecast.dry_run import batch_line
from nanoray.forecast.memory import Sizes, state_memory
from nanoray.forecast.rank_memory import assume_device, memory_line
from nanoray.forecast.trial import trial_on_fakes
from nanoray.mesh.layout import Layout
from nanoray.own.optimizer_trial import PROBE, kept_alone
from nanoray.state.optimizers import name_of


def own_lines(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any, Any], Tensor],
    batch: Batch,
    example: tuple[Any, Any],
    placement: str,
) -> list[str]:
    """Return the lines for a module: mesh, batch arithmetic, parameters, memory.

    `example`: inputs and targets of one micro batch.
    """
    device = assume_device(config)
    sizes = Sizes.of(model)
    optimizer_name = name_of(optimizer)
    notes = []

    # State: exact, but for an optimizer that cannot be tried alone.
    moments = kept_per_element(optimizer)
    layout = Layout(dp=batch.dp, replicas=config.replicas)
    shared_by = layout.shard_size
    state = state_memory(
        config, sizes, shared_by, batch.accum, device.bucket_mb, device.mirrored, moments or 0.0
    )

    # Activations: a script's forward may look at values, which fake tensors do not have.
    more = {"buffers": sum(buffer.nbytes for buffer in model.buffers())}
    try:
        more["activations"] = trial_on_fakes(model, loss, *example, device.precision).kept
    except Exception as error:
        notes.append(
            f"memory     without activations: a forward on fake tensors failed ({one_line(error)})"
        )
    if moments is None:
        notes.append(
            f"memory     without the state of {optimizer_name}, which could not be tried alone"
        )

    frozen = ""
    if sizes.params > sizes.trained:
        frozen = f", {sizes.params - sizes.trained:,} of them frozen"
    return [
        f"mesh       {layout.world_size} rank(s) = {layout}",
        f"placement  {placement}",
        "data       of the script",
        batch_line(config, batch, "samples"),
        f"model      {type(model).__name__}, {sizes.params:,} parameters{frozen}, {optimizer_name}",
        memory_line(config, batch, device.precision, state | more),
        *notes,
    ]


def kept_per_element(optimizer: torch.optim.Optimizer) -> float | None:
    """Return how many numbers an optimizer keeps for each element that it updates.

    None if it cannot be tried alone.
    """
    kept = kept_alone(optimizer)
    if kept is None:
        return None
    # Scalars such as a step count do not grow with the parameter.
    numbers = sum(value.numel() for value in kept.values() if value.dim())
    return numbers / prod(PROBE)
