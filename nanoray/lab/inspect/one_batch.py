"""`nanoray inspect --verify`: one batch forward and backward in one process on this CPU.

Of each module the table has the mean and the root mean square (RMS) of what it returns, and the RMS
of its own weights and of their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.cli.forecast.probe import WatchedForward
from nanoray.data.images import ImageData
from nanoray.data.prepare import prepare
from nanoray.data.tokens import TokenData
from nanoray.errors import CheckpointError, ConfigError
from nanoray.lab.inspect.target import InspectTarget
from nanoray.lab.inspect.tree import modules_of
from nanoray.machine.compat import tree_leaves
from nanoray.models.build import build_model
from nanoray.models.precision import autocast, weight_type


def run_batch(target: InspectTarget, description: dict[str, Any]) -> dict[str, Any]:
    """Run one batch; return its loss, a row of numbers for each module, and problems.

    Raises NanorayError without a model or data.
    """
    model = _real_model(target)
    x, y = _real_batch(target)
    return measure(target, description, model, x, y)


def _real_model(target: InspectTarget) -> nn.Module:
    """Return the model with the checkpoint's weights, else with new ones."""
    if target.script:
        return target.model
    config = target.config
    torch.manual_seed(config.seed)
    model = build_model(config, target.dataset.vocab_size).to(weight_type(config.precision))
    if target.state:
        try:
            model.load_state_dict(target.state.model)
        except RuntimeError as error:
            raise CheckpointError(
                f"{target.checkpoint} does not fit this model: "
                f"{' '.join(str(error).split())[:300]}; drop the flags "
                "that change the model"
            ) from None
    return model


def _real_batch(target: InspectTarget) -> tuple[Any, Any]:
    """Return the first micro batch of the run's training data."""
    if target.script:
        return target.example
    config = target.config
    dataset = target.dataset
    if not dataset.path.is_dir() or not dataset.train_tokens:
        dataset = prepare(config)
        if dataset.vocab_size != target.dataset.vocab_size:
            raise ConfigError(
                f"its data is not here, and {dataset.note} has another vocabulary; run this where "
                "its data is"
            )
    cpu = torch.device("cpu")
    data: ImageData | TokenData
    if dataset.kind == "images":
        data = ImageData(dataset, config.seed, cpu)
    else:
        data = TokenData(dataset, config.block_size, config.seed, cpu)
    return data.train_batch(0, target.micro)


def measure(
    target: InspectTarget, description: dict[str, Any], model: nn.Module, x: Any, y: Any
) -> dict[str, Any]:
    """Run forward and backward of `model`, and measure each module."""
    # In the mode in which it trains: a script may have set modules of its model to eval mode.
    watched = WatchedForward(model)
    with _outputs(model) as outputs, autocast("cpu", target.config.precision):
        loss = watched.run(lambda: target.loss(model, x, y))
    loss.backward()

    # Fake tensors may have failed, or have hidden what depends on values; this batch has all of it.
    description["modules"] = modules_of(model, watched)

    rows = []
    for name, module in model.named_modules():
        if type(module).forward is nn.Module.forward:
            continue  # a list of modules has no forward
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        output_mean, output_rms = outputs.get(name, (None, None))
        rows.append(
            {
                "name": name,
                "type": type(module).__name__,
                "calls": watched.seen[name].calls,
                "outputs": watched.seen[name].outputs,
                "output_mean": output_mean,
                "output_rms": output_rms,
                "weight_rms": rms(own),
                "grad_rms": rms(p.grad for p in own if p.grad is not None),
            }
        )
    return {"loss": loss.item(), "modules": rows, "problems": _problems(model, loss)}


@contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, tuple[float, float]]]:
    """Measure mean and RMS of the first call's result of each module, by its name."""
    found: dict[str, tuple[float, float]] = {}

    @torch.no_grad()
    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        floats = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if floats and name not in found:
            result = floats[0].float()
            found[name] = (result.mean().item(), result.square().mean().sqrt().item())

    hooks = [
        module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def rms(tensors: Iterable[Tensor]) -> float | None:
    """Return the root mean square of all elements; None where there are none."""
    squares = 0.0
    count = 0
    for tensor in tensors:
        squares += tensor.double().square().sum().item()
        count += tensor.numel()
    if not count:
        return None
    return math.sqrt(squares / count)


def _problems(model: nn.Module, loss: Tensor) -> list[str]:
    """Return what would keep the model from training."""
    problems = []
    if not loss.isfinite():
        problems.append(f"the loss is {loss.item()}")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            problems.append(f"{name} has no gradient")
        elif not parameter.grad.isfinite().all():
            problems.append(f"the gradient of {name} is not finite")
    return problems
