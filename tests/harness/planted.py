"""Bugs in the ways to share a model, planted on a pool's ranks for a benchmark of equivalence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.models import moe
from nanoray.parallel import ep, pp, residual_stream, tp, tp_experts
from nanoray.parallel.axis import Axis
from nanoray.parallel.buckets import Bucket, Buckets
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


def twice(patch: Any) -> None:
    """Gradients are averaged although the factor has entered at the loss."""
    start = Axis.start_reduce_scatter

    def averaging(self: Axis, *args: Any, **flags: Any) -> Callable[[Tensor], Tensor]:
        arrived = start(self, *args, **flags)
        return lambda out: arrived(out).div_(self.size)

    patch.setattr(Axis, "start_reduce_scatter", averaging)


def owner(patch: Any) -> None:
    """A rank updates the slice of its neighbour, while the ranks gather everyone's own."""
    close = Buckets._close

    def shifted(self: Buckets, *args: Any) -> Bucket:
        bucket = close(self, *args)
        size = bucket.own.stop - bucket.own.start
        begin = bucket.own.stop % bucket.size
        bucket.own = slice(begin, begin + size)
        return bucket

    patch.setattr(Buckets, "_close", shifted)


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


def row_bias(patch: Any) -> None:
    """Every rank adds the bias of a Row layer, before the sum."""
    patch.setattr(
        tp.Row, "forward", lambda self, x: tp.leave(F.linear(x, self.weight, self.bias), self.axis)
    )


def replicas(patch: Any) -> None:
    """The norm counts a parameter that all ranks hold once for each of them."""
    right = tp.with_owners
    patch.setattr(
        tp, "with_owners", lambda *args: [replace(shard, owner=True) for shard in right(*args)]
    )


def untied(patch: Any) -> None:
    """The embedding and the output layer have weights of their own, as DTensor's plans make them."""
    right = tp.cut

    def cut(model: Any, axis: Axis, *more: Any) -> None:
        right(model, axis, *more)
        head = model.lm_head
        head.register_buffer("first", head.weight.detach().clone())
        right_product = head.product
        head.product = lambda x: right_product(x) - F.linear(x, model.tok_emb.weight - head.first)

    patch.setattr(tp, "cut", cut)


def loose_ends(patch: Any) -> None:
    """A pipeline's first and last stage do not add up gradients of the tied embedding."""
    patch.setattr(pp.Pipe, "add_tied", lambda self, gradient: None)


def both_ends(patch: Any) -> None:
    """The norm counts the tied embedding on the first and on the last stage."""
    right = pp.with_tie
    patch.setattr(
        pp, "with_tie", lambda *args: [replace(shard, owner=True) for shard in right(*args)]
    )


def each_stage(patch: Any) -> None:
    """Every stage applies the factor of the mean, not the one with the loss alone."""
    right = pp.Pipe.backward

    def backward(self: pp.Pipe, turn: Any, scaled: Callable[[Tensor], Tensor]) -> None:
        if self._received is not None:
            self._received = scaled(self._received)
        right(self, turn, scaled)

    patch.setattr(pp.Pipe, "backward", backward)


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


def expert_axis(patch: Any) -> None:
    """Gradients of experts are summed over all data ranks, also over ranks with other experts."""
    right = ep.ExpertParallel.__init__
    patch.setattr(
        ep.ExpertParallel,
        "__init__",
        lambda self, model, data, replicas, *args: right(self, model, data, data, *args),
    )


def balance(patch: Any) -> None:
    """The balance loss is that of a rank's batch, not of each sequence."""
    right = moe.describe

    def describe(logits: Tensor, probabilities: Tensor, hot: Tensor, kept: Any) -> Tensor:
        return right(*(t.flatten(0, 1).unsqueeze(0) for t in (logits, probabilities, hot)), kept)

    patch.setattr(moe, "describe", describe)


def gates(patch: Any) -> None:
    """Under tensor parallelism each rank's gates have the gradient of its own hidden units alone."""
    right = tp_experts.enter
    patch.setattr(tp_experts, "enter", lambda x, *where: right(x, *where) if x.shape[-1] > 4 else x)


def expert_bias(patch: Any) -> None:
    """Every rank adds the biases of the experts' second layer, before the sum."""
    patch.setattr(tp_experts.StackedRow, "layers", moe.Stacked.layers)


def expert_pieces(patch: Any) -> None:
    """The norm counts the experts' biases, which tensor parallelism does not cut, on every rank."""
    right = tp.names_of_cut
    patch.setattr(tp, "names_of_cut", lambda model: right(model) | ep.names_of_experts(model))


def lost_losses(patch: Any) -> None:
    """The routers' losses of a stage that does not end in the loss are forgotten."""
    patch.setattr(pp.Stage, "aside", property(lambda self: None, lambda self, losses: None))


def bare_losses(patch: Any) -> None:
    """The factor of the mean is not on the losses of such a stage."""
    right = pp.Pipe.backward

    def backward(self: pp.Pipe, turn: Any, scaled: Callable[[Tensor], Tensor]) -> None:
        right(self, turn, scaled if self._is_end(turn.chunk) else lambda loss: loss)

    patch.setattr(pp.Pipe, "backward", backward)


def norms(patch: Any) -> None:
    """With the sequence cut, each rank updates norms by the gradient of its own positions."""
    patch.setattr(residual_stream.PartialGradients, "add_up", lambda self: None)


def ratings(patch: Any) -> None:
    """With the sequence cut, the complete gradients of a router's logits are added up."""
    patch.setattr(tp_experts, "whole", lambda x, axis: residual_stream.enter(x, axis, True))


def measure_rank(
    mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None], bug: Callable[[Any], None]
) -> None:
    """Run the benchmark's function with a bug planted, and remove the bug. (all ranks)"""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        equivalence.measure_rank(mesh, order, emit)


measure_with_share = partial(measure_rank, bug=share)
measure_with_twice = partial(measure_rank, bug=twice)
measure_with_owner = partial(measure_rank, bug=owner)
measure_with_qkv = partial(measure_rank, bug=qkv)
measure_with_row_bias = partial(measure_rank, bug=row_bias)
measure_with_replicas = partial(measure_rank, bug=replicas)
measure_with_untied = partial(measure_rank, bug=untied)
measure_with_loose_ends = partial(measure_rank, bug=loose_ends)
measure_with_both_ends = partial(measure_rank, bug=both_ends)
measure_with_each_stage = partial(measure_rank, bug=each_stage)
measure_with_expert_factor = partial(measure_rank, bug=expert_factor)
measure_with_expert_replicas = partial(measure_rank, bug=expert_replicas)
measure_with_expert_axis = partial(measure_rank, bug=expert_axis)
measure_with_balance = partial(measure_rank, bug=balance)
measure_with_norms = partial(measure_rank, bug=norms)
measure_with_ratings = partial(measure_rank, bug=ratings)
measure_with_gates = partial(measure_rank, bug=gates)
measure_with_expert_bias = partial(measure_rank, bug=expert_bias)
measure_with_expert_pieces = partial(measure_rank, bug=expert_pieces)
measure_with_lost_losses = partial(measure_rank, bug=lost_losses)
measure_with_bare_losses = partial(measure_rank, bug=bare_losses)
