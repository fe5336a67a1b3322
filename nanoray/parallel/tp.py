"""Tensor parallelism by hand: every rank of an axis computes some heads, hidden units and tokens of
every layer.

A linear layer that widens is cut by its outputs (Column), one that narrows by its inputs (Row).
Between the two no rank needs anything of another one, so attention and the MLP take one sum each.
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
        ░░░░  and its bias                          alike

Norms, position embeddings and the biases of Row layers are on every rank. Their inputs and the
gradients of their outputs are equal to the bit on all ranks of the axis, and so are their own
gradients: nothing is exchanged for them. With --sequence_parallel, ● and Σ are other collectives,
and between Σ and ● a rank has T/tp positions (stream.py).

    embedding   a rank looks up the tokens that it has, the others count as zeros; one sum
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

from nanoray.config.conflicts import require_divisible
from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.mesh.pieces import Piece, Shard, whole_pieces
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.gpt import GPT, Attention, KVCache, LMHead, Positions
from nanoray.models.moe import MoE
from nanoray.parallel.stream import CutDropout, enter, leave, require_whole
from nanoray.parallel.tp_experts import SplitExperts, StackedColumn, StackedRow


def cut(model: nn.Module, axis: Axis, sequence: bool = False) -> None:
    """Cut a whole GPT in place: each rank of the axis keeps its pieces. Nothing communicates; meta
    tensors will do.

    All ranks must hold equal weights. `sequence`: they also share the positions of the residual
    stream. Afterwards `model.pieces` tells the piece that each parameter is. Raises ConfigError
    when the model cannot be cut.
    """
    if not isinstance(model, GPT):
        raise ConfigError(
            f"tp = {axis.size} cuts a gpt, but the model is a {type(model).__name__}; drop tp"
        )
    shape = model.shape
    require_divisible(
        axis.size, shape.n_head, shape.n_embd, shape.padded_vocab, shape.expert_hidden
    )
    pieces = whole_pieces(model)
    for n, block in enumerate(model.blocks):
        attn, at = block.get_submodule("attn"), f"blocks.{n}"
        # Heads of (3, C, C)
        _cut(attn.get_submodule("qkv"), Column, f"{at}.attn.qkv", 1, pieces, axis)
        _cut(attn.get_submodule("proj"), Row, f"{at}.attn.proj", 1, pieces, axis)
        _become(attn, SplitAttention, axis)
        _cut_mlp(block.get_submodule("mlp"), f"{at}.mlp", pieces, axis)
    _cut(model.tok_emb, VocabEmbedding, "tok_emb", 0, pieces, axis)
    _become(model.lm_head, VocabHead, axis)
    model.lm_head.weight = model.tok_emb.weight  # tied, as before
    model.pieces = pieces  # type: ignore[assignment]
    for module in [*model.modules()]:
        if hasattr(module, "sequence"):
            module.sequence = sequence  # type: ignore[assignment]
        if sequence and isinstance(module, nn.Dropout):
            _become(module, CutDropout, axis)
    if sequence and not model.shape.rotary:
        _become(model.pos_emb, CutPositions, axis)


def _cut_mlp(mlp: nn.Module, at: str, pieces: dict[str, Piece], axis: Axis) -> None:
    if not isinstance(mlp, MoE):
        _cut(mlp.get_submodule("up"), Column, f"{at}.up", 0, pieces, axis)
        _cut(mlp.get_submodule("down"), Row, f"{at}.down", 1, pieces, axis)
        return
    _cut(mlp.up, StackedColumn, f"{at}.up", 1, pieces, axis)  # hidden units of (E, hidden, C)
    _cut(mlp.down, StackedRow, f"{at}.down", 2, pieces, axis)
    mlp.__class__ = SplitExperts
    mlp.tensor = axis  # type: ignore[assignment]
    if mlp.shared is not None:
        _cut_mlp(mlp.shared, f"{at}.shared", pieces, axis)


def _cut(
    layer: nn.Module, kind: type, name: str, dim: int, pieces: dict[str, Piece], axis: Axis
) -> None:
    """Keep this rank's part of a layer's parameters along one dimension of their views; note the
    pieces.
    """
    for key, p in [*layer.named_parameters()]:
        piece = pieces[f"{name}.{key}"]
        if dim < len(piece.view):  # else the bias of a Row layer, which every rank keeps whole
            size = piece.view[dim] // axis.size
            own = p.detach().view(piece.view).narrow(dim, axis.index * size, size)
            # Queries, keys and values under one another again
            own = own.flatten(0, own.dim() - p.dim()).clone()
            setattr(layer, key, nn.Parameter(own))
            pieces[f"{name}.{key}"] = piece.narrow(dim, axis.index * size, size)
    _become(layer, kind, axis)


def _become(layer: nn.Module, kind: type, axis: Axis) -> None:
    layer.__class__ = kind
    layer.axis = axis  # type: ignore[assignment]


# The layers. Each was one of models/gpt.py, with the same parameters by the same names, and less of
# them.


class Column(nn.Linear):
    """Some outputs of a linear layer, from all inputs."""

    axis: Axis
    sequence = False

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs (..., outputs/tp) of x (..., inputs)."""
        return self.product(enter(x, self.axis, self.sequence))

    def product(self, x: Tensor) -> Tensor:
        """Return what this rank computes by itself."""
        return F.linear(x, self.weight, self.bias)


