"""Rounds of replicas that rarely communicate: each replica is a thread, and messages are memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoray.models.precision import LossScaler
from nanoray.parallel import local_sgd
from nanoray.parallel.compress import from_int8
from nanoray.parallel.local_sgd import Rounds
from nanoray.state.outer import Outer, fragments_of
from nanoray.state.train_state import TrainState
from nanoray.train.guard.guards import Guards
from tests.harness.ranks import make_spec
from tests.harness.replicas import CPU, Simulation

RECIPE: dict[str, Any] = {
    "n_layer": 4,
    "max_steps": 11,
    "optimizer": "sgd",
    "lr": 0.1,
    "grad_clip": 0.0,
    "precision": "fp32",
    "bucket_mb": 0.02,
    "sync_every": 4,
}


class Wire:
    """What the replicas have posted, by message and replica."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._posted: dict[tuple[str, int, int], Tensor] = {}
        self._arrived = threading.Condition()

    def post(self, kind: str, number: int, replica: int, tensor: Tensor) -> None:
        with self._arrived:
            self._posted[kind, number, replica] = tensor.clone()
            self._arrived.notify_all()

    def take(self, kind: str, number: int, replica: int) -> Tensor:
        key = (kind, number, replica)
        with self._arrived:
            assert self._arrived.wait_for(lambda: key in self._posted, timeout=20)
            return self._posted[key]


