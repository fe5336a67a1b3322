"""What a script's code changes in a pass that is no step is undone, wherever it keeps it."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import tests.harness.own_runs as other_module
from nanoray.own.side_effects import SideEffects, undisturbed
from nanoray.own.skipping_ddp import touch
from nanoray.train.guard.bad_step import Probe

GLOBAL = 0
other_module.CALLS = 0  # type: ignore[attr-defined]


class Counting:
    """An object of a script, with an attribute, a slot's counterpart in its class, and a list."""

    of_all = 0

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        self.seen.append(self.calls)
        type(self).of_all += 1

    def read(self) -> Any:
        return self.calls, [*self.seen], Counting.of_all


class OwnList(list[int]):
    """A class that derives from a collection."""


def closure() -> tuple[Callable[..., None], Callable[[], Any]]:
    calls = 0

    def count(*arguments: Any) -> None:
        nonlocal calls
        calls += 1

    return count, lambda: calls


def of_globals() -> tuple[Callable[..., None], Callable[[], Any]]:
    def helper() -> None:
        global GLOBAL
        GLOBAL += 1
        other_module.CALLS += 1  # type: ignore[attr-defined]

    def count(*arguments: Any) -> None:
        helper()

    return count, lambda: (GLOBAL, other_module.CALLS)  # type: ignore[attr-defined]


def of_function() -> tuple[Callable[..., None], Callable[[], Any]]:
    def count(*arguments: Any, kept: list[int] = []) -> None:  # noqa: B006
        kept.append(1)
        count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]

    return count, lambda: (getattr(count, "calls", 0), [*count.__kwdefaults__["kept"]])


def collected(
    value: Any, change: Callable[[Any], object]
) -> tuple[Callable[..., None], Callable[[], Any]]:
    def count(*arguments: Any) -> None:
        change(value)

    return count, lambda: repr(value)


def of_object() -> tuple[Callable[..., None], Callable[[], Any]]:
    counting = Counting()
    return counting, counting.read


def of_method() -> tuple[Callable[..., None], Callable[[], Any]]:
    counting = Counting()
    return partial(counting.__call__), counting.read


def add_one(array: Any) -> None:
    array += 1


