"""An optimizer's state as named tensors and JSON, whatever its class.

    state[p]["exp_avg"]        ─► tensor "exp_avg.<param>"
    state[p]["step"] = 7       ─► tensor "step:int.<param>", one element
    everything else            ─► JSON, and tensors "0/PLACE." whose names have no parameter
    param_groups[0]["k"] = 7   ─► JSON, if it has changed since the script gave the optimizer away

An optimizer with a `state_dict` of its own is asked for it, and gets the same one back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.errors import CheckpointError
from nanoray.machine.compat import STATE_HOOKS
from nanoray.models.values import Unsupported, put_together, take_apart

# Python numbers, as tensors of one element
NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "int": (int, torch.int64),
    "float": (float, torch.float64),
    "bool": (bool, torch.bool),
}
STEP = "step"  # the key of a count, which is one number for a parameter
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
        if not _is_element(value):
            continue
        if isinstance(value, Tensor):
            elements[_quoted(key)] = value
        else:
            kind = type(value).__name__
            _, dtype = NUMBERS[kind]
            elements[f"{_quoted(key)}:{kind}"] = torch.tensor(value, dtype=dtype)
    return elements


def _is_element(value: Any) -> bool:
    """Return whether a value of a parameter's state is one tensor or one number."""
    return isinstance(value, Tensor) or type(value).__name__ in NUMBERS


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
        if has_own_state_dict(member):
            kept = {"dict": member.state_dict()}
        else:
            kept = _other_values(member, names)
            for p, name in names.items():
                for key, tensor in elements_of(member.state.get(p, {})).items():
                    tensors[f"{key}.{name}"] = tensor
        beside: dict[str, Tensor] = {}
        if kept:
            values[str(number)] = take_apart(kept, "state", beside)
        for place, tensor in beside.items():
            tensors[f"{number}/{_quoted(place, '%.:')}."] = tensor
    return tensors, values


