"""What must hold of a script's optimizer, found on a small copy of it before anything starts.

copy ─► 3 steps ─► save ─► load into a second copy ─► both go on: equal to the bit, or refused
copy ─► whole matrices, and flat halves of them: equal, or refused where dp_mode cuts parameters
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.base.script_errors import one_line
from nanoray.checkpoint.tensorfile import DTYPE_NAMES
from nanoray.errors import ConfigError
from nanoray.own.optimizer_trial import (
    TRIAL_STEPS,
    OptimizerTrial,
    copy_of,
    copy_with_state,
    trial_of,
    trial_of_copies,
    tried_format,
)
from nanoray.own.part import part
from nanoray.own.several import Several
from nanoray.state.optimizers import (
    changed_groups,
    elements_of,
    group_values,
    has_own_state_dict,
    load_groups,
    load_tensors,
    members_of,
    tensors_of,
    values_of,
)
from nanoray.state.values import Unsupported, same
from nanoray.train.optim.modes import has_modes, set_mode

STEPS_AFTER = 7  # of both copies after a resume: Lookahead's slow weights move every fifth step
CLOSE = 1e-3  # of an update: two ways to sum differ by 1e-6, a norm of another piece by far more
ULPS = 2  # by which a kernel rounds the last elements of a tensor unlike the others, at most
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# Matrices to compare with their pieces. The small one comes first: an optimizer that keeps a matrix
# for each dimension would take minutes for the other one, which is for optimizers that keep 8 bits
# from some thousand elements on.
MATRICES = ((6, 8), (64, 96))


def optimizer_of(given: Any) -> Optimizer:
    """Return a script's optimizer; of several, one that steps them in their order.

    Raises ConfigError for what is no optimizer.
    """
    several = isinstance(given, (list, tuple))
    members = list(given) if several else [given]
    for member in members:
        if not isinstance(member, Optimizer):
            raise ConfigError(
                f"the optimizer is a {type(member).__name__}; give a torch.optim.Optimizer, or a "
                "list of them"
            )
    return Several(members) if several else members[0]


def require_resumable(optimizer: Optimizer) -> None:
    """Raise ConfigError for what nanoray cannot step, save and resume as torch would.

    Tried on small copies, of which each parameter must have a shape.
    """
    for member in members_of(optimizer):
        _require_resumable(member)


def _require_resumable(optimizer: Optimizer) -> None:
    name = _name(optimizer)
    make_trial: Callable[[Optimizer], OptimizerTrial] = trial_of
    try:
        _take_steps(_trial(optimizer, make_trial), range(TRIAL_STEPS + STEPS_AFTER))
    except ConfigError:
        # It may have tensors of its parameters' shapes, as a wrapper with slow weights does.
        make_trial = trial_of_copies
    first = _trial(optimizer, make_trial)
    before = group_values(first.optimizer)
    _take_steps(first, range(TRIAL_STEPS))
    try:
        tensors, values = _saved(first)
        groups = changed_groups(first.optimizer, before)
    except Unsupported as error:
        raise ConfigError(
            f"{name} keeps {error.where} as a {error.kind}, which a checkpoint cannot hold; "
            "checkpoints hold numbers, texts, tensors, and lists and dicts of them: use another "
            "optimizer"
        ) from None
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name} keeps {key.partition('.')[0]} in {kind}, which a checkpoint cannot hold; "
                "use another optimizer"
            )

    # What is saved must be all that the next steps depend on.
    second = _trial(optimizer, make_trial)
    for old, new in zip(first.probes, second.probes, strict=True):
        new.data.copy_(old.data)
    with part(f"{name}, resumed from its own state_dict,", "use another optimizer"):
        params = {str(i): probe for i, probe in enumerate(second.probes)}
        kept = json.loads(json.dumps(values))
        load_tensors(second.optimizer, params, tensors, kept, format_of=tried_format)
        load_groups(second.optimizer, json.loads(json.dumps(groups)))
        restored, _ = _saved(second)
        exact = same(dict(sorted(tensors.items())), dict(sorted(restored.items())))
        seeds = range(TRIAL_STEPS, TRIAL_STEPS + STEPS_AFTER)
        for trial in (first, second):
            _take_steps(trial, seeds)
    for old, new in zip(first.probes, second.probes, strict=True):
        exact = exact and same(old.data, new.data)
    if not exact:
        raise ConfigError(
            f"{name} takes other steps after a resume: it keeps something that its state_dict() "
            "lacks, or that load_state_dict() changes; let both have all of it, with its types, or "
            "use another optimizer"
        )


def require_elementwise(optimizer: Optimizer, dp_mode: str) -> None:
    """Raise ConfigError for an optimizer that treats a piece of a parameter unlike the whole.

    zero1, zero2 and fsdp give it flat pieces. It is tried on matrices, and on the flat halves of
    them, each half in an optimizer of its own, as on two ranks.
    """
    for member in members_of(optimizer):
        problem = _difference_of_pieces(member)
        if problem:
            raise ConfigError(
                f"dp_mode = {dp_mode} gives the optimizer flat pieces of the parameters, but "
                f"{_name(member)} {problem}; use dp_mode ddp or ddp_by_hand"
            )


def require_no_draws(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose update is random: it would differ between ranks."""
    for member in members_of(optimizer):
        with torch.random.fork_rng(devices=[]):
            trial = _trial(member, trial_of)
            for probe in trial.probes:
                probe.grad = torch.zeros_like(probe)
            before = torch.get_rng_state()
            with suppress(Exception):  # `require_resumable` has tried it
                trial.update()
            draws = not torch.equal(before, torch.get_rng_state())
        if draws:
            raise ConfigError(
                f"{_name(member)} draws random numbers in its step, which differ between ranks, so "
                "their weights would drift apart; train it on one rank, or use another optimizer"
            )


