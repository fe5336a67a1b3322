"""Try a script's model on its first micro batch, before step 1: forward, loss, backward, evaluation.

What the script's code raises here ends the run on all ranks, in one line (part.py). Looked for are only
mistakes that raise nothing, or raise in a later step: those would train wrongly, or end a run hours
later. The model and the random generators are afterwards as they were (untouched.py), and the data are
read again from their start. It costs one micro batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.base.compat import gradient_hooks, tree_leaves, tree_map
from nanoray.config import Config
from nanoray.errors import ConfigError, DataError, NanorayError, OutOfMemory
from nanoray.faults.cause import is_out_of_memory
from nanoray.mesh.memory import equal_bits
from nanoray.mesh.mesh import Mesh
from nanoray.models.precision import autocast
from nanoray.models.weighted import Weighted
from nanoray.own.call import arguments_of, loss_in, loss_of
from nanoray.own.checks import lazy_parts, unstorable
from nanoray.own.part import describe, part
from nanoray.own.untouched import untouched
from nanoray.train.out_of_memory import HALVE

WARNINGS = 3  # notes on what torch warns of


@dataclass(frozen=True)
class TrialSubject:
    """What is tried."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any] | None
    train_batch: Callable[[], tuple[Any, Any]]  # the first micro batch of this rank
    val_batch: Callable[[], tuple[Any, Any]] | None  # None: there is no evaluation
    # Whether a batch is read once and used again, and not made anew from samples
    batches_are_kept: bool = False


def try_model(subject: TrialSubject, config: Config, mesh: Mesh) -> list[str]:
    """Try the model on one micro batch; return notes for the user. (all ranks)

    Raises ConfigError on all ranks where any rank has found a mistake, OutOfMemory where one has too
    little memory for the batch.
    """
    fault = ""
    is_short = False  # whether it is no mistake, but a lack of memory
    notes: list[str] = []
    try:
        # Whatever the script's code raises, also in a hook or in get_extra_state.
        name = type(subject.model).__name__
        with part(name, "mend what the traceback names"):
            notes = _try_on_this_rank(subject, config, mesh)
    except NanorayError as error:
        fault = str(error)
        cause = error.__cause__
        # Of a batch that could not be read a smaller one is not known to help.
        is_short = (
            cause is not None and is_out_of_memory(cause) and not isinstance(error, DataError)
        )
        if is_short:  # the caller may halve the micro batch itself
            fault = fault.removesuffix(f"; {HALVE}")

    # A rank that raises alone would leave the others waiting in the next collective.
    everyone = mesh.all_gather((fault, is_short))
    faults = [found for found, _ in everyone]
    # A mistake on one rank counts more than a lack of memory on another.
    for rank, (found, short) in sorted(enumerate(everyone), key=lambda each: each[1][1]):
        if found:
            where = "" if all(faults) else f"on rank {rank}: "
            kind = OutOfMemory if short else ConfigError
            raise kind(f"{where}{found}")
    return notes


def _try_on_this_rank(subject: TrialSubject, config: Config, mesh: Mesh) -> list[str]:
    """Try the model. Raises ConfigError for the first mistake."""
    model = subject.model
    given = subject.train_batch()
    # A copy, because a forward may change its inputs, and step 1 gets the same batch.
    x, y = _copied(given)
    names = {name for name, _ in model.named_parameters()}

    with warnings.catch_warnings(record=True) as seen:
        # Eager: compiled layers are compiled in the warm-up, for the wrapped model.
        eager = torch.compiler.set_stance("force_eager")
        with untouched(model, mesh.device) as traces, eager:
            with autocast(mesh.device.type, config.precision):
                loss = _forward(subject, x, y)
            _backward(subject, loss, x)
            _require_gradients(model)
            if _keeps_a_graph(model):
                _try_again(subject, config, mesh, x, y)
            if subject.val_batch is not None:
                _evaluate(subject, config, mesh)
            # Forwards may have bound buffers or extra states that no checkpoint can hold.
            for line in unstorable(model, None, config.sharded):
                raise ConfigError(line)
        _require_unwritten(model, traces.written, mesh)
    _require_same_names(model, names)
    if subject.batches_are_kept and not _equal(given, (x, y)):
        raise ConfigError(
            f"the forward of {type(model).__name__} changes its inputs in place, and nanoray keeps "
            "a batch to repeat a step with it; write x = x - 1 instead of x -= 1"
        )

    texts = dict.fromkeys(str(warning.message).split("\n", 1)[0] for warning in seen)
    notes = [f"note    the first batch warns: {text}" for text in list(texts)[:WARNINGS]]
    for name in traces.drawn:
        notes.append(
            f"note    the forward draws from the generator {name}, whose state no checkpoint has: "
            "after a resume it draws other numbers; draw from the default generator, which nanoray "
            "seeds for each micro batch"
        )
    if mesh.world_size > 1:
        notes += notes_on_hooks(model)
    return notes


