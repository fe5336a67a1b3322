"""Copies of a script's optimizer over small parameters: what it keeps is seen when one has stepped.

    optimizer ─► copy over a parameter of each group and number of dimensions ─► a few steps ─► its state

Nothing of the script's own optimizer changes, and nothing is constructed anew.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.base.compat import OPTIMIZER_HOOKS, without_global_optimizer_hooks
from nanoray.state.optimizers import (
    Shape,
    StateFormat,
    elements_of,
    has_own_state_dict,
    members_of,
)

PROBE = (2, 8)  # the parameter that an optimizer is tried on
TRIAL_STEPS = 3  # some optimizers make a part of their state in a later step than the first


def copy_of(optimizer: Optimizer, swap: Mapping[Tensor, Tensor | None]) -> Optimizer:
    """Return a copy of an optimizer, without its state, over other parameters.

    `swap` has the new parameter of each old one; None: the copy is without it. A group that loses
    all of its parameters stays, empty. The copy has none of the script's hooks. Nothing is
    constructed anew, so the arguments of the class do not matter.
    """
    # copy.deepcopy takes what stands in its memo for the copy of an object. So all references to a
    # parameter change, also those in attributes of the optimizer.
    memo: dict[int, Any] = {}
    dropped = set()
    for old, new in swap.items():
        if new is None:
            new = nn.Parameter(torch.empty(0))
            dropped.add(id(new))
        memo[id(old)] = new
    return _copy(optimizer, memo, dropped)


def _copy(optimizer: Optimizer, memo: dict[int, Any], dropped: set[int]) -> Optimizer:
    members = members_of(optimizer)
    if members != [optimizer]:
        several: Any = type(optimizer)
        composite: Optimizer = several([_copy(member, memo, dropped) for member in members])
        return composite

    # torch's own way to copy an optimizer keeps its state and its groups only, so every attribute is
    # copied here. An optimizer may contain another one, and share its state.
    duplicate = object.__new__(type(optimizer))
    memo[id(optimizer)] = duplicate
    memo.setdefault(id(optimizer.state), defaultdict(dict))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            memo[id(value)] = _copy(value, memo, dropped)
    for name, value in vars(optimizer).items():
        # A script's hooks belong to the steps of the original: a copy is tried, or steps shards.
        if name in OPTIMIZER_HOOKS:
            duplicate.__dict__[name] = OrderedDict()
        # A scheduler has replaced `step` by a function of the original.
        elif name != "step":
            duplicate.__dict__[name] = copy.deepcopy(value, memo)
    for group in duplicate.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in dropped]
    return duplicate


def copy_with_state(optimizer: Optimizer, swap: Mapping[Tensor, Tensor | None]) -> Optimizer:
    """Return a copy over other parameters, which begin with the state of the old ones.

    Some optimizers make their state when they are constructed, and need it in their first step.
    Where a new parameter has another shape, its state has the old one's first element everywhere.
    What has the old one's dtype gets that of the new one.
    """
    duplicate = copy_of(optimizer, swap)
    for member, own in zip(members_of(duplicate), members_of(optimizer), strict=True):
        for p, new in swap.items():
            if new is None or p not in own.state:
                continue
            state = {}
            for key, value in own.state[p].items():
                if not isinstance(value, Tensor):
                    state[key] = copy.deepcopy(value)
                    continue
                dtype = new.dtype if value.dtype == p.dtype else value.dtype
                if value.shape == p.shape and new.shape != p.shape and value.numel():
                    state[key] = torch.full(new.shape, value.flatten()[0].item(), dtype=dtype)
                else:
                    state[key] = value.detach().to("cpu", dtype, copy=True)
            member.state[new] = state
    return duplicate


class OptimizerTrial(NamedTuple):
    """A copy of an optimizer over small parameters of the same numbers of dimensions."""

    optimizer: Optimizer
    probes: list[nn.Parameter]

    def step(self, seed: int) -> None:
        """Do one step with random gradients that follow from the seed alone."""
        for number, probe in enumerate(self.probes):
            generator = torch.Generator().manual_seed(1000 * seed + number)
            probe.grad = torch.randn(probe.shape, generator=generator).to(probe.dtype)
        with torch.random.fork_rng(devices=[]):
            # For an optimizer that draws random numbers. The trial lies on the CPU:
            # torch.manual_seed would seed the generators of GPUs as well, and leave them so.
            torch.default_generator.manual_seed(seed)
            self.update()

    def update(self) -> None:
        """Do one step with the gradients that are there, which no hook of the script sees."""
        with without_global_optimizer_hooks():
            self.optimizer.step()

    @property
    def names(self) -> dict[Tensor, str]:
        """Names for the parameters of the trial."""
        return {probe: str(i) for i, probe in enumerate(self.probes)}


def trial_of_copies(optimizer: Optimizer) -> OptimizerTrial:
    """Return a copy of an optimizer over copies of all of its parameters, on the CPU.

    For an optimizer that has tensors of its parameters' shapes besides its state.
    """
    swap: dict[Tensor, Tensor | None] = {}
    probes = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            probes.append(nn.Parameter(p.detach().cpu().clone(), requires_grad=p.requires_grad))
            swap[p] = probes[-1]
    return OptimizerTrial(copy_with_state(optimizer, swap), probes)


def small_shape(dim: int) -> tuple[int, ...]:
    """Return the shape of a trial's parameter with `dim` dimensions; PROBE for a number."""
    if dim == 0:
        return PROBE
    if dim == 1:
        return PROBE[1:]
    return (*PROBE, *[3] * (dim - 2))


