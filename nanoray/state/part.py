"""A part of the state: what it does where the state is saved, received, rolled back and compared."""

from __future__ import annotations

from nanoray.state.rank_state import RankState
from nanoray.state.state_dict import StateDict, Tensors


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

    def of_rank(self) -> Tensors:
        """Return what this rank alone has; a checkpoint keeps it beside the generators of each rank."""
        return {}

    def load(self, saved: StateDict) -> None:
        """Restore the part in place. Raises CheckpointError where it belongs to another model."""

    def compared(self, tensors: Tensors) -> None:
        """Add the live tensors that must be equal on all replicas."""
