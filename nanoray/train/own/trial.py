"""Try a script's model on its first micro batch, before step 1: forward, loss, backward, evaluation.

A mistake that would end a run later, or train nothing, is found here and described in one line. The
model and the random generators are afterwards as they were (untouched.py), and the data are read
again from their start. It costs one micro batch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import nanoray
from nanoray.checkpoint.storable import unstorable
from nanoray.compat import gradient_hooks, tree_leaves, tree_map
from nanoray.config import Config
from nanoray.errors import ConfigError, NanorayError
from nanoray.mesh.memory import equal_bits
from nanoray.mesh.mesh import Mesh
from nanoray.models.precision import autocast
from nanoray.models.weighted import Weighted
from nanoray.train.own.call import arguments_of, loss_in, loss_of
from nanoray.train.own.checks import describe, lazy_parts
from nanoray.train.own.untouched import untouched

# Where the frames of a traceback lie that are not the script's
LIBRARIES = (
    f"{Path(nanoray.__file__).resolve().parent}{os.sep}",
    f"{Path(torch.__file__).resolve().parent}{os.sep}",
    contextlib.__file__,
)
FRAMES = 8  # of the script's traceback, the innermost ones
WARNINGS = 3  # notes on what torch warns of


class Unfit(Exception):
    """The model, the loss or the data cannot be trained: its text says why, and what to do."""


@dataclass(frozen=True)
class Subject:
    """What is tried."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any] | None
    train_batch: Callable[[], tuple[Any, Any]]  # the first micro batch of this rank
    val_batch: Callable[[], tuple[Any, Any]] | None  # None: there is no evaluation
    # Whether a batch is read once and used again, and not made anew from samples
    batches_are_kept: bool = False


def try_model(subject: Subject, config: Config, mesh: Mesh) -> list[str]:
    """Try the model on one micro batch; return notes for the user. (all ranks)

    Raises ConfigError on all ranks where any rank has found a mistake.
    """
    fault = ""
    notes: list[str] = []
    try:
        # Whatever the script's code raises, also in a hook or in get_extra_state.
        name = type(subject.model).__name__
        with _explained(name, "mend what the traceback names"):
            notes = _try_on_this_rank(subject, config, mesh)
    except Unfit as unfit:
        fault = str(unfit)

    # A rank that raises alone would leave the others waiting in the next collective.
    faults = mesh.all_gather(fault)
    for rank, found in enumerate(faults):
        if found:
            where = "" if all(faults) else f"on rank {rank}: "
            raise ConfigError(f"{where}{found}")
    return notes


