"""Bugs in the ways to share a model, planted on a pool's ranks for a benchmark of equivalence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from nanoray.parallel import ep, pp, residual_stream, tp
from nanoray.parallel.axis import Axis
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.fsdp import FSDP
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import Piece
from tests.stress import equivalence


def share(patch: Any) -> None:
    """The loss is not divided by the number of ranks."""
    for kind in (Buckets, FSDP):
        made = kind.__init__

        def init(self: Any, *args: Any, made: Any = made, **more: Any) -> None:
            made(self, *args, **more)
            self.divisor = 1

        patch.setattr(kind, "__init__", init)


def qkv(patch: Any) -> None:
    """The rows of qkv are cut as they lie: the first rank has all queries and half of the keys."""
    right = tp._cut

    def cut(
        layer: nn.Module, kind: type, name: str, dim: int, pieces: dict[str, Piece], axis: Axis
    ) -> None:
        if name.endswith("qkv"):
            pieces |= {
                f"{name}.{key}": Piece.whole(f"{name}.{key}", p.shape)
                for key, p in layer.named_parameters()
            }
            dim = 0
        right(layer, kind, name, dim, pieces, axis)

    patch.setattr(tp, "_cut", cut)


def loose_ends(patch: Any) -> None:
    """A pipeline's first and last stage do not add up gradients of the tied embedding."""
    patch.setattr(pp.Pipe, "add_tied", lambda self, gradient: None)


def expert_factor(patch: Any) -> None:
    """Gradients of experts are averaged, although the factor has entered at the loss."""
    start = Axis.start_reduce_scatter

    def averaging(self: Axis, *args: Any, **flags: Any) -> Callable[[Tensor], Tensor]:
        arrived = start(self, *args, **flags)
        return (lambda out: arrived(out).div_(self.size)) if self.name == "edp" else arrived

    patch.setattr(Axis, "start_reduce_scatter", averaging)


def expert_replicas(patch: Any) -> None:
    """The norm counts an expert once for each replica, not once."""

    def norm(self: ep.ExpertParallel) -> Tensor:
        owned = [*self._rest.owned, *self._experts.gradients]
        return ep.norm_of_owned(owned, self._data, self._data.mesh.device)

    patch.setattr(ep.ExpertParallel, "norm", norm)


def norms(patch: Any) -> None:
    """With the sequence cut, each rank updates norms by the gradient of its own positions."""
    patch.setattr(residual_stream.PartialGradients, "add_up", lambda self: None)


def measure_rank(
    mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None], bug: Callable[[Any], None]
) -> None:
    """Run the benchmark's function with a bug planted, and remove the bug. (all ranks)"""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        equivalence.measure_rank(mesh, order, emit)


measure_with_share = partial(measure_rank, bug=share)
measure_with_qkv = partial(measure_rank, bug=qkv)
measure_with_loose_ends = partial(measure_rank, bug=loose_ends)
measure_with_expert_factor = partial(measure_rank, bug=expert_factor)
measure_with_expert_replicas = partial(measure_rank, bug=expert_replicas)
measure_with_norms = partial(measure_rank, bug=norms)
