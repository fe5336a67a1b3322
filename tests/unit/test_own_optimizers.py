"""Optimizers of a script: which ones a mode may cut, and that a state comes back to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from nanoray.checkpoint.state.optimizers import (
    apart,
    changed_groups,
    group_values,
    load_groups,
    load_optimizer_tensors,
)
from nanoray.errors import ConfigError
from nanoray.parallel.pieces import Shard, whole_shards
from nanoray.script.optimizer import (
    ELEMENTWISE,
    require_elementwise,
)
from nanoray.script.shards import cut_optimizer
from tests.harness import optimizers as styles
from tests.harness.same import same

Make = Callable[[Any], optim.Optimizer]


def muon_of(params: Any) -> optim.Optimizer:
    return optim.Muon([p for p in params if p.dim() == 2])


# Those of torch that a mode may cut, also with other settings
CUT: dict[str, Make] = {kind.__name__: kind for kind in ELEMENTWISE} | {
    "SGD momentum": partial(optim.SGD, momentum=0.9, nesterov=True),
    "Adam amsgrad foreach": partial(optim.Adam, amsgrad=True, foreach=True),
    "AdamW fused maximize": partial(optim.AdamW, fused=True, maximize=True),
    "AdamW tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "RMSprop centered": partial(optim.RMSprop, centered=True, momentum=0.5),
}
TORCHS: dict[str, Make] = CUT | {"Adafactor": optim.Adafactor, "Muon": muon_of}
# What others keep: lists, texts, nested dicts, values of a group, a state_dict of their own
STYLES: dict[str, Make] = {
    "Lion": styles.Lion,
    "Mixed": styles.Mixed,
    "Lookahead": lambda params: styles.Lookahead(optim.SGD(params, momentum=0.9)),
}


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


@pytest.mark.parametrize("name", [*TORCHS, *STYLES])
def test_an_optimizer_continues_from_its_saved_state_to_the_bit(name: str) -> None:
    """With all values that it keeps, of the same types."""
    first, second = a_model(1), a_model(2)
    unbroken = (TORCHS | STYLES)[name](list(first.parameters()))
    resumed = (TORCHS | STYLES)[name](list(second.parameters()))
    before = group_values(unbroken)
    steps(first, unbroken, range(4))

    # As a checkpoint keeps it.
    live, kept = apart(unbroken, whole_shards(first))
    tensors = {name: tensor.clone() for name, tensor in live.items()}
    values = json.loads(json.dumps(kept, allow_nan=False))
    groups = json.loads(json.dumps(changed_groups(unbroken, before), allow_nan=False))
    second.load_state_dict(first.state_dict())
    load_optimizer_tensors(resumed, whole_shards(second), tensors, values)
    load_groups(resumed, groups)
    theirs, ours = unbroken.state_dict(), resumed.state_dict()
    for kept in (theirs, ours):
        kept["state"] = {key: state for key, state in kept.get("state", {}).items() if state}
    assert same(ours, theirs), (ours, theirs)

    steps(first, unbroken, range(4, 12))
    steps(second, resumed, range(4, 12))
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("make", "stated", "words"),
    [
        (optim.Adafactor, False, "Adafactor is none of torch's that update each element by itself"),
        (styles.Lion, False, "give RuntimeEngine(..., elementwise=True)"),
        (STYLES["Lookahead"], True, "Lookahead has a state_dict() of its own"),
    ],
)
def test_what_cannot_be_cut_is_refused(make: Make, stated: bool, words: str) -> None:
    with pytest.raises(ConfigError, match="dp_mode = zero1 gives the optimizer flat") as found:
        require_elementwise(make(list(a_model(1).parameters())), "zero1", stated)
    assert words in str(found.value)


def test_a_script_may_state_that_its_optimizer_can_be_cut() -> None:
    require_elementwise(styles.Lion(list(a_model(1).parameters())), "zero1", True)


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


@pytest.mark.parametrize("make", [*CUT.values(), styles.Lion], ids=[*CUT, "Lion"])
def test_pieces_are_updated_as_the_whole_is(make: Make) -> None:
    """Also with a state from before; a piece of one element and an empty group are no obstacle."""
    model = a_model(1)
    whole = make(list(model.parameters()))
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
