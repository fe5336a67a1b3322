"""A mixture of experts in place of a block's MLP: a router sends each token to k of E experts.

    x (B, T, C) ─┬─ router ─ softmax over E experts ─ the k largest, as gates g ─────────┐
                 │                                                                       │
                 ├─ copy each token k times, sort by expert                              │
                 │   tokens of expert 0 ▒▒▒▒▒ ─ up 0 ─ GELU ─ down 0 ─┐                  │
                 │             expert 1 ░     ─ up 1 ─ GELU ─ down 1 ─┼─ unsort ─ Σ g·y ─┴─┐
                 │             expert 2       (no token: its gradient is zero)             + ─ y
                 │             expert 3 ▓▓▓   ─ up 3 ─ GELU ─ down 3 ─┘                    │
                 └─ shared experts, one MLP for every token ───────────────────────────────┘

    up.weight (E, hidden, C), down.weight (E, C, hidden): the experts' layers one behind the other;
    ep.py cuts along E

    gates       of the k chosen experts, divided by their sum; with k = 1 the probability itself, or
                the router would learn nothing from the loss
    dropless    an expert takes every token that is sent to it
    balance     per sequence: E · Σ_e (share of choices of e) · (mean probability of e); 1 if even
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

from nanoray.models.dropout import dropout_layer

# Indices of a layer's routing statistics, a vector (LOAD + E,)
BALANCE = 0
Z = 1
ENTROPY = 2
LOAD = 3  # and what follows: each expert's share of the choices


class RouterTraining(NamedTuple):
    """How a router is trained."""

    balance: float = 0.01  # factor of the balance loss
    z: float = 0.001  # factor of the z loss


class Stacked(nn.Module):
    """One linear layer for each expert, all in one parameter.

    The biases are one vector, because the optimizer decays no vectors.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None

    def layers(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight (outputs, inputs) and bias (outputs,) of each expert, as views.

        Backward adds up the views' gradients into one gradient of the parameter.
        """
        weights = self.weight.unbind(0)
        if self.bias is None:
            return [(weight, None) for weight in weights]
        biases = self.bias.view(len(weights), -1).unbind(0)
        return list(zip(weights, biases, strict=True))


class MoE(nn.Module):
    """The experts of a block, with their router."""

    def __init__(
        self,
        width: int,
        experts: int,
        per_token: int,
        hidden: int,
        bias: bool,
        dropout: float,
        shared: nn.Module | None = None,
        gelu: str = "none",
    ) -> None:
        super().__init__()
        self.per_token = per_token
        self.gelu = gelu  # torch's word for the form of GELU: none | tanh
        self.router = nn.Linear(width, experts, bias=False)
        self.up = Stacked(experts, width, hidden, bias)
        self.down = Stacked(experts, hidden, width, bias)
        self.shared = shared
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' result (B, T, C) for x (B, T, C), and statistics of the routing.

        The statistics, float32 (LOAD + E,), are means over the batch: the two losses, which have a
        gradient, the entropy of a token's probabilities as a share of the largest possible one, and
        each expert's share of the choices.
        """
        # Rate the experts, and choose the k best for each token.
        logits = self._logits(x)  # (B, T, E)
        probabilities = logits.softmax(-1)  # (B, T, E)
        # Only the k chosen experts compute; the gates carry the router's gradient.
        gates, chosen = probabilities.topk(self.per_token)  # (B, T, k) each
        if self.per_token > 1:
            gates = gates / gates.sum(-1, keepdim=True)

        # Apply the experts.
        y = self.mix(x, gates, chosen)  # (B, T, C)
        if self.shared is not None:
            y = y + self.shared(x)
        return self.dropout(y), describe(logits, probabilities, chosen)

    def _logits(self, x: Tensor) -> Tensor:
        # In float32: rounded logits would flip the choice between close experts.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.weight.float())

    @torch.compiler.disable
    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of the experts' results for x (B, T, C), weighted with gates (B, T, k).

        Returns (B, T, C). It runs eagerly in a compiled block, because the number of an expert's
        tokens changes with every step, and the host needs it.
        """
        tokens = x.flatten(0, 1)  # (N, C)
        N, C = tokens.shape
        k = self.per_token
        E = self.router.weight.shape[0]

        # Sort the N·k choices by expert, then by token.
        expert = chosen.flatten()  # (N·k,)
        counts = expert.bincount(minlength=E)  # (E,) tokens of each expert
        order = expert.argsort(stable=True)  # (N·k,)

        # Apply the experts to the sorted copies. In the compute dtype, because with expert
        # parallelism they travel to other ranks.
        copies = tokens.repeat_interleave(k, 0)[order].to(_compute_dtype(tokens))  # (N·k, C)
        results = self.apply_experts(copies, counts)  # (N·k, C)

        # Put the results back in order, and add up those of a token.
        unsorted = results.new_zeros(N * k, C).index_copy(0, order, results).view(N, k, C)
        weighted = unsorted * gates.flatten(0, 1).unsqueeze(-1)  # (N, k, C)
        return weighted.sum(1).view(x.shape).to(x.dtype)

    def apply_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the results (n, C) of tokens (n, C), sorted by expert, counts[e] of expert e."""
        return self.own_experts(tokens, counts.tolist())

    def own_experts(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the results of tokens (n, C), sorted by expert, by the experts of this rank."""
        parts = tokens.split(list(counts))
        results = []
        # An expert without tokens multiplies empty matrices, so its gradient is zero, not None.
        for part, up, down in zip(parts, self.up.layers(), self.down.layers(), strict=True):
            inner = F.linear(part, *up)  # (counts[e], hidden)
            hidden = F.gelu(inner, approximate=self.gelu)
            results.append(F.linear(hidden, *down))  # (counts[e], C)
        return torch.cat(results)


def describe(logits: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return the statistics of a layer's routing, float32 (LOAD + E,); see `MoE.forward`."""
    E = logits.shape[-1]
    # Only the mean probability has a gradient here; counting choices has none.
    share = F.one_hot(chosen, E).float().mean((1, 2))  # (B, E): of a sequence's choices
    balance = E * (share * probabilities.mean(1)).sum(-1).mean()
    z = logits.logsumexp(-1).square().mean()

    log_probabilities = probabilities.clamp_min(1e-30).log()
    entropy = -(probabilities * log_probabilities).sum(-1).mean() / math.log(max(E, 2))
    return torch.cat([torch.stack([balance, z, entropy.detach()]), share.mean(0)])


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products run here."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class Routing:
    """Statistics of a model's routers by layer: means over the training passes since `begin`."""

    stages = 1  # of a pipeline; each has other layers

    def __init__(self, training: RouterTraining, layers: int) -> None:
        self.training = training
        self._layers = layers
        self.begin()

    def begin(self) -> None:
        """Drop all statistics."""
        self._totals: dict[int, Tensor] = {}  # by layer, of this rank's layers
        self._passes = Counter[int]()

    def losses(self, routed: Mapping[int, Tensor]) -> Tensor:
        """Add the statistics {layer: (LOAD + E,)}; return the sum of the routers' losses."""
        statistics = torch.stack(list(routed.values()))  # (L, LOAD + E)
        for layer, values in zip(routed, statistics.detach(), strict=True):
            if layer in self._totals:
                values = self._totals[layer] + values
            self._totals[layer] = values
            self._passes[layer] += 1
        balance = self.training.balance * statistics[:, BALANCE]  # (L,)
        z = self.training.z * statistics[:, Z]  # (L,)
        return (balance + z).sum()

    def added_to(self, loss: Tensor, routed: Mapping[int, Tensor]) -> Tensor:
        """Return `loss` with the gradient, but not the value, of the routers' losses.

        Also adds the layers' statistics. So a loss is the cross entropy to the bit, in training as
        in evaluation, and every factor on it, of a mean or of fp16, is also on the routers' losses.
        """
        # x - x.detach() is zero with the gradient of x.
        extra = self.losses(routed)
        return loss + (extra - extra.detach())

    def means(self) -> Tensor | None:
        """Return the means (L, LOAD + E) of all layers, on the device; None before the first pass.

        A stage of a pipeline returns its own layers' means times the number of stages, and zeros
        for the layers of other stages: the mean over all ranks is then the mean of each layer.
        """
        if not self._totals:
            return None
        zeros = torch.zeros_like(next(iter(self._totals.values())))
        rows = []
        for layer in range(self._layers):
            if layer in self._totals:
                rows.append(self._totals[layer] / self._passes[layer])
            else:
                rows.append(zeros)
        means = torch.stack(rows)
        if self.stages > 1:
            means = means * self.stages
        return means
