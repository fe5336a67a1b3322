"""Expert parallelism by hand: each rank of a block of ep data ranks holds some experts, and tokens
travel to them.

dp 4, ep 2, experts 0 to 3: data rank d holds the experts of d mod 2, so ranks 0 and 2 hold the same

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

With tensor parallelism, the ranks of a block have the same t, and send tokens to their own hidden
units of the experts. With a pipeline, they are of one stage.

Everything else is data-parallel. The factor of the mean, 1/(accum·dp), enters at the loss, and all
that follows is a sum. The gradients of experts already contain the tokens of all ranks of their
block, so they have buckets of their own and are summed over the axis edp alone; the others over dp.
In the norm and in checkpoints each expert counts once: each of its replicas owns a slice, or the
first one owns all of it.

The number of tokens that an expert gets differs from step to step: the counts are exchanged first,
and the host waits for them.

Source: Lepikhin et al. 2020, GShard; Fedus et al. 2021, Switch Transformers; Rajbhandari et al.
2022, DeepSpeed-MoE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.models.moe import MoE, Stacked
from nanoray.parallel.axis import Axis
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.mode import DataParallel
from nanoray.parallel.norm import norm_of_owned
from nanoray.parallel.pieces import Piece, Shard, received_gradients, whole_pieces
from nanoray.parallel.tp_experts import SplitExperts


def cut(model: nn.Module, axis: Axis) -> None:
    """Keep this rank's experts of a whole model, in place. Nothing is sent.

    All ranks must hold equal weights; meta tensors will do. Afterwards `model.pieces` has the piece
    that each parameter is.
    """
    pieces = whole_pieces(model)
    for name, (kept, piece) in experts_at(model, axis.size, axis.index).items():
        layer, _, key = name.rpartition(".")
        setattr(model.get_submodule(layer), key, nn.Parameter(kept))
        pieces[name] = piece

    # The layers stay where they are, with other methods.
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        moe.__class__ = SplitTwice if isinstance(moe, SplitExperts) else SplitMoE
        moe.axis = axis  # type: ignore[assignment]
    model.pieces = pieces  # type: ignore[assignment]


def experts_at(model: nn.Module, ranks: int, index: int) -> dict[str, tuple[Tensor, Piece]]:
    """Return the experts that rank `index` of `ranks` keeps of a whole model.

    By parameter name: a copy of its part, and which piece that is.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    pieces = whole_pieces(model)
    kept: dict[str, tuple[Tensor, Piece]] = {}
    for layer, moe in layers.items():
        share = moe.router.weight.shape[0] // ranks
        for part in ("up", "down"):
            for key, p in moe.get_submodule(part).named_parameters():
                name = f"{layer}.{part}.{key}"
                # Tensor parallelism may have cut other dimensions: the piece has one box of these
                # sizes, (E, ...).
                (box,) = pieces[name].boxes
                sizes = [stop - start for start, stop in box]
                own = p.detach().view(sizes).narrow(0, index * share, share)
                own = own.flatten(0, own.dim() - p.dim()).clone()
                kept[name] = (own, pieces[name].narrow(0, index * share, share))
    return kept


class _Exchange(torch.autograd.Function):
    """Send rows to the ranks of the axis; the backward returns their gradients to the senders."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.axis = axis
        return axis.all_to_all(rows, send, receive, "tokens")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        returned = ctx.axis.all_to_all(grads[0], ctx.receive, ctx.send, "tokens")
        return returned, None, None, None


class SplitMoE(MoE):
    """A mixture of experts, some of which are on this rank."""

    axis: Axis

    def apply_experts(self, sent: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's tokens `sent` (N, C), which lie by expert.

        (all ranks of the axis) counts: how many tokens each expert gets, (E,).
        """
        ep = self.axis.size
        share = len(counts) // ep

        # Exchange the counts. The host waits for them: they are the sizes of the messages.
        theirs = self.axis.all_to_all(counts, [share] * ep, [share] * ep, "tokens")
        theirs = theirs.view(ep, share)  # by sending rank, by own expert
        send = counts.view(ep, share).sum(1).tolist()
        receive = theirs.sum(1).tolist()

        # Tokens arrive by rank, and for each rank by expert. Sort them by expert.
        arrived = _Exchange.apply(sent, send, receive, self.axis)
        expert = torch.arange(share, device=sent.device).repeat(ep)
        expert = expert.repeat_interleave(theirs.flatten())  # of each token that has arrived
        order = expert.argsort(stable=True)
        results = self.own_experts(arrived[order], theirs.sum(0).tolist())

        # Return the results in the order in which the tokens came.
        as_arrived = torch.zeros_like(results).index_copy(0, order, results)
        return _Exchange.apply(as_arrived, receive, send, self.axis)


