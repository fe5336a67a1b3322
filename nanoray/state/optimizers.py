"""An optimizer's state as named tensors and JSON, whatever its class, and copies to try it on.

    state[p]["exp_avg"]        ─► tensor "exp_avg.<param>"
    state[p]["step"] = 7       ─► tensor "step:int.<param>", one element
    state[p]["GG"] = [a, b]    ─► tensors "GG/0.<param>", "GG/1.<param>", and JSON with their places
    state["global"]            ─► JSON and tensors, whose names have no parameter
    param_groups[0]["k"] = 7   ─► JSON, if it has changed since the script gave the optimizer away

An optimizer with a `state_dict` of its own is asked for it, and gets the same one back.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.base.compat import OPTIMIZER_HOOKS, STATE_HOOKS, without_global_optimizer_hooks
from nanoray.errors import CheckpointError
from nanoray.state.values import Unsupported, put_together, take_apart

PROBE = (2, 8)  # the parameter that an optimizer is tried on
TRIAL_STEPS = 3  # some optimizers make a part of their state in a later step than the first
# Python numbers, as tensors of one element
NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "int": (int, torch.int64),
    "float": (float, torch.float64),
    "bool": (bool, torch.bool),
}
Groups = list[list[dict[str, Any]]]  # by optimizer and group: the values of a group, as JSON


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one consists of: itself, if it is a plain one."""
    members: list[Optimizer] | None = getattr(optimizer, "members", None)
    return [optimizer] if members is None else members


def name_of(optimizer: Optimizer) -> str:
    """Return the class of an optimizer, or the classes of those that it consists of."""
    return ", ".join(type(member).__name__ for member in members_of(optimizer))


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the class, or a hook, decides what the optimizer's state consists of."""
    for name in ("state_dict", "load_state_dict"):
        if getattr(type(optimizer), name, None) is not getattr(Optimizer, name):
            return True
    return any(getattr(optimizer, hooks, None) for hooks in STATE_HOOKS)


# What is kept for one parameter.


