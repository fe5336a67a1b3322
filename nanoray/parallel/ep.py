"""Expert parallelism by hand: every data rank of a block of ep ranks holds some experts, and tokens
travel to them.

dp 4, ep 2, experts 0 to 3: d mod 2 tells which experts a rank holds, so ranks 0 and 2 hold the same
ones

    rank 0   own sequences   experts 0 1 ░ ░   ┐ axis ep:       rank 2   own sequences   experts 0 1 ░ ░   ┐ axis ep:
    rank 1   own sequences   experts ░ ░ 2 3   ┘ all-to-all     rank 3   own sequences   experts ░ ░ 2 3   ┘ all-to-all
                                     └────────── axis edp: replicas of experts, ranks 0 2 | 1 3 ──┘

    forward of a layer on rank 0, whose tokens are a b c; d e f are those of rank 1:

    by expert     counts        tokens           by expert      experts      tokens         in order
    a c | b    ─► 2 0 | 1 0  ─► a c ▸ rank 0  ─► a c d | e   ─► 0, 1      ─► a c ◂ rank 0 ─► Σ gate · result
    (0)   (2)     (all-to-all)  b   ▸ rank 1     (0)     (1)                 b   ◂ rank 1    (models/moe.py)

    backward     the same two exchanges of tokens the other way round: gradients of results go to the experts, those of
                 tokens come back

    up.weight (E, hidden, C), down.weight (E, C, hidden), and their biases: rows e of [E·i/ep, E·(i+1)/ep) on ep rank i

With tensor parallelism a block are ranks with the same t, which send tokens to their own hidden
units of the experts; with a pipeline, ranks of one stage.

Everything else is data-parallel. The factor of the mean, 1/(accum·dp), enters at the loss, and all
that follows is a sum. So the gradients of experts, which already have the tokens of all ranks of
their block, are summed over the axis edp alone, by buckets of their own; the others over dp. In the
norm and in checkpoints each expert counts once: of its replicas, each owns its slice (or the first
one all of it).

How many tokens an expert gets, only this step tells: the counts are exchanged first, and the host
waits for them.

Source: Lepikhin et al. 2020, GShard; Fedus et al. 2021, Switch Transformers; Rajbhandari et al.
2022, DeepSpeed-MoE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.mesh.pieces import Piece, Shard, whole_pieces
from nanoray.models.moe import MoE, Stacked
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.norm import clip_to, norm_of_owned
from nanoray.parallel.tp_experts import SplitExperts


def cut(model: nn.Module, axis: Axis) -> None:
    """Keep this rank's experts of a whole model, in place. Nothing communicates; meta tensors will
    do.

    All ranks must hold equal weights. Afterwards `model.pieces` tells the piece that each parameter
    is. Raises ConfigError when there are no experts, or `axis.size` does not divide them.
    """
    pieces = whole_pieces(model)
    for name, (kept, piece) in experts_at(model, axis.size, axis.index).items():
        at, _, key = name.rpartition(".")
        setattr(model.get_submodule(at), key, nn.Parameter(kept))
        pieces[name] = piece
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        moe.__class__ = SplitTwice if isinstance(moe, SplitExperts) else SplitMoE
        moe.axis = axis  # type: ignore[assignment]
    model.pieces = pieces  # type: ignore[assignment]


def experts_at(model: nn.Module, ranks: int, index: int) -> dict[str, tuple[Tensor, Piece]]:
    """Return what a rank of the axis keeps of the experts of a whole model: copies by name, and
    which piece each is.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise ConfigError(
            f"ep = {ranks} cuts experts, but the model has none; drop ep, or give experts"
        )
    pieces, found = whole_pieces(model), {}
    for name, moe in layers.items():
        experts = moe.router.weight.shape[0]
        if experts % ranks:
            raise ConfigError(
                f"ep = {ranks} does not divide experts = {experts}; use a divisor of them for ep"
            )
        own = experts // ranks
        for part in ("up", "down"):
            for key, p in moe.get_submodule(part).named_parameters():
                at = f"{name}.{part}.{key}"
                (box,) = pieces[at].boxes  # tensor parallelism may have cut other dimensions
                sizes = [stop - start for start, stop in box]
                kept = p.detach().view(sizes).narrow(0, index * own, own)
                kept = kept.flatten(0, kept.dim() - p.dim()).clone()
                found[at] = kept, pieces[at].narrow(0, index * own, own)
    return found


class _Exchange(torch.autograd.Function):
    """Rows go to the ranks of the axis; in backward, their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        ctx.way_back = receive, send, axis
        return axis.all_to_all(rows, send, receive, "tokens")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        receive, send, axis = ctx.way_back
        return axis.all_to_all(grads[0], receive, send, "tokens"), None, None, None


class SplitMoE(MoE):
    """A mixture of experts of which this rank holds some."""

    axis: Axis

    def apply_experts(self, sent: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's tokens, which lie by expert. (all ranks of the axis)"""
        ep = self.axis.size
        own = len(counts) // ep
        # By rank, by expert
        theirs = self.axis.all_to_all(counts, [own] * ep, [own] * ep, "tokens").view(ep, own)
        send, receive = counts.view(ep, own).sum(1).tolist(), theirs.sum(1).tolist()
        got = _Exchange.apply(sent, send, receive, self.axis)
        expert = (
            torch.arange(own, device=sent.device).repeat(ep).repeat_interleave(theirs.flatten())
        )
        order = expert.argsort(stable=True)  # they arrive by rank, and in that by expert
        results = self.own_experts(got[order], theirs.sum(0).tolist())
        as_arrived = torch.zeros_like(results).index_copy(0, order, results)
        return _Exchange.apply(as_arrived, receive, send, self.axis)