def _try_on_this_rank(subject: Subject, config: Config, mesh: Mesh) -> list[str]:
    """Try the model; raise Unfit for the first mistake."""
    model = subject.model
    with _explained("reading the train data", "mend the dataset"):
        given = subject.train_batch()
    # A copy, because a forward may change its inputs, and step 1 gets the same batch.
    x, y = _copied(given)
    names = {name for name, _ in model.named_parameters()}

    with warnings.catch_warnings(record=True) as seen:
        # Eager: compiled layers are compiled in the warm-up, for the wrapped model.
        eager = torch.compiler.set_stance("force_eager")
        with untouched(model, mesh.device, [subject.loss_fn]) as traces, eager:
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
                raise Unfit(line)
        _require_unwritten(model, traces.written, mesh)
    _require_same_names(model, names)
    if subject.batches_are_kept and not _equal(given, (x, y)):
        raise Unfit(
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


def _forward(subject: Subject, x: Any, y: Any) -> Tensor:
    """Return the loss of a batch, checked."""
    model = subject.model
    positional, named = arguments_of(x, y, subject.loss_fn is not None)
    _require_arguments(subject, x, y)
    name = type(model).__name__
    given = describe(x) if subject.loss_fn else f"{describe(x)} and {describe(y)}"
    with _explained(f"the forward of {name}, called with {given},", "mend it, or the data"):
        output = model(*positional, **named)
    if any(p.grad is not None for p in model.parameters()):
        raise Unfit(
            f"the forward of {name} calls backward, and its gradients would be added to those of "
            "the loss; use torch.autograd.grad in it, and leave the loss's backward to nanoray"
        )
    if subject.loss_fn is None:
        loss = loss_in(output, x)
        source = name
        hint = "return the mean loss of the batch, or give RuntimeEngine a loss_fn"
    else:
        source = "loss_fn"
        hint = "return the mean loss of the batch"
        what = f"loss_fn, called with {describe(output)} and {describe(y)},"
        with _explained(what, "mend it, or what the model returns"):
            loss = subject.loss_fn(output, y)
        if any(p.grad is not None for p in model.parameters()):
            raise Unfit("loss_fn calls backward, which nanoray does; let it return the loss alone")
    scalar = _scalar_of(loss, source, hint)
    if not scalar.requires_grad:
        raise Unfit(_why_no_gradient(subject, output))
    return scalar


def _require_arguments(subject: Subject, x: Any, y: Any) -> None:
    """Raise Unfit for a forward or a loss_fn that does not take what it is given."""
    positional, named = arguments_of(x, y, subject.loss_fn is not None)
    model = subject.model
    name = type(model).__name__
    if getattr(model.forward, "__name__", "") == "_forward_unimplemented":
        raise Unfit(f"{name} has no forward; define forward(self, inputs) in it")
    refusal = _why_not_called(model.forward, positional, named)
    if refusal and named:
        raise Unfit(
            f"a batch is a dict, and the model is called with its keys as arguments, but the "
            f"forward of {name} {refusal}; let it take them, or give pairs of inputs and targets"
        )
    if refusal and subject.loss_fn is None:
        raise Unfit(
            f"without a loss_fn the model is called with inputs and targets, but the forward of "
            f"{name} {refusal}; give RuntimeEngine a loss_fn, or let forward take the targets and "
            "return the loss"
        )
    if refusal:
        raise Unfit(
            f"the model is called with the inputs alone, {describe(x)}, but the forward "
            f"of {name} {refusal}; let it take one argument and unpack that: a tuple or a dict of "
            "tensors"
        )
    if subject.loss_fn is not None:
        refusal = _why_not_called(subject.loss_fn, (None, None), {})
        if refusal:
            raise Unfit(
                f"loss_fn is called with the model's output and the targets, but it {refusal}; "
                "let it take two arguments"
            )


def _why_not_called(
    function: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any]
) -> str:
    """Return why a function does not take these arguments; "" where it does, or is not known to."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C++
        return ""
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        return f"takes ({names}): {error}"
    return ""


def _scalar_of(loss: Any, source: str, hint: str) -> Tensor:
    """Return a loss, or the sum of one with a weight. Raises Unfit for anything else."""
    if not isinstance(loss, Weighted):
        if isinstance(loss, (tuple, list)) and len(loss) == 2:
            hint = f"{hint}, or nanoray.Weighted(sum=..., weight=...)"
        _require_loss(loss, f"{source} returns", hint)
        return loss
    found = f"{source} returns a nanoray.Weighted whose sum is"
    _require_loss(loss.sum, found, "give the sum over its targets")
    weight = loss.weight
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        weight = weight.item()
    is_number = isinstance(weight, (bool, int, float))
    if not is_number or not 0 <= weight < math.inf:
        raise Unfit(
            f"{source} returns a nanoray.Weighted whose weight is {describe(weight)}; give "
            "the number of targets that the sum adds up, 0 or more"
        )
    return loss.sum


def _require_loss(loss: Any, found: str, hint: str) -> None:
    """Raise Unfit unless a loss is one real number, as a tensor. `found`: where, and a verb."""
    if isinstance(loss, (bool, int, float)):
        raise Unfit(
            f"{found} {describe(loss)}, through which no gradient flows; return the "
            "tensor, without .item()"
        )
    if loss is None:
        raise Unfit(f"{found} None; end it with `return loss`")
    if not isinstance(loss, Tensor):
        attribute = ", such as its .loss" if hasattr(loss, "loss") else ""
        raise Unfit(f"{found} {describe(loss)}; {hint}, as one tensor{attribute}")
    if not loss.is_floating_point():
        raise Unfit(
            f"{found} {describe(loss)}, and only a real floating point number has a "
            f"gradient; {hint}"
        )
    if loss.numel() != 1:
        raise Unfit(f"{found} {describe(loss)}, which is not one number; {hint}: loss.mean()")
    if loss.dim():
        raise Unfit(f"{found} {describe(loss)}; return a single number: loss.squeeze()")


def _why_no_gradient(subject: Subject, output: Any) -> str:
    """Return why a loss has no gradient, given the model's output."""
    name = type(subject.model).__name__
    flows = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
    source = "loss_fn" if subject.loss_fn and flows else f"the forward of {name}"
    return (
        f"no gradient flows through {source}: its result does not require one; remove detach, "
        "torch.no_grad, numpy and argmax on the way from the weights to the loss"
    )


def _backward(subject: Subject, loss: Tensor, x: Any) -> None:
    name = type(subject.model).__name__
    what = f"the backward of {name}, after a forward with {describe(x)},"
    with _explained(what, "mend the forward"):
        loss.backward()


