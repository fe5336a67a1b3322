"""How the ranks of a new group get the state of the run: from the memory of those that are left.

    FromOne               all ranks have the same: one of them sends it
    FromHolders           each has a share: all send what they hold, or mirror (mirror.py)
    FromReplicas          replicas rarely communicate: each keeps its own (rounds.py)
    FromShardedReplicas   likewise, where the ranks of a replica have a share each (rounds.py)

Which of them it is follows from the plan of the group, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from nanoray.config import Config
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import whole_shards
from nanoray.parallel.plan import Plan
from nanoray.state.rank_state import Share
from nanoray.state.train_state import TrainState
from nanoray.train.fetch import share
from nanoray.train.mirror import FromHolders
from nanoray.train.rounds import FromReplicas, FromShardedReplicas


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