def trial_of(
    optimizer: Optimizer, shape_of: Callable[[int], Sequence[int]] = small_shape
) -> OptimizerTrial:
    """Return a copy of an optimizer with one small parameter per group and number of dimensions.

    `shape_of` returns the shape for a number of dimensions. The copy lies on the CPU, where no
    kernel can be captured.
    """
    swap: dict[Tensor, Tensor | None] = {}
    probes: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        seen = set()
        for p in group["params"]:
            swap[p] = None
            if p.dim() in seen or not p.requires_grad:
                continue
            seen.add(p.dim())
            generator = torch.Generator().manual_seed(len(probes))
            values = torch.randn(tuple(shape_of(p.dim())), generator=generator)
            probe = nn.Parameter(values.to(p.dtype))
            swap[p] = probe
            probes.append(probe)

    duplicate = copy_with_state(optimizer, swap)
    for group in duplicate.param_groups:
        if group.get("capturable"):
            group["capturable"] = False
    return OptimizerTrial(duplicate, probes)


Kept = list[tuple[tuple[int, ...], dict[str, Tensor]]]  # a shape, and what is kept for it


def kept_by_kind(
    optimizer: Optimizer,
    shape_of: Callable[[int], Sequence[int]] = small_shape,
    with_own_dicts: bool = False,
) -> Kept | None:
    """Return what an optimizer keeps for one parameter of each group and number of dimensions.

    None if no copy of it can be made and tried. `with_own_dicts`: also what is saved by a
    `state_dict` of its own.
    """
    try:
        trial = trial_of(optimizer, shape_of)
        for seed in range(TRIAL_STEPS):
            trial.step(seed)
        kept: Kept = []
        for member in members_of(trial.optimizer):
            if has_own_state_dict(member) and not with_own_dicts:
                continue
            for group in member.param_groups:
                for probe in group["params"]:
                    kept.append((tuple(probe.shape), elements_of(member.state.get(probe, {}))))
        return kept
    except Exception as error:  # any class of optimizer may come from a user's script
        logging.getLogger("nanoray.rank").info(
            "%s could not be tried alone: %r", type(optimizer).__name__, error
        )
        return None


def _always(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape


def kept_alone(optimizer: Optimizer) -> dict[str, Tensor] | None:
    """Return the tensors that an optimizer keeps for a parameter of shape PROBE after a few steps.

    With several groups, those of any of them. None if no copy of it can be made and tried.
    """
    found = kept_by_kind(optimizer, partial(_always, PROBE), with_own_dicts=True)
    if found is None:
        return None
    kept: dict[str, Tensor] = {}
    for _, tensors in found:
        kept |= tensors
    return kept


# What a checkpoint of it must have.


def tried_format(optimizer: Optimizer, shapes: Collection[Shape] = ()) -> StateFormat:
    """Return what a script's optimizer keeps, as a few steps of a copy show it.

    The copy is tried on small parameters, and on those of the given shapes.
    """
    kinds = kept_by_kind(optimizer)
    for shape in shapes:
        kinds = (kinds or []) + (kept_by_kind(optimizer, partial(_always, shape)) or [])
    if not kinds:
        return StateFormat(None, set(), set(), {"step"}, False, False, None)
    keys: set[str] = set()
    required = set(kinds[0][1])
    shaped_otherwise = set()
    with_dimensions = set()
    for shape, kept in kinds:
        keys |= kept.keys()
        required &= kept.keys()
        for key, tensor in kept.items():
            if tensor.dim():
                with_dimensions.add(key)
            if tensor.shape != shape:
                shaped_otherwise.add(key)
    scalars = keys - with_dimensions | {"step"}
    return StateFormat(keys, required, keys - shaped_otherwise, scalars, False, False, None)
