"""Optimizers of a script: each is resumed to the bit, or refused in one line before anything starts.

A table of all of torch's, and of the styles that people use with it. What the table says of resumes
and pieces is compared with the optimizers themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from nanoray.errors import CheckpointError, ConfigError
from nanoray.mesh.pieces import Shard, whole_shards
from nanoray.own.optimizer import (
    optimizer_of,
    require_all_parameters,
    require_elementwise,
    require_no_draws,
    require_resumable,
)
from nanoray.own.optimizer_trial import tried_format
from nanoray.own.shards import cut_optimizer
from nanoray.state.optimizer_part import load_optimizer_tensors, optimizer_tensors
from nanoray.state.optimizers import changed_groups, group_values, load_groups, values_of
from nanoray.state.values import Unsupported, put_together, same, take_apart
from tests.harness import optimizers as styles

WHOLE = "as if it used rows or norms"


class Case(NamedTuple):
    """How an optimizer is made, why it is refused, and why flat pieces of parameters are."""

    make: Callable[[Any], Any]
    refused: str = ""
    in_pieces: str = ""
    ddp: str = "as torch, resumed to the bit"  # for the page


def matrices(params: Any) -> list[Any]:
    return [p for p in params if p.dim() == 2]


optim = torch.optim
CASES = {
    "ASGD": Case(optim.ASGD),
    "Adadelta": Case(optim.Adadelta),
    "Adafactor": Case(optim.Adafactor, in_pieces=WHOLE),
    "Adagrad": Case(optim.Adagrad),
    "Adam": Case(optim.Adam),
    "AdamW": Case(optim.AdamW),
    "Adamax": Case(optim.Adamax),
    "LBFGS": Case(
        optim.LBFGS, refused="LBFGS.step() missing 1 required positional argument: 'closure'; use"
    ),
    "Muon": Case(
        lambda params: optim.Muon(matrices(params)), in_pieces="Param gradient must be a 2D matrix"
    ),
    "NAdam": Case(optim.NAdam),
    "RAdam": Case(optim.RAdam),
    "RMSprop": Case(optim.RMSprop),
    "Rprop": Case(optim.Rprop),
    "SGD": Case(optim.SGD),
    "SparseAdam": Case(optim.SparseAdam, refused="SparseAdam does not support dense gradients"),
    # Settings of torch's.
    "SGD momentum": Case(lambda params: optim.SGD(params, momentum=0.9, nesterov=True)),
    "Adam amsgrad foreach": Case(lambda params: optim.Adam(params, amsgrad=True, foreach=True)),
    "AdamW fused maximize": Case(lambda params: optim.AdamW(params, fused=True, maximize=True)),
    "AdamW capturable": Case(
        lambda params: optim.AdamW(params, capturable=True), ddp="the same; refused on a CPU"
    ),
    "AdamW tensor lr": Case(lambda params: optim.AdamW(params, lr=torch.tensor(0.01))),
    "RMSprop centered": Case(lambda params: optim.RMSprop(params, centered=True, momentum=0.5)),
    "SGD differentiable": Case(
        lambda params: optim.SGD(params, differentiable=True), refused="a leaf Variable that requi"
    ),
    # Styles from elsewhere.
    "Lion": Case(styles.Lion),
    "Adan": Case(styles.Adan),
    "Eager": Case(styles.Eager),
    "Sophia": Case(styles.Sophia),
    "Shampoo": Case(styles.Shampoo, in_pieces=WHOLE),
    "ScheduleFree": Case(
        styles.ScheduleFree, in_pieces="changes the weights in its eval() and train()"
    ),
    "Prodigy": Case(
        styles.Prodigy, in_pieces="keeps values of a group that depend on all parameters"
    ),
    "Lars": Case(styles.Lars, in_pieces=WHOLE),
    "EightBit": Case(styles.EightBit, in_pieces=WHOLE),
    "Mixed": Case(styles.Mixed, in_pieces="keeps a str for each (name)"),
    "Lookahead": Case(
        lambda params: styles.Lookahead(optim.SGD(params, momentum=0.9)),
        in_pieces="has a state_dict() of its own, which cannot be cut",
    ),
    "Rateless": Case(lambda params: styles.Rateless(params, budget=100)),
    "Noisy": Case(styles.Noisy, in_pieces=WHOLE, ddp="the same; refused with several ranks"),
    "Forgetful": Case(styles.Forgetful, refused="Forgetful takes other steps after a resume: it"),
    "Strange": Case(
        styles.Strange, refused="Strange keeps window as a range, which a checkpoint cannot hold"
    ),
    "Complex": Case(
        styles.Complex, in_pieces="keeps another spectrum for a piece than for the whole"
    ),
    "Wide": Case(styles.Wide, refused="Wide keeps moment in complex128, which a checkpoint cannot"),
    "Sam": Case(styles.Sam, refused="sharpness aware minimization requires a closure; use another"),
}
ACCEPTED = sorted(name for name, case in CASES.items() if not case.refused)


# What is special about a style, for the table of the page.
STYLES = {
    "Adan": "a step counter in the group",
    "Complex": "moments in complex64, of the whole parameter",
    "Eager": "state that the constructor makes, and no step",
    "EightBit": "moments in 8 bits, with scales of blocks",
    "Forgetful": "a counter that state_dict() lacks",
    "Lars": "rates by the norms of parameters",
    "Lion": "`step` as a Python int",
    "Lookahead": "a wrapper with slow weights and a state_dict() of its own",
    "Mixed": "texts, booleans, None, tuples, nested dicts, `state['global']`",
    "Noisy": "random noise in each update",
    "Prodigy": "a rate in the group, by sums over all parameters",
    "Rateless": "no `lr`, and an argument without a default",
    "Sam": "a closure that the signature does not ask for",
    "ScheduleFree": "train() and eval()",
    "Shampoo": "lists of matrices of other shapes",
    "Sophia": "a curvature of every third step",
    "Strange": "an object that no file can hold",
    "Wide": "moments of a type that safetensors lacks",
}


def page() -> str:
    """Return the table of docs/own/optimizers.md."""
    lines = ["| optimizer | ddp | shards |", "| --- | --- | --- |"]
    for name, case in CASES.items():
        title = f"{STYLES[name]} (as {name})" if name in STYLES else f"`{name}`"
        ddp = case.ddp
        shards = "the same"
        if case.in_pieces:
            shards = "refused"
        if case.refused:
            ddp = "refused"
            shards = "refused"
        lines.append(f"| {title} | {ddp} | {shards} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_this_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/own/optimizers.md").read_text("utf-8")
    assert page() in text, "run python -m tests.unit.test_own_optimizers, and paste its output"
    assert STYLES.keys() <= CASES.keys()


def test_the_table_has_every_optimizer_of_torch() -> None:
    found = set()
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            found.add(name)
    assert found - {"Optimizer"} <= CASES.keys()


def a_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 1))


def steps(model: nn.Module, optimizer: Any, seeds: range) -> None:
    getattr(optimizer, "train", lambda: None)()
    for seed in seeds:
        for number, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + number)
            p.grad = torch.randn(p.shape, generator=generator)
        torch.manual_seed(seed)
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_accepted_or_refused_in_one_line(name: str) -> None:
    case = CASES[name]
    given = case.make(list(a_model(1).parameters()))
    if not case.refused:
        assert optimizer_of(given) is given
        require_resumable(given)
        return
    with pytest.raises(ConfigError) as found:
        require_resumable(optimizer_of(given))
    line, _, frames = str(found.value).partition("\n")
    assert case.refused in line
    assert frames.count("  File ") == frames.count("tests/"), "the frames of the script alone"
    assert str(found.value).startswith(type(given).__name__)


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_optimizer_continues_from_its_saved_state_to_the_bit(name: str) -> None:
    """With all values that it keeps, of the same types."""
    if name == "AdamW capturable":
        return  # on a GPU only
    first, second = a_model(1), a_model(2)
    unbroken = CASES[name].make(list(first.parameters()))
    resumed = CASES[name].make(list(second.parameters()))
    before = group_values(unbroken)
    steps(first, unbroken, range(4))

    # As a checkpoint keeps it.
    names = {shard.param: shard.piece.name for shard in whole_shards(first)}
    tensors = {k: t.clone() for k, t in optimizer_tensors(unbroken, whole_shards(first)).items()}
    values = json.loads(json.dumps(values_of(unbroken, names), allow_nan=False))
    groups = json.loads(json.dumps(changed_groups(unbroken, before), allow_nan=False))
    second.load_state_dict(first.state_dict())
    load_optimizer_tensors(resumed, whole_shards(second), tensors, values, format_of=tried_format)
    load_groups(resumed, groups)
    theirs, ours = unbroken.state_dict(), resumed.state_dict()
    for kept in (theirs, ours):
        kept["state"] = {key: state for key, state in kept.get("state", {}).items() if state}
    assert same(ours, theirs), (ours, theirs)

    steps(first, unbroken, range(4, 12))
    steps(second, resumed, range(4, 12))
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ACCEPTED)
def test_flat_pieces_are_refused_where_they_change_the_result(
    name: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    given = case.make(list(a_model(1).to(dtype).parameters()))
    if case.in_pieces:
        with pytest.raises(ConfigError, match="dp_mode = zero1 gives the optimizer flat") as found:
            require_elementwise(given, "zero1")
        assert case.in_pieces in str(found.value)
        assert str(found.value).endswith("; use dp_mode ddp or ddp_by_hand")
        return
    require_elementwise(given, "zero1")


class Coarse(styles.Styled):
    """Keeps its momentum in a coarse type, and may scale it by the norm of the parameter."""

    def __init__(self, params: Any, dtype: torch.dtype, by_norm: bool) -> None:
        super().__init__(params)
        self.dtype = dtype
        self.by_norm = by_norm

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: Any, group: Any) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=self.dtype)
        momentum = 0.9 * state["momentum"].to(p.dtype) + grad
        if self.by_norm:
            momentum = momentum * (p.norm() / momentum.norm())
        state["momentum"] = momentum.to(self.dtype)
        p.sub_(momentum, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tolerance_of_the_trial_follows_the_types_of_the_state(dtype: torch.dtype) -> None:
    parameters = list(a_model(1).parameters())
    require_elementwise(Coarse(parameters, dtype, by_norm=False), "zero1")
    with pytest.raises(ConfigError, match=WHOLE):
        require_elementwise(Coarse(parameters, dtype, by_norm=True), "zero1")


class Overflowing(styles.Styled):
    """Its update is infinite for any gradient: nothing can be compared."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: Any, group: Any) -> None:
        p.add_(grad * float("inf"))


