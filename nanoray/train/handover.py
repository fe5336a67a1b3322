"""How the ranks of a new group get the state of the run: from the memory of those that are left.

    FromOne               all ranks have the same: one of them sends it
    FromHolders           each has a share: all send what they hold, or mirror (mirror.py)
    FromReplicas          replicas rarely communicate: each keeps its own
    FromShardedReplicas   likewise, where the ranks of a replica have a share each

Which of them it is follows from the plan of the group, here and nowhere else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.config import Config
from nanoray.errors import StateLost
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Piece, Shard, whole_shards
from nanoray.parallel.plan import Plan
from nanoray.state.optimizers import elements_of, put_element
from nanoray.state.outer import OUTER_MOMENTUM, Outer, joins_now, of_kind
from nanoray.state.rank_state import Holding, Scalars, Session, Share
from nanoray.state.train_state import TrainState
from nanoray.train.fetch import fetch, share
from nanoray.train.mirror import FromHolders, deal


class Handover(Protocol):
    """A way to give each rank of a new group the state of the run."""

    def give(self, state: TrainState, mesh: Mesh, source: int) -> int:
        """Bring `state` up to date on all ranks; return the step up to which replicas must train
        alone. (all ranks)

        `source` is the rank with the most completed steps. Another rank may be lost meanwhile: then
        those that had the state can still give it. Raises StateLost on all ranks where no rank is
        left that has some part of it.
        """


class FromOne:
    """Every rank takes all that the source has."""

    def give(self, state: TrainState, mesh: Mesh, source: int) -> int:
        share(state, mesh, source)
        return 0


def handover_of(
    config: Config,
    par: Plan,
    state: TrainState,
    wanted: Share | None,
    begin_rounds: Callable[[], None],
    strays: Collection[int],
) -> Handover:
    """Return the way for a group with this plan.

    wanted: what this rank is to hold of a state that is cut; None: all of it. begin_rounds gives
    `state` its place among replicas that rarely communicate. strays: ranks whose state differs
    from that of the majority.
    """
    if wanted is None:
        return FromReplicas(begin_rounds, strays) if par.rounds else FromOne()
    weights = whole_shards(state.model) if par.weights is None else par.weights
    if par.rounds is None:
        return FromHolders(wanted, weights, config.grad_clip)
    momentum = config.outer_momentum > 0
    anchors = state.anchors(momentum, config.sync_fragments, wanted.own.shards)
    return FromShardedReplicas(wanted, weights, par.rounds.replica, anchors, begin_rounds)


# After the loss of a rank: bring the replicas that rarely communicate together again.
#
#     replica 0   step 17 ─────────────► 18 ─┐          behind: does its own steps up to the furthest
#     replica 1   step 18 ──────────────────┤          the furthest: rank `source` is one of its ranks
#     replica 2   lost ─► state of `source` ─┘          counts in the average from the next round on
#
# No replica takes over weights of another one, unless all of its ranks are lost. A rank of a replica
# that is left takes the state of the others of its replica, which loses nothing. What one replica has
# finished of a round, the mean that all have, the others take from it.


Place = tuple[int, int, tuple[int, ...]]  # a rank's replica, its step (-1: it is new), its rounds
MOMENTUM = "momentum"  # kinds under which they travel beside an anchor
SENT = "sent"


@dataclass
class FromReplicas:
    """A handover among replicas that rarely communicate, whose ranks have whole models."""

    begin_rounds: Callable[[], None]  # gives the state its place among the replicas
    strays: Collection[int]  # ranks whose state differs from that of the majority

    def give(self, state: TrainState, mesh: Mesh, source: int) -> int:
        """Let each replica go on from its own state; one that is lost takes that of the source.

        (all ranks)
        """
        self.begin_rounds()
        assert state.outer
        if mesh.rank in self.strays:
            state.whole = False
        is_new = not state.whole
        own: Place = (state.outer.replica, -1 if is_new else state.step, state.rounds)
        places: list[Place] = mesh.all_gather(own)

        # Each replica's ranks take the state of the most advanced of them.
        orphans = []  # replicas of which no rank is left
        for replica in sorted({place[0] for place in places}):
            members = [rank for rank, place in enumerate(places) if place[0] == replica]
            best = max(members, key=lambda rank: places[rank][1:])
            if places[best][1] < 0:
                orphans.append(replica)
                continue
            behind = [rank for rank in members if places[rank][1:] != places[best][1:]]
            if behind:
                packed, _ = fetch(state, mesh, best)
                if mesh.rank in behind:
                    state.load(packed)
                    own = (replica, *places[best][1:])

        # A replica that is lost as a whole begins anew from the furthest one. Others take from it
        # the rounds that it has finished and they have not.
        finished = places[source][2]
        lack_rounds = [rank for rank, place in enumerate(places) if place[2] < finished]
        if orphans or lack_rounds:
            packed, _ = fetch(state, mesh, source)
            if state.outer.replica in orphans:
                joins_now(packed)
                state.load(packed)
            elif own[2] < finished:
                momenta = of_kind(OUTER_MOMENTUM, packed.optimizer)
                state.outer.follow(finished, packed.model, momenta, state.step)

        return _agree(state, state.outer, mesh, source, places[source][0])


def _agree(state: TrainState, outer: Outer, mesh: Mesh, source: int, replica: int) -> int:
    """Take over what has been reported and saved of the furthest step, and return it. (all ranks)

    `outer` is this rank's from now on, `replica` that of rank `source`.
    """
    # Where all that had begun a round are lost, the source's replica stands for them.
    of_ranks = mesh.all_gather(outer.counting)
    has_all = all(any(of_fragment) for of_fragment in zip(*of_ranks, strict=True))

    # Small values in one message.
    values = (asdict(state.session), asdict(state.scalars), state.step)
    session, scalars, front = mesh.broadcast(values, source)
    if not has_all and outer.replica == replica:
        outer.stand_in()
    state.session = Session(**session)
    state.scalars = Scalars(**scalars)
    state.whole = True
    return front


# ---- replicas that shard their state -------------------------------------------------------------


@dataclass
class FromShardedReplicas:
    """A handover among replicas that rarely communicate, each of whose ranks has a share.

    A replica that has lost a rank, or whose ranks are at different steps, begins anew from the
    furthest complete one.
    """

    wanted: Share  # what this rank is to hold
    weights: Sequence[Shard]  # further shards whose weights alone it needs
    replica: int  # of this rank
    anchors: Outer  # new ones of the wanted shards, in which the values do not matter
    begin_rounds: Callable[[], None]  # gives the state its place among the replicas

    def give(self, state: TrainState, mesh: Mesh, source: int) -> int:
        """Fill the wanted shards and their anchors. (all ranks)

        Until all has arrived, those in `state` stay valid. Raises StateLost on all ranks where no
        replica is complete.
        """
        # A replica is complete if its ranks were one before, and hold the same pieces as before.
        old = state.own
        wanted = self.wanted.own
        place: tuple[int, int, int, tuple[int, ...]] = (self.replica, -1, -1, ())
        if state.whole and state.outer is not None and _pieces(old) == _pieces(wanted):
            place = (self.replica, state.outer.replica, state.step, state.rounds)
        places: list[tuple[int, int, int, tuple[int, ...]]] = mesh.all_gather(place)

        complete: dict[int, tuple[int, tuple[int, ...]]] = {}  # replica -> its step and its rounds
        for number in sorted({each[0] for each in places}):
            of_ranks = {each[1:] for each in places if each[0] == number}
            _, step, rounds = next(iter(of_ranks))
            if len(of_ranks) == 1 and step >= 0:
                complete[number] = (step, rounds)
        if not complete:
            raise StateLost(
                "each replica has lost a rank, or has ranks at different steps: no replica has all "
                "of its part of a round. The run continues from the newest checkpoint"
            )
        best = max(complete, key=lambda number: complete[number])
        source = next(rank for rank, each in enumerate(places) if each[0] == best)
        finished = complete[best][1]

        # (all ranks) What is whole on each rank: buffers, counters, guards. A replica that begins
        # anew is no source any more, should another rank be lost now.
        is_complete = self.replica in complete
        packed, _ = fetch(state, mesh, source, pieces=False)
        if not is_complete:
            state.whole = False
            state.load(packed)

        # (all ranks) Anchor, momentum and sent weights, to those that lack a round; then weights
        # and the optimizer's state, to replicas that begin anew.
        gives = self.replica == best
        lacks_round = not is_complete or state.rounds < finished
        anchors = self.anchors
        taken = _of_outer(anchors)
        given = [_of_outer(state.outer)] if gives and state.outer else []
        deal(mesh, given, [taken] if lacks_round else [])
        held = [old] if gives else []
        needed = [] if is_complete else [wanted]
        deal(mesh, held, needed, [] if is_complete else [s for s in self.weights if s.trained])

        # A complete replica copies its own shards, from memory to memory.
        if is_complete:
            _copy(old, wanted)
            assert state.outer
            outer = state.outer
        else:
            for shard in taken.shards:
                sent = taken.optimizer.state[shard.param].get(SENT)
                if sent is not None:
                    anchors.sent[shard.piece.name] = sent
            anchors.synced = list(finished)
            anchors.joined = state.step
            outer = anchors
        outer.replica = self.replica
        front = _agree(state, outer, mesh, source, best)

        # Nothing communicates from here on.
        state.hold(self.wanted)
        outer.shards = wanted.shards
        state.outer = outer
        self.begin_rounds()
        if is_complete and lacks_round:
            outer.follow(finished, anchors.anchor, anchors.momentum, state.step)
        return front


@torch.no_grad()
def _copy(old: Holding, wanted: Holding) -> None:
    """Copy weights and optimizer state to shards of the same pieces, in the same order."""
    for before, shard in zip(old.shards, wanted.shards, strict=True):
        shard.param.copy_(before.param.view_as(shard.param))
        kept = elements_of(old.optimizer.state.get(before.param, {}))
        for key, tensor in kept.items():
            put_element(wanted.optimizer.state[shard.param], key, tensor.clone())
    for before, shard in zip(old.frozen, wanted.frozen, strict=True):
        shard.param.copy_(before.param.view_as(shard.param))


def _pieces(holding: Holding) -> list[Piece]:
    return [shard.piece for shard in holding.shards]


class _KeptOptimizer:
    """Stands for an optimizer: what is kept for each anchor beside it."""

    def __init__(self) -> None:
        self.state: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)


def _of_outer(outer: Outer) -> Holding:
    """Return anchors as shards, with momentum and sent weights as their optimizer's state, live."""
    kept = _KeptOptimizer()
    anchors = []
    for shard in outer.shards:
        name = shard.piece.name
        param = nn.Parameter(outer.anchor[name], requires_grad=False)
        anchors.append(replace(shard, param=param))
        if name in outer.momentum:
            kept.state[param][MOMENTUM] = outer.momentum[name]
        if name in outer.sent:
            kept.state[param][SENT] = outer.sent[name]
    return Holding(anchors, cast(Optimizer, kept), outer.replica)