class SplitTwice(SplitMoE, SplitExperts):
    """A mixture of experts, some of which are on this rank, with some hidden units of each."""


def names_of_experts(model: nn.Module) -> set[str]:
    """Return the names of the parameters that expert parallelism cuts."""
    stacks = {name for name, module in model.named_modules() if isinstance(module, Stacked)}
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in stacks}


class ExpertParallel(DataParallel):
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
        super().__init__(model, data)
        self._data = data
        self._replicas = replicas
        self._mirror = mirror
        self.divisor = data.size  # of the loss
        self.experts = names_of_experts(model)

        # Two sets of buckets with one numbering. Along the axis of replicas the mirror is nearer:
        # of ep neighbours on the data axis, one has the same experts.
        names = {name for name, _ in model.named_parameters()}
        distance = mirror * replicas.size // data.size if replicas.size > 1 else 0
        self._rest = Buckets(model, data, mode, bucket_mb, mirror, only=names - self.experts)
        self._experts = Buckets(
            model,
            replicas,
            mode,
            bucket_mb,
            distance,
            only=self.experts,
            first=len(self._rest.bucket_names),
        )
        self._both = (self._rest, self._experts)

        if mode != "ddp_by_hand":
            self.shards = [*(self._rest.shards or []), *(self._experts.shards or [])]
        self._others = self._copied(others) if others else []
        self._others_grad = received_gradients(self._others, model)
        mirrored = [
            *(self._rest.mirror_shards or []),
            *(self._experts.mirror_shards or []),
            *self._others,
        ]
        self.mirror_shards = mirrored or None
        received = [*self._rest.mirrored_gradients, *self._experts.mirrored_gradients]
        if self._others:
            received.append(self._others_grad)
        self.mirrored_gradients = received

    def _copied(self, others: Mapping[str, tuple[Tensor, Piece]]) -> list[Shard]:
        """Return shards of another rank's experts, in the order of this rank's shards."""
        shards = []
        for own in self._experts.shards or ():  # each is a whole one: no rank shares it
            weights, piece = others[own.piece.name]
            shards.append(Shard(piece, nn.Parameter(weights.flatten()), own.decays))
        return shards

    @property
    def bucket_names(self) -> dict[int, list[str]]:
        return self._rest.bucket_names | self._experts.bucket_names

    def replicas(self, name: str) -> Axis:
        return self._replicas if name in self.experts else self._data

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Run a chunk's backward inside. (all ranks)

        With `last`, and in zero2, gradients are exchanged.
        """
        with self._rest.backward(last, chunk, late), self._experts.backward(last, chunk, late):
            yield

    def sum_of(self, p: nn.Parameter) -> Tensor:
        return self._rest.sum_of(p)  # a tied parameter is no expert's

    @property
    def gradients(self) -> list[Tensor]:
        return self._rest.gradients + self._experts.gradients

    def mirror_gradients(self) -> bool:
        for part in self._both:
            part.mirror_gradients()

        # Experts that no other rank has: their gradients go along the data axis, in one tensor.
        if self._others:
            own = [
                shard.param.grad
                for shard in self._experts.shards or ()
                if shard.param.grad is not None
            ]
            self._data.start_pass_on(torch.cat(own), self._mirror, "mirror", self._others_grad)()
        return self.mirror_shards is not None

    def norm(self) -> Tensor:
        owned = self._rest.owned + self._experts.owned
        return norm_of_owned(owned, self._data, self._data.mesh.device)

    def spread(self) -> None:
        for part in self._both:
            part.spread()

    def settle(self) -> None:
        for part in self._both:
            part.settle()

    def zero_grad(self) -> None:
        for part in self._both:
            part.zero_grad()