def _require_gradients(model: nn.Module) -> None:
    """Raise Unfit where no weight got a gradient, or one that ranks cannot average."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not gradients:
        raise Unfit(
            "the loss depends on no parameter that is trained: none got a gradient; use them in "
            "the forward, or set requires_grad on those that it uses"
        )
    for name, gradient in gradients.items():
        if gradient.layout != torch.strided:
            raise Unfit(
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


def _try_again(subject: Subject, config: Config, mesh: Mesh, x: Any, y: Any) -> None:
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
        raise Unfit(
            f"{type(subject.model).__name__} keeps the graph of the batch before in an attribute, "
            "and backward would need it again; keep the value alone: self.state = state.detach()"
        ) from None


def _evaluate(subject: Subject, config: Config, mesh: Mesh) -> None:
    """Run a batch of the validation data in evaluation mode, as an evaluation does."""
    assert subject.val_batch is not None
    model = subject.model
    with _explained("reading the validation data", "mend the dataset"):
        x, y = subject.val_batch()
    model.eval()
    name = type(model).__name__
    with torch.no_grad(), autocast(mesh.device.type, config.precision):
        what = f"the evaluation of {name}, in eval mode and called with {describe(x)},"
        with _explained(what, "let it return in eval mode what it returns in training"):
            loss = loss_of(model, subject.loss_fn, x, y)
    source = "loss_fn" if subject.loss_fn else name
    _scalar_of(loss, f"in eval mode {source}", "return what it returns in training")


def _require_unwritten(model: nn.Module, written: list[str], mesh: Mesh) -> None:
    """Raise Unfit for weights that the forward writes: frozen ones, or on several ranks."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name in written:
        if name not in trained:
            raise Unfit(
                f"the forward writes the frozen weight {name}, and a step that is repeated after a "
                "fault would write it twice; keep it as a buffer (register_buffer), which nanoray "
                "restores"
            )
        if mesh.world_size > 1:
            raise Unfit(
                f"the forward writes {name}, as max_norm of nn.Embedding does: each rank would "
                "write its own values, of its own samples; normalise what is read, not what is "
                "kept, or train on one rank"
            )


def _require_same_names(model: nn.Module, before: set[str]) -> None:
    """Raise Unfit for parameters that a forward has added or removed."""
    after = {name for name, _ in model.named_parameters()}
    if after - before:
        raise Unfit(
            f"the forward makes the parameter {min(after - before)}, which no optimizer updates; "
            "make it in __init__, or with a lazy module such as nn.LazyLinear"
        )
    if before - after:
        raise Unfit(
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


@contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    """Raise Unfit for an exception of the script's code inside, with its traceback."""
    try:
        yield
    except Unfit:
        raise
    except NanorayError as error:
        raise Unfit(str(error)) from None
    except (Exception, SystemExit) as error:
        if _is_out_of_memory(error):
            raise Unfit(
                f"out of memory: {what} failed ({_first_line(error)}); halve --micro_batch_size: "
                "accumulation doubles and the result stays the same"
            ) from None
        line = f"{what} failed in the trial before step 1: {_first_line(error)}; {remedy}"
        raise Unfit("\n".join([line, *_frames(error)])) from None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]}"


def _frames(error: BaseException) -> list[str]:
    """Return the lines of a traceback that show the script's own code."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(LIBRARIES):
            frames.append(frame)
    return [text.rstrip() for text in traceback.format_list(frames[-FRAMES:])]


def require_storable(model: nn.Module, optimizer: Optimizer, sharded: bool) -> None:
    """Raise ConfigError for what a checkpoint could not hold, or not restore exactly.

    sharded: of a mode in which ranks save parts of the model.
    """
    name = type(model).__name__
    try:
        with _explained(f"the state_dict of {name}", "mend what the traceback names"):
            lines = unstorable(model, optimizer, sharded)
    except Unfit as unfit:
        raise ConfigError(str(unfit)) from None
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise ConfigError(f"{lines[0]}{more}")


def fill_lazy_parameters(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, x: Any, y: Any
) -> None:
    """Give lazy modules their shapes and first values, by one forward on a micro batch.

    Raises ConfigError when the forward fails, or leaves a parameter without a shape.
    """
    subject = Subject(model, loss_fn, lambda: (x, y), None)
    positional, named = arguments_of(x, y, loss_fn is not None)
    what = f"the first forward of {type(model).__name__}, called with {describe(x)},"
    # In eval mode, so that no running statistics change. The modes of parts stay as they are.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        _require_arguments(subject, x, y)
        with torch.no_grad(), _explained(what, "mend it, or the data"):
            model(*positional, **named)
    except Unfit as unfit:
        raise ConfigError(str(unfit)) from None
    finally:
        for module in training:
            module.training = True
    left = lazy_parts(model)
    if left:
        raise ConfigError(
            f"{left[0]} is lazy, and the first forward has not used it; run the model once with a "
            "batch that uses it, before RuntimeEngine"
        )
