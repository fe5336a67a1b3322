"""Tensor parallelism by hand: each rank of an axis computes some heads, hidden units and tokens of
every layer.

A linear layer that widens is cut by its outputs (Column), one that narrows by its inputs (Row).
Between the two nothing is exchanged, so attention and the MLP take one sum each.
With tp = 2, ▒ on rank 0 and ░ on rank 1:

                           Column               Row                         Column                Row
                        ┌─ ▒ qkv ─ heads 0, 1 ─ ▒ proj ─┐               ┌─ ▒ up ─ 0..2C-1 ──── ▒ down ─┐
    x (B, T, C) ─ norm ─●                               Σ ─ + x ─ norm ─●                              Σ ─ + x
                        └─ ░ qkv ─ heads 2, 3 ─ ░ proj ─┘               └─ ░ up ─ 2C..4C-1 ─── ░ down ─┘

    forward     nothing at ●, a sum over the ranks at Σ
    backward    a sum over the ranks at ●, nothing at Σ

    qkv.weight as (3, C, C)    up.weight (4C, C)    proj.weight (C, C)    tok_emb.weight = lm_head.weight (V, C)
        ▒▒▒▒  of q                 ▒▒▒▒                 ▒▒░░                  ▒▒▒▒   rows of tokens 0..V/2-1
        ░░░░                       ▒▒▒▒                 ▒▒░░                  ▒▒▒▒
        ▒▒▒▒  of k                 ░░░░                 ▒▒░░                  ░░░░   rows of V/2..V-1
        ░░░░                       ░░░░                 ▒▒░░                  ░░░░
        ▒▒▒▒  of v             and its bias         down.weight (C, 4C)
        ░░░░  and its bias                      is cut as proj.weight is

Norms, position embeddings and the biases of Row layers are on every rank. Their inputs and the
gradients of their outputs are equal to the bit on all ranks of the axis, and so are their own
gradients: nothing is exchanged for them. With --sequence_parallel, ● and Σ are other collectives,
and between Σ and ● a rank has T/tp positions (residual_stream.py).

    embedding   a rank looks up its own tokens, the others are zeros; one sum
    loss        logits of the rank's own tokens (B·T, V/tp); one maximum (B·T,), one sum of two numbers per token
                (2, B·T): Σ exp(logit - maximum), and the logit of the target. The logits themselves never travel
    dropout     masks of the residual stream are equal on all ranks, those of attention differ: other heads
    experts     a rank has some hidden units of every one (tp_experts.py)

Source: Shoeybi et al. 2019, Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.gpt import GPT, Attention, KVCache, LMHead, Positions
from nanoray.models.moe import MoE
from nanoray.parallel.axis import Axis
from nanoray.parallel.pieces import Piece, Shard, whole_pieces
from nanoray.parallel.residual_stream import CutDropout, enter, leave, require_whole
from nanoray.parallel.tp_experts import SplitExperts, StackedColumn, StackedRow


def cut(model: nn.Module, axis: Axis, sequence: bool = False) -> None:
    """Cut a whole GPT in place: each rank of the axis keeps its pieces. Nothing is sent.

    All ranks must hold equal weights; meta tensors will do. `sequence`: they also share the
    positions of the residual stream. Afterwards `model.pieces` has the piece that each parameter
    is.
    """
    assert isinstance(model, GPT), "the table of conflicts refuses other models"
    pieces = whole_pieces(model)

    # In each block: the heads of attention, rows of qkv as (3, C, C), and the hidden units.
    for n, block in enumerate(model.blocks):
        attn = block.get_submodule("attn")
        _cut(attn.get_submodule("qkv"), Column, f"blocks.{n}.attn.qkv", 1, pieces, axis)
        _cut(attn.get_submodule("proj"), Row, f"blocks.{n}.attn.proj", 1, pieces, axis)
        _become(attn, SplitAttention, axis)
        _cut_mlp(block.get_submodule("mlp"), f"blocks.{n}.mlp", pieces, axis)

    # The rows of tokens. The output layer stays tied to the embedding.
    _cut(model.tok_emb, VocabEmbedding, "tok_emb", 0, pieces, axis)
    _become(model.lm_head, VocabHead, axis)
    model.lm_head.weight = model.tok_emb.weight
    model.pieces = pieces  # type: ignore[assignment]

    # With sequence parallelism, also what lies between the layers that are cut.
    for module in [*model.modules()]:
        if hasattr(module, "sequence"):
            module.sequence = sequence  # type: ignore[assignment]
        if sequence and isinstance(module, nn.Dropout):
            _become(module, CutDropout, axis)
    if sequence and not model.shape.rotary:
        _become(model.pos_emb, CutPositions, axis)


def _cut_mlp(mlp: nn.Module, name: str, pieces: dict[str, Piece], axis: Axis) -> None:
    """Keep this rank's hidden units of a dense MLP, or of every expert."""
    if not isinstance(mlp, MoE):
        _cut(mlp.get_submodule("up"), Column, f"{name}.up", 0, pieces, axis)
        _cut(mlp.get_submodule("down"), Row, f"{name}.down", 1, pieces, axis)
        return
    _cut(mlp.up, StackedColumn, f"{name}.up", 1, pieces, axis)  # of (E, hidden, C)
    _cut(mlp.down, StackedRow, f"{name}.down", 2, pieces, axis)  # of (E, C, hidden)
    mlp.__class__ = SplitExperts
    mlp.tensor = axis  # type: ignore[assignment]
    if mlp.shared is not None:
        _cut_mlp(mlp.shared, f"{name}.shared", pieces, axis)


