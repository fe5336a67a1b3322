"""What one rank has of a run: model, optimizer and the shards that it updates, counters, guards.

A step changes it here; train_state.py packs, loads and compares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanoray.parallel.pieces import Piece, Shard, whole_shards

EMA_DECAY = 0.99  # per step, of the smoothed loss
Rate = float | Tensor | None  # a learning rate; a tensor may lie on a GPU


class Values(Protocol):
    """What keeps values of its own that are no tensors of the model, such as the guards."""

    def values(self) -> dict[str, Any]:
        """Return them as JSON."""

    def load_values(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned."""


class Scaler(Values, Protocol):
    """A loss scaler, whose state lies on the device."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal on all replicas."""


class Schedule(Protocol):
    """The learning rates of a script's optimizer, which the configuration does not set."""

    @property
    def lr(self) -> Rate:
        """The rate of the first group in the next update; None: the optimizer has none."""

    @property
    def has_state(self) -> bool:
        """Whether there are schedulers, whose state belongs to a checkpoint."""

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the rates of the next update in these optimizers. Nothing communicates."""

    def see_loss(self, loss: float, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give the validation loss to the schedulers that follow it. Nothing communicates."""

    def values(self) -> dict[str, Any]:
        """Return the state of the schedulers as JSON."""

    def load_values(self, values: dict[str, Any] | None, step: int) -> None:
        """Restore what `values` returned after a step; None: it was saved without schedulers."""


@dataclass
class Scalars:
    """What a resumed run continues with, besides tensors and the two counters of RankState."""

    loss: float | None = None  # of the newest logged step, mean over all ranks
    # Exponential moving average of the logged losses, EMA_DECAY per step
    loss_ema: float | None = None
    ema_step: int = 0  # the step of the newest loss in it
    val_loss: float | None = None
    best_val_loss: float | None = None
    train_s: float = 0.0  # seconds spent in timed steps, over all parts of the run
    timed_steps: int = 0


@dataclass
class Session:
    """The progress of one command in its run. It survives the loss of a rank, but not a resume.

    The step fields record what has been done at the end of the newest step. So an interrupted end
    can be repeated: nothing is reported twice and nothing is skipped.
    """

    begun: int = 0  # the step at which this command started
    current: int = 0  # the step being computed, or just completed
    first_step_s: float | None = None  # from the command to the end of its first step
    evaluated: int = -1
    reported: int = -1
    saved: int = -1
    compared: int = -1
    record: dict[str, Any] | None = None  # of a completed step whose end is not done
    newest: dict[str, Any] = field(default_factory=dict)  # the last reported record

    def reported_step(self, step: int) -> int:
        """Return the newest reported step, given the newest completed one."""
        is_pending = self.record is not None and self.reported != step
        return step - 1 if is_pending else step


@dataclass
class Holding:
    """Shards in this rank's memory, and the optimizer that updates them."""

    shards: list[Shard]
    optimizer: torch.optim.Optimizer
    owner: int = -1  # the rank that is mirrored; -1: they are this rank's own
    frozen: list[Shard] = field(default_factory=list)  # of weights that no optimizer updates


@dataclass
class Share:
    """What a rank holds in a group whose ranks cut the state."""

    own: Holding
    mirror: Holding | None = None  # another rank's share, updated from the same gradients
    sharded: bool = True  # other ranks have the optimizer state of other shards
    weights: list[Shard] | None = None  # the parts of weights that this rank has; None: all
    copies: int = 1  # groups of ranks that each have the whole state: several in hybrid sharding

    @property
    def holdings(self) -> list[Holding]:
        return [self.own] if self.mirror is None else [self.own, self.mirror]


class Update(NamedTuple):
    """What a rank needs, besides its gradients, to repeat the newest update of the other ranks."""

    norm: Tensor | None = None  # of the whole gradient
    leave_out: Tensor | None = None  # 1: the update was left out


class RankState:
    """One rank's share of the state of a run: weights, and the optimizer state of its shards."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, guards: Values
    ) -> None:
        """Take everything as it is at step 0, while the model is whole."""
        self.model = model
        self.optimizer = optimizer
        # This rank's own optimizer, and the one of the share that it mirrors
        self.optimizers = [optimizer]
        self.scaler = scaler
        self.guards = guards
        # A script's own learning rates; None: the configuration's schedule sets them in each step
        self.schedule: Schedule | None = None
        self.step = 0  # completed optimizer steps
        self.samples = 0  # sequences consumed by them: the one cursor of the data
        self.scalars = Scalars()
        self.session = Session()

        # This rank's shards; see Share for what `hold` changes.
        self.shards = whole_shards(model)
        self.frozen: list[Shard] = []
        self.mirror: Holding | None = None
        self.sharded = False
        self.weights: list[Shard] | None = None
        self.copies = 1

        # Other ranks may copy this state only after a resume or recovery is done.
        self.whole = False
        # Whether this rank holds gradients that complete the next step if others are lost
        self.can_finish = False
        self.update = Update()  # the newest one
        # Whether an update is changing the weights: a step that ends here cannot be repeated
        self.is_updating = False

    @property
    def own(self) -> Holding:
        """This rank's own shards, with their optimizer."""
        return Holding(self.shards, self.optimizer, frozen=self.frozen)

    @property
    def holdings(self) -> list[Holding]:
        """This rank's own shards, and those that it mirrors."""
        return [self.own] if self.mirror is None else [self.own, self.mirror]

    @property
    def pieces(self) -> dict[str, Piece] | None:
        """Which part of each parameter this rank's optimizer updates; None: all of it."""
        if not self.sharded:
            return None
        return {shard.piece.name: shard.piece for shard in self.shards}

    @property
    def weight_pieces(self) -> dict[str, Piece] | None:
        """Which part of each parameter this rank has; None: all of it."""
        if self.weights is None:
            return None
        return {shard.piece.name: shard.piece for shard in self.weights}

    @property
    def reported_step(self) -> int:
        """The newest reported step; records after it in metrics.jsonl will be written again."""
        return self.session.reported_step(self.step)

    def advance(self, samples: int, update: Update | None = None) -> None:
        """Count a completed step of `samples` sequences. Nothing communicates."""
        self.step += 1
        self.samples += samples
        self.update = update or Update()
        self.can_finish = False
        self.is_updating = False
        if self.schedule is not None:
            self.schedule.step(self.optimizers)

    def see_loss(self, loss: float, smooth: bool) -> None:
        """Record a logged step's mean loss; `smooth` adds it to the moving average.

        A resumed run logs its first step besides the regular ones. The average leaves that loss
        out, so that it equals the average of an uninterrupted run.
        """
        scalars = self.scalars
        scalars.loss = loss
        if not smooth:
            return

        # EMA_DECAY is per step, and losses are logged every few steps.
        if scalars.loss_ema is None:
            scalars.loss_ema = loss
        else:
            decay = EMA_DECAY ** (self.step - scalars.ema_step)
            scalars.loss_ema = decay * scalars.loss_ema + (1 - decay) * loss
        scalars.ema_step = self.step
