"""What a checkpoint cannot keep is named before the first step, and what a forward changes is undone."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanoray.errors import ConfigError
from nanoray.machine.tensor_memory import bytes_of
from nanoray.models.modules import Undisturbed, extra_states, join, split
from nanoray.script.checks import require_storable
from tests.harness.keepers import KEEPERS
from tests.harness.same import same

# torch warns of the kinds of tensors that it supports less
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def with_buffer(tensor: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", tensor)
    return nn.Sequential(model)


def with_weight(tensor: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(tensor, requires_grad=False)
    return nn.Sequential(model)


class Labelled(Tensor):
    """A subclass of Tensor, as libraries of quantised weights have them."""


class Extra(nn.Module):
    """A module with an extra state of any kind."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Renamed(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}w"] = destination.pop(f"{prefix}weight")


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex128": (
        lambda: with_weight(torch.zeros(2, dtype=torch.complex128)),
        "0.extra is a Parameter of complex128 on cpu, torch.strided, which a checkpoint cannot hold",
    ),
    "sparse": (
        lambda: with_buffer(torch.eye(3).to_sparse()),
        "torch.sparse_coo, which a checkpoint",
    ),
    "subclass": (
        lambda: with_buffer(torch.ones(2).as_subclass(Labelled)),
        "0.kept is a Labelled of",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(2)),
        "0.weight has no shape before the first forward; call the model on a batch before",
    ),
    "a set": (
        lambda: nn.Sequential(Extra({"a": [{1, 2}]})),
        "0._extra_state/a/0 is a set, which a checkpoint cannot keep exactly",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_named(kind: str) -> None:
    build, text = REFUSED[kind]
    with pytest.raises(ConfigError) as found:
        require_storable(build(), sharded=False)
    assert text in str(found.value)


@pytest.mark.parametrize("kind", KEEPERS)
def test_what_can_be_kept_is_not_refused(kind: str) -> None:
    require_storable(KEEPERS[kind](), sharded=True)


def test_a_translated_state_dict_is_refused_where_ranks_save_parts() -> None:
    renamed = nn.Sequential(Renamed(2, 2))
    require_storable(renamed, sharded=False)
    longer = nn.Sequential(nn.Linear(2, 2))
    longer[0].register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({f"{prefix}version": torch.ones(1)})
    )
    for model, name in ((renamed, "0.w "), (longer, "0.version ")):
        with pytest.raises(
            ConfigError, match="translates its state_dict; use dp_mode ddp"
        ) as found:
            require_storable(model, sharded=True)
        assert str(found.value).startswith(name)


@pytest.mark.parametrize(
    "value",
    [
        (1, [True, "zwei", {"a": (), "b": {}}], -0.0, 2**70),
        [np.float64(0.1), np.float32("nan"), np.int64(-3), np.bool_(True)],
        OrderedDict({2: Counter("aab"), None: {"": "float"}}),
    ],
)
def test_values_come_back_exactly(value: Any) -> None:
    tensors, values = split({"m": value})
    assert not tensors
    values = json.loads(json.dumps(values, allow_nan=False))
    found = join(values, tensors, torch.device("cpu"))["m"]
    assert repr(found) == repr(value)
    assert same(found, value)


@pytest.mark.parametrize("kind", ["assorted", "extra states", "moving"])
def test_what_a_forward_changes_is_undone(kind: str) -> None:
    torch.manual_seed(0)
    model = KEEPERS[kind]()
    x = torch.randn(4, 3)
    model(x)  # some have their first batch behind them
    model.eval()
    model[0].train() if kind == "extra states" else None
    before = {name: t.clone() for name, t in split(model.state_dict())[0].items()}
    _, values = split(extra_states(model))
    modes = [module.training for module in model.modules()]
    with Undisturbed(model):
        model.train()
        model(x)
        model(x + 1)
    after = split(model.state_dict())[0]
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(bytes_of(after[name]), bytes_of(tensor)), name
    assert split(extra_states(model))[1] == values
    assert [module.training for module in model.modules()] == modes


def test_a_scripted_module_is_restored_in_place() -> None:
    model = torch.jit.script(nn.BatchNorm1d(3))
    with Undisturbed(model):
        model(torch.randn(5, 3))
    assert model.num_batches_tracked == 0
    require_storable(model, sharded=True)