def notes_on_hooks(model: nn.Module) -> list[str]:
    """Return a note where the script's hooks see the gradients of one rank."""
    hooked = [name for name, p in model.named_parameters() if gradient_hooks(p)]
    if not hooked:
        return []
    return [
        f"note    the gradient hook of {hooked[0]} sees this rank's part of the gradient, with the "
        "factor that dp_mode gives it: what is not linear, such as a clamp, differs from one "
        "process; clip by grad_clip"
    ]


def _forward(subject: TrialSubject, x: Any, y: Any) -> Tensor:
    """Return the loss of a batch, as a scalar."""
    model = subject.model
    positional, named = arguments_of(x, y, subject.loss_fn is not None)
    name = type(model).__name__
    given = describe(x)
    remedy = "mend it, or the data"
    if named:
        remedy = "the keys of a batch are its arguments by name: mend it, or the data"
    elif subject.loss_fn is None:
        given = f"{given} and {describe(y)}"
        remedy = "mend it, or give RuntimeEngine a loss_fn, which gets the targets instead"
    with part(f"the forward of {name}, called with {given},", remedy):
        output = model(*positional, **named)
    _require_no_backward(model, f"the forward of {name}")
    if subject.loss_fn is None:
        return _scalar_of(loss_in(output, x), name)

    what = (
        f"loss_fn ({describe(subject.loss_fn)}), called with {describe(output)} and {describe(y)},"
    )
    remedy = "give a function of the output and the targets, or mend what the model returns"
    with part(what, remedy):
        loss = subject.loss_fn(output, y)
    _require_no_backward(model, "loss_fn")
    return _scalar_of(loss, "loss_fn")


def _require_no_backward(model: nn.Module, source: str) -> None:
    """Raise ConfigError where a forward or a loss has called backward itself."""
    if any(p.grad is not None for p in model.parameters()):
        raise ConfigError(
            f"{source} calls backward, and its gradients would be added to those of the loss; "
            "leave the loss's backward to nanoray, and use torch.autograd.grad for others"
        )


def _scalar_of(loss: Any, source: str) -> Tensor:
    """Return a loss, or the sum of one with a weight, as one real number.

    Raises ConfigError for anything else: an evaluation, which has no backward, would not.
    """
    scalar = loss
    found = f"{source} returns"
    if isinstance(loss, Weighted):
        weight = loss.weight
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
            weight = weight.item()
        is_number = isinstance(weight, (bool, int, float))
        if not is_number or not 0 <= weight < math.inf:
            raise ConfigError(
                f"{found} a nanoray.Weighted whose weight is {describe(weight)}; give the number of "
                "targets that the sum adds up, 0 or more"
            )
        scalar = loss.sum
        found += " a nanoray.Weighted whose sum is"
    is_real = isinstance(scalar, Tensor) and scalar.is_floating_point()
    if not is_real or scalar.dim():
        raise ConfigError(
            f"{found} {describe(scalar)}; return the mean loss of the batch as a tensor of one real "
            "number, such as loss.mean() without .item(), or nanoray.Weighted(sum=..., weight=...)"
        )
    return scalar


def _backward(subject: TrialSubject, loss: Tensor, x: Any) -> None:
    name = type(subject.model).__name__
    remedy = (
        "let gradients flow: no detach, torch.no_grad, numpy or change in place on the way from "
        "weights with requires_grad to the loss"
    )
    with part(f"the backward of {name}, after a forward with {describe(x)},", remedy):
        loss.backward()


