"""Models that people bring: norms that run twice or never, weights in another order, layers in
layers, tiny ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness.ranks import run_ranks, series

SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 0,
    "log_every": 1,
    "max_steps": 8,
}
SETTINGS |= {
    "tensorboard": False,
    "checkpoint_every": 0,
    "eval_every": 0,
    "timeout_s": 20,
    "init_timeout_s": 20,
}


def outcomes(
    folder: Path, world: int, main: Callable[[Run], None], **settings: Any
) -> tuple[RunSpec, list[Any]]:
    config = make_config(DEFAULTS | SETTINGS | {"out_dir": str(folder)} | settings)
    spec = open_run(config, script_data(), 0.0)
    return spec, run_ranks(spec, world, train=Program(main, frozenset(settings)))


def trained(folder: Path, world: int, main: Callable[[Run], None], **settings: Any) -> RunSpec:
    spec, found = outcomes(folder, world, main, **settings)
    assert not [outcome for outcome in found if "error" in outcome], found
    return spec


def final(spec: RunSpec) -> dict[str, Tensor]:
    newest, _ = newest_valid(spec.checkpoints)
    assert newest
    return newest.state.model


class Images(nn.Module):
    """A norm that runs once for a batch, twice, in every other micro batch, or that is frozen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.conv, self.norm, self.head = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8, momentum=1.0),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.how == "sometimes" and self.training and self.calls % 2:
            return self.head(self.conv(x).mean((2, 3)))
        if self.how == "twice":
            return sum((self.one(half) for half in x.chunk(2, -1)), torch.zeros(()))
        return self.one(x)

    def one(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def images(run: Run, how: str = "once", layout: Any = torch.contiguous_format) -> None:
    torch.manual_seed(0)
    model: Any = Images(how).to(memory_format=layout)
    with torch.no_grad():
        model.norm.running_mean.fill_(0.3)
        model.norm.running_var.fill_(2.0)
    if how == "frozen":
        model.norm.eval()
    rate = 1e-12 if how != "trained" else 0.05
    x = 5 + torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    RuntimeEngine(model, optimizer, run, nn.functional.cross_entropy).fit(
        TensorDataset(x, torch.arange(96) % 2)
    )


@pytest.mark.parametrize("how", ["once", "twice", "sometimes", "frozen"])
def test_statistics_are_means_over_the_passes_that_a_norm_has_made(
    tmp_path: Path, how: str
) -> None:
    """With hardly any rate and a momentum of one they are those of the last step's samples, about
    the data's.
    """
    found = final(
        trained(tmp_path, 2, partial(images, how=how), grad_accum_steps=2, dp_mode="ddp_by_hand")
    )
    mean, var = found["norm.running_mean"], found["norm.running_var"]
    if how == "frozen":
        assert torch.equal(mean, torch.full((8,), 0.3))
        assert torch.equal(var, torch.full((8,), 2.0))
        return
    torch.manual_seed(0)
    x = 5 + torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = Images("once").conv(x)
    assert mean == pytest.approx(y.mean((0, 2, 3)), abs=0.1)
    assert var == pytest.approx(y.var((0, 2, 3)), rel=0.35)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = (
            nn.ModuleList(nn.Linear(16, 16) for _ in range(2)),
            nn.Linear(16, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x)


class Layers(nn.Module):
    """Layers in layers, lists of lists, or a weight that two layers share."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(3, 16), nn.Linear(16, 1)
        if kind == "lists":
            pairs: Any = (nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]) for _ in range(2))
            self.layers = nn.ModuleList(pairs)
        else:
            self.layers = nn.ModuleList(
                Stage() if kind == "nested" else nn.Linear(16, 16) for _ in range(2)
            )
        if kind == "tied":
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            for each in layer if isinstance(layer, nn.ModuleList) else [layer]:
                x = x + torch.tanh(each(x))
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.0)), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind: partial(Layers, kind) for kind in ("nested", "lists", "tied")},
    "scaled": Scaled,
    "small": lambda: nn.Linear(3, 1),
}


def points(run: Run, kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(
        TensorDataset(x, x.sum(1, keepdim=True))
    )


@pytest.mark.parametrize("kind", ["nested", pytest.param("lists", marks=pytest.mark.full)])
def test_layers_in_layers_are_gathered_apart(tmp_path: Path, kind: str) -> None:
    both = [
        trained(tmp_path / mode, 2, partial(points, kind=kind), dp_mode=mode)
        for mode in ("ddp", "fsdp")
    ]
    assert series(both[0]) == pytest.approx(series(both[1]), abs=1e-5)