def test_a_trial_that_overflows_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="values that are not finite from gradients of about 100"):
        require_elementwise(Overflowing(list(a_model(1).parameters())), "zero1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", [name for name in ACCEPTED if hasattr(torch.optim, name)])
def test_torchs_optimizers_are_resumable_in_every_type(name: str, dtype: torch.dtype) -> None:
    require_resumable(CASES[name].make(list(a_model(1).to(dtype).parameters())))


def halves(model: nn.Module) -> list[list[Shard]]:
    """Return the shards of two ranks: each parameter cut in the middle."""
    sides: list[list[Shard]] = [[], []]
    for shard in whole_shards(model):
        middle = shard.param.numel() // 2
        for side, bounds in enumerate([(0, middle), (middle, shard.param.numel())]):
            piece = shard.piece.flat_range(*bounds)
            if piece.numel:
                param = nn.Parameter(piece.take(shard.param.detach()).clone())
                sides[side].append(Shard(piece, param, True))
    return sides


@pytest.mark.parametrize("name", [name for name in ACCEPTED if not CASES[name].in_pieces])
def test_pieces_are_updated_as_the_whole_is(name: str) -> None:
    """Also with a state from before; a piece of one element and an empty group are no obstacle."""
    if name == "AdamW capturable":
        return  # on a GPU only
    model = a_model(1)
    whole = CASES[name].make(list(model.parameters()))
    steps(model, whole, range(3))
    sides = halves(model)
    updated = dict(model.named_parameters())
    cut = [cut_optimizer(whole, updated, {s.piece.name: s for s in side}) for side in sides]
    # What a group keeps is not copied with the state, but as it is.
    for seed in range(3, 6):
        steps(model, whole, range(seed, seed + 1))
        for side, optimizer in zip(sides, cut, strict=True):
            for shard in side:
                gradient = updated[shard.piece.name].grad
                shard.param.grad = shard.piece.take(gradient).clone()
            optimizer.step()
    for side in sides:
        for shard in side:
            expected = shard.piece.take(updated[shard.piece.name].detach())
            assert torch.allclose(shard.param, expected, rtol=1e-5, atol=1e-7), shard.piece.name