def _other_values(member: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return what an optimizer keeps besides tensors and numbers of its parameters."""
    of_parameters: dict[str, Any] = {}
    of_optimizer: dict[str, Any] = {}
    for p, state in member.state.items():
        # Some optimizers keep values beside those of their parameters.
        if not isinstance(p, Tensor):
            of_optimizer[p] = state
            continue
        # A frozen parameter may have a state, too, which no step changes.
        rest = {key: value for key, value in state.items() if not _is_element(value)}
        if rest and p in names:
            of_parameters[names[p]] = rest
    kept = {"parameters": of_parameters, "optimizer": of_optimizer}
    return {what: values for what, values in kept.items() if values}


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
        beside = {}
        for name, tensor in tensors.items():
            place, _, param = name.partition(".")
            if not param and place.startswith(f"{number}/"):
                beside[unquote(place.partition("/")[2])] = tensor
        # A rank whose share of the weights has none of this optimizer's has nothing to move to a device.
        own = (p for group in member.param_groups for p in group["params"])
        device = next((p.device for p in own), torch.device("cpu"))
        kept = put_together(values.get(str(number), {}), beside, device)
        if "dict" in kept:
            member.load_state_dict(kept["dict"])
        member.state.update(kept.get("optimizer", {}))
        for name, rest in kept.get("parameters", {}).items():
            if name in params:
                member.state[params[name]].update(rest)


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
    members = members_of(optimizer)
    here = [len(member.param_groups) for member in members]
    there = [len(of_member) for of_member in changed]
    if changed and here != there:
        raise CheckpointError(
            f"the checkpoint has values of {_listed(there)} parameter groups, but "
            f"{name_of(optimizer)} has {_listed(here)}; resume with the optimizer that wrote it"
        )
    for member, of_member in zip(members, changed, strict=False):
        for group, values in zip(member.param_groups, of_member, strict=True):
            for key, data in values.items():
                value = put_together(data)
                present = group.get(key)
                if isinstance(present, Tensor) and isinstance(value, Tensor):
                    # A compiled or captured step refers to this very tensor.
                    present.copy_(value)
                else:
                    group[key] = value


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


# Loading the tensors of parameters.


class StateFormat(NamedTuple):
    """What an optimizer keeps for a parameter, and how."""

    keys: set[str] | None  # those that some parameter has; None: not known
    required: set[str]  # those that every parameter has
    scalars_on_host: bool  # also where a fused kernel updates the parameter
    dtype: torch.dtype | None  # of its tensors; None: see `_dtype_of`

    @property
    def whole(self) -> set[str]:
        """The keys whose tensors are shaped like their parameters."""
        return (self.keys or set()) - {STEP}


def known_format(optimizer: Optimizer) -> StateFormat:
    """Return what an optimizer keeps: as it declares it, or as torch's AdamW and SGD are known.

    Of another optimizer nothing is known, and its tensors are loaded as they were saved.
    """
    on_host = getattr(optimizer, "scalars_on_host", False)
    dtype = getattr(optimizer, "state_type", None)
    declared = getattr(optimizer, "state_keys", None)
    groups = optimizer.param_groups
    keys: set[str]
    required: set[str]
    if declared is not None:
        keys = required = set(declared)
    elif type(optimizer) is torch.optim.AdamW:
        required = {"step", "exp_avg", "exp_avg_sq"}
        keys = required | {"max_exp_avg_sq"} if any(g["amsgrad"] for g in groups) else required
    elif type(optimizer) is torch.optim.SGD:
        keys = {"momentum_buffer"} if any(g["momentum"] for g in groups) else set()
        required = keys if all(g["momentum"] for g in groups) else set()
    else:
        return StateFormat(None, set(), on_host, dtype)
    return StateFormat(keys, required, on_host, dtype)


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
    of_parameters = {}
    for name, tensor in tensors.items():
        _, _, owner = name.partition(".")
        if owner:
            of_parameters[name] = tensor

    group_of = {}
    member_of = {}
    members = members_of(optimizer)
    for member in members:
        for group in member.param_groups:
            for p in group["params"]:
                group_of[p] = group
                member_of[p] = member

    # The state must have the keys of this optimizer, and of several each its own.
    form_of = {}
    for number, member in enumerate(members):
        of_member = of_parameters
        if len(members) > 1:
            of_member = {}
            for name, tensor in of_parameters.items():
                param = params.get(name.partition(".")[2])
                if param is not None and member_of.get(param) is member:
                    of_member[name] = tensor
        # The pieces of one rank may all be of parameters that have had no gradient yet, and so may
        # be all parameters of one of several optimizers. With a `state_dict` of its own the state
        # is in `values`.
        has_own_dict = "dict" in values.get(str(number), {})
        may_be_empty = cut or len(members) > 1 or has_own_dict
        form_of[member] = _fitting_format(member, of_member, may_be_empty)

    # What this optimizer keeps now is of another step.
    for p in params.values():
        if p in optimizer.state:
            optimizer.state[p].clear()

    for name, tensor in of_parameters.items():
        key, _, param_name = name.partition(".")
        param = params.get(param_name)
        misfit = CheckpointError(
            f"optimizer state {name} {tuple(tensor.shape)} does not fit this model's parameters"
        )
        if param is None or param not in member_of:
            raise misfit
        form = form_of[member_of[param]]
        has_known_place = key == STEP or ":" in key
        is_number = tensor.dim() == 0 and param.dim() > 0
        is_scalar = is_number or (has_known_place and tensor.numel() == 1)

        # A tensor that is whole may have any shape, if the optimizer's own tensors have.
        shapes = (param.shape, (param.numel(),))
        must_fit = cut or key in form.whole
        if must_fit and not is_scalar and tensor.shape not in shapes:
            raise misfit

        state = optimizer.state[param]
        if ":" in key:
            put_element(state, key, tensor)
        elif is_scalar:
            device: torch.device | str = param.device
            if has_known_place:
                device = _device_of_scalars(param, group_of[param], form)
            put_element(state, key, tensor.reshape(()).to(device, copy=True))
        else:
            dtype = _dtype_of(tensor, param, member_of[param], form)
            if must_fit:
                tensor = tensor.view_as(param)
            put_element(state, key, tensor.to(param.device, dtype, copy=True))
    load_values(optimizer, params, tensors, values)


def _fitting_format(
    optimizer: Optimizer, of_parameters: Mapping[str, Tensor], may_be_empty: bool
) -> StateFormat:
    """Return what an optimizer keeps. Raises CheckpointError where the state has other keys."""
    form = known_format(optimizer)
    saved_keys = {name.partition(".")[0] for name in of_parameters}
    fits = form.keys is None or form.required <= saved_keys <= form.keys
    if not fits and (saved_keys or not may_be_empty):
        raise CheckpointError(
            f"optimizer state holds {sorted(saved_keys) or 'nothing'}, but "
            f"{name_of(optimizer)} needs {sorted(form.keys or ()) or 'nothing'}; resume "
            "with the optimizer and the precision that wrote it"
        )
    return form


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