def _difference_of_pieces(optimizer: Optimizer) -> str | None:
    """Return how an optimizer treats pieces unlike the whole; None if it does not."""
    if has_own_state_dict(optimizer):
        return "has a state_dict() of its own, which cannot be cut"
    if has_modes(optimizer):
        return "changes the weights in its eval() and train()"
    for matrix in MATRICES:
        problem = _compare_with_halves(optimizer, matrix)
        if problem:
            return problem
    return None


def _compare_with_halves(optimizer: Optimizer, matrix: tuple[int, int]) -> str | None:
    """Return how flat halves of parameters are treated unlike the whole; None if they are not."""
    # One rounding error of 16-bit weights is as large as an update, so weights and gradients are
    # compared in float32. The optimizer's class decides what it does, and not their type.
    whole = _uneven_trial(optimizer, matrix, lambda p: p)
    before = [probe.detach().clone() for probe in whole.probes]
    halves = [
        _uneven_trial(optimizer, matrix, lambda p: p.flatten()[: p.numel() // 2]),
        _uneven_trial(optimizer, matrix, lambda p: p.flatten()[p.numel() // 2 :]),
    ]
    try:
        # A rank may have no element of a group.
        nothing: dict[Tensor, Tensor | None] = {}
        for group in optimizer.param_groups:
            nothing |= dict.fromkeys(group["params"])
        OptimizerTrial(copy_of(optimizer, nothing), []).update()
        for seed in range(TRIAL_STEPS + STEPS_AFTER):
            gradients = _uneven_gradients(whole, seed)
            whole.update()
            for side, half in enumerate(halves):
                for probe, gradient in zip(half.probes, gradients, strict=True):
                    probe.grad = gradient.flatten().chunk(2)[side].clone()
                half.update()
    except Exception as error:  # any class of optimizer may come from a user's script
        return f"fails on them ({one_line(error)})"

    for i, start in enumerate(before):
        update = whole.probes[i].detach() - start
        updates = [half.probes[i].detach() for half in halves]
        pieces = torch.cat(updates) - start.flatten()
        states = [trial.optimizer.state[trial.probes[i]] for trial in (whole, *halves)]
        # An update is as coarse as the coarsest of what it is computed from.
        limit = max(_tolerance(t) for t in (update, *elements_of(states[0]).values()))
        if not update.isfinite().all():
            return "computes values that are not finite from gradients of about 100"
        if not _close(update.flatten(), pieces, limit):
            return "gives other results on a piece than on the whole, as if it used rows or norms"
        problem = _difference_of_states(states[0], states[1:], limit)
        if problem:
            return problem
    if values_of(whole.optimizer, whole.names):
        return "keeps values beside those of single parameters"
    groups = [group_values(trial.optimizer) for trial in (whole, *halves)]
    if any(a != b for a, b in pairwise(groups)):
        return "keeps values of a group that depend on all parameters"
    return None


def _difference_of_states(
    whole: Mapping[str, Any], halves: Sequence[Mapping[str, Any]], limit: float
) -> str | None:
    """Return how the states of two halves differ from that of the whole; None if they do not."""
    for key, value in whole.items():
        if not isinstance(value, (Tensor, int, float)):
            return f"keeps a {type(value).__name__} for each ({key})"
    elements = elements_of(whole)
    parts = [elements_of(half) for half in halves]
    for key, tensor in elements.items():
        if any(key not in part for part in parts):
            return f"keeps {key} for large parameters only"
        if not tensor.dim():
            equal = all(_close(tensor, part[key], limit) for part in parts)
        else:
            flat = torch.cat([part[key].flatten() for part in parts])
            equal = flat.shape == (tensor.numel(),) and _close(tensor.flatten(), flat, limit)
        if not equal:
            return (
                f"keeps another {key} for a piece than for the whole, as if it used rows or norms"
            )
    return None


def _tolerance(tensor: Tensor) -> float:
    """Return how far two ways to compute a tensor may be apart, relative to its largest element."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return CLOSE
    return max(CLOSE, ULPS * torch.finfo(tensor.dtype).eps)


def _close(a: Tensor, b: Tensor, limit: float) -> bool:
    """Return whether two tensors are equal but for the order of sums within a kernel.

    `limit`: relative to the largest element, of those that are finite.
    """
    if not a.numel():
        return True
    # Types of 8 bits have no arithmetic of their own.
    wide = torch.complex128 if a.is_complex() else torch.float64
    a = a.to(wide)
    largest = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(a, b.to(wide), rtol=limit, atol=limit * largest, equal_nan=True)


def _uneven_trial(
    optimizer: Optimizer, matrix: tuple[int, int], part: Callable[[Tensor], Tensor]
) -> OptimizerTrial:
    """Return a trial over a part of each parameter, with a rate that moves them."""
    trial = trial_of(optimizer, lambda dim: (1,) * dim)
    swap: dict[Tensor, Tensor | None] = {}
    probes = []
    for number, probe in enumerate(trial.probes):
        shape = (*matrix, *[3] * (probe.dim() - 2))
        if probe.dim() < 2:
            shape = (matrix[0] * matrix[1],)
        generator = torch.Generator().manual_seed(number)
        dtype = torch.float32 if probe.dtype in SIXTEEN_BITS else probe.dtype
        values = torch.randn(shape, generator=generator).to(dtype)
        probes.append(nn.Parameter(part(values).clone()))
        swap[probe] = probes[-1]
    duplicate = copy_with_state(trial.optimizer, swap)
    for group in duplicate.param_groups:
        if isinstance(group.get("lr"), (float, Tensor)):
            group["lr"] = group["lr"] * 0 + 0.01
    return OptimizerTrial(duplicate, probes)


def _uneven_gradients(trial: OptimizerTrial, seed: int) -> list[Tensor]:
    """Set random gradients whose second half is far larger, and return them."""
    gradients = []
    for number, probe in enumerate(trial.probes):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        flat = torch.randn(probe.numel(), generator=generator)
        flat[probe.numel() // 2 :] *= 100
        probe.grad = flat.view(probe.shape).to(probe.dtype)
        gradients.append(probe.grad.clone())
    return gradients


def _trial(
    optimizer: Optimizer, make_trial: Callable[[Optimizer], OptimizerTrial]
) -> OptimizerTrial:
    what = f"{_name(optimizer)}, copied to be tried,"
    with part(what, "keep what cannot be copied out of its attributes, or use another optimizer"):
        trial = make_trial(optimizer)
    set_mode([trial.optimizer], "train")
    return trial


def _take_steps(trial: OptimizerTrial, seeds: Sequence[int]) -> None:
    what = f"{_name(trial.optimizer)}, in a step() on dense gradients and without a closure,"
    with part(what, "use another optimizer, or other settings of it"):
        for seed in seeds:
            trial.step(seed)


def _saved(trial: OptimizerTrial) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a trial's state, in tensors of its own."""
    tensors = tensors_of(trial.optimizer, trial.names)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return copies, values_of(trial.optimizer, trial.names)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


# Parameters.


def require_all_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer by the names that they have in the model.

    Raises ConfigError when one is of another model, is missing, or belongs to two of several.
    """
    # By identity: parameters compare element by element.
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[str, int] = {}  # the number of the optimizer: one may be listed twice
    updated = {}
    members = members_of(optimizer)
    for number, member in enumerate(members):
        for group in member.param_groups:
            for p in group["params"]:
                if id(p) not in names:
                    raise ConfigError(
                        f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                        "model's; make it from model.parameters(), after the last change of the "
                        "model"
                    )
                name = names[id(p)]
                owner = owners.setdefault(name, number)
                if owner != number:
                    raise ConfigError(
                        f"{name} belongs to both {_name(members[owner])} and {_name(member)}; give "
                        "each parameter to one optimizer"
                    )
                updated[name] = p
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in updated
    ]
    if missing:
        raise ConfigError(
            f"the optimizer does not update {missing[0]}; give it all parameters, or set "
            "requires_grad to False"
        )
    return updated
