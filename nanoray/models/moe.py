"""A mixture of experts in place of a block's MLP: a router sends each token to the k experts that
it rates highest.

    x (B, T, C) ─┬─ router ─ softmax over E experts ─ the k largest, as gates g ────────────────────┐
                 │                                                                                  │
                 ├─ copy each token k times, sort by expert                                         │
                 │      tokens of expert 0 ▒▒▒▒▒ ── up 0 ─ GELU ─ down 0 ─┐                         │
                 │                expert 1 ░     ── up 1 ─ GELU ─ down 1 ─┼─ back in order ─ Σ g·y ─┴─┐
                 │                expert 2       (no token: its gradient is zero)                     + ─ y (B, T, C)
                 │                expert 3 ▓▓▓   ── up 3 ─ GELU ─ down 3 ─┘                           │
                 └─ shared experts, one MLP for every token ──────────────────────────────────────────┘

    up.weight (E, hidden, C), down.weight (E, C, hidden): the experts' layers one behind the other; ep.py cuts along E

    gates       of the k chosen ones, divided by their sum; with k = 1 the probability itself, or the router would learn
                nothing from the loss
    dropless    an expert takes every token that is sent to it
    capacity    while training, an expert takes at most ceil(capacity · T·k/E) tokens of a sequence, the first ones.
                It counts in each sequence by itself and in the order of positions: so no token depends on later ones,
                nor on the sequences beside it. The tokens after those are dropped: this expert adds nothing to them.
                Evaluation and sampling drop nothing
    balance     per sequence: E · Σ_e (share of choices that fell on e) · (mean probability of e); 1 if they are even
    z           mean of (log Σ_e exp logit_e)², which keeps the logits small

Both losses are means over sequences or tokens, so how the ranks share the batch does not change
them. The router computes in float32 in every precision. Sources: Shazeer et al. 2017; Fedus et al.
2021, Switch; Zoph et al. 2022, ST-MoE, for z; Dai et al. 2024, DeepSeekMoE, for shared experts and
the balance of a sequence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.models.dropout import Dropout

# What a layer tells of its routing; the experts' loads are the rest
BALANCE, Z, ENTROPY, DROPPED, LOAD = range(5)


class RouterTraining(NamedTuple):
    """How a router is trained: it fixes no parameter's shape."""

    capacity: float = 0.0  # factor on the mean number of a sequence's tokens; 0: dropless
    balance: float = 0.01  # factors of the two losses
    z: float = 0.001


class Stacked(nn.Module):
    """One linear layer for each expert, all in one parameter. The biases are a vector: vectors do
    not decay.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None

    def layers(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight (outputs, inputs) and bias of each expert; backward makes one gradient of
        theirs.
        """
        weights = self.weight.unbind(0)
        biases = (
            [None] * len(weights)
            if self.bias is None
            else self.bias.view(len(weights), -1).unbind(0)
        )
        return [*zip(weights, biases, strict=True)]


