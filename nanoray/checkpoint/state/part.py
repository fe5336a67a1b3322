"""A part of the state: what it does where the state is saved, received, rolled back and compared."""

from __future__ import annotations

from dataclasses import asdict

from nanoray.checkpoint.state.rank_state import RankState, Scalars, Session
from nanoray.checkpoint.state.state_dict import StateDict, Tensors


class StatePart:
    """One subject of the state. A subclass defines the methods in which it has something to do.

    The parts are called in their order, so a later one may change what earlier ones have packed or
    listed.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state

    def pack(self, packed: StateDict) -> None:
        """Add this part: all of it or, where ranks cut the state, what all ranks have.

        Tensors are the live ones, which the next step changes.
        """

    def pack_own(self, packed: StateDict, first: bool) -> None:
        """Replace this part, as packed, by what this rank saves of it where each saves its own.

        `packed.pieces` has the pieces that this rank saves. The `first` rank adds what has no owner.
        """

    def load(self, saved: StateDict) -> None:
        """Restore the part in place. Raises CheckpointError where it belongs to another model."""

    def compared(self, tensors: Tensors) -> None:
        """Add the live tensors that must be equal on all replicas."""


# The parts of the state that are a few numbers: counters, what guards have seen, loss scale.


class Counters(StatePart):
    """The step, the cursor of the data, the losses and the clock."""

    def pack(self, packed: StateDict) -> None:
        state = self._state
        scalars = state.scalars
        is_evaluated = state.session.evaluated == state.step
        packed.meta |= {
            "step": state.step,
            "samples_seen": state.samples,
            "val_loss": scalars.val_loss if is_evaluated else None,
            "best_val_loss": scalars.best_val_loss,
            "scalars": asdict(scalars),
        }

    def load(self, saved: StateDict) -> None:
        state = self._state
        meta = saved.meta
        state.step = meta["step"]
        state.samples = meta["samples_seen"]
        state.scalars = Scalars(**meta["scalars"])

        # The step's end was done before it was saved. The command itself goes on.
        step = state.step
        first_step_s = state.session.first_step_s
        state.session = Session(step, step, first_step_s, evaluated=step, reported=step, saved=step)


class GuardsPart(StatePart):
    """What the guards have seen, and counted."""

    def pack(self, packed: StateDict) -> None:
        packed.meta["guards"] = self._state.guards.values()

    def load(self, saved: StateDict) -> None:
        self._state.guards.load_values(saved.meta["guards"])


class ScalerPart(StatePart):
    """The loss scale of fp16."""

    def pack(self, packed: StateDict) -> None:
        packed.scaler = self._state.scaler.values()

    def load(self, saved: StateDict) -> None:
        self._state.scaler.load_values(saved.scaler)

    def compared(self, tensors: Tensors) -> None:
        tensors |= self._state.scaler.tensors()
