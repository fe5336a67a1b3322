"""When the ranks of a run meet. The loop asks its Pace, and sees no other difference.

    Pace     in every step: all ranks exchange gradients, and vote     vote ─ step ─ end   vote ─ step ─ end
    Rarely   replicas of several ranks or one train alone, and         step   step   vote ─ step ─ average ─ end
             average their weights at the end of a round

fit ─► begin        finish the step that a lost rank has interrupted
    ─► start_vote   ask all ranks whether to go on, where they meet
    ─► end_step     report, evaluate, save and compare; read the vote
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanoray.config import Config
from nanoray.mesh.mesh import Mesh, Vote
from nanoray.mesh.rendezvous import Order
from nanoray.parallel.local_sgd import Rounds
from nanoray.parallel.plan import Plan
from nanoray.state.train_state import TrainState
from nanoray.train.guard.guards import Agree, BadStep


class Loop(Protocol):
    """What a Pace asks of the engine of its group.

    The engine has the Pace. In a cycle of the two it would stay in memory, with its process groups,
    until Python looks for cycles: perhaps in a worker process forked meanwhile, which cannot free
    groups whose threads it does not have. So a Pace is given its loop with each call.
    """

    regrouped: bool  # the group continues from the memory of its ranks

    def wanted(self) -> Order:
        """Return the order that this rank votes for."""

    def finish_step(self) -> None:
        """Report, evaluate, save and compare where the newest step is due for it. (all ranks)"""


class Pace:
    """In every step all ranks meet."""

    front = 0  # up to this step this replica does alone what the others have done
    ends_round = False  # whether a round ends after the present step
    # Finds the first bad step of all replicas, where each leaves out steps of its own
    agree: Agree | None = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def begin(self, loop: Loop) -> Order:
        """Finish the newest step, and return the order for the first one. (all ranks)

        The last group may have broken between the update of that step and its record.
        """
        loop.finish_step()
        # A group that has formed only to save a checkpoint does no step.
        if loop.regrouped:
            return self.mesh.start_vote(loop.wanted()).result()
        return Order.GO_ON

    def start_vote(self, loop: Loop, step: int, logged: bool) -> Vote:
        """Start to ask all ranks what follows a step, if they meet in it. (all ranks)"""
        return self.mesh.start_vote(loop.wanted())

    def end_step(self, loop: Loop, vote: Vote) -> Order:
        """Do what is due after the newest step; return what the ranks have voted for. (all ranks)

        It can be interrupted anywhere: then the next group begins with the rest.
        """
        loop.finish_step()
        return vote.result()

    def max(self, flags: Tensor) -> Tensor:
        """Take the maximum over the ranks that update one model by the same gradients, in place.

        (all of these ranks)
        """
        return self.mesh.all_reduce(flags, "overflow", op="max")

    def is_due(self, every: int, step: int) -> bool:
        """Return whether `step` is the one in which `every` steps are full and the ranks meet."""
        return step % every == 0

    def before_save(self) -> None:
        """Bring all replicas to a state from which a checkpoint can continue. (all ranks)"""

    def rolled_back(self) -> None:
        """Go on from a checkpoint that has just been loaded. (all ranks)"""


class Rarely(Pace):
    """Replicas train alone, and meet at the end of a round and where a step is logged.

    In between no collective leaves a replica. Nor does one in a step that another replica had done
    when a rank was lost: a replica that is behind first does its own steps up to `front`.
    """

    def __init__(
        self, mesh: Mesh, rounds: Rounds, par: Plan, state: TrainState, config: Config, front: int
    ) -> None:
        """front: the step of the replica that was furthest when the group formed."""
        super().__init__(mesh)
        self.rounds = rounds
        self.par = par
        self.state = state
        self.config = config
        self.front = front

    def begin(self, loop: Loop) -> Order:
        """As in every step, after the average that is due; a replica that is behind goes on alone."""
        if self.state.step < self.front:
            return Order.GO_ON
        self._average()
        return super().begin(loop)

    def start_vote(self, loop: Loop, step: int, logged: bool) -> Vote:
        self.ends_round = step > self.front and self.rounds.end(step)
        if logged or self.ends_round:
            return super().start_vote(loop, step, logged)
        return self.mesh.no_vote

    def end_step(self, loop: Loop, vote: Vote) -> Order:
        step = self.state.step
        # A replica that is behind only keeps what would have been sent.
        if step < self.front:
            self.rounds.keep(self.state)
            return vote.result()
        # It has come to where the others have begun.
        if step == self.front:
            return self.begin(loop)
        # Where a round ends, average by how much the replicas have moved.
        self._average()
        return super().end_step(loop, vote)

    def max(self, flags: Tensor) -> Tensor:
        return self.par.replica_axis.max(flags, "overflow")

    def is_due(self, every: int, step: int) -> bool:
        return self.rounds.first_end(every, step)

    def before_save(self) -> None:
        # Another number of replicas cannot go on in the middle of a round, and the next command
        # starts all of them again.
        if self.mesh.world_size < self.mesh.slots:
            self.rounds.close(self.state.step)
            self._average()

    def rolled_back(self) -> None:
        self.front = 0
        self.par.send_weights()

    def _average(self) -> None:
        """Average what is due of the replicas' weights, unless that is done. (all ranks)

        It can be interrupted anywhere and called again.
        """
        state = self.state
        assert state.outer
        lr = self.config.outer_lr
        momentum = self.config.outer_momentum
        has_changed = False
        for fragment, step, means in self.rounds.meet(state):
            # (all ranks of a replica) Each has its part of the means: no rank of a replica may
            # finish a round that another one cannot.
            if self.par.replica_axis.size > 1:
                self.par.replica_axis.sum(torch.zeros(1, device=self.mesh.device), "rounds")
            # Nothing communicates here, so all replicas move their anchors by the same bits. But
            # weights of the inner step may be on their way to the ranks of this replica.
            self.par.settle()
            state.outer.update(fragment, means, step, lr, momentum)
            has_changed = True
        if has_changed:
            self.par.send_weights()

    def agree(self, own: Sequence[BadStep]) -> BadStep | None:
        """Return the earliest step since the last meeting that was bad on any replica. (all ranks)

        Each replica has steps of its own that it left out. The norm is that of the replica whose
        step it was, the loss this rank's.
        """
        some = torch.tensor(float(bool(own)), device=self.mesh.device)
        if not self.mesh.all_reduce(some, "overflow", op="max"):
            return None
        first = None
        if own:
            first = (own[0].step, own[0].loss, own[0].norm)
        found = [BadStep(*bad) for bad in self.mesh.all_gather(first) if bad is not None]
        earliest = min(found, key=lambda bad: bad.step)
        losses = [bad.loss for bad in own if bad.step == earliest.step]
        return earliest._replace(loss=losses[0] if losses else self.par.own_losses[0].item())
