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

from nanoray.machine.tensor_memory import local_of
from nanoray.models.gpt import LMHead
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import MicroBatch

NAMED = 4  # ranks that a message describes


class Finding(NamedTuple):
    """One rank's part of the description of a step that was not finite."""

    loss: float  # this rank's, when the step first ran
    layer: str | None  # where the replay first found a value that is not finite; None: nowhere
    samples: str


def replay(
    model: nn.Module,
    batch: Callable[[int], MicroBatch],
    repeat: Callable[..., None],
    seed: Callable[[int], None],
) -> tuple[str | None, int | None]:
    """Run a step's forwards and backwards again, without a sum of gradients. (all ranks)

    Returns what was first not finite (None for nothing), and in which micro batch. Gradients stay as
    they were. `repeat` is that of the plan's flow, `batch` returns a micro batch by its number, `seed` seeds
    the dropout of one; the caller restores the generators afterwards.
    """
    # Put the step's gradients aside, so that backward makes new ones.
    params = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in params]
    model.zero_grad(set_to_none=True)

    probe = Probe(model)
    bad_micros: list[int] = []

    def after_turn(micro: int) -> None:
        if probe.found and not bad_micros:
            bad_micros.append(micro)

    # Compiled blocks would not call the probe's hooks.
    with probe, torch.compiler.set_stance("force_eager"):
        repeat(batch, seed, after_turn)

    # All activations were finite: look at the gradients. With fsdp backward has summed them. A
    # reduction of a DTensor would communicate with the other ranks, which may not come here.
    if not probe.found:
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        summed = any(isinstance(grad, DTensor) for grad in grads.values())
        local = {name: local_of(grad) for name, grad in grads.items()}
        probe.found = _bad_gradient(local, summed)

    for p, grad in zip(params, kept, strict=True):
        p.grad = grad
    return probe.found, bad_micros[0] if bad_micros else None


def _bad_gradient(grads: dict[str, Tensor], summed: bool) -> str | None:
    """Return the first gradient that is not finite; None if their norm is finite."""
    if torch.isfinite(get_total_norm([*grads.values()])):
        return None
    for name, grad in grads.items():
        if not torch.isfinite(grad).all():
            if summed:
                return f"the sum over ranks of the gradient of {name}"
            return f"the gradient of {name}"
    return "the norm of all gradients, which overflows"


def describe(mesh: Mesh, step: str, own: Finding) -> str:
    """Describe the findings of all ranks. (all ranks)

    `step` is a text with a field {loss} for the mean loss.
    """
    everyone = mesh.all_gather((own.loss, own.layer, own.samples))
    findings = [Finding(*finding) for finding in everyone]
    mean = sum(finding.loss for finding in findings) / len(findings)

    verdict = "it is finite this time: a transient error of the machine, or an injected fault"
    if any(finding.layer for finding in findings):
        verdict = "it is not finite again: lower lr, set grad_clip, or look at that data"

    descriptions = []
    for rank, finding in enumerate(findings):
        if math.isfinite(finding.loss) and not finding.layer:
            continue
        description = f"rank {rank}: own loss {finding.loss:.4g}, samples {finding.samples}"
        if finding.layer:
            description += f", first in {finding.layer}"
        descriptions.append(description)

    ranks = "Every rank's own loss and gradients are finite"
    if descriptions:
        named = descriptions[:NAMED]
        if len(descriptions) > NAMED:
            named.append(f"and {len(descriptions) - NAMED} more ranks")
        ranks = f"Not finite on {'; '.join(named)}"
    return f"{step.format(loss=mean)}, {verdict}. {ranks}"


class Probe:
    """A context that finds the first layer whose output, or whose gradient, is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: str | None = None  # the first place that was not finite
        self._handles: list[Any] = []

    def __enter__(self) -> Probe:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def check(what: str, tensor: Tensor) -> None:
            if not self.found and not torch.isfinite(tensor).all():
                self.found = what

        def check_gradient(grad: Tensor) -> None:
            check(f"the gradient at the output of {name or 'the model'}", grad)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # A layer of experts also returns its routing.
            if isinstance(output, tuple):
                output = output[0]
            # The padding of the vocabulary has logits of -inf on purpose.
            tokens = output
            if isinstance(module, LMHead):
                tokens = output[..., : module.vocab_size]

            # The model itself has no name: it returns a scalar, or a stage's stream.
            what = f"the output of {name}"
            if not name:
                what = "the loss" if output.dim() == 0 else "the output of the stage"
            check(what, tokens)
            if output.requires_grad:
                output.register_hook(check_gradient)

        return hook
