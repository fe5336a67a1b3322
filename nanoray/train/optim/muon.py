"""Muon by hand: the matrices of the blocks get orthogonal updates, all other parameters AdamW's.

    v ← 0.95·v + g                      momentum of a matrix's gradient
    u = g + 0.95·v                      Nesterov: look ahead
    O = orthogonal(u)                   ≈ U·Vᵀ of u = U·S·Vᵀ: all singular values near 1
    w ← w·(1 - lr·decay) - lr·√max(1, rows/columns)·O

A gradient's few large singular values drown the rest of its directions; here all directions move by
the same amount. Queries, keys and values are three matrices. Matrices of one shape are orthogonalised
together, in float32 on a CPU and in bf16 on a GPU. Source: Jordan et al. 2024, Muon: An optimizer
for hidden layers in neural networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoray.config import Config
from nanoray.machine.compat import foreach_add, foreach_add_, foreach_mul_
from nanoray.parallel.pieces import Shard

MOMENTUM = 0.95
# The quintic a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X, of which 5 rounds bring singular values of 0.01 to 1
# between 0.65 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Muon for one group of matrices, and torch's fused AdamW for the others."""

    def __init__(
        self, groups: list[dict[str, Any]], views: Sequence[tuple[int, ...]], config: Config
    ) -> None:
        """Take the matrices as the first group; a view (n, rows, columns) splits each into n."""
        super().__init__(groups, {"lr": config.lr})
        matrices, *others = self.param_groups
        self._adamw = torch.optim.AdamW(others, betas=(config.beta1, config.beta2), fused=True)
        self._adamw.state = self.state
        # torch's word for: `step` itself leaves out an update where found_inf is 1.
        matrices["fused"] = True
        self.param_groups = [matrices, *self._adamw.param_groups]
        self._views = dict(zip(matrices["params"], views, strict=True))

        # All state begins as zeros, AdamW's too: ranks share it before the first step.
        for p in matrices["params"]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for group in self._adamw.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)

    @classmethod
    def of(cls, shards: Sequence[Shard], config: Config) -> Muon:
        """Return the optimizer of a GPT's parameters, each of them whole."""
        # What decays is a matrix; those outside of the blocks are embeddings.
        matrices = []
        embeddings = []
        vectors = []
        views = []
        for shard in shards:
            if not shard.decays:
                vectors.append(shard.param)
            elif shard.piece.name.startswith("blocks."):
                matrices.append(shard.param)
                views.append(shard.piece.view)
            else:
                embeddings.append(shard.param)

        # The schedule sets AdamW's rate, and Muon's in proportion to it.
        muon: dict[str, Any] = {
            "params": matrices,
            "weight_decay": config.weight_decay,
            "lr": config.muon_lr,
            "lr_factor": config.muon_lr / config.lr,
        }
        groups = [
            muon,
            {"params": embeddings, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return cls(groups, views, config)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. `closure` is torch's signature; there must be none."""
        assert closure is None
        left_out: Tensor | None = getattr(self, "found_inf", None)
        self._step_matrices(left_out)
        self._adamw.found_inf = left_out  # type: ignore[attr-defined]
        self._adamw.step()

    def _step_matrices(self, left_out: Tensor | None) -> None:
        """Update the matrices, unless `left_out`, a scalar on the device, is 1. No host waits."""
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [p.grad for p in params]
        sums = [self.state[p]["momentum_buffer"] for p in params]

        # A left-out update must change neither weights nor momentum: factors 1, and gradients 0.
        momentum: Any = MOMENTUM
        decay: Any = 1 - group["lr"] * group["weight_decay"]
        on = None
        if left_out is not None:
            on = left_out == 0
            grads = [torch.where(on, grad, 0.0) for grad in grads]
            momentum = torch.where(on, momentum, 1.0)
            decay = torch.where(on, decay, 1.0)

        # Momentum, and Nesterov's look ahead.
        foreach_mul_(sums, momentum)
        foreach_add_(sums, grads)
        ahead = foreach_add(grads, sums, alpha=MOMENTUM)

        # One batch (n, rows, columns) per shape, transposed where there are more rows than columns:
        # the products of `orthogonal` are (rows, rows).
        batches: dict[tuple[int, ...], list[tuple[Tensor, Tensor, float]]] = {}
        for p, u in zip(params, ahead, strict=True):
            rows, columns = self._views[p][-2:]
            factor = max(1.0, rows / columns) ** 0.5
            weights = p.view(-1, rows, columns)
            updates = u.view(-1, rows, columns)
            for weight, update in zip(weights, updates, strict=True):
                if rows > columns:
                    weight = weight.T
                    update = update.T
                batches.setdefault(update.shape, []).append((weight, update, factor))

        # Decay, then add the orthogonal updates.
        foreach_mul_(params, decay)
        for batch in batches.values():
            orthogonal_updates = orthogonal(torch.stack([update for _, update, _ in batch]))
            for (weight, _, factor), update in zip(batch, orthogonal_updates, strict=True):
                if on is not None:
                    update = torch.where(on, update, 0.0)
                weight.add_(update.to(weight.dtype), alpha=-group["lr"] * factor)


def orthogonal(u: Tensor) -> Tensor:
    """Return about U·Vᵀ of each matrix U·S·Vᵀ in u (n, rows, columns), where rows ≤ columns.

    These are rounds of Newton and Schulz's iteration. Singular values from 0.01 to 1 times the
    largest come out between 0.65 and 1.2; the directions are kept.
    """
    a, b, c = QUINTIC
    x = u.to(torch.bfloat16) if u.is_cuda else u
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (n, rows, rows)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x
