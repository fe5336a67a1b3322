"""Rounds of replicas that rarely communicate: each replica is a thread, and messages are memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.run import RunSpec
from nanoray.launch.shares import Shares
from nanoray.mesh.pieces import Shard, whole_shards
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.mesh.wire import decode, encode
from nanoray.models.precision import LossScaler
from nanoray.parallel import local_sgd
from nanoray.parallel.compress import from_int8
from nanoray.parallel.local_sgd import Rounds
from nanoray.state.outer import Outer, fragments_of
from nanoray.state.rank_state import Holding, Share
from nanoray.state.state_dict import StateDict
from nanoray.state.train_state import TrainState
from nanoray.train.guard.guards import Guards
from nanoray.train.handover import FromReplicas, FromShardedReplicas
from nanoray.train.rank import train
from tests.harness.axes import equal, final
from tests.harness.ranks import make_spec, series
from tests.harness.replicas import CPU, Simulation

RECIPE: dict[str, Any] = {
    "n_layer": 2,
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
        self._posted: dict[tuple[str, int, int], Any] = {}
        self._arrived = threading.Condition()

    def post(self, kind: str, number: int, replica: int, value: Any) -> None:
        with self._arrived:
            self._posted[kind, number, replica] = value
            self._arrived.notify_all()

    def take(self, kind: str, number: int, replica: int) -> Any:
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
        self._wire.post("exchange", number, self.index, flat.clone())

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
        own = flat.view(self.size, -1)[self.index].clone()
        self._wire.post("gather", number, self.index, own)

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
        state.outer = state.anchors(config.outer_momentum > 0, config.sync_fragments)
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
            state.outer.update(fragment, means, step, lr, momentum)

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
    "one of each layer": (3, {"sync_every": 5, "sync_fragments": 5, "max_steps": 13}),
    "empty fragments": (2, {"sync_every": 12, "sync_fragments": 12, "max_steps": 14}),
    "8 bits": (3, {"sync_bits": 8}),
    "fragments in 8 bits": (2, {"sync_fragments": 2, "sync_bits": 8}),
}


OFTEN = ("whole", "fragments", "empty fragments", "8 bits")


@pytest.mark.parametrize(
    "case",
    [case if case in OFTEN else pytest.param(case, marks=pytest.mark.full) for case in CASES],
)
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


def test_some_fragments_of_a_small_model_are_empty() -> None:
    assert [] in fragments_of({"emb": 40, "a": 10}, 5)


def test_fragments_are_layers_that_follow_each_other() -> None:
    sizes = {"emb": 40, "a": 10, "b": 10, "c": 10, "d": 10}
    assert fragments_of(sizes, 1) == [["emb", "a", "b", "c", "d"]]
    assert fragments_of(sizes, 2) == [["emb"], ["a", "b", "c", "d"]]
    for count in range(1, 6):
        parts = fragments_of(sizes, count)
        assert len(parts) == count
        assert [name for part in parts for name in part] == list(sizes)


# ---- one replica in this process -----------------------------------------------------------------

ALONE = {"optimizer": "adamw", "lr": 0.01, "dropout": 0.1, "attention": "plain", "log_every": 3}
ALONE |= {"eval_every": 2, "hash_every": 2, "sync_fragments": 2, "sync_bits": 8, "n_layer": 2}


def finished(spec: RunSpec) -> RunSpec:
    outcome = train(spec, Rendezvous())
    assert outcome["step"] == spec.config.last_step
    return spec


def test_a_run_resumes_with_fragments_on_their_way(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of a round, with the same bits; and not where the momentum is forgotten."""
    settings = RECIPE | ALONE
    whole = finished(make_spec(text, tmp_path / "whole", **settings))
    simulation = Simulation(whole, 1)
    simulation.train(whole.config.max_steps)
    model = final(whole).model
    assert all(torch.equal(model[name], right) for name, right in simulation.anchor.items())
    assert series(whole) == {step: simulation.losses[step] for step in series(whole)}

    def resumed(stop: int, folder: str) -> RunSpec:
        first = finished(make_spec(text, tmp_path / folder, **settings | {"stop_at": stop}))
        again = settings | {"resume": str(first.folder)}
        return finished(make_spec(text, tmp_path / folder, **again))

    for stop in (5, 6):
        spec = resumed(stop, str(stop))
        assert equal(final(spec), final(whole)), stop
        assert series(spec, "val/loss") == series(whole, "val/loss")

    load = Outer.load

    def forgetting(self: Outer, saved: StateDict) -> None:
        kept = {name: t for name, t in saved.optimizer.items() if "outer_momentum" not in name}
        load(self, replace(saved, optimizer=kept))

    monkeypatch.setattr(Outer, "load", forgetting)
    assert not equal(final(resumed(7, "forgotten")), final(whole))


