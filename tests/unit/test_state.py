"""The state of a run: packed, loaded and rewound by one serialiser; its clock and its averages go
on after a resume.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.state.rank_state import EMA_DECAY
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.config import Batch, make_config
from nanoray.errors import StateDiverged
from nanoray.models.precision import LossScaler
from nanoray.parallel.mesh import Mesh
from nanoray.train.broadcast_state import broadcast_state
from nanoray.train.guard import replicas
from nanoray.train.guard.guards import Guards

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A model with one weight under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(x)).square().mean() + self.emb(x).mean()


def a_state(seed: int, steps: int = 0, fp16: bool = False) -> TrainState:
    torch.manual_seed(seed)
    model = Tied()
    config = make_config({"micro_batch_size": 2, "log_every": 4})
    scaler = LossScaler(CPU, fp16)
    guards = Guards(config, Batch(2, 1, 1), CPU, scaler if fp16 else None)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1), scaler, guards)
    for _ in range(steps):
        model(torch.randn(5, 3)).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.advance(2)
        state.see_loss(1.0 / state.step, smooth=True)
        guards.check(state.step, torch.tensor(2.0), torch.tensor(1.0), None, True, pytest.fail, 0)
    return state


def same(a: TrainState, b: TrainState) -> bool:
    left, right = a.tensors(), b.tensors()
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def without_optimizer(state: TrainState) -> TrainState:
    """With plain SGD, which keeps nothing."""
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)
    return state


def through_json(saved: StateDict) -> StateDict:
    """What a file keeps of it."""
    saved = copy.deepcopy(saved)
    saved.meta, saved.scaler = (
        json.loads(json.dumps(saved.meta)),
        json.loads(json.dumps(saved.scaler)),
    )
    return saved


def test_what_is_packed_is_what_is_loaded() -> None:
    first, second = a_state(1, steps=5, fp16=True), a_state(2, fp16=True)
    first.scalars.train_s, first.scalars.timed_steps = 12.5, 4
    second.load(through_json(first.pack()))
    assert same(first, second)
    assert (second.step, second.samples) == (first.step, first.samples)
    assert second.scalars == first.scalars
    assert second.guards.values() == first.guards.values()
    assert second.model.norm.running_mean.tolist() == first.model.norm.running_mean.tolist(), (
        "buffers, too"
    )
    assert (second.session.begun, second.session.reported, second.session.saved) == (5, 5, 5), (
        "step 5 is over"
    )
    assert not second.whole, "the caller says when"


def test_a_rewind_keeps_clock_and_guards_and_takes_the_new_cursor() -> None:
    state = a_state(1, steps=3)
    saved = through_json(state.pack())
    later = a_state(1, steps=6)
    later.scalars.train_s, later.scalars.timed_steps, later.session.first_step_s = 9.0, 5, 1.5
    later.guards.rolled_back("step_3", "why")
    later.rewind(saved, samples=14)
    assert same(state, later)
    assert (later.step, later.samples, later.scalars.train_s, later.scalars.timed_steps) == (
        3,
        14,
        9.0,
        5,
    )
    assert later.guards.metrics()["fault/rollbacks"] == 1
    assert later.session.first_step_s == 1.5


@pytest.mark.parametrize("every", [1, 3])
def test_the_moving_average_is_that_of_a_run_without_the_resume(every: int) -> None:
    """A resumed run logs its first step, too; the average sees the regular ones only."""
    losses = {step: 5.0 / step for step in range(1, 13)}

    def run(state: TrainState, steps: range, first: int) -> None:
        for step in steps:
            state.advance(1)
            if step % every == 0 or step == first:
                state.see_loss(losses[step], smooth=step % every == 0)

    whole, first, second = (without_optimizer(a_state(seed)) for seed in (1, 1, 2))
    run(whole, range(1, 13), first=1)
    run(first, range(1, 8), first=1)
    second.load(through_json(first.pack()))
    run(second, range(8, 13), first=8)
    assert second.scalars.loss_ema == whole.scalars.loss_ema
    expected = None
    for step in range(every, 13, every):
        keep = EMA_DECAY**every
        expected = losses[step] if expected is None else keep * expected + (1 - keep) * losses[step]
    assert whole.scalars.loss_ema == expected


# Over a group of ranks: a mesh that says what two others would.


class ScriptedMesh(Mesh):
    """Rank `rank` of three; the others hold the digests that are given. Broadcasts fail, as when a
    peer is lost.
    """

    def __init__(self, rank: int, digests: dict[int, Any]) -> None:
        super().__init__(rank, 3, rank, CPU, "gloo", "")
        self.digests = digests

    def all_gather(self, value: Any) -> list[Any]:
        return [self.digests.get(rank, value) for rank in range(3)]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(("rank", "whole"), [(0, True), (1, False)])
def test_a_stray_must_not_serve_others_until_it_is_healed(rank: int, whole: bool) -> None:
    """A rank is lost in the middle of a heal: the state must not be taken over from the stray's
    memory.
    """
    good, bad = a_state(1, steps=2), a_state(3, steps=2)
    state = good if rank == 0 else bad
    state.whole = True

    def digest(of: TrainState) -> Any:
        _, hashes = replicas.hash_tensors(of.tensors())
        return (replicas.combine(hashes), of.samples)

    mesh = ScriptedMesh(rank, {0: digest(good), 1: digest(bad), 2: digest(good)})
    first = mesh.all_gather
    calls: list[Any] = []

    def gather(value: Any) -> list[Any]:
        calls.append(value)
        return first(value) if len(calls) == 1 else [value] * 3

    mesh.all_gather = gather  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Connection closed"):
        replicas.compare(state, mesh)
    assert state.whole is whole


def test_without_a_majority_nothing_is_healed() -> None:
    states = [a_state(seed, steps=2) for seed in (1, 3, 4)]
    digests = {}
    for rank, state in enumerate(states):
        _, hashes = replicas.hash_tensors(state.tensors())
        digests[rank] = (replicas.combine(hashes), state.samples)
    mesh = ScriptedMesh(0, digests)
    hashes_of = {
        rank: (len(h), h)
        for rank, h in enumerate(replicas.hash_tensors(s.tensors())[1] for s in states)
    }
    answers = iter(
        [[digests[r] for r in range(3)], [(0, [], {})] * 3, [hashes_of[r] for r in range(3)]]
    )
    mesh.all_gather = lambda value: next(answers)  # type: ignore[method-assign]
    with pytest.raises(StateDiverged, match=r"no majority agrees: rank 1 in .*; rank 2 in "):
        replicas.compare(states[0], mesh)


class Wire:
    """What rank 0 sends, kept for another rank of the same process."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.tensors: list[Tensor] = []


