"""Optimizers in the styles of those that people use with torch: short, and with the same kinds of
state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Styled(Optimizer):
    """An optimizer whose step is a loop over parameters; `update` is that of one."""

    defaults_of_class: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, lr: float = 0.01, **values: Any) -> None:
        super().__init__(params, {"lr": lr} | self.defaults_of_class | values)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Styled):
    """Its step is a Python int, as in most optimizers outside of torch."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
        state["step"] += 1
        rate = group["lr"] / state["step"] ** 0.5
        p.sub_(state["exp_avg"].mul(0.9).add(grad, alpha=0.1).sign_(), alpha=rate)
        state["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


class ScheduleFree(Styled):
    """The weights that are trained are not those that are evaluated."""

    defaults_of_class = {"k": 0, "weight_sum": 0.0, "train_mode": False}  # noqa: RUF012

    def begin(self, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("not in train mode; call optimizer.train()")
        group["k"] += 1
        group["weight_sum"] += group["lr"] ** 2

    def update(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"] = p.clone()
        share = group["lr"] ** 2 / group["weight_sum"]
        p.lerp_(state["z"], share)
        p.sub_(grad, alpha=group["lr"] * (1 - 0.9 * (1 - share)))
        state["z"].sub_(grad, alpha=group["lr"])

    def train(self) -> None:
        self._switch(True, 0.1)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _switch(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] == mode:
                continue
            group["train_mode"] = mode
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)


class Mixed(Styled):
    """Every kind of value that a state may have, for a parameter, the optimizer and a group."""

    defaults_of_class = {"betas": (0.9, 0.99), "t": 0}  # noqa: RUF012

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        everywhere = self.state["global"]
        everywhere["history"] = (*everywhere.get("history", ()), len(everywhere))
        everywhere["least"] = {3: float("-inf"), "mean": torch.tensor(0.5, dtype=torch.float64)}
        super().step()
        for group in self.param_groups:
            group["t"] += 1
            group["betas"] = (0.9, 1 - 0.1 ** group["t"])

    def update(self, p: Tensor, grad: Tensor, state: Any, group: dict[str, Any]) -> None:
        if not state:
            state.update({"flag": True, "name": "first", "nothing": None, "rate": 1.0})
            state["a.dotted:key/50%"] = torch.zeros(2, dtype=torch.int32)
            state["nested"] = {"deep": [torch.zeros_like(p), (1, [2.5])]}
        state["flag"] = not state["flag"]
        state["name"] += "."
        state["rate"] *= 1.01
        state["a.dotted:key/50%"] += 1
        moment = state["nested"]["deep"][0]
        moment.mul_(group["betas"][0]).add_(grad)
        rate = state["rate"] * len(state["name"]) * (1 if state["flag"] else 2)
        p.sub_(moment, alpha=1e-3 * rate * float(state["a.dotted:key/50%"].sum()))


class Lookahead(Optimizer):
    """A wrapper: slow weights follow those of another optimizer in every fifth step."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups
        self.count = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 5:
            return
        params = [p for group in self.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, params, strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow = [tensor.clone() for tensor in state_dict["slow"]]
        self.count = state_dict["count"]
