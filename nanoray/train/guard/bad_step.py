"""Repeat a bad step exactly, and find where it first went wrong.

Data and dropout depend only on (seed, step, micro batch, data rank), and a step that is not finite
changes no weights. So a second forward and backward, without a sum of gradients, is the same
computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from nanoray.forecast.memory import local_of
from nanoray.mesh.mesh import Mesh
from nanoray.models.gpt import LMHead
from nanoray.parallel.plan import MicroBatch

NAMED = 4  # ranks that a message describes


class Finding(NamedTuple):
    """What one rank knows about a step that was not finite."""

    loss: float  # this rank's, when the step first ran
    layer: str  # where the replay first found a value that is not finite; empty: nowhere
    samples: str


def replay(
    model: nn.Module,
    batch: Callable[[int], MicroBatch],
    repeat: Callable[..., None],
    seed: Callable[[int], None],
) -> tuple[str, int | None]:
    """Run a step's forwards and backwards without a sum of gradients, which stay as they were. (all
    ranks)

    Returns what was first not finite (empty: nothing) and in which micro batch. `repeat` is
    Plan.repeat, `batch` returns a micro batch by its number, `seed` seeds the dropout of one; the
    caller restores the generators after.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in params]
    model.zero_grad(set_to_none=True)
    probe, where = Probe(model), list[int]()
    with probe, torch.compiler.set_stance("force_eager"):  # compiled blocks would not see the hooks
        repeat(
            batch, seed, lambda micro: where.append(micro) if probe.found and not where else None
        )
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    summed = any(isinstance(grad, DTensor) for grad in own.values())
    # With fsdp backward has summed. A look at a DTensor's values talks to the other ranks, which
    # may not come here.
    own = {name: local_of(grad) for name, grad in own.items()}
    if not probe.found and not torch.isfinite(get_total_norm([*own.values()])):
        what = "the sum over ranks of the gradient" if summed else "the gradient"
        names = (
            f"{what} of {name}" for name, grad in own.items() if not torch.isfinite(grad).all()
        )
        probe.found = next(names, "the norm of all gradients, which overflows")
    for p, grad in zip(params, kept, strict=True):
        p.grad = grad
    return probe.found, where[0] if where else None


def describe(mesh: Mesh, step: str, own: Finding) -> str:
    """Describe what the replay found on all ranks. (all ranks) `step` is a text with a field for
    the mean loss.
    """
    everyone = mesh.all_gather((own.loss, own.layer, own.samples))
    findings = [Finding(loss, layer, samples) for loss, layer, samples in everyone]
    named = [(r, f) for r, f in enumerate(findings) if f.layer or not math.isfinite(f.loss)]
    if any(f.layer for f in findings):
        verdict = "it is not finite again: lower lr, set grad_clip, or look at that data"
    else:
        verdict = "it is finite this time: a transient error of the machine, or an injected fault"
    told = [
        f"rank {r}: own loss {f.loss:.4g}, samples {f.samples}"
        + (f", first in {f.layer}" if f.layer else "")
        for r, f in named[:NAMED]
    ]
    told += [f"and {len(named) - NAMED} more ranks"] if len(named) > NAMED else []
    whose = (
        f"Not finite on {'; '.join(told)}"
        if named
        else "Every rank's own loss and gradients are finite"
    )
    mean = sum(f.loss for f in findings) / len(findings)
    return f"{step.format(loss=mean)}, {verdict}. {whose}"


class Probe:
    """A context that finds the first layer of a model whose output, or else whose gradient, is not
    finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, ""
        self._handles: list[Any] = []

    def __enter__(self) -> Probe:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def look(what: str, tensor: Tensor) -> None:
            if not self.found and not torch.isfinite(tensor).all():
                self.found = what

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Experts also tell of their routing
            output = output[0] if isinstance(output, tuple) else output
            # The padding of the vocabulary has logits of -inf on purpose.
            tokens = output[..., : module.vocab_size] if isinstance(module, LMHead) else output
            whole = "the loss" if output.dim() == 0 else "the output of the stage"
            look(f"the output of {name}" if name else whole, tokens)
            if output.requires_grad:
                output.register_hook(
                    lambda grad: look(f"the gradient at the output of {name or 'the model'}", grad)
                )

        return hook