class ThreadAxis:
    """The axis of the replicas, as one of them sees it."""

    def __init__(self, wire: Wire, index: int) -> None:
        self.size = wire.size
        self.index = index
        self._wire = wire
        self._sent = {"exchange": 0, "gather": 0}

    def _number(self, kind: str) -> int:
        self._sent[kind] += 1
        return self._sent[kind]

    def start_exchange(self, flat: Tensor, what: str) -> Callable[[], Tensor]:
        number = self._number("exchange")
        self._wire.post("exchange", number, self.index, flat)

        def finish() -> Tensor:
            slices = []
            for replica in range(self.size):
                sent = self._wire.take("exchange", number, replica)
                slices.append(sent.view(self.size, -1)[self.index])
            return torch.cat(slices)

        return finish

    def noted(self, op: str, what: str, tensor: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def start_all_gather(self, flat: Tensor, what: str) -> Callable[[], None]:
        number = self._number("gather")
        self._wire.post("gather", number, self.index, flat.view(self.size, -1)[self.index])

        def finish() -> None:
            for replica in range(self.size):
                flat.view(self.size, -1)[replica] = self._wire.take("gather", number, replica)

        return finish


def far(simulation: Simulation, state: TrainState) -> float:
    """Return the largest difference of an anchor from that of the simulation."""
    assert state.outer
    anchors = state.outer.anchor
    return max((anchors[n] - right).abs().max().item() for n, right in simulation.anchor.items())


def trained(spec: Any, replicas: int, joined: int = 0) -> tuple[Simulation, list[TrainState]]:
    """Train the simulation's replicas again, with rounds of the package in its place.

    joined: the step after which the last replica begins.
    """
    simulation = Simulation(spec, replicas)
    again = Simulation(spec, replicas)
    config = spec.config
    wire = Wire(replicas)
    states = []
    rounds = []
    for index, replica in enumerate(again.replicas):
        scaler = LossScaler(CPU, False)
        state = TrainState(
            replica.model, replica.optimizer, scaler, Guards(config, again.batch, CPU)
        )
        state.begin_rounds(config.outer_momentum > 0, config.sync_fragments)
        states.append(state)
        rounds.append(Rounds(ThreadAxis(wire, index), config))  # type: ignore[arg-type]

    simulation.replicas[-1].joined = joined
    last = states[-1].outer
    assert last
    last.joined = joined

    def meet(index: int) -> None:
        state = states[index]
        assert state.outer
        lr, momentum = config.outer_lr, config.outer_momentum
        for fragment, step, means in rounds[index].meet(state):
            state.outer.update(state.shards, fragment, means, step, lr, momentum)

    for _ in range(config.max_steps):
        simulation.train(1)
        for index in range(replicas):
            again._inner_step(index)
            states[index].advance(again.batch.global_size)
        again.step += 1
        threads = [threading.Thread(target=meet, args=(index,)) for index in range(replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return simulation, states


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (3, {}),
    "no momentum": (2, {"outer_momentum": 0.0}),
    "one step": (3, {"sync_every": 1}),
    "fragments": (2, {"sync_fragments": 3}),
    "one of each layer": (3, {"sync_every": 7, "sync_fragments": 7, "max_steps": 18}),
    "8 bits": (3, {"sync_bits": 8}),
    "fragments in 8 bits": (2, {"sync_fragments": 2, "sync_bits": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_rounds_have_the_bits_of_the_simulation(text: Path, tmp_path: Path, case: str) -> None:
    replicas, settings = CASES[case]
    spec = make_spec(text, tmp_path, **RECIPE | settings)
    simulation, states = trained(spec, replicas)
    for index, state in enumerate(states):
        assert state.outer
        for name, anchor in simulation.anchor.items():
            assert torch.equal(state.outer.anchor[name], anchor), name
        assert state.outer.at_anchor(spec.config.max_steps)
        weights = dict(state.model.named_parameters())
        for name, right in simulation.replicas[index].weights.items():
            assert torch.equal(weights[name], right), name


def test_fragments_are_layers_that_follow_each_other() -> None:
    sizes = {"emb": 40, "a": 10, "b": 10, "c": 10, "d": 10}
    assert fragments_of(sizes, 1) == [["emb", "a", "b", "c", "d"]]
    assert fragments_of(sizes, 2) == [["emb"], ["a", "b", "c", "d"]]
    for count in range(1, 6):
        parts = fragments_of(sizes, count)
        assert len(parts) == count
        assert [name for part in parts for name in part] == list(sizes)


# ---- planted bugs --------------------------------------------------------------------------------


def stale_anchor(patch: pytest.MonkeyPatch) -> None:
    """The weights move, and the anchor of the next round does not."""
    update = Outer.update

    def stale(self: Outer, *args: Any) -> None:
        before = {name: anchor.clone() for name, anchor in self.anchor.items()}
        update(self, *args)
        for name, anchor in before.items():
            self.anchor[name].copy_(anchor)

    patch.setattr(Outer, "update", stale)


def forgotten_momentum(patch: pytest.MonkeyPatch) -> None:
    """The momentum is lost after each round, as where a resume forgets it."""
    update = Outer.update

    def forgetting(self: Outer, *args: Any) -> None:
        update(self, *args)
        for momentum in self.momentum.values():
            momentum.zero_()

    patch.setattr(Outer, "update", forgetting)


def wrong_layers(patch: pytest.MonkeyPatch) -> None:
    """The means of a fragment are applied to its layers in another order, where shapes allow it."""
    update = Outer.update

    def shifted(self: Outer, shards: Any, fragment: int, means: Any, *args: Any) -> None:
        by_shape: dict[Any, list[torch.Tensor]] = {}
        for mean in means:
            by_shape.setdefault(mean.shape, []).append(mean)
        reverse = [by_shape[mean.shape].pop() for mean in means]
        update(self, shards, fragment, reverse, *args)

    patch.setattr(Outer, "update", shifted)


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    """A block is decoded with the scale of the block before it."""

    def shifted(rows: torch.Tensor) -> torch.Tensor:
        scales = 4 * (rows.shape[1] // (local_sgd.BLOCK + 4))
        rows = rows.clone()
        rows[:, :scales] = rows[:, :scales].roll(4, dims=1)
        return from_int8(rows)

    patch.setattr(local_sgd, "from_int8", shifted)


def all_count(patch: pytest.MonkeyPatch) -> None:
    """The mean is over all replicas, also over one that has joined in the middle of the round."""
    patch.setattr(Outer, "counts", lambda self, fragment: True)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "stale anchor": (stale_anchor, {}),
    "momentum forgotten": (forgotten_momentum, {}),
    "wrong layers": (wrong_layers, {"sync_fragments": 2}),
    "scale of another block": (wrong_scale, {"sync_bits": 8}),
    "all count": (all_count, {}),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    plant, settings = PLANTED[bug]
    spec = make_spec(text, tmp_path, **RECIPE | settings)
    joined = 3 if bug == "all count" else 0
    right, states = trained(spec, 2, joined)
    assert far(right, states[0]) == 0.0
    plant(monkeypatch)
    simulation, states = trained(spec, 2, joined)
    assert far(simulation, states[0]) > 1e-4
