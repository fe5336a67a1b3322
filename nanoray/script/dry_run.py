"""A dry run of a script's own model: the memory of a rank by part, with no rank started and no
device taken.

    main(run) ─► model, optimizer, data ─► RuntimeEngine.fit ─► these lines, and the script ends there

The state follows from the model's parameters and from a step of the optimizer's class on a few
numbers. Activations follow from a forward pass on fake tensors, which have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.checkpoint.state.optimizers import members_of, name_of
from nanoray.cli.forecast.dry_run import batch_line
from nanoray.cli.forecast.job import assume_device
from nanoray.cli.forecast.memory import Sizes, state_memory
from nanoray.cli.forecast.probe import probe_on_fakes
from nanoray.cli.forecast.rank_memory import memory_line
from nanoray.config import Batch, Config
from nanoray.config.layout import Layout
from nanoray.machine.script_errors import one_line
from nanoray.script.optimizer import ELEMENTWISE


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

    # State: exact, but for an optimizer that is not torch's own.
    moments = kept_per_element(optimizer)
    layout = Layout(dp=batch.dp, replicas=config.replicas)
    shared_by = layout.shard_size
    state = state_memory(
        config, sizes, shared_by, batch.accum, device.bucket_mb, device.mirrored, moments or 0.0
    )

    # Activations: a script's forward may look at values, which fake tensors do not have.
    more = {"buffers": sum(buffer.nbytes for buffer in model.buffers())}
    try:
        more["activations"] = probe_on_fakes(model, loss, *example, device.precision).kept
    except Exception as error:
        notes.append(
            f"memory     without activations: a forward on fake tensors failed ({one_line(error)})"
        )
    if moments is None:
        notes.append(
            f"memory     without the state of {optimizer_name}, which is not one of torch's own"
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

    Shown by a step of its class on a few numbers; of several, the most. None for a class that is not
    torch's own, which may keep anything.
    """
    most = 0.0
    for member in members_of(optimizer):
        if type(member) not in ELEMENTWISE:
            return None
        few = nn.Parameter(torch.zeros(2, 8))
        few.grad = torch.zeros_like(few)
        kind: Any = type(member)
        alone = kind([{**member.param_groups[0], "params": [few], "capturable": False}])
        alone.step()
        tensors = [value for value in alone.state[few].values() if isinstance(value, Tensor)]
        # Scalars such as a step count do not grow with the parameter.
        most = max(most, sum(t.numel() for t in tensors if t.dim()) / few.numel())
    return most