# ---- after the loss of a rank --------------------------------------------------------------------


class ThreadMesh:
    """The ranks of a group, as one of them sees it."""

    device = CPU

    def __init__(self, wire: Wire, rank: int) -> None:
        self.rank = rank
        self.world_size = wire.size
        self._wire = wire
        self._number = 0

    def all_gather(self, value: Any) -> list[Any]:
        self._number += 1
        self._wire.post("values", self._number, self.rank, decode(encode(value)))
        return [self._wire.take("values", self._number, rank) for rank in range(self._wire.size)]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.all_gather(value)[src]

    def broadcast_tensor(self, tensor: Tensor, src: int) -> None:
        self._number += 1
        if self.rank == src:
            self._wire.post("tensor", self._number, src, tensor.clone())
        tensor.copy_(self._wire.take("tensor", self._number, src))


class Ranks:
    """States of ranks at some steps of their replicas' rounds, which then meet again."""

    def __init__(self, spec: RunSpec, replicas: list[int]) -> None:
        """replicas: the replica of each rank."""
        self.config = spec.config
        self.simulation = Simulation(spec, len(replicas))
        self.states: list[TrainState] = []
        for rank, replica in enumerate(replicas):
            one = self.simulation.replicas[rank]
            scaler = LossScaler(CPU, False)
            guards = Guards(self.config, self.simulation.batch, CPU)
            state = TrainState(one.model, one.optimizer, scaler, guards)
            momentum = self.config.outer_momentum > 0
            state.outer = state.anchors(momentum, self.config.sync_fragments)
            state.outer.replica = replica
            self.states.append(state)

    def go_to(self, rank: int, step: int, synced: int = 0) -> None:
        """Let a rank be after a step, its weights and its optimizer all its own."""
        if synced:
            self.finish(rank, synced)
        state = self.states[rank]
        assert state.outer
        torch.manual_seed(100 * state.outer.replica + step)
        for shard in state.shards:
            shard.param.grad = torch.randn(shard.param.shape)
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step = step
        state.whole = True

    def finish(self, rank: int, step: int) -> None:
        """Let a rank have finished the round that ends after a step."""
        state = self.states[rank]
        assert state.outer
        for fragment in range(len(state.outer.synced)):
            torch.manual_seed(step)
            means = [torch.randn_like(m) for m in state.outer.moved(fragment)]
            state.outer.update(fragment, means, step, 0.7, 0.9)

    def meet(self, source: int) -> list[int]:
        """Give every rank its state; return the step up to which each must train alone."""
        wire = Wire(len(self.states))
        fronts = [-1] * len(self.states)

        def call(rank: int) -> None:
            mesh: Any = ThreadMesh(wire, rank)
            handover = FromReplicas(begin_rounds=lambda: None, strays=())
            fronts[rank] = handover.give(self.states[rank], mesh, source)

        threads = [threading.Thread(target=call, args=(r,)) for r in range(len(self.states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return fronts

    def weights(self, rank: int) -> Tensor:
        return torch.cat([shard.param.detach().flatten() for shard in self.states[rank].shards])

    def outer(self, rank: int) -> Outer:
        outer = self.states[rank].outer
        assert outer
        return outer

    def anchor(self, rank: int) -> Tensor:
        outer = self.outer(rank)
        return torch.cat(
            [each.flatten() for each in [*outer.anchor.values(), *outer.momentum.values()]]
        )


def test_a_new_rank_takes_the_state_of_the_furthest_replica(text: Path, tmp_path: Path) -> None:
    ranks = Ranks(make_spec(text, tmp_path, **RECIPE | {"optimizer": "adamw"}), [0, 1, 2])
    ranks.go_to(0, 6, synced=4)
    ranks.go_to(2, 5, synced=4)
    behind = ranks.weights(2)
    assert ranks.meet(source=0) == [6, 6, 6], "rank 2 has a step to do alone"
    assert torch.equal(ranks.weights(1), ranks.weights(0))
    assert equal(ranks.states[1].pack(), ranks.states[0].pack())
    assert torch.equal(ranks.weights(2), behind), "it keeps its own weights"
    assert [state.step for state in ranks.states] == [6, 6, 5]
    counting = [ranks.outer(rank).counting for rank in range(3)]
    assert counting == [[True], [False], [True]], "from the next round on"


def test_a_finished_round_is_taken_from_a_replica_that_has_it(text: Path, tmp_path: Path) -> None:
    """Without fragments the weights are the anchor; else they keep the steps since they were sent."""
    for count in (1, 2):
        settings = RECIPE | {"sync_fragments": count}
        ranks = Ranks(make_spec(text, tmp_path / str(count), **settings), [0, 1, 2])
        ranks.go_to(0, 8)
        ranks.go_to(2, 8)
        sent = ranks.weights(2)
        if count == 2:
            for fragment in range(count):
                ranks.outer(2).put_aside(fragment)
            ranks.go_to(2, 9)
            ranks.go_to(2, 10)
        since = ranks.weights(2) - sent
        ranks.finish(0, 8)
        ranks.go_to(0, 11)
        before = ranks.anchor(2)
        ranks.meet(source=0)
        assert torch.equal(ranks.anchor(2), ranks.anchor(0))
        assert not torch.equal(ranks.anchor(2), before)
        assert ranks.outer(2).synced == [8] * count
        anchors = torch.cat([each.flatten() for each in ranks.outer(2).anchor.values()])
        assert torch.allclose(ranks.weights(2), anchors + since, atol=1e-6)
        assert not ranks.outer(2).sent


def test_a_rank_of_a_replica_that_is_left_loses_nothing(text: Path, tmp_path: Path) -> None:
    """It takes the state of its neighbour, and not of the furthest replica."""
    ranks = Ranks(make_spec(text, tmp_path, **RECIPE | {"optimizer": "adamw"}), [0, 1, 1])
    ranks.go_to(0, 6, synced=4)
    ranks.go_to(2, 5, synced=4)
    ranks.meet(source=0)
    assert torch.equal(ranks.weights(1), ranks.weights(2))
    assert equal(ranks.states[1].pack(), ranks.states[2].pack())
    assert not torch.equal(ranks.weights(1), ranks.weights(0))
    assert ranks.states[1].step == 5
    assert ranks.outer(1).counting == [True]


def test_where_all_that_had_begun_a_round_are_lost_one_stands_for_them(
    text: Path, tmp_path: Path
) -> None:
    ranks = Ranks(make_spec(text, tmp_path, **RECIPE), [0, 1, 2])
    ranks.go_to(1, 6, synced=4)
    ranks.outer(1).joined = 5
    ranks.meet(source=1)
    assert [ranks.outer(rank).counting for rank in range(3)] == [[False], [True], [False]]


def halves(state: TrainState, half: int) -> Holding:
    """Return half of each parameter of a whole model, as shards with an optimizer of their own."""
    shards = []
    for whole in whole_shards(state.model):
        middle = whole.param.numel() // 2
        begin, end = (0, middle) if half == 0 else (middle, whole.param.numel())
        param = nn.Parameter(whole.param.detach().flatten()[begin:end].clone())
        piece = whole.piece.flat_range(begin, end)
        shards.append(Shard(piece, param, whole.decays, cut_from=whole.piece))
    optimizer = torch.optim.AdamW([shard.param for shard in shards], lr=0.01)
    return Holding(shards, optimizer, half)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_replica_that_has_lost_a_share_begins_anew(text: Path, tmp_path: Path, lost: int) -> None:
    """Two replicas of two ranks each; the complete one keeps its own, whatever the other one had."""
    ranks = Ranks(make_spec(text, tmp_path, **RECIPE | {"sync_fragments": 2}), [0, 0, 1, 1])
    for rank, state in enumerate(ranks.states):
        state.hold(Share(halves(state, rank % 2)))
        state.outer = state.anchors(True, 2)
        outer = ranks.outer(rank)
        outer.replica = rank // 2
        if rank == lost:
            continue
        ranks.go_to(rank, 4)
        for fragment in range(2):
            # Its mean must be the same on both replicas, and another one for each half.
            torch.manual_seed(rank % 2)
            means = [torch.randn_like(m) for m in outer.moved(fragment)]
            outer.update(fragment, means, 4, 0.7, 0.9)
        ranks.go_to(rank, 6)
        outer.put_aside(1)
        ranks.go_to(rank, 7)

    before = [(ranks.weights(rank), ranks.anchor(rank).clone()) for rank in range(4)]
    wanted = [halves(state, rank % 2) for rank, state in enumerate(ranks.states)]
    wire = Wire(4)
    fronts = [-1] * 4

    def call(rank: int) -> None:
        state = ranks.states[rank]
        mesh: Any = ThreadMesh(wire, rank)
        new = state.anchors(True, 2, wanted[rank].shards)
        share = Share(wanted[rank])
        handover = FromShardedReplicas(share, [], rank // 2, new, begin_rounds=lambda: None)
        fronts[rank] = handover.give(state, mesh, 0)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert fronts == [7] * 4
    broken = lost // 2
    for rank in range(4):
        twin = rank % 2 + 2 * (1 - broken)  # of the complete replica
        assert torch.equal(ranks.weights(rank), before[twin][0])
        assert torch.equal(ranks.anchor(rank), before[twin][1])
        ours = ranks.states[rank].pack_own(first=False).optimizer
        theirs = ranks.states[twin].pack_own(first=False).optimizer
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        assert ranks.outer(rank).counting == [rank // 2 != broken] * 2
        assert ranks.states[rank].step == 7


def test_groups_that_rarely_communicate_go_on_as_a_whole(text: Path, tmp_path: Path) -> None:
    """One of them that has lost a rank holds nothing that another one could use."""
    settings = {"dp_mode": "zero1", "replicas": 2, "sync_every": 4, "global_batch_size": 8}
    config = make_spec(text, tmp_path, **settings).config
    shares = Shares.of(config, "gloo", range(4), range(4), 4)
    assert shares.lost([1]) is shares.lost([0, 1]) is None
    assert shares.lost([1, 2]).startswith("each replica has lost a rank")
    done = {0: 5, 2: 6, 3: 6}
    assert shares.whole_replicas(config, 4, [0, 2, 3], done) == [2, 3]
    assert shares.whole_replicas(config, 4, [0, 2, 3], done, saves=True) == [2, 3]
    assert shares.whole_replicas(config, 4, [0, 1, 2, 3], done) == [0, 1, 2, 3]
    assert shares.whole_replicas(config, 4, [0, 3], {0: 5, 3: 5}, saves=True) == []
    whole = Shares.of(config.model_copy(update={"dp_mode": "ddp"}), "gloo", range(4), range(4), 4)
    assert whole.lost([0, 2, 3]) is None
    assert whole.lost([0, 1, 2, 3])


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

    def shifted(self: Outer, fragment: int, means: Any, *args: Any) -> None:
        by_shape: dict[Any, list[torch.Tensor]] = {}
        for mean in means:
            by_shape.setdefault(mean.shape, []).append(mean)
        reverse = [by_shape[mean.shape].pop() for mean in means]
        update(self, fragment, reverse, *args)

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
