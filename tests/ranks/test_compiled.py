"""Compiled layers of a ResNet and of a script's own model: the losses of eager ones, and a resume
to the bit.

Ranks compile without the last step of the compiler, which needs minutes: tracing, guards, the limit
of versions and autograd's graphs are all there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.data.dataset import DatasetInfo
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from tests.harness.images import small_dataset
from tests.harness.ranks import run_ranks, series
from tests.harness.script_runs import final_tensors
from tests.ranks.test_own import open_own, points


def traced_only() -> None:
    """Compile without generating code; more versions than the limit are an error, no return to
    eager code.
    """
    whole = nn.Module.compile

    def compile(self: nn.Module, **settings: Any) -> None:
        whole(self, backend="aot_eager", **settings)

    nn.Module.compile = compile  # type: ignore[method-assign]
    torch._dynamo.config.fail_on_recompile_limit_hit = True


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    return small_dataset(tmp_path_factory.mktemp("images"))


class Tower(nn.Module):
    """Layers in a list, and a number called blocks, which is no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.first, self.last = 3, nn.Linear(3, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(self.blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.last(h)


def with_layers(run: Run) -> None:
    fit(run, Tower())


def without_layers(run: Run) -> None:
    fit(run, nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)))


def fit(run: Run, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points(50, 1), points(20, 2))


def own(main: Any, folder: Path, **settings: Any) -> RunSpec:
    spec = open_own(folder, **settings)
    outcomes = run_ranks(
        spec, 2, timeout_s=300, first=traced_only, train=Program(main, frozenset(settings))
    )
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return spec


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["ddp", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("zero1", "fsdp"))]
)
@pytest.mark.parametrize(
    "main", [with_layers, pytest.param(without_layers, marks=pytest.mark.full)]
)
def test_a_compiled_model_of_a_script_resumes_to_the_bit(
    tmp_path: Path, main: Any, mode: str
) -> None:
    settings = {"dp_mode": mode, "timeout_s": 120, "init_timeout_s": 120}
    eager = own(main, tmp_path / "eager", **settings)
    whole = own(main, tmp_path / "whole", compile=True, **settings)
    own(main, tmp_path / "parts", compile=True, stop_at=3, **settings)
    rest = own(main, tmp_path / "parts", compile=True, resume="auto", **settings)
    assert series(rest) == series(whole)
    assert series(whole) == pytest.approx(series(eager), rel=1e-4)
    ours, theirs = final_tensors(rest), final_tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
