"""Do a run's steps again in one process, which plays all data ranks, one after the other.

    rank 0   forward, backward ─► gradients ─┐
    rank 1   forward, backward ─► gradients ─┼─► added in the order of the ranks ─► norm, clip, update
    rank 2   forward, backward ─► gradients ─┘

The loop is that of training: only its plan and its reader of batches are others. It writes what any
run writes, into a folder of its own: records, hashes of the state, and a checkpoint after the last
step.
"""

from __future__ import annotations

import bdb
import pdb
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Batch, Config
from nanoray.data.tokens import MicroBatches
from nanoray.faults.inject import Injector
from nanoray.machine.compat import foreach_add_
from nanoray.models.weighted import mean_of
from nanoray.parallel.ddp import TorchDDP
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.norm import norm_of_owned
from nanoray.parallel.plan import Loss, MicroBatch, Plan
from nanoray.parallel.rendezvous import Order
from nanoray.train.elastic import TrainingGroup
from nanoray.train.recipe import Recipe
from nanoray.train.tasks import task_of


class Witness:
    """Records one rank in one step: its batches, the loss of each, and its gradients before the sum."""

    def __init__(self, step: int, rank: int, debug: bool = False) -> None:
        """With `debug`, the debugger stops in the model's forward, once."""
        self.step, self.rank, self._debug = step, rank, debug
        self._looks = False
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        # The number of ranks, where the mode divides the loss and not the gradients
        self.divided_by = 1

    def turns_to(self, step: int, rank: int) -> bool:
        """Return whether this is the step and rank to watch."""
        self._looks = (step, rank) == (self.step, self.rank)
        return self._looks

    def call(self, loss: Loss, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return loss(model, x, y); record batch and loss if this is the step and rank to watch."""
        if not self._looks:
            return mean_of(loss(model, x, y))
        if self._debug:
            self._debug = False
            forward = model.forward
            # On the instance, so that the class and other models keep their forward.
            model.__dict__["forward"] = lambda *args, **named: pdb.Pdb().runcall(
                forward, *args, **named
            )
        try:
            value = mean_of(loss(model, x, y))
        finally:
            # Without this the debugger would stop again in the next micro batch.
            model.__dict__.pop("forward", None)
        if value is None:  # runcall returns nothing when the user quits
            raise bdb.BdbQuit
        # On the CPU, so that the records do not take memory that the step needs.
        self.inputs.append(x.detach().cpu())
        self.targets.append(y.detach().cpu())
        self.losses.append(value.item())
        return value


class InTurn(TorchDDP):
    """Adds up the gradients of ranks that one process plays, as the mode of the run does."""

    def __init__(self, model: nn.Module, plan: Plan, config: Config, ranks: int) -> None:
        super().__init__(model, plan.data, config)
        self._ranks, self._by_hand_mode = ranks, ranks > 1 and config.dp_mode != "ddp"
        self.divisor = ranks if self._by_hand_mode else 1
        # Which sums over ranks first, and micro batches last
        self._each = ranks > 1 and config.dp_mode == "zero2"
        self._sums: list[list[Tensor]] = []
        self._micro = -1  # of the rank that is played; below 0: none is
        self.watched = False
        self.own: list[Tensor] = []  # gradients of the newest rank before the sum, if it is watched

    def begin(self, watched: bool) -> None:
        """Begin to play a rank."""
        self._micro = 0
        self.watched = watched
        self.own = []

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Run a backward inside, then add its gradients to the sum.

        Only after a rank's last one, or with zero2 after each.
        """
        yield
        if self._micro >= 0 and (last or self._each):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
            for p in self._params:
                p.grad = None
            if self.watched:
                self.own = [a + b for a, b in zip(self.own, grads, strict=False)] or [
                    grad.clone() for grad in grads
                ]
            if not self._by_hand_mode:
                grads = [grad.mul_(1.0 / self._ranks) for grad in grads]
            if self._micro == len(self._sums):
                self._sums.append(grads)
            else:
                foreach_add_(self._sums[self._micro], grads)
            self._micro += 1

    def finish(self) -> None:
        """Put the sum over all ranks into the parameters' gradients."""
        total, *others = self._sums
        for other in others:
            foreach_add_(total, other)
        for p, grad in zip(self._params, total, strict=True):
            p.grad = grad
        self._sums = []
        self._micro = -1

    def norm(self) -> Tensor:
        if self._by_hand_mode:
            return norm_of_owned(self.gradients, self._axis, self._params[0].device)
        return super().norm()


class Played(Plan):
    """A plan whose step is that of several data ranks."""

    def __init__(
        self, *args: Any, ranks: int, witness: Witness | None, step: Callable[[], int]
    ) -> None:
        model, mesh, config, accum, loss, *rest = args
        super().__init__(
            model, mesh, config, accum, partial(witness.call, loss) if witness else loss, *rest
        )
        self._ranks, self._witness, self._step = ranks, witness, step
        self._mode = self._turn = InTurn(model, self, config, ranks)

    def forward_backward(
        self,
        micro_batches: Iterator[MicroBatch],
        phase: Callable[[str], None],
        seed: Callable[[int], None] | None,
    ) -> Tensor:
        losses, witness = [], self._witness
        for rank in range(self._ranks):
            watched = witness is not None and witness.turns_to(self._step(), rank)
            self._turn.begin(watched)
            losses.append(super().forward_backward(micro_batches, phase, seed))
            if witness and watched:
                witness.divided_by = self._turn.divisor
                names = [name for name, p in self.model.named_parameters() if p.requires_grad]
                witness.gradients = dict(zip(names, self._turn.own, strict=True))
        self._turn.finish()
        self.own_losses = losses
        return sum(losses[1:], losses[0]) / self._ranks


class RanksBatches(MicroBatches):
    """The micro batches of all ranks, one rank after the other; `rank` is the one whose turn it is."""

    def step(self, samples: int) -> Iterator[MicroBatch]:
        for rank in range(self.batch.dp):
            self.rank = rank
            for micro in range(self.batch.accum):
                yield self.get(samples, micro)


class OneProcess(Recipe):
    """A recipe whose one rank plays all ranks of a group."""

    batches = RanksBatches

    def __init__(
        self, group: TrainingGroup, of_run: dict[str, Any], witness: Witness | None
    ) -> None:
        """`of_run`: the record of the group in the run's hashes.jsonl."""
        self._of_run = of_run
        spec = group.spec
        super().__init__(
            group, (), lambda: Order.GO_ON, Injector(spec.folder / "faults.jsonl"), task_of(spec)
        )
        self.plan = partial(
            Played, ranks=of_run["ranks"], witness=witness, step=lambda: self.state.step + 1
        )

    def batch_for(self, mesh: Mesh) -> Batch:
        """Return the batch as the run's ranks shared it."""
        return super().batch_for(
            replace(mesh, world_size=self._of_run["ranks"], slots=self._of_run["slots"])
        )
