"""Pipelines without process groups: every schedule's timetable, how a model is split, ownership,
memory, refusals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.multiprocessing.reductions import StorageWeakRef

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.config import make_config
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError
from nanoray.faults.hang import Position, behind
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import LossScaler
from nanoray.parallel import tp
from nanoray.parallel.axis import Axis
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.ddp import TorchDDP
from nanoray.parallel.flow import Straight
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import Shard, whole_pieces, whole_shards
from nanoray.parallel.pp import TIED, Stage, split, with_tie
from nanoray.parallel.schedules import (
    ALIKE,
    SCHEDULES,
    Turn,
    bubble,
    last_half,
    messages,
    needed,
    timetable,
    turns,
    waited,
)
from nanoray.parallel.zero_bubble import WeightGradients

SHAPE = ModelShape(n_layer=8, n_head=4, n_embd=24, block_size=8, bias=True, vocab_size=65)
SHAPES = [
    (kind, pp, micro, chunks)
    for kind in SCHEDULES
    for pp in range(1, 7)
    for micro in range(1, 13)
    for chunks in ((1, 2, 3) if kind == "interleaved" else (1,))
    if kind != "interleaved" or micro % pp == 0
]


def begins(kind: str, pp: int, micro: int, chunks: int, **cost: int) -> dict[tuple[int, Turn], int]:
    """Return the tick in which each turn of each stage begins."""
    table = timetable(kind, pp, micro, chunks, cost or ALIKE)
    return {
        (stage, turn): tick
        for tick, row in enumerate(table)
        for stage, turn in enumerate(row)
        if turn
    }


@pytest.mark.parametrize("kind", SCHEDULES)
def test_no_schedule_deadlocks_and_none_leaves_out_a_turn(kind: str) -> None:
    """All shapes up to 6 stages, 12 micro batches and 3 chunks; turns begin after what they need
    has ended.
    """
    for _, pp, micro, chunks in (shape for shape in SHAPES if shape[0] == kind):
        at = begins(kind, pp, micro, chunks)
        ops = "FBW" if kind == "zero_bubble" else "FB"
        every = {Turn(op, chunk, k) for op in ops for chunk in range(chunks) for k in range(micro)}
        for stage in range(pp):
            assert {turn for s, turn in at if s == stage} == every, (pp, micro, chunks)
            order = turns(kind, pp, stage, micro, chunks)
            assert len(order) == len(every)
            assert sorted(order, key=lambda turn: at[stage, turn]) == order, (
                "in a stage's own order"
            )
        for (stage, turn), tick in at.items():
            need = needed(turn, stage, pp, chunks)
            assert need is None or at[need] < tick
            if turn.op != "F":
                before = "F" if turn.op == "B" else "B"
                assert at[stage, turn._replace(op=before)] < tick, (
                    "every F before its B, every B before its W"
                )


@pytest.mark.parametrize(
    ("kind", "pp", "micro", "chunks"), [shape for shape in SHAPES if shape[1] > 1]
)
def test_each_message_has_one_sender_and_one_receiver_and_comes_in_time(
    kind: str, pp: int, micro: int, chunks: int
) -> None:
    table = timetable(kind, pp, micro, chunks)
    at = begins(kind, pp, micro, chunks)
    sent = [(tick, m) for tick, row in enumerate(messages(table, pp, chunks)) for m in row]
    assert len({(m.target, m.turn) for _, m in sent}) == len(sent) == 2 * micro * (pp * chunks - 1)
    for tick, m in sent:
        source = needed(m.turn, m.target, pp, chunks)
        assert source is not None
        assert source[0] == m.source != m.target
        assert at[source] == tick < at[m.target, m.turn], "sent when made, needed later"


def test_backwards_come_in_the_order_of_micro_batches() -> None:
    """So gradients are added in one order under every schedule: the same bits."""
    for kind, pp, micro, chunks in SHAPES:
        for stage in range(pp):
            for chunk in range(chunks):
                for op in {"B", last_half(kind)}:
                    order = [
                        t.micro
                        for t in turns(kind, pp, stage, micro, chunks)
                        if (t.op, t.chunk) == (op, chunk)
                    ]
                    assert order == list(range(micro))


@given(st.sampled_from(SHAPES), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_costs_change_no_order_and_never_deadlock(
    shape: tuple[str, int, int, int], forward: int, backward: int, weights: int
) -> None:
    kind, pp, micro, chunks = shape
    cost = {"F": forward, "B": backward, "W": weights}
    at = begins(*shape, **cost)
    for (stage, turn), tick in at.items():
        need = needed(turn, stage, pp, chunks)
        assert need is None or at[need] + cost[need[1].op] <= tick
    least = micro * chunks * (forward + backward + weights * (kind == "zero_bubble"))
    assert len(timetable(*shape, cost)) >= least


@pytest.mark.parametrize(("pp", "micro", "chunks"), [(2, 4, 2), (3, 6, 2), (4, 8, 2), (4, 8, 3)])
def test_interleaved_is_the_order_of_torch(pp: int, micro: int, chunks: int) -> None:
    sizes = {
        "n_local_stages": chunks,
        "microbatches_per_round": pp,
        "pp_group_size": pp,
        "_n_microbatches": micro,
    }
    order = ScheduleInterleaved1F1B._calculate_single_rank_operations
    for stage in range(pp):
        actions = [a for a in order(SimpleNamespace(**sizes), stage) if a is not None]  # type: ignore[arg-type]
        theirs = [
            Turn(a.computation_type.value[0], a.stage_index // pp, a.microbatch_index)
            for a in actions
        ]
        assert turns("interleaved", pp, stage, micro, chunks) == theirs


@pytest.mark.parametrize(("pp", "micro"), [(2, 4), (3, 6), (4, 4), (4, 8)])
def test_zero_bubble_is_the_order_of_torch(pp: int, micro: int) -> None:
    sizes = {
        "n_local_stages": 1,
        "microbatches_per_round": pp,
        "pp_group_size": pp,
        "_n_microbatches": micro,
    }
    order = ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    for stage in range(pp):
        actions = [a for a in order(SimpleNamespace(**sizes), stage) if a is not None]  # type: ignore[arg-type]
        theirs = [(a.computation_type.value.replace("I", "B"), a.microbatch_index) for a in actions]
        assert [(turn.op, turn.micro) for turn in turns("zero_bubble", pp, stage, micro)] == theirs


def test_the_bubble_is_that_of_the_papers() -> None:
    for kind, pp, micro, chunks in SHAPES:
        if micro >= pp:
            work = 3 * micro if kind == "zero_bubble" else chunks * micro
            theory = (pp - 1) / (work + pp - 1)
            assert bubble(kind, pp, micro, chunks) == pytest.approx(theory), (
                kind,
                pp,
                micro,
                chunks,
            )
    assert bubble("1f1b", 4, 1) == pytest.approx(3 / 4), (
        "one micro batch: one stage works at a time"
    )


def test_the_forecast_of_the_bubble_is_that_of_the_timetable() -> None:
    """Also with fewer micro batches than stages, where the formula of zero_bubble does not hold."""
    for kind, pp, micro, chunks in SHAPES:
        share = bubble(kind, pp, micro, chunks)
        assert waited(kind, pp, micro, chunks) == pytest.approx(micro * share / (1 - share)), (
            kind,
            pp,
            micro,
            chunks,
        )


def test_gradients_that_come_with_b_and_with_w_leave_before_the_end() -> None:
    """A bucket is sent when its last gradient comes, in whichever half, and not with all others at
    the end.
    """
    mesh = Mesh(0, 1, 0, torch.device("cpu"), "none", "test")
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    )
    halves = WeightGradients(model)
    buckets = Buckets(model, Axis("dp", [0], 0, None, mesh), "ddp_by_hand", 1e-6)
    sent: list[int] = []
    send = buckets._send
    buckets._send = lambda bucket: (sent.append(bucket.index), send(bucket))[1]  # type: ignore[method-assign]
    with buckets.backward(False):
        model(torch.randn(3, 8)).sum().backward()
        halves.keep(0)
    assert sent == []
    with buckets.backward(True, 0, halves.params):
        assert sent == [], "the first bucket is of a linear layer"
        halves.compute(0)
        assert sent == list(range(len(buckets.bucket_names)))
    assert len(sent) >= 4


@pytest.mark.parametrize("rows", [7])
def test_between_its_halves_a_backward_keeps_inputs_and_gradients_only(rows: int) -> None:
    layer = torch.nn.Linear(5, 3)
    halves = WeightGradients(layer)
    x = torch.randn(rows, 5, requires_grad=True)
    y = layer(x * 1.0)
    made = StorageWeakRef(y.untyped_storage())
    dy = torch.ones_like(y)
    y.backward(dy)
    halves.keep(0)
    assert layer.weight.grad is None
    assert torch.equal(x.grad, dy @ layer.weight)  # type: ignore[arg-type]
    del y
    assert made.expired(), "the layer's output is gone"
    halves.compute(0)
    assert torch.equal(layer.weight.grad, dy.T @ x)  # type: ignore[arg-type]


def test_without_a_pipeline_forward_and_backward_take_turns() -> None:
    mesh = Mesh(0, 1, 0, torch.device("cpu"), "none", "test")
    model = torch.nn.Linear(3, 1, bias=False)
    batches = [(torch.randn(2, 3), torch.zeros(2)) for _ in range(2)]
    order: list[str] = []

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order.append("F")
        return model(x).mean()

    class Noting(LossScaler):
        def scale(self, loss: torch.Tensor) -> torch.Tensor:
            order.append("B")
            return loss

    flow = Straight(model, 2, loss, Noting(mesh.device, enabled=True), mesh.device)
    mode = TorchDDP(model, Axis("dp", (0,), 0, None, mesh), make_config({"micro_batch_size": 1}))
    total = flow.run(mode, iter(batches), order.append, lambda micro: order.append(str(micro)))
    first = ["data", "forward", "0", "F", "backward", "B"]
    second = ["data", "forward", "1", "F", "backward", "B"]
    assert order == first + second
    assert total.item() == pytest.approx(sum(model(x).mean().item() for x, _ in batches) / 2)
    mean = (batches[0][0].mean(0) + batches[1][0].mean(0)) / 2
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad[0], mean)


def stages(pp: int, chunks: int = 1, shape: ModelShape = SHAPE) -> list[Stage]:
    found = []
    for stage in range(pp):
        torch.manual_seed(1)
        model = GPT(shape)
        found.append(split(model, stage, pp, chunks))
    return found


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2), (2, 4), (8, 1)])
def test_stages_hold_each_parameter_once_and_the_tied_one_twice(pp: int, chunks: int) -> None:
    torch.manual_seed(1)
    whole = dict(GPT(SHAPE).named_parameters())
    owners: dict[str, list[int]] = {}
    for n, stage in enumerate(stages(pp, chunks)):
        for name, p in stage.named_parameters():
            assert torch.equal(p, whole[name]), name
        shards = with_tie(whole_shards(stage), n)
        for shard in shards:
            owners.setdefault(shard.piece.name, []).append(n)
            assert shard.owner == (shard.piece.name != TIED or n == 0)
            assert shard.holders == (2 if shard.piece.name == TIED else 1)
        assert whole_pieces(stage).keys() == dict(stage.named_parameters()).keys()
        params = [p for of in stage.chunk_params() for p in of]
        assert {*params} == {*stage.parameters()}
        assert len(params) == len({*params})
        assert (stage.tied is not None) == (n in (0, pp - 1))
        if stage.tied is not None:
            assert stage.lm_head.weight is stage.tok_emb.weight is stage.tied
    assert owners.pop(TIED) == [0, pp - 1]
    assert all(len(ranks) == 1 for ranks in owners.values())
    assert {*owners, TIED} == whole.keys()


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_stages_after_one_another_are_the_whole_model(pp: int, chunks: int) -> None:
    torch.manual_seed(1)
    whole, parts = GPT(SHAPE), stages(pp, chunks)
    x, y = torch.randint(0, 65, (2, 3, 8))
    stream = x
    for chunk in range(chunks):
        for stage in parts:
            stream = stage(stream, y, chunk=chunk)
    assert torch.equal(stream, whole(x, y))


MESHES = [
    Layout(),
    Layout(pp=2),
    Layout(dp=3),
    Layout(dp=2, pp=2),
    Layout(tp=2),
    Layout(dp=3, tp=2, pp=2),
    Layout(pp=4),
]


def owned(rank: int, layout: Layout, chunks: int = 1) -> list[Shard]:
    """The shards of one rank under zero1, as the plan makes them; nothing is sent."""
    mesh = Mesh(rank, layout.world_size, rank, torch.device("cpu"), "none", "test")
    place = layout.coords(rank)
    of = {axis: next(g for g in layout.groups(axis) if rank in g) for axis in ("dp", "tp", "pp")}
    data, tensor = (Axis(axis, of[axis], getattr(place, axis), None, mesh) for axis in ("dp", "tp"))
    torch.manual_seed(1)
    model: GPT = GPT(SHAPE)
    if layout.tp > 1:
        tp.cut(model, tensor)
    if layout.pp > 1:
        model = split(model, place.pp, layout.pp, chunks)
    shards = Buckets(model, data, "zero1", 0.001).shards
    assert shards is not None
    shards = tp.with_owners(shards, tp.names_of_cut(model), tensor, lambda name: data, True)
    return with_tie(shards, place.pp) if layout.pp > 1 else shards


def pairs() -> Iterator[Any]:
    """Each mesh, and the next one and the third after it; in `make test-all` each with each."""
    for i, j in itertools.permutations(range(len(MESHES)), 2):
        near = (j - i) % len(MESHES) in (1, 3)
        yield pytest.param(MESHES[i], MESHES[j], marks=() if near else pytest.mark.full)


def test_both_holders_of_the_tied_embedding_have_the_same_slices() -> None:
    """Under zero1 with replicas, so that the two stages can add up what each replica's slice has
    summed.
    """
    every = [
        shard
        for rank in range(6)
        for shard in owned(rank, Layout(dp=3, pp=2))
        if shard.piece.name == TIED
    ]
    places = [shard.piece.place for shard in every]
    assert len(set(places)) == 3
    assert all(shard.holders == places.count(shard.piece.place) == 2 for shard in every)


def test_ranks_that_the_axes_do_not_divide_are_refused() -> None:
    for ranks in (1, 3):
        with pytest.raises(
            ConfigError, match=rf"ranks = dp\*pp, but pp = 2 does not divide {ranks} rank"
        ):
            Layout.of(make_config({"micro_batch_size": 1, "pp": 2}), ranks)
    both = make_config({"micro_batch_size": 1, "pp": 2, "tp": 2})
    with pytest.raises(
        ConfigError,
        match=r"ranks = dp\*tp\*pp, but tp\*pp = 2\*2 = 4 does not divide 6 rank\(s\); use 8",
    ):
        Layout.of(both, 6)
    assert Layout.of(both, 4) == Layout(dp=1, tp=2, pp=2)


def test_a_lost_rank_of_a_pipeline_means_a_restart() -> None:
    assert not recovers_in_place(make_config({"micro_batch_size": 1, "pp": 2}), "gloo", 2)
    assert not recovers_in_place(
        make_config({"micro_batch_size": 1, "pp": 2, "dp_mode": "zero1"}), "gloo", 2
    )


def test_a_stage_that_computes_is_behind_the_stages_that_wait_for_it() -> None:
    positions = {
        0: Position(5, "idle"),
        1: Position(5, "forward"),
        2: Position(5, "idle"),
        3: Position(5, "optimizer"),
    }
    assert behind(positions, {}) == [1]