def _cut(
    layer: nn.Module, kind: type, name: str, dim: int, pieces: dict[str, Piece], axis: Axis
) -> None:
    """Keep this rank's part of a layer's parameters, and note the pieces.

    dim: the dimension of the parameters' views that is cut.
    """
    for key, p in list(layer.named_parameters()):
        piece = pieces[f"{name}.{key}"]
        if dim >= len(piece.view):  # the bias of a Row layer: every rank keeps all of it
            continue
        size = piece.view[dim] // axis.size
        own = p.detach().view(piece.view).narrow(dim, axis.index * size, size)

        # The parameter's own dimensions again: (3, C/tp, C) of queries, keys and values becomes
        # (3·C/tp, C).
        own = own.flatten(0, own.dim() - p.dim()).clone()
        setattr(layer, key, nn.Parameter(own))
        pieces[f"{name}.{key}"] = piece.narrow(dim, axis.index * size, size)
    _become(layer, kind, axis)


def _become(layer: nn.Module, kind: type, axis: Axis) -> None:
    """Give a layer the methods of its class for a cut model; names and hooks stay."""
    layer.__class__ = kind
    layer.axis = axis  # type: ignore[assignment]


# The layers. Each was one of models/gpt.py: its parameters keep their names, and are smaller.


class Column(nn.Linear):
    """Some outputs of a linear layer, from all inputs."""

    axis: Axis
    sequence = False

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs (..., outputs/tp) of x (..., inputs)."""
        return self.product(enter(x, self.axis, self.sequence))

    def product(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, given x on every rank. Nothing is exchanged."""
        return F.linear(x, self.weight, self.bias)


class Row(nn.Linear):
    """All outputs of a linear layer, from some of its inputs.

    The bias is added once, after the sum.
    """

    axis: Axis
    sequence = False
    bias_in_product = False

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs (..., outputs), summed over the ranks' inputs (..., inputs/tp)."""
        y = leave(self.product(x), self.axis, self.sequence)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y

    def product(self, x: Tensor) -> Tensor:
        """Return this rank's share of the sum."""
        return F.linear(x, self.weight)