def _require_gradients(model: nn.Module) -> None:
    """Raise ConfigError where no weight got a gradient, or one that ranks cannot average."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not gradients:
        raise ConfigError(
            "the loss depends on no parameter that is trained: none got a gradient; use them in "
            "the forward, or set requires_grad on those that it uses"
        )
    for name, gradient in gradients.items():
        if gradient.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {name} is sparse, and nanoray sums, clips and hashes dense ones; "
                "make its layer with sparse=False, and take an optimizer for dense gradients"
            )


def _keeps_a_graph(model: nn.Module) -> bool:
    """Return whether an attribute of a module refers to the graph of the batch, as a state may."""
    for module in model.modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_modules"):
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    return True
    return False


def _try_again(subject: TrialSubject, config: Config, mesh: Mesh, x: Any, y: Any) -> None:
    """Run a second batch: its backward fails if it needs the graph of the first one."""
    with autocast(mesh.device.type, config.precision):
        for p in subject.model.parameters():
            p.grad = None
        loss = _forward(subject, x, y)
    try:
        loss.backward()
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise ConfigError(
            f"{type(subject.model).__name__} keeps the graph of the batch before in an attribute, "
            "and backward would need it again; keep the value alone: self.state = state.detach()"
        ) from None


def _evaluate(subject: TrialSubject, config: Config, mesh: Mesh) -> None:
    """Run a batch of the validation data in evaluation mode, as an evaluation does."""
    assert subject.val_batch is not None
    model = subject.model
    x, y = subject.val_batch()
    model.eval()
    name = type(model).__name__
    with torch.no_grad(), autocast(mesh.device.type, config.precision):
        what = f"the evaluation of {name}, in eval mode and called with {describe(x)},"
        with part(what, "let it return in eval mode what it returns in training"):
            loss = loss_of(model, subject.loss_fn, x, y)
    _scalar_of(loss, "in eval mode loss_fn" if subject.loss_fn else f"in eval mode {name}")


def _require_unwritten(model: nn.Module, written: list[str], mesh: Mesh) -> None:
    """Raise ConfigError for weights that the forward writes: frozen ones, or on several ranks."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name in written:
        if name not in trained:
            raise ConfigError(
                f"the forward writes the frozen weight {name}, and a step that is repeated after a "
                "fault would write it twice; keep it as a buffer (register_buffer), which nanoray "
                "restores"
            )
        if mesh.world_size > 1:
            raise ConfigError(
                f"the forward writes {name}, as max_norm of nn.Embedding does: each rank would "
                "write its own values, of its own samples; normalise what is read, not what is "
                "kept, or train on one rank; if only the first call writes, to initialise the "
                "model, call it once before it is given to RuntimeEngine"
            )


def _require_same_names(model: nn.Module, before: set[str]) -> None:
    """Raise ConfigError for parameters that a forward has added or removed."""
    after = {name for name, _ in model.named_parameters()}
    if after - before:
        raise ConfigError(
            f"the forward makes the parameter {min(after - before)}, which no optimizer updates; "
            "make it in __init__, or with a lazy module such as nn.LazyLinear"
        )
    if before - after:
        raise ConfigError(
            f"the forward removes the parameter {min(before - after)}; remove it in __init__, or "
            "leave it unused"
        )


def _copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def _equal(batch: Any, other: Any) -> bool:
    """Return whether the tensors of two batches have the same bits."""
    pairs = zip(tree_leaves(batch), tree_leaves(other), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(equal_bits(a, b) for a, b in tensors)


def require_storable(model: nn.Module, optimizer: Optimizer, sharded: bool) -> None:
    """Raise ConfigError for what a checkpoint could not hold, or not restore exactly.

    sharded: of a mode in which ranks save parts of the model.
    """
    name = type(model).__name__
    with part(f"the state_dict of {name}", "mend what the traceback names"):
        lines = unstorable(model, optimizer, sharded)
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise ConfigError(f"{lines[0]}{more}")


def fill_lazy_parameters(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, x: Any, y: Any
) -> None:
    """Give lazy modules their shapes and first values, by one forward on a micro batch.

    Raises ConfigError when the forward fails, or leaves a parameter without a shape.
    """
    positional, named = arguments_of(x, y, loss_fn is not None)
    what = f"the first forward of {type(model).__name__}, called with {describe(x)},"
    # In eval mode, so that no running statistics change. The modes of parts stay as they are.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), part(what, "mend it, or the data"):
            model(*positional, **named)
    finally:
        for module in training:
            module.training = True
    left = lazy_parts(model)
    if left:
        raise ConfigError(
            f"{left[0]} is lazy, and the first forward has not used it; run the model once with a "
            "batch that uses it, before RuntimeEngine"
        )