def elements_of(state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return an optimizer's tensors for one parameter, live, and its numbers as tensors."""
    elements = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            elements[_quoted(key)] = value
        elif type(value).__name__ in NUMBERS:
            kind = type(value).__name__
            _, dtype = NUMBERS[kind]
            elements[f"{_quoted(key)}:{kind}"] = torch.tensor(value, dtype=dtype)
    return elements


def put_element(state: dict[Any, Any], name: str, tensor: Tensor) -> None:
    """Store a tensor under the name that `elements_of` has given it; a number as a number."""
    key, _, kind = name.partition(":")
    if not kind:
        state[unquote(key)] = tensor
        return
    number, _ = NUMBERS[kind]
    state[unquote(key)] = number(tensor.item())


def _quoted(key: Any, characters: str = "%.:/") -> str:
    """Return a key without the characters that separate the parts of a tensor's name."""
    if not isinstance(key, str):
        raise Unsupported("a key of the state", key)
    for character in characters:
        key = key.replace(character, f"%{ord(character):02X}")
    return key


def _quoted_place(place: str) -> str:
    """Return the place of a tensor within a value, in which "/" separates the parts."""
    return _quoted(place, "%.:")


# All of an optimizer's state.


def tensors_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state, live, by names such as `exp_avg.<parameter>`."""
    tensors, _ = _apart(optimizer, names)
    return tensors


def values_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return as JSON what an optimizer keeps besides tensors and numbers of its parameters."""
    _, values = _apart(optimizer, names)
    return values


def _apart(
    optimizer: Optimizer, names: Mapping[Tensor, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state as tensors, and as JSON by the number of the optimizer.

    Raises Unsupported for what a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for number, member in enumerate(members_of(optimizer)):
        outside: dict[str, Tensor] = {}
        if has_own_state_dict(member):
            values[str(number)] = {"dict": take_apart(member.state_dict(), "state", outside)}
        else:
            kept = _state_apart(member, names, tensors, outside)
            if kept:
                values[str(number)] = kept
        for place, tensor in outside.items():
            tensors[f"{number}/{_quoted_place(place)}."] = tensor
    return tensors, values


def _state_apart(
    member: Optimizer,
    names: Mapping[Tensor, str],
    tensors: dict[str, Tensor],
    outside: dict[str, Tensor],
) -> dict[str, Any]:
    """Add one optimizer's state to `tensors` and `outside`, and return the JSON of the rest."""
    of_parameters: dict[str, Any] = {}
    of_optimizer: dict[str, Any] = {}
    for p, state in member.state.items():
        # Some optimizers keep values beside those of their parameters.
        if not isinstance(p, Tensor):
            _quoted(p)
            of_optimizer[p] = take_apart(state, p, outside)
            continue

        # A frozen parameter may have a state, too, which no step changes.
        name = names.get(p)
        if name is None:
            continue
        for key, tensor in elements_of(state).items():
            tensors[f"{key}.{name}"] = tensor
        rest = {}
        for key, value in state.items():
            if isinstance(value, Tensor) or type(value).__name__ in NUMBERS:
                continue
            nested: dict[str, Tensor] = {}
            rest[key] = take_apart(value, _quoted(key), nested)
            for place, tensor in nested.items():
                tensors[f"{_quoted_place(place)}.{name}"] = tensor
        if rest:
            of_parameters[name] = rest

    values = {}
    if of_parameters:
        values["parameters"] = of_parameters
    if of_optimizer:
        values["optimizer"] = of_optimizer
    return values


def load_values(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Restore what `values_of` returned, with the tensors that belong to it, copied.

    Tensors and numbers that a parameter keeps by themselves are not among them.
    """
    for number, member in enumerate(members_of(optimizer)):
        kept = values.get(str(number), {})
        device = member.param_groups[0]["params"][0].device if "dict" in kept else None
        outside = {}
        for name, tensor in tensors.items():
            place, _, param = name.partition(".")
            if not param and place.startswith(f"{number}/"):
                outside[unquote(place.partition("/")[2])] = _copied(tensor, device)
        if "dict" in kept:
            member.load_state_dict(put_together(kept["dict"], outside))
            continue

        for key, value in kept.get("optimizer", {}).items():
            member.state[key] = put_together(value, outside)
        for name, rest in kept.get("parameters", {}).items():
            if name not in params:
                continue
            p = params[name]
            nested = {}
            for full, tensor in tensors.items():
                place, _, param = full.partition(".")
                if param == name and "/" in place:
                    nested[unquote(place)] = _copied(tensor, p.device)
            for key, value in rest.items():
                member.state[p][key] = put_together(value, nested)


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    return tensor.to(device or tensor.device, copy=True)


# The values of parameter groups.


def group_values(optimizer: Optimizer) -> Groups:
    """Return the values of all groups, as JSON; of other types the objects themselves."""
    groups = []
    for member in members_of(optimizer):
        of_member = []
        for group in member.param_groups:
            values = {}
            for key, value in group.items():
                if key != "params":
                    values[key] = _json_or_itself(value, key)
            of_member.append(values)
        groups.append(of_member)
    return groups


def _json_or_itself(value: Any, key: str) -> Any:
    try:
        return json.dumps(take_apart(value, key))  # as text, 1 and 1.0 differ
    except Unsupported:
        return value


def _equal(old: Any, now: Any) -> bool:
    """Compare two values of `_json_or_itself`; objects by identity, as they may not be comparable."""
    return old is now or (isinstance(old, str) and isinstance(now, str) and old == now)


def changed_groups(
    optimizer: Optimizer, before: Groups, skip: Collection[str] = ()
) -> list[list[dict[str, Any]]]:
    """Return the values of groups that differ from `before`, as JSON; [] if none does.

    Raises Unsupported where a changed value is of another type than a checkpoint can hold.
    """
    changed: Groups = []
    found = False
    for number, member in enumerate(members_of(optimizer)):
        of_member = []
        for i, group in enumerate(member.param_groups):
            old = before[number][i]
            values: dict[str, Any] = {}
            # An own state_dict has the groups already.
            keys = () if has_own_state_dict(member) else group.keys() - {"params", *skip}
            for key in sorted(keys):
                now = _json_or_itself(group[key], key)
                if key not in old or not _equal(old[key], now):
                    values[key] = take_apart(group[key], f"param_groups[{i}]/{key}")
            found = found or bool(values)
            of_member.append(values)
        changed.append(of_member)
    return changed if found else []


def load_groups(optimizer: Optimizer, changed: Groups) -> None:
    """Restore what `changed_groups` returned. Tensors are written in place."""
    for member, of_member in zip(members_of(optimizer), changed, strict=False):
        for group, values in zip(member.param_groups, of_member, strict=True):
            for key, data in values.items():
                value = put_together(data)
                present = group.get(key)
                if isinstance(present, Tensor) and isinstance(value, Tensor):
                    # A compiled or captured step refers to this very tensor.
                    present.copy_(value)
                else:
                    group[key] = value


# Copies of an optimizer, over other parameters.


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


# Loading the tensors of parameters.


class StateFormat(NamedTuple):
    """What an optimizer keeps for a parameter, and how."""

    keys: set[str] | None  # those that some parameter has; None: not known
    required: set[str]  # those that every parameter has
    whole: set[str]  # those whose tensors are shaped like their parameters
    scalars: set[str]  # those of single numbers
    scalars_on_host: bool  # also where a fused kernel updates the parameter
    declared: bool  # whether the optimizer itself names its keys, as nanoray's own do
    dtype: torch.dtype | None  # of its tensors; None: see `_dtype_of`


def state_format(optimizer: Optimizer, shapes: Collection[tuple[int, ...]] = ()) -> StateFormat:
    """Return what an optimizer keeps: as it declares it, else as a few steps of a copy show it.

    The copy is tried on small parameters, and on those of the given shapes.
    """
    on_host = getattr(optimizer, "scalars_on_host", False)
    dtype = getattr(optimizer, "state_type", None)
    declared = getattr(optimizer, "state_keys", None)
    if declared is not None:
        keys = set(declared)
        return StateFormat(keys, keys, keys - {"step"}, {"step"}, on_host, True, dtype)

    kinds = kept_by_kind(optimizer)
    for shape in shapes:
        kinds = (kinds or []) + (kept_by_kind(optimizer, partial(_always, shape)) or [])
    if not kinds:
        return StateFormat(None, set(), set(), {"step"}, on_host, False, dtype)
    keys = set()
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
    return StateFormat(keys, required, keys - shaped_otherwise, scalars, on_host, False, dtype)


def load_tensors(
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    cut: bool = False,
) -> None:
    """Restore what `tensors_of` and `values_of` returned, on each parameter's device.

    With `cut` a tensor is a flat piece of its parameter's. Raises CheckpointError when the state
    belongs to another optimizer or to other parameters.
    """
    # The state must have the keys of this optimizer, where they are known.
    form = state_format(optimizer)
    of_parameters = {}
    for name, tensor in tensors.items():
        key, _, owner = name.partition(".")
        if owner and "/" not in key:
            of_parameters[name] = tensor
    saved_keys = {name.partition(".")[0] for name in of_parameters}
    # The pieces of one rank may all be of parameters that have had no gradient yet.
    has_state = bool(of_parameters) or not cut
    fits = form.keys is None or form.required <= saved_keys <= form.keys
    if has_state and not fits and not form.declared:
        # Some optimizers keep other things for a large parameter than for a small one.
        shapes = set()
        for name in of_parameters:
            key, _, owner = name.partition(".")
            if key not in (form.keys or ()) and owner in params:
                shapes.add(tuple(params[owner].shape))
        form = state_format(optimizer, shapes)
        fits = form.keys is None or form.required <= saved_keys <= form.keys
    if has_state and not fits:
        where = ", in its precision" if form.declared else ""
        raise CheckpointError(
            f"optimizer state holds {sorted(saved_keys) or 'nothing'}, but "
            f"{name_of(optimizer)} needs {sorted(form.keys or ()) or 'nothing'}; resume "
            f"with the optimizer that wrote it{where}"
        )

    # What this optimizer keeps now is of another step.
    group_of = {}
    member_of = {}
    for member in members_of(optimizer):
        for group in member.param_groups:
            for p in group["params"]:
                group_of[p] = group
                member_of[p] = member
    for p in params.values():
        if p in optimizer.state:
            optimizer.state[p].clear()

    for name, tensor in of_parameters.items():
        key, _, param_name = name.partition(".")
        param = params.get(param_name)
        is_scalar = (key in form.scalars or ":" in key) and tensor.numel() == 1

        # A tensor that is whole may have any shape, if the optimizer's own tensors have.
        fits = param is not None
        if fits and not is_scalar and (cut or form.keys is None or key in form.whole):
            assert param is not None
            fits = tensor.shape in (param.shape, (param.numel(),))
        if param is None or not fits:
            raise CheckpointError(
                f"optimizer state {name} {tuple(tensor.shape)} does not fit this model's parameters"
            )

        state = optimizer.state[param]
        if ":" in key:
            put_element(state, key, tensor)
        elif is_scalar:
            device = _device_of_scalars(param, group_of[param], form)
            put_element(state, key, tensor.reshape(()).to(device, copy=True))
        else:
            dtype = _dtype_of(tensor, param, member_of[param], form)
            if key in form.whole or cut:
                tensor = tensor.view_as(param)
            put_element(state, key, tensor.to(param.device, dtype, copy=True))
    load_values(optimizer, params, tensors, values)


def _device_of_scalars(
    param: Tensor, group: dict[str, Any], form: StateFormat
) -> torch.device | str:
    """Return where an optimizer keeps a parameter's step, as Adam does.

    On the host, except for kernels that read it on the device.
    """
    is_read_on_device = group.get("fused") or group.get("capturable")
    return param.device if is_read_on_device and not form.scalars_on_host else "cpu"


def _dtype_of(saved: Tensor, param: Tensor, optimizer: Optimizer, form: StateFormat) -> torch.dtype:
    """Return the dtype of a tensor in the optimizer's state.

    The run that saved it may have had another precision. torch's AdamW and SGD keep the dtype of
    the parameter; of another optimizer it is not known, so the saved one stays.
    """
    if form.dtype is not None:
        return form.dtype
    if isinstance(optimizer, torch.optim.AdamW | torch.optim.SGD):
        return param.dtype
    return saved.dtype