class SplitAttention(Attention):
    """Attention over this rank's heads.

    Each rank draws dropout masks of its own for them. Those of later layers are equal again.
    """

    axis: Axis

    def heads(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        if not (self.training and self.dropout.p > 0):
            return super().heads(x, cache)
        common = _seed_apart(self.axis.index, x.device)
        y = super().heads(x, cache)
        _seed_again(common, x.device)
        return y


@torch.compiler.disable
def _seed_apart(index: int, device: torch.device) -> int:
    """Seed the generators for this rank alone; return the seed that they had on all ranks."""
    seed = torch.initial_seed()
    seed_generators(derive_seed(seed, index), device)
    return seed


_seed_again = torch.compiler.disable(seed_generators)


class VocabEmbedding(nn.Embedding):
    """The rows of some tokens."""

    axis: Axis
    sequence = False

    def forward(self, idx: Tensor) -> Tensor:
        """Return the embeddings of tokens idx (B, T): (B, T, C), or of own positions (B, T/tp, C)."""
        if self.sequence:
            require_whole(idx.shape[1], self.axis)

        # Tokens of other ranks are zeros here, so the sum has each token once.
        own, others = _own_tokens(idx, self.weight.shape[0], self.axis)
        x = F.embedding(own, self.weight).masked_fill(others.unsqueeze(-1), 0.0)  # (B, T, C)
        return leave(x, self.axis, self.sequence)


class CutPositions(Positions):
    """The positions of the rank's own part of a sequence."""

    axis: Axis

    def forward(self, start: int, end: int) -> Tensor:  # type: ignore[override]
        share = (end - start) // self.axis.size
        first = start + self.axis.index * share
        return super().forward(first, first + share)


class VocabHead(LMHead):
    """The output layer of some tokens."""

    axis: Axis
    sequence = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of all tokens (..., padded_vocab) of x (..., C), without a gradient.

        With --sequence_parallel x is the last position of each rank's part, and the last rank has
        that of the sequence.
        """
        if self.sequence:
            is_last = self.axis.index == self.axis.size - 1
            x = x.detach() if is_last else torch.zeros_like(x)
            x = self.axis.sum(x, "activations")

        # Each rank fills its own columns; a sum puts them together.
        own = self.product(x).detach()
        full = own.new_zeros(*own.shape[:-1], self.axis.size, own.shape[-1])
        full[..., self.axis.index, :] = own
        return self.axis.sum(full, "logits").flatten(-2)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of x (B, T, C), given targets (B, T).

        A float32 scalar, equal on all ranks. With --sequence_parallel x has own positions,
        (B, T/tp, C).
        """
        x = enter(x, self.axis, self.sequence)  # (B, T, C)
        logits = self.product(x).flatten(0, 1).float()  # (B·T, V/tp)
        return _CrossEntropy.apply(logits, targets.flatten(), self.axis)

    def product(self, x: Tensor) -> Tensor:
        """Return the logits (..., V/tp) of this rank's tokens."""
        # The vocabulary is padded to a multiple of tp: its last rows are no tokens, and get -inf.
        rows = self.weight.shape[0]
        real = min(max(self.vocab_size - self.axis.index * rows, 0), rows)
        padding = None
        if real < rows:
            padding = F.pad(x.new_zeros(real), (0, rows - real), value=-math.inf)
        return F.linear(x, self.weight, padding)


class _CrossEntropy(torch.autograd.Function):
    """The mean cross entropy of logits (N, V/tp) that are cut by tokens, N = B·T."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        # Subtract the maximum over all ranks, so that no exponential overflows.
        top = axis.max(logits.amax(-1), "logits")  # (N,)
        exps = (logits - top[:, None]).exp_()  # (N, V/tp)

        # The target's logit is on one rank; the others add zero.
        own, others = _own_tokens(targets, logits.shape[1], axis)
        hit = logits.gather(1, own[:, None])[:, 0].masked_fill(others, 0.0)

        # One message for the sum of exponentials and the target's logit. The probabilities are
        # written over the exponentials.
        total, hit = axis.sum(torch.stack([exps.sum(-1), hit]), "logits")  # (N,) each
        ctx.save_for_backward(exps.div_(total[:, None]), own, others)
        return (total.log() + top - hit).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Of the mean over N: probability, less 1 at the target.
        probabilities, own, others = ctx.saved_tensors
        share = grads[0] / len(own)
        hit = torch.where(others, 0.0, -share)[:, None]
        return (probabilities * share).scatter_add_(1, own[:, None], hit), None, None


def _own_tokens(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, and whether the token is on another rank.

    The row is 0 then.
    """
    own = tokens - axis.index * rows
    others = (own < 0) | (own >= rows)
    return own.masked_fill(others, 0), others


def names_of_cut(model: nn.Module) -> set[str]:
    """Return the names of the parameters of which each rank has another piece."""
    names = set()
    for layer, module in model.named_modules():
        if isinstance(module, _CUT):
            names.add(f"{layer}.weight")
        if isinstance(module, Column | StackedColumn):  # Row layers keep all of their bias
            names.add(f"{layer}.bias")
    return names & {name for name, _ in model.named_parameters()}


def names_of_partial(model: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradient on a rank is that of its own positions.

    There are none unless the stream is cut along the sequence. Then they are all that no rank has
    cut, but for the biases of `StackedRow`, which are added before the sum.
    """
    if not any(getattr(module, "sequence", False) for module in model.modules()):
        return set()
    names = {name for name, _ in model.named_parameters()} - names_of_cut(model)
    for layer, module in model.named_modules():
        if isinstance(module, StackedRow):
            names.discard(f"{layer}.bias")
    return names


_CUT = (Column, Row, StackedColumn, StackedRow, VocabEmbedding)


def with_owners(
    shards: Sequence[Shard],
    cut: Collection[str],
    axis: Axis,
    replicas: Callable[[str], Axis],
    sharded: bool,
) -> list[Shard]:
    """Return a rank's shards, each with its number of holders, and whether this rank owns it.

    Each element has one owner, which saves it, and counts it in the norm. `cut`: the names that
    `names_of_cut` returns. `replicas` returns the axis of a parameter's replicas by its name; they
    hold different pieces if they are `sharded`.
    """
    marked = []
    for shard in shards:
        data = replicas(shard.piece.name)
        holders = 1
        owner = True
        if shard.piece.name not in cut:  # all tensor ranks hold the same
            holders *= axis.size
            owner = axis.index == 0
        if not sharded:  # and so do all replicas
            holders *= data.size
            owner = owner and data.index == 0
        marked.append(replace(shard, owner=owner, holders=holders))
    return marked
