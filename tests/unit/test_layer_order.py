"""Ranks that skip layers call all of them in one order, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanoray.errors import ConfigError
from nanoray.own.layer_order import LayerOrder
from nanoray.parallel.fsdp import units_of

WIDTH = 3


class Nested(nn.Module):
    """A layer with layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, chosen: str = "01") -> Tensor:
        for number in chosen:
            x = self.inner[int(number)](x)
        return self.out(x)


class Chosen(nn.Module):
    """Calls the layers that it is told to, in that order; a layer "n:01" calls its own 0 and 1."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, calls: str) -> Tensor:
        x = self.into(x)
        for call in calls.split():
            number, colon, inner = call.partition(":")
            layer = self.layers[int(number)]
            x = layer(x, inner) if colon else layer(x)
        return x


class Rank:
    """A model as one rank calls it, and the sequence of the calls that gather weights."""

    def __init__(self, layers: list[nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = Chosen(layers)
        units = units_of(self.model)
        self.seen: list[str] = []
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(
                lambda *_, number=number: self.seen.append(f"gather {number}")
            )
            unit.register_forward_hook(lambda *_, number=number: self.seen.append(f"free {number}"))
        self.order = LayerOrder(self.model, units)

    def run(self, calls: str) -> list[str]:
        self.seen.clear()
        self.order.checksum = 0
        self.model(torch.ones(2, WIDTH), calls).sum().backward()
        return self.seen[:]


def linears() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def test_ranks_that_skip_layers_gather_the_same_ones() -> None:
    one, other = Rank(linears()), Rank(linears())
    whole = one.run("0 1 2 3")
    assert [call for call in whole if "gather" in call] == [f"gather {n}" for n in range(4)]
    for calls in ("1", "3", "0 3", "", "1 2"):
        assert other.run(calls) == whole, calls


def test_layers_within_layers_are_skipped_within_them() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Nested(), nn.Linear(WIDTH, WIDTH)]
    one = Rank(layers)
    other = Rank([nn.Linear(WIDTH, WIDTH), Nested(), nn.Linear(WIDTH, WIDTH)])
    whole = one.run("0 1 2")
    assert len(whole) == 10
    for calls in ("0 2", "0 1:1 2", "1:0", "2", ""):
        assert other.run(calls) == whole, calls


def test_the_order_is_learned_from_the_first_calls() -> None:
    """Layers that are called in another order than they are defined cost no further gathers."""
    rank = Rank(linears())
    rank.run("3 1")
    assert rank.order.calls == [3, 1]
    assert len(rank.seen) == 16, "two passes through the order of the definition"
    rank.order.learn([[3, 1], [3], [1]])
    learned = rank.run("3 1")
    assert len(learned) == 8
    for calls in ("3", "1", ""):
        assert rank.run(calls) == learned, calls

    # A layer may have several places; the second pass is the identity where it is left out.
    rank.order.learn([[0, 1, 0, 1, 2, 3]])
    assert len(rank.run("0 1 0 1 2 3")) == 12
    assert rank.run("0 1 2 3") == rank.run("0 1 0 1 2 3")


def test_calls_that_fit_into_no_order_are_refused() -> None:
    rank = Rank(linears())
    rank.order.learn([[0, 1], [2, 3]])
    assert len(rank.run("1 2")) == 8
    with pytest.raises(ConfigError, match="calls them in a different order; use dp_mode zero2"):
        rank.run("2 1")
    with pytest.raises(ConfigError, match="calls them in a different order"):
        rank.order.learn([[0, 1], [1, 0]])


def test_a_skipped_layer_changes_no_number_and_has_no_gradient() -> None:
    plain = Chosen(linears())
    rank = Rank(linears())
    rank.model.load_state_dict(plain.state_dict())
    x = torch.randn(2, WIDTH)
    plain(x, "1").square().sum().backward()
    rank.model(x, "1").square().sum().backward()
    for (name, ours), theirs in zip(rank.model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad)


def test_what_backward_computes_again_is_no_call() -> None:
    rank = Rank(linears())
    layer = rank.model.layers[0]
    out = checkpoint(lambda x: rank.model(x, "0 1 2 3"), torch.ones(2, WIDTH), use_reentrant=False)
    before = rank.order.checksum
    out.sum().backward()
    assert rank.order.checksum == before
    assert layer.weight.grad is not None


def test_other_orders_have_other_checksums() -> None:
    rank = Rank(linears())
    checksums = []
    for calls in ("0 1 2 3", "0 2", "1 0", "0 1 2 3 0"):
        rank.run(calls)
        checksums.append(rank.order.checksum)
    assert checksums[0] == checksums[1], "the same layers are gathered in the same order"
    assert checksums[2] == checksums[3], "a second pass each"
    assert checksums[1] != checksums[2]
