"""Bugs of hybrid sharding, planted on a pool's ranks for `tests.stress equivalence`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nanoray.parallel import hybrid
from nanoray.parallel.hybrid import Groups, Sum
from nanoray.parallel.mesh import Mesh
from tests.harness.planted import measure_rank


def left_out(patch: Any) -> None:
    """The groups do not add up their gradients: each trains on its own samples."""
    patch.setattr(Groups, "start", lambda self, own, bucket: None)
    patch.setattr(Groups, "sum", lambda self, own: None)


def done_twice(patch: Any) -> None:
    """A slice that has been summed over the groups is summed again."""
    start = Groups.start
    right_sum = Groups.sum

    def start_twice(self: Groups, own: Tensor, bucket: int) -> None:
        start(self, own, bucket)
        self.finish()
        start(self, own, bucket)

    def sum_twice(self: Groups, own: Tensor) -> None:
        right_sum(self, own)
        right_sum(self, own)

    patch.setattr(Groups, "start", start_twice)
    patch.setattr(Groups, "sum", sum_twice)


def wrong_slice(patch: Any) -> None:
    """A rank adds up the part of a slice that is its neighbour's."""
    right = Sum.of.__func__  # type: ignore[attr-defined]

    def shifted(cls: Any, own: Tensor, replica: Any, bucket: int | None = None) -> Sum:
        made = right(cls, own, replica, bucket)
        other = (replica.index + 1) % replica.size
        return Sum(made.own, made.parts, made.parts.view(replica.size, -1)[other], made.bucket)

    patch.setattr(hybrid.Sum, "of", classmethod(shifted))


def every_group_counts(patch: Any) -> None:
    """The norm counts each element once for each group."""
    patch.setattr(Groups, "is_first", property(lambda self: True))


BUGS: dict[str, Callable[[Any], None]] = {
    "left_out": left_out,
    "done_twice": done_twice,
    "wrong_slice": wrong_slice,
    "every_group_counts": every_group_counts,
}


def measure_with_bugs(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Run the benchmark's function once for each bug; arms get its name before theirs. (all ranks)"""
    for name, bug in BUGS.items():
        arms = {f"{name} {arm}": own for arm, own in order["arms"].items()}
        measure_rank(mesh, order | {"arms": arms}, emit, bug)