def test_random_numbers_in_an_update_are_noticed() -> None:
    params = [nn.Parameter(torch.zeros(2, 8))]
    with pytest.raises(ConfigError, match="Noisy draws random numbers in its step, which differ"):
        require_no_draws(styles.Noisy(params))
    require_no_draws(styles.Lion(params))
    before = torch.get_rng_state()
    require_no_draws(torch.optim.AdamW(params))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_optimizer_names_the_keys() -> None:
    """A state without the number that the optimizer needs, as an older nanoray wrote it."""
    model = a_model(1)
    lion = styles.Lion(model.parameters())
    old = {f"exp_avg.{name}": torch.zeros_like(p) for name, p in model.named_parameters()}
    with pytest.raises(
        CheckpointError,
        match=r"optimizer state holds \['exp_avg'\], but Lion needs \['exp_avg', 'step:int'\]",
    ):
        load_optimizer_tensors(lion, whole_shards(model), old, format_of=tried_format)


def test_what_is_no_optimizer_is_refused() -> None:
    model = a_model(1)
    with pytest.raises(
        ConfigError, match=r"the optimizer is a Sequential; give a torch\.optim\.Opti"
    ):
        optimizer_of(model)
    with pytest.raises(ConfigError, match=r"not update 0\.weight; give it all"):
        require_all_parameters(model, optimizer_of([]))
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    with pytest.raises(ConfigError, match=r"0\.weight belongs to both SGD and Adam; give each"):
        require_all_parameters(model, optimizer_of(both))
    with pytest.raises(ConfigError, match=r"0\.weight belongs to both SGD and SGD; give each"):
        require_all_parameters(model, optimizer_of([both[0], both[0]]))

    kept_open = torch.optim.SGD(model.parameters(), lr=0.1)
    kept_open.handle = (n for n in range(3))  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"SGD, copied to be tried, failed before step 1: TypeError: .*pickle"
    ):
        require_resumable(kept_open)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**70,
        0.1,
        float("inf"),
        "text",
        (1, [2.5, None], ()),
        {"": 1, "b": {3: (True,), float("inf"): 1}},
        np.float64("-inf"),
        {"betas": [np.float32(0.1), np.int64(3), np.bool_(False)]},
        torch.arange(3, dtype=torch.int16),
        {"deep": [torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 2)]},
    ],
)
def test_values_keep_their_types(value: Any) -> None:
    for tensors in (None, {}):
        text = json.dumps(take_apart(value, "value", tensors), allow_nan=False)
        assert same(put_together(json.loads(text), tensors), value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1, 2}, "value is a set"),
        ({"a": [b"bytes"]}, "value/a/0 is a bytes"),
        ({(1, 2): 3}, "a key of value is a tuple"),
        (torch.zeros(2).to_sparse(), "value is a sparse tensor"),
        (nn.Parameter(torch.zeros(2)), "value is a Parameter"),
    ],
)
def test_other_values_are_named_with_their_place(value: Any, text: str) -> None:
    with pytest.raises(Unsupported, match=f"^{text}$"):
        take_apart(value, "value", {})


if __name__ == "__main__":
    print(page(), end="")