class Row(nn.Linear):
    """All outputs of a linear layer, from some of its inputs; the bias is added once, after the
    sum.
    """

    axis: Axis
    sequence = bias_in_product = False

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs (..., outputs) of this rank's inputs (..., inputs/tp), summed over the
        ranks.
        """
        y = leave(self.product(x), self.axis, self.sequence)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return this rank's share of the sum."""
        return F.linear(x, self.weight)


class SplitAttention(Attention):
    """Attention over this rank's heads. Their masks are the rank's own; the masks after them must
    be equal again.
    """

    axis: Axis

    def heads(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        if not (self.training and self.dropout.p > 0):
            return super().heads(x, cache)
        seed = _seed_apart(self.axis.index, x.device)
        y = super().heads(x, cache)
        _seed_again(seed, x.device)
        return y


@torch.compiler.disable
def _seed_apart(index: int, device: torch.device) -> int:
    """Seed the generators for this rank alone; return the block's seed, which all ranks have."""
    seed = torch.initial_seed()
    seed_generators(derive_seed(seed, index), device)
    return seed


_seed_again = torch.compiler.disable(seed_generators)


class VocabEmbedding(nn.Embedding):
    """The rows of some tokens."""

    axis: Axis
    sequence = False

    def forward(self, idx: Tensor) -> Tensor:
        """Return the embeddings (B, T, C) of all tokens idx (B, T), or of own positions (B, T/tp,
        C).
        """
        if self.sequence:
            require_whole(idx.shape[1], self.axis)
        own, others = _own_tokens(idx, self.weight.shape[0], self.axis)
        return leave(
            F.embedding(own, self.weight).masked_fill(others.unsqueeze(-1), 0.0),
            self.axis,
            self.sequence,
        )


class CutPositions(Positions):
    """The positions of the rank's own part of a sequence."""

    axis: Axis

    def forward(self, start: int, end: int) -> Tensor:  # type: ignore[override]
        own = (end - start) // self.axis.size
        return super().forward(start + self.axis.index * own, start + (self.axis.index + 1) * own)


class VocabHead(LMHead):
    """The output layer of some tokens."""

    axis: Axis
    sequence = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of all tokens (..., padded_vocab) of x (..., C), without a gradient.

        Of a sequence that is cut, x is the last position of each rank's part, and the last rank's
        counts.
        """
        if self.sequence:
            x = x.detach() if self.axis.index == self.axis.size - 1 else torch.zeros_like(x)
            x = self.axis.sum(x, "activations")
        own = self.product(x).detach()
        full = own.new_zeros(*own.shape[:-1], self.axis.size, own.shape[-1])
        full[..., self.axis.index, :] = own
        return self.axis.sum(full, "logits").flatten(-2)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of x (B, T, C), given targets (B, T): a float32 scalar,
        equal on all ranks.

        With --sequence_parallel x has own positions, (B, T/tp, C).
        """
        # (B·T, V/tp)
        logits = self.product(enter(x, self.axis, self.sequence)).flatten(0, 1).float()
        return _CrossEntropy.apply(logits, targets.flatten(), self.axis)

    def product(self, x: Tensor) -> Tensor:
        """Return the logits (..., V/tp) of this rank's tokens."""
        rows = self.weight.shape[0]
        # The other rows are padding
        real = min(max(self.vocab_size - self.axis.index * rows, 0), rows)
        padding = (
            F.pad(x.new_zeros(real), (0, rows - real), value=-math.inf) if real < rows else None
        )
        return F.linear(x, self.weight, padding)


class _CrossEntropy(torch.autograd.Function):
    """The mean cross entropy of logits that are cut by tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        top = axis.max(logits.amax(-1), "logits")  # (N,)
        exps = (logits - top[:, None]).exp_()  # (N, V/tp)
        own, others = _own_tokens(targets, logits.shape[1], axis)
        hit = logits.gather(1, own[:, None])[:, 0].masked_fill(others, 0.0)
        total, hit = axis.sum(torch.stack([exps.sum(-1), hit]), "logits")  # (N,) each
        ctx.save_for_backward(exps.div_(total[:, None]), own, others)
        return (total.log() + top - hit).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        probabilities, own, others = ctx.saved_tensors
        share = grads[0] / len(own)
        hit = torch.where(others, 0.0, -share)[:, None]
        return (probabilities * share).scatter_add_(1, own[:, None], hit), None, None


def _own_tokens(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens on this rank, 0 for those of other ranks; and whether a token is
    one of those.
    """
    own = tokens - axis.index * rows
    others = (own < 0) | (own >= rows)
    return own.masked_fill(others, 0), others


def names_of_cut(model: nn.Module) -> set[str]:
    """Return the names of the parameters of which each rank has another piece."""
    names = {f"{at}.weight" for at, module in model.named_modules() if isinstance(module, _CUT)}
    names |= {
        f"{at}.bias"
        for at, module in model.named_modules()
        if isinstance(module, Column | StackedColumn)
    }
    return names & {name for name, _ in model.named_parameters()}


def names_of_partial(model: nn.Module) -> set[str]:
    """Return the names of the parameters that have the gradient of this rank's positions only, on
    every rank another.

    There are none unless the stream is cut along the sequence. Biases of `StackedRow` are added
    before the sum.
    """
    if not any(getattr(module, "sequence", False) for module in model.modules()):
        return set()
    before = {
        f"{at}.bias" for at, module in model.named_modules() if isinstance(module, StackedRow)
    }
    return {name for name, _ in model.named_parameters()} - names_of_cut(model) - before


_CUT = (Column, Row, StackedColumn, StackedRow, VocabEmbedding)


def with_owners(
    shards: Sequence[Shard],
    cut: Collection[str],
    axis: Axis,
    replicas: Callable[[str], Axis],
    sharded: bool,
) -> list[Shard]:
    """Return a rank's shards with the number of ranks that hold the same piece, and whether this
    one owns it.

    Each element has one owner, which saves it, and counts it in the norm. `cut`: the names that
    `names_of_cut` returns; `replicas`: by a parameter's name, the axis of its replicas, which hold
    different pieces if they are `sharded`.
    """
    marked = []
    for shard in shards:
        everywhere, data = shard.piece.name not in cut, replicas(shard.piece.name)
        holders = (axis.size if everywhere else 1) * (1 if sharded else data.size)
        owner = (axis.index == 0 or not everywhere) and (data.index == 0 or sharded)
        marked.append(replace(shard, owner=owner, holders=holders))
    return marked
