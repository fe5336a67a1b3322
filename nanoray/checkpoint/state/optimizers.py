"""An optimizer's state as named tensors and JSON, whatever its class.

    state[p]["exp_avg"]        ─► tensor "exp_avg.<param>"
    state[p]["step"] = 7       ─► tensor "step:int.<param>", one element
    param_groups[0]["k"] = 7   ─► JSON, if it has changed since the script gave the optimizer away

An optimizer that keeps anything else, or has a `state_dict` of its own, is written as a whole: as JSON,
with tensors whose names begin with a dot.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanoray.errors import CheckpointError
from nanoray.machine.compat import STATE_HOOKS
from nanoray.models.values import Unsupported, put_together, take_apart
from nanoray.parallel.pieces import Shard

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


def kind_of(optimizer: Optimizer) -> str:
    """Return what decides which values an optimizer keeps: its class, and whether it has momentum.

    A state fits an optimizer of the same kind. A class may keep what another one keeps, and say so by
    an attribute `state_kind`.
    """
    kinds = []
    for member in members_of(optimizer):
        kind = getattr(member, "state_kind", type(member).__name__)
        if any(group.get("momentum") for group in member.param_groups):
            kind = f"{kind} with momentum"
        kinds.append(kind)
    return ", ".join(kinds)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the class, or a hook, decides what the optimizer's state consists of."""
    for name in ("state_dict", "load_state_dict"):
        if getattr(type(optimizer), name, None) is not getattr(Optimizer, name):
            return True
    return any(getattr(optimizer, hooks, None) for hooks in STATE_HOOKS)


# What is kept for one parameter.


def elements_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return an optimizer's tensors for one parameter, live, and its numbers as tensors."""
    elements = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            elements[key] = value
        else:
            kind = type(value).__name__
            _, dtype = NUMBERS[kind]
            elements[f"{key}:{kind}"] = torch.tensor(value, dtype=dtype)
    return elements


def put_element(state: dict[Any, Any], name: str, tensor: Tensor) -> None:
    """Store a tensor under the name that `elements_of` has given it; a number as a number."""
    key, _, kind = name.partition(":")
    if not kind:
        state[key] = tensor
        return
    number, _ = NUMBERS[kind]
    state[key] = number(tensor.item())


def _is_plain(member: Optimizer) -> bool:
    """Return whether an optimizer keeps only tensors and numbers of its parameters, under plain names."""
    if has_own_state_dict(member):
        return False
    for p, state in member.state.items():
        if not isinstance(p, Tensor):
            return False
        for key, value in state.items():
            is_element = isinstance(value, Tensor) or type(value).__name__ in NUMBERS
            if not is_element or not isinstance(key, str) or not key.isidentifier():
                return False
    return True


# All of an optimizer's state.


def optimizer_tensors(optimizer: Optimizer, shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state, live, by names such as `exp_avg.<parameter>`."""
    tensors, _ = apart(optimizer, shards)
    return tensors


def apart(
    optimizer: Optimizer, shards: Sequence[Shard]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state as tensors, live, and as JSON by the number of the optimizer.

    Raises Unsupported for what a checkpoint cannot hold.
    """
    names: dict[Tensor, str] = {shard.param: shard.piece.name for shard in shards}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for number, member in enumerate(members_of(optimizer)):
        if _is_plain(member):
            for p, name in names.items():
                for key, tensor in elements_of(member.state.get(p, {})).items():
                    tensors[f"{key}.{name}"] = tensor
            continue

        if has_own_state_dict(member):
            kept = {"dict": member.state_dict()}
        else:
            # By the names of parameters. What belongs to the optimizer alone has keys of its own. A
            # frozen parameter may have a state, too, which no step changes.
            states: dict[Any, Any] = {}
            for p, state in member.state.items():
                if p in names or not isinstance(p, Tensor):
                    states[names.get(p, p)] = state
            kept = {"state": states}
        beside: dict[str, Tensor] = {}
        values[str(number)] = take_apart(kept, str(number), beside)
        for place, tensor in beside.items():
            tensors[f".{place}"] = tensor
    return tensors, values


def load_optimizer_tensors(
    optimizer: Optimizer,
    shards: Sequence[Shard],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any] | None = None,
    cut: bool = False,
) -> None:
    """Restore what `apart` returned, in copies on each parameter's device.

    With `cut` a tensor is a flat piece of its parameter's.
    """
    # The tensors of a parameter by its name and their keys; under the key "" those beside JSON.
    kept: dict[str, dict[str, Tensor]] = {}
    beside: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key, _, param = name.partition(".")
        if key:
            kept.setdefault(param, {})[key] = tensor
        else:
            beside[param] = tensor

    names: dict[Tensor, str] = {shard.param: shard.piece.name for shard in shards}
    params = {shard.piece.name: shard.param for shard in shards}
    for number, member in enumerate(members_of(optimizer)):
        device = torch.device("cpu")
        for group in member.param_groups:
            for p in group["params"]:
                device = p.device
                # What the optimizer keeps now is of another step.
                if p in member.state:
                    member.state[p].clear()
                if p not in names:
                    continue
                for key, tensor in kept.get(names[p], {}).items():
                    placed = _placed(tensor, key, p, group, member, cut)
                    put_element(member.state[p], key, placed)

        whole = put_together((values or {}).get(str(number), {}), beside, device)
        if "dict" in whole:
            member.load_state_dict(whole["dict"])
        for name, state in whole.get("state", {}).items():
            member.state[params.get(name, name)] = state


def _placed(
    tensor: Tensor, key: str, p: Tensor, group: dict[str, Any], member: Optimizer, cut: bool
) -> Tensor:
    """Return a copy of a saved tensor as an optimizer keeps it for the parameter `p`."""
    if key == STEP:
        # A number, on the host, except for kernels that read it on the device.
        is_read_there = group.get("fused") or group.get("capturable")
        if is_read_there and not getattr(member, "scalars_on_host", False):
            return tensor.reshape(()).to(p.device, copy=True)
        return tensor.reshape(()).to("cpu", copy=True)

    # The run that saved it may have had another precision. torch's AdamW and SGD keep the dtype of
    # the parameter; of another optimizer it is not known, so the saved one stays.
    dtype: torch.dtype = getattr(member, "state_type", tensor.dtype)
    if type(member) in (torch.optim.AdamW, torch.optim.SGD):
        dtype = p.dtype
    if cut and tensor.dim():
        tensor = tensor.view_as(p)
    return tensor.to(p.device, dtype, copy=True)


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
