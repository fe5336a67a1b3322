"""AdamW and SGD for weights of 16 bits: each update is computed in float32, and rounded once.

                        weights   gradients   state of the optimizer         rounded
    bf16_pure           bf16      bf16        m, v in bf16                   to nearest, or at random
    fp16_pure           fp16      fp16        2^12·m and 2^12·√v in fp16     to nearest
    either + masters    16 bits   16 bits     m, v and weights in float32    nothing is lost

fp16 has no number below 6e-8. There v, a square, would be zero for every gradient below 2e-4, and
m/√v without bound; so √v is kept, and both are kept larger. bf16 has the range of float32, and 8
bits: w - lr·u is w again where lr·u is below w/512. Rounding at random keeps such an update on
average. Source: Gupta et al. 2015, Deep Learning with Limited Numerical Precision.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.models.dropout import derive_seed
from nanoray.models.precision import weight_type
from nanoray.parallel.pieces import Shard

FP16_FACTOR = 2.0**12  # of the state in fp16: it reaches from 1.5e-11 to 16
FP16_MOST = 65504.0
EPS = 1e-8


class Optim16(torch.optim.Optimizer):
    """AdamW, or plain SGD, for weights and gradients of 16 bits, as the configuration says."""

    scalars_on_host = True  # `step`, which the host reads in every update

    def __init__(
        self, groups: list[dict[str, Any]], shards: Sequence[Shard], config: Config
    ) -> None:
        """Take the groups of `shards`. All the state is made in the first step."""
        # "fused" is torch's word for: `step` itself leaves out an update where `found_inf` is 1.
        super().__init__(groups, {"lr": config.lr, "fused": True})
        self._adam = config.optimizer == "adamw"
        self._betas = (config.beta1, config.beta2)
        self._masters = config.master_weights == "fp32"
        self._stochastic = config.rounding == "stochastic"
        self._seed = config.seed
        self._small = config.precision == "fp16_pure" and not self._masters

        # A parameter's number, and its first element here: an element gets the same random bits on
        # all ranks, however the parameter is cut.
        self._places = {}
        for shard in shards:
            number = zlib.crc32(shard.piece.name.encode())
            self._places[shard.param] = (number, shard.piece.span_in(shard.piece.all)[0])

        # The kinds of state for each parameter.
        self.state_type = torch.float32 if self._masters else weight_type(config.precision)
        self._moments: tuple[str, ...] = ()
        if self._adam and self._small:
            self._moments = ("exp_avg_x4096", "exp_avg_root_x4096")
        elif self._adam:
            self._moments = ("exp_avg", "exp_avg_sq")
        # torch's AdamW keeps the same moments in float32, so a run may go on in the other precision.
        self.state_kind = "AdamW"
        if self._masters or self._moments != ("exp_avg", "exp_avg_sq"):
            kept = [*self._moments, *(["master"] if self._masters else [])]
            self.state_kind = f"Optim16 with {', '.join(kept) or 'a count of steps'}"
        self.found_inf: Tensor | None = None  # 1: leave out the update
        self.grad_scale: Tensor | None = None  # the factor that the gradients still have

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights, unless `found_inf` is 1. Waits for the device where it may be."""
        skip = self.found_inf is not None and bool(self.found_inf.item())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                # Also when the very first update is left out: a checkpoint needs the state.
                state = self.state[p] or self._begin(p)
                if not skip:
                    self._update(p, state, group["lr"], group["weight_decay"])

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        state["step"] = torch.zeros(())
        for key in self._moments:
            state[key] = torch.zeros_like(p, dtype=self.state_type)
        if self._masters:
            state["master"] = p.detach().float()
        return state

    def _update(self, p: nn.Parameter, state: dict[str, Tensor], lr: float, decay: float) -> None:
        state["step"] += 1
        step = int(state["step"])
        grad = p.grad.float()  # type: ignore[union-attr]
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        weight = state["master"] if self._masters else p.float()
        bits = self._bits(p, step) if self._stochastic else None

        # The update in float32.
        if self._adam:
            m, v = self._read(state)
            weight.mul_(1 - lr * decay)
            adamw_(weight, grad, m, v, step, lr, self._betas)
            self._keep(state, m, v, bits)
        else:
            weight.sub_(grad, alpha=lr)

        # Rounded once, to nearest or at random.
        if bits is not None:
            weight = round_at_random(weight, bits & 0xFFFF)
        p.copy_(weight)

    def _read(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return both moments in float32: the state itself where it is float32, else copies."""
        m, v = (state[key].float() for key in self._moments)
        if self._small:
            m.div_(FP16_FACTOR)
            v.div_(FP16_FACTOR).square_()
        return m, v

    def _keep(self, state: dict[str, Tensor], m: Tensor, v: Tensor, bits: Tensor | None) -> None:
        """Write both moments back into the state, rounded."""
        if self._masters:
            return  # they are the state itself
        if self._small:
            m.mul_(FP16_FACTOR).clamp_(-FP16_MOST, FP16_MOST)
            v.sqrt_().mul_(FP16_FACTOR).clamp_(-FP16_MOST, FP16_MOST)
        elif bits is not None:  # v changes by a few per mill in a step, m by a tenth
            v = round_at_random(v, (bits >> 16) & 0xFFFF)
        for key, moment in zip(self._moments, (m, v), strict=True):
            state[key].copy_(moment)

    def _bits(self, p: nn.Parameter, step: int) -> Tensor:
        number, begin = self._places[p]
        seed = derive_seed(self._seed, step, number)
        return random_bits(seed, begin, p.numel(), p.device).view(p.shape)


def adamw_(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
) -> None:
    """Do AdamW's update in place, in float32, after weight decay.

    Source: Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2.
    """
    m.lerp_(grad, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    bounded = v.sqrt().div_(math.sqrt(1 - betas[1] ** step)).add_(EPS)
    weight.addcdiv_(m, bounded, value=-lr / (1 - betas[0] ** step))


def random_bits(seed: int, begin: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each element from `begin` on, (count,) int32.

    They are a function of (seed, element): no generator has a state. Two rounds of Wellons' 32-bit
    finalizer lowbias32, each with one half of the seed.
    """
    x = torch.arange(begin, begin + count, dtype=torch.int32, device=device)
    for key in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF):
        x = x.bitwise_xor_(_signed(key))
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return x


def round_at_random(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bf16, up or down, with `bits` in [0, 2^16).

    The mean over all `bits` is the value itself: the 16 bits that bf16 lacks are added to `bits`,
    and a carry rounds away from zero. Values that are not finite stay so.
    """
    whole = (value.view(torch.int32) + bits).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(value.isfinite(), whole, value).to(torch.bfloat16)


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