class MoE(nn.Module):
    """The experts of a block, with their router. It returns what an MLP does, and what it tells of
    its routing.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        per_token: int,
        hidden: int,
        bias: bool,
        dropout: float,
        training: RouterTraining,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.per_token, self.capacity = per_token, training.capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.up = Stacked(experts, width, hidden, bias)
        self.down = Stacked(experts, hidden, width, bias)
        self.shared = shared
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' result (B, T, C) for x (B, T, C), and of its routing float32 (LOAD +
        E,).

        These are means over the batch, of which BALANCE and Z have a gradient: losses, the entropy
        of a token's probabilities as a share of the largest possible one, the share of choices
        dropped, and each expert's share.
        """
        logits = self._logits(x)  # (B, T, E)
        probabilities = logits.softmax(-1)
        gates, chosen = probabilities.topk(self.per_token)  # (B, T, k)
        if self.per_token > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        hot = F.one_hot(chosen, logits.shape[-1])  # (B, T, k, E)
        kept = self._within_capacity(hot) if self.training and self.capacity else None
        y = self.mix(x, gates, chosen, kept)
        if self.shared is not None:
            y = y + self.shared(x)
        return self.dropout(y), describe(logits, probabilities, hot, kept)

    def _logits(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.weight.float())

    def _within_capacity(self, hot: Tensor) -> Tensor:
        """Return which choices (B, T, k) their experts take: the first ones of each sequence."""
        B, T, k, E = hot.shape
        most = math.ceil(self.capacity * T * k / E)
        # Choices of the same expert before this one
        before = hot.view(B, T * k, E).cumsum(1).view(B, T, k, E) - hot
        return (before * hot).sum(-1) < most

    @torch.compiler.disable
    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor, kept: Tensor | None) -> Tensor:
        """Return the experts' results for x (B, T, C), weighted with gates (B, T, k) and added up:
        (B, T, C).

        It runs eagerly in a compiled block: how many tokens an expert gets is known to the host in
        this step only.
        """
        tokens = x.flatten(0, 1)  # (N, C)
        (N, C), k, E = tokens.shape, self.per_token, self.router.weight.shape[0]
        of = chosen.flatten() if kept is None else chosen.flatten().masked_fill(~kept.flatten(), E)
        counts = of.bincount(minlength=E + 1)[:E]
        order = of.argsort(stable=True)  # by expert, then by token; the dropped ones come last
        if kept is not None:
            order = order[: int(counts.sum())]
        sent = tokens.repeat_interleave(k, 0)[order].to(_compute_dtype(tokens))
        back = self.apply_experts(sent, counts)
        each = back.new_zeros(N * k, C).index_copy(0, order, back).view(N, k, C)
        return (each * gates.flatten(0, 1).unsqueeze(-1)).sum(1).view(x.shape).to(x.dtype)

    def apply_experts(self, sent: Tensor, counts: Tensor) -> Tensor:
        """Return the results (n, C) of tokens (n, C) that lie by expert, counts[e] for expert e."""
        return self.own_experts(sent, counts.tolist())

    def own_experts(self, sent: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the results of tokens (n, C) that lie by expert, for the experts whose weights are
        here.
        """
        layers = zip(sent.split([*counts]), self.up.layers(), self.down.layers(), strict=True)
        return torch.cat(
            [F.linear(F.gelu(F.linear(part, *up)), *down) for part, up, down in layers]
        )


def describe(logits: Tensor, probabilities: Tensor, hot: Tensor, kept: Tensor | None) -> Tensor:
    """Return what `MoE.forward` tells of its routing, float32 (LOAD + E,)."""
    E = logits.shape[-1]
    share = hot.float().mean((1, 2))  # (B, E): of a sequence's choices
    balance = E * (share * probabilities.mean(1)).sum(-1).mean()
    z = logits.logsumexp(-1).square().mean()
    entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum(-1).mean() / math.log(
        max(E, 2)
    )
    dropped = torch.zeros_like(z) if kept is None else 1 - kept.float().mean()
    return torch.cat([torch.stack([balance, z, entropy.detach(), dropped]), share.mean(0)])


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products run here: tokens that travel are as small as they
    can be.
    """
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Routing:
    """What a model's routers did since `begin`: means over the forward passes in training mode, by
    layer.
    """

    stages = 1  # that have other layers each

    def __init__(self, training: RouterTraining, layers: int) -> None:
        self.training, self._layers = training, layers
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self._totals: dict[int, Tensor] = {}  # by layer, of those that are here
        self._passes = Counter[int]()

    def losses(self, told: Mapping[int, Tensor]) -> Tensor:
        """Return the routers' losses with their factors, a scalar; note what the layers, by their
        numbers, told.
        """
        of_layers = torch.stack([*told.values()])  # (L, LOAD + E)
        for n, seen in zip(told, of_layers.detach(), strict=True):
            self._totals[n] = self._totals[n] + seen if n in self._totals else seen
            self._passes[n] += 1
        return (
            self.training.balance * of_layers[:, BALANCE] + self.training.z * of_layers[:, Z]
        ).sum()

    def added_to(self, loss: Tensor, told: Mapping[int, Tensor]) -> Tensor:
        """Return `loss` with the gradient, but not the value, of the routers' losses; note what the
        layers told.

        So a loss is the cross entropy to the bit, in training as in evaluation, and every factor on
        it, of a mean or of fp16, is also on the routers' losses.
        """
        extra = self.losses(told)
        return loss + (extra - extra.detach())

    def means(self) -> Tensor | None:
        """Return the means (L, LOAD + E) of all layers, on the device; None before the first
        forward pass.

        Of a stage of a pipeline they are times the number of stages, and other stages' layers are
        zeros: the mean over all ranks is that of each layer.
        """
        if not self._totals:
            return None
        elsewhere = torch.zeros_like(next(iter(self._totals.values())))
        rows = [
            self._totals[n] / self._passes[n] if n in self._totals else elsewhere
            for n in range(self._layers)
        ]
        means = torch.stack(rows)
        return means * self.stages if self.stages > 1 else means