KINDS: dict[str, Callable[[], tuple[Callable[..., None], Callable[[], Any]]]] = {
    "a variable": closure,
    "globals, also of another module": of_globals,
    "an attribute and a default of a function": of_function,
    "an object that is called": of_object,
    "a method": of_method,
    "list": lambda: collected([1], lambda v: v.append(2)),
    "list in a tuple in a dict": lambda: collected({"a": ([0],)}, lambda v: v["a"][0].append(2)),
    "dict": lambda: collected({"a": 1}, lambda v: v.update(a=2, b=3)),
    "OrderedDict": lambda: collected(OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "Counter": lambda: collected(Counter("ab"), lambda v: v.update("abc")),
    "defaultdict": lambda: collected(defaultdict(int), lambda v: v.update(x=v["y"] + 1)),
    "a list of the script's own": lambda: collected(OwnList([1]), lambda v: v.append(v.pop() + 1)),
    "set": lambda: collected({1}, lambda v: v.add(2)),
    "deque": lambda: collected(deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "array": lambda: collected(np.zeros(3), add_one),
    "tensor": lambda: collected(torch.zeros(3), lambda v: v.add_(1)),
    "namespace": lambda: collected(
        SimpleNamespace(values=[0]), lambda v: v.values.__setitem__(0, v.values[0] + 1)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_changes_is_undone(kind: str) -> None:
    model = nn.Linear(2, 2)
    count, read = KINDS[kind]()
    model.register_forward_hook(lambda *_: count())
    before = read()
    with undisturbed(model):
        model(torch.ones(2))
        assert read() != before, "the hook was called"
    assert read() == before
    model(torch.ones(2))
    assert read() != before, "it is called again, and works on the same objects"


@pytest.mark.parametrize("kind", ["a variable", "globals, also of another module", "list", "set"])
def test_what_a_loss_or_a_gradient_hook_changes_is_undone(kind: str) -> None:
    model = nn.Linear(2, 2)
    count, read = KINDS[kind]()
    before = read()
    effects = SideEffects(model, [count])
    count()
    effects.undo()
    assert read() == before

    model.weight.register_hook(lambda gradient: count())
    model.bias.register_post_accumulate_grad_hook(lambda p: count())
    with undisturbed(model):
        model(torch.ones(2)).sum().backward()
        assert read() != before
    assert read() == before


class Remembering(nn.Module):
    """Counts, collects, keeps a state, and makes an attribute in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0
        self.hidden: Tensor | None = None
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.first = getattr(self, "first", 0) + 1
        self.hidden = self.layer(x)
        self.outputs.append(self.hidden)
        return self.hidden

    def read(self) -> Any:
        return self.calls, self.hidden, [*self.outputs], getattr(self, "first", None)


def test_attributes_of_a_module_are_undone_also_new_ones() -> None:
    model = Remembering()
    with undisturbed(model):
        model(torch.ones(2))
    assert model.read() == (0, None, [], None)


def test_an_evaluation_keeps_what_it_collects_and_nothing_else() -> None:
    """Training must not depend on the counts of evaluations, but a script may read predictions."""
    model = Remembering()
    with undisturbed(model, keep_collected=True):
        model(torch.ones(2))
    calls, hidden, outputs, first = model.read()
    assert (calls, hidden, first) == (0, None, None)
    assert len(outputs) == 1


def test_a_module_beside_the_model_is_undone_but_for_evaluations() -> None:
    """A moving average that a hook updates, and a metric that an evaluation fills."""
    model = nn.Linear(2, 2)
    average = AveragedModel(model)
    model.weight.register_post_accumulate_grad_hook(lambda p: average.update_parameters(model))
    with torch.no_grad():
        model.weight.add_(1)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    with undisturbed(model):
        model(torch.ones(2)).sum().backward()
        assert average.n_averaged == 1
    after = average.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with undisturbed(model, keep_collected=True):
        model(torch.ones(2)).sum().backward()
    assert average.n_averaged == 1


def test_a_hook_that_removes_itself_is_there_again() -> None:
    """Those of a module, a parameter and all modules, with what torch notes of them."""
    model = nn.Linear(2, 2)
    handles: dict[str, Any] = {}
    calls: Counter[str] = Counter()

    def once(name: str) -> Callable[..., None]:
        def hook(*arguments: Any, **named: Any) -> None:
            calls[name] += 1
            handles[name].remove()

        return hook

    handles["pre"] = model.register_forward_pre_hook(once("pre"), with_kwargs=True)
    handles["forward"] = model.register_forward_hook(once("forward"), always_call=True)
    handles["gradient"] = model.weight.register_hook(once("gradient"))
    handles["sum"] = model.bias.register_post_accumulate_grad_hook(once("sum"))
    handles["all"] = nn.modules.module.register_module_forward_hook(once("all"))
    try:
        with undisturbed(model):
            model(torch.ones(2)).sum().backward()
            assert calls == dict.fromkeys(handles, 1)
        assert calls == {}
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
        assert calls == dict.fromkeys(handles, 1)
    finally:
        handles["all"].remove()


def test_hooks_of_libraries_stay_as_they_are() -> None:
    """torch's lazy modules remove theirs in the first forward, and nanoray adds some."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    probe = Probe(model)
    with undisturbed(model):
        model(torch.ones(3))
        probe.__enter__()
    assert not model[0]._forward_pre_hooks
    assert model[1]._forward_hooks
    probe.__exit__(None, None, None)
    model(torch.ones(3))


def test_objects_of_libraries_keep_what_they_have_done() -> None:
    """A logger's handlers or a tracker's state must not go back: others refer to them."""
    logger = logging.getLogger("tests.side_effects")
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: logger.setLevel(logging.ERROR))
    logger.setLevel(logging.INFO)
    with undisturbed(model):
        model(torch.ones(2))
    assert logger.level == logging.ERROR


def test_the_models_own_weights_are_left_alone() -> None:
    """Others care for them, and copies of all weights would take their memory again."""
    model = nn.Linear(2, 2)
    kept = [model.weight]
    model.register_forward_hook(lambda *_: kept.append(model.weight))
    with undisturbed(model):
        with torch.no_grad():
            model.weight.add_(1)
        expected = model.weight.clone()
    assert torch.equal(model.weight, expected)


def test_a_parameter_without_a_gradient_calls_no_hook() -> None:
    p = nn.Parameter(torch.ones(2))
    calls: list[Any] = []
    p.register_hook(calls.append)
    p.register_post_accumulate_grad_hook(calls.append)
    touch([p])
    assert calls == []
    p.sum().backward()
    assert len(calls) == 2