class WireMesh(Mesh):
    def __init__(self, rank: int, wire: Wire) -> None:
        super().__init__(rank, 2, rank, CPU, "gloo", "")
        self.wire = wire

    def broadcast(self, value: Any, src: int = 0) -> Any:
        if self.rank == src:
            self.wire.objects.append(copy.deepcopy(value))
            return value
        return self.wire.objects.pop(0)

    def broadcast_tensor(self, tensor: Tensor, src: int) -> None:
        if self.rank == src:
            self.wire.tensors.append(tensor.detach().clone())
        else:
            tensor.copy_(self.wire.tensors.pop(0))


@pytest.mark.parametrize("steps", [0, 4])
def test_a_newcomer_gets_everything_and_a_tied_weight_once(steps: int) -> None:
    first, second, wire = a_state(1, steps), a_state(2), Wire()
    first.session.record, first.session.current = {"step": steps}, steps + 1
    broadcast_state(first, WireMesh(0, wire), 0)
    assert len(wire.tensors) == len(
        {p.data_ptr() for p in first.pack().model.values()}
    ) + 3 * 3 * bool(steps)
    broadcast_state(second, WireMesh(1, wire), 0)
    assert same(first, second)
    assert second.model.head.weight is second.model.emb.weight
    assert (second.step, second.samples) == (first.step, first.samples)
    assert (second.scalars, second.session) == (first.scalars, first.session)
    assert second.whole
    assert wire.tensors == []


# Each part, in every use of the list of parts.


def flip(tensor: Tensor) -> None:
    """Flip one bit of a tensor."""
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def weight(state: TrainState) -> Any:
    return state.model.emb.weight


def running_mean(state: TrainState) -> Any:
    return state.model.norm.running_mean


def moment(state: TrainState) -> Any:
    return state.optimizer.state[state.model.emb.weight]["exp_avg"]


def betas(state: TrainState) -> Any:
    return state.optimizer.param_groups[0]["betas"]


def scale(state: TrainState) -> Any:
    return state.scaler.values()


def losses(state: TrainState) -> Any:
    return state.step, state.samples, state.scalars


def seen_by_guards(state: TrainState) -> Any:
    return state.guards.values()


TENSORS = [weight, running_mean, moment]
VALUES: dict[Any, Callable[[TrainState], Any]] = {
    betas: lambda state: state.optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    scale: lambda state: state.scaler.load_values({"scale": 8.0, "good_steps": 3, "skipped": 1}),
    losses: lambda state: state.see_loss(0.25, smooth=True),
    seen_by_guards: lambda state: state.guards.rolled_back("step_3", "why"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("what", [*TENSORS, *VALUES])
def test_each_part_is_saved_received_and_compared(what: Callable[[TrainState], Any]) -> None:
    first = a_state(1, steps=3, fp16=True)
    before = replicas.digest(first)
    if what in TENSORS:
        flip(what(first))
    else:
        VALUES[what](first)
    # What the guards have seen, and losses, are those of one rank.
    if what in (*TENSORS, scale):
        assert replicas.digest(first) != before

    loaded = a_state(2, fp16=True)
    loaded.load(through_json(first.pack()))
    wire = Wire()
    broadcast_state(first, WireMesh(0, wire), 0)
    received = a_state(2, fp16=True)
    broadcast_state(received, WireMesh(1, wire), 0)
    for state in (loaded, received):
        if what in TENSORS:
            assert torch.equal(what(state), what(first))
        else:
            assert what(state) == what(first)
