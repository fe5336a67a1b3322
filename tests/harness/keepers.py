"""Modules with everything that a checkpoint must keep besides weights that an optimizer updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]


class Assorted(nn.Module):
    """Frozen weights of each kind, tied ones, an empty one, and persistent buffers of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 16)
        self.base.requires_grad_(False)
        self.low = nn.Linear(16, 16).to(torch.bfloat16)
        self.low.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.layers[0].requires_grad_(False)  # a whole unit of fsdp
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)
        self.tied = nn.Linear(16, 16, bias=False)
        self.again = nn.Linear(16, 16, bias=False)
        self.again.weight = self.tied.weight
        self.frozen_twice = nn.ParameterList([self.base.weight, nn.Parameter(torch.randn(5))])
        self.head = nn.Linear(16, 1)
        codes = torch.randint(-100, 100, (16, 16), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.packed = nn.Parameter(codes.view(torch.uint8)[:3].clone(), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)
        self.tiny = nn.Parameter(torch.randn(7).to(torch.float8_e4m3fn), requires_grad=False)

        shared = torch.randn(4)
        for key, value in {
            "mask": torch.rand(5, 2) > 0.5,
            "int64": torch.randint(0, 2**40, (3,)),
            "int16": torch.randint(-(2**15), 2**15, (7,), dtype=torch.int16),
            "uint16": torch.randint(0, 2**16, (3,)).to(torch.uint16),
            "float64": torch.randn(2, 3, dtype=torch.float64),
            "spectrum": torch.randn(3, dtype=torch.complex64),
            "wide": torch.randn(3, dtype=torch.complex64).conj(),
            "number": torch.randint(0, 100, ()),
            "none_yet": torch.zeros(0, 3),
            "shared": shared,
            "transposed": torch.randn(3, 5).t(),
            "expanded": torch.randn(1, 3).expand(4, 3),
        }.items():
            self.register_buffer(key, value)
        self.head.register_buffer("shared", shared)
        self.head.register_buffer("unset", None)
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        h = h + self.low(h.to(torch.bfloat16)).float() + h @ (self.codes.float() * self.scale)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        h = h + self.up(self.down(h)) + self.again(torch.tanh(self.tied(h)))
        shift = self.shared.sum() * self.frozen_twice[1].sum() + self.empty.sum()
        return self.head(torch.tanh(h)) + shift


class Noted(nn.Linear):
    """A layer that counts its batches in an extra state of numbers, texts and tensors."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.notes: dict[str, Any] = {
            "batches": 0,
            "names": ["a", ("b", None, True)],
            "best": float("inf"),
            "history": [torch.zeros(2, dtype=torch.float64), {"last": torch.tensor(0)}],
        }

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.notes["batches"] += 1
            self.notes["best"] = 0.1 * self.notes["batches"]
            self.notes["history"][0] += 1.5
            self.notes["history"][1]["last"] = torch.tensor(self.notes["batches"])
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


class Counted(nn.Module):
    """Its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return x

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


class Moving(nn.Module):
    """Buffers that a forward changes: a counter, a running maximum, an average, a counter of
    evaluations, and one that is bound anew; some of them act on the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 16)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 1)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("evaluations", torch.tensor(0))
        self.register_buffer("largest", torch.tensor(-1.0))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("bound", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        with torch.no_grad():
            if self.training:
                self.batches += 1
                self.largest.copy_(torch.maximum(self.largest, x.max()))
                self.average.lerp_(h.mean(0), 0.1)
                self.bound = self.bound + 2
            else:
                self.evaluations += 1
        return self.head(self.normed(h) - 0.3 * self.average) + 0.01 * self.batches


class Late(nn.Module):
    """A model without buffers, whose forward registers one that a checkpoint would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(2))
        return self.inner(x)


class Passing(nn.Module):
    """A mean of the samples so far that no checkpoint keeps, and that acts on the output.

    `grows`: a buffer whose shape follows from the samples.
    """

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.grows = grows
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("largest", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.grows:
                self.largest = x.detach()[x[:, 0] > 0]
        return self.inner(x - self.mean)


def normed() -> nn.Module:
    """torch's norms and older wrappers, whose state_dict must load into torch's own modules."""
    return nn.Sequential(
        nn.Linear(3, 16),
        nn.BatchNorm1d(16),
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.Tanh(),
        nn.Linear(16, 1),
    )


def with_extra_states() -> nn.Module:
    return nn.Sequential(Noted(3, 16), Counted(), nn.Tanh(), Noted(16, 1))


KEEPERS: dict[str, Make] = {
    "assorted": Assorted,
    "extra states": with_extra_states,
    "moving": Moving,
    "late": Late,
    "passing": Passing,
    "passing and growing": partial(Passing, grows=True),
    "normed": normed,
}