class SplitTwice(SplitMoE, SplitExperts):
    """A mixture of experts of which this rank holds some, and of those some hidden units."""


def names_of_experts(model: nn.Module) -> set[str]:
    """Return the names of the parameters that expert parallelism cuts."""
    stacks = [name for name, module in model.named_modules() if isinstance(module, Stacked)]
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in stacks}


class ExpertParallel:
    """Data parallelism in which experts are summed over their replicas, and the rest over all data
    ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Axis,
        replicas: Axis,
        mode: str,
        bucket_mb: float,
        mirror: int = 0,
        others: Mapping[str, tuple[Tensor, Piece]] | None = None,
    ) -> None:
        """Lay out the buckets of a model that `cut` has cut; nothing is sent. (all ranks of `data`)

        mirror: with ZeRO, data rank d + mirror also updates the slices of rank d. It has the same
        experts, or keeps those of rank d besides its own where no other rank has them: `others`, as
        `experts_at` returns them.
        """
        self.wrapped, self._data, self._replicas, self._mode = model, data, replicas, mode
        self.divisor = data.size  # of the loss
        self.experts = names_of_experts(model)
        rest = {name for name, _ in model.named_parameters()} - self.experts
        self._rest = Buckets(model, data, mode, bucket_mb, mirror, only=rest)
        first = len(self._rest.bucket_names)
        # Along the axis of replicas
        apart = mirror * replicas.size // data.size if replicas.size > 1 else 0
        self._experts = Buckets(
            model, replicas, mode, bucket_mb, apart, only=self.experts, first=first
        )
        self._both = (self._rest, self._experts)
        self.bucket_names = self._rest.bucket_names | self._experts.bucket_names
        whole = [*(self._rest.shards or []), *(self._experts.shards or [])]
        self.shards = whole if mode != "ddp_by_hand" else None
        self._mirror, self._others = mirror, self._copied(others) if others else []
        mirrored = [
            *(self._rest.mirror_shards or []),
            *(self._experts.mirror_shards or []),
            *self._others,
        ]
        self.mirror_shards = mirrored or None

    def _copied(self, others: Mapping[str, tuple[Tensor, Piece]]) -> list[Shard]:
        """Return shards of another rank's experts, in the order of this rank's, with gradients in
        one tensor.
        """
        shards = []
        for own in self._experts.shards or ():  # each is a whole one, as nobody shares it
            weights, piece = others[own.piece.name]
            shards.append(Shard(piece, nn.Parameter(weights.flatten()), own.decays))
        sizes = [shard.param.numel() for shard in shards]
        self._others_grad = shards[0].param.new_zeros(sum(sizes))
        for shard, grad in zip(shards, self._others_grad.split(sizes), strict=True):
            shard.param.grad = grad
        return shards

    def replicas(self, name: str) -> Axis:
        """Return the axis of the ranks that hold the same of a parameter."""
        return self._replicas if name in self.experts else self._data

    def forward(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for a forward, which needs none. Tokens travel. (all ranks)"""
        return nullcontext()

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Run a chunk's backward inside; with `last`, and in zero2, gradients are exchanged. (all
        ranks)
        """
        with self._rest.backward(last, chunk, late), self._experts.backward(last, chunk, late):
            yield

    def sum_of(self, p: nn.Parameter) -> Tensor:
        """Return what this rank has of the summed gradient of a parameter with its own bucket,
        which is no expert's.
        """
        return self._rest.sum_of(p)

    def quiet(self) -> AbstractContextManager[None]:
        """Return a context for a forward and backward without a sum of gradients. Tokens travel.
        (all ranks)
        """
        return nullcontext()

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with."""
        return [gradient for part in self._both for gradient in part.gradients]

    def mirror_gradients(self) -> bool:
        """Send this rank's gradients to the rank that mirrors it, and receive those to mirror. (all
        ranks)

        Returns whether the step can be finished, once this has been done, without the ranks that
        are lost later.
        """
        for part in self._both:
            part.mirror_gradients()
        if self._others:
            own = torch.cat(
                [s.param.grad for s in self._experts.shards or () if s.param.grad is not None]
            )
            self._data.pass_on([own], [self._others_grad], self._mirror, "mirror")
        return self.mirror_shards is not None

    def norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, equal on all ranks, a scalar on the
        device. (all ranks)
        """
        owned = [gradient for part in self._both for gradient in part.owned]
        return norm_of_owned(owned, self._data, self._data.mesh.device)

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""
        for part in self._both:
            part.clip(limit, norm)
        clip_to(limit, [self._others_grad] if self._others else [], norm)

    def spread(self) -> None:
        """Start to gather the weights that the owners have updated. (all ranks)"""
        for part in self._both:
            part.spread()

    def settle(self) -> None:
        """Wait until the weights are whole."""
        for part in self._both:
            part.settle()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._both:
            part.zero_grad()
