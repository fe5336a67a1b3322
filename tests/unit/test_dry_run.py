"""A dry run of a script's own model: every part against what really is there, and nothing started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import nanoray
from nanoray.bench.held_memory import held_bytes
from nanoray.cli.forecast.probe import probe_on_fakes
from nanoray.script.dry_run import kept_per_element
from nanoray.script.engine import RuntimeEngine
from nanoray.script.run import Run


class Tower(nn.Module):
    """Layers in a list, a frozen embedding, a tied weight, and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.table.weight.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.BatchNorm1d(64)
        self.up, self.down = nn.Linear(64, 512, bias=False), nn.Linear(64, 512, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.down(self.norm(h)) + self.up(h)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}


def parts(out: str) -> dict[str, float]:
    line = next(
        line for line in out.splitlines() if line.startswith("memory ") and " per rank, " in line
    )
    told = line.partition("MiB per rank")[2].partition(": ")[2]
    found = re.findall(r"([a-z][a-z ]+?) ([\d.,]+)(?: \+|$)", told)
    return {name: float(size.replace(",", "")) for name, size in found}


def dry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str = "adamw", **settings: Any
) -> str:
    ended = []

    def main(run: Run) -> None:
        model = Tower()
        x = torch.randint(512, (5000,), generator=torch.Generator().manual_seed(1))
        updated = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
        try:
            RuntimeEngine(model, updated, run, nn.functional.cross_entropy).fit(
                TensorDataset(x, x), steps=9
            )
        except Exception:
            pytest.fail("a dry run is no error of fit")
        ended.append("after fit")

    config = {
        "workers": 4,
        "micro_batch_size": 1000,
        "device": "cpu",
        "out_dir": str(tmp_path / "runs"),
    } | settings
    assert nanoray.launch(main, config | {"dry_run": True}) == 0  # type: ignore[operator]
    assert not ended, "the script ends at fit"
    assert not (tmp_path / "runs").exists()
    return capsys.readouterr().out


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_holds_what_was_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    """State by the storages of a real step, activations by what a real forward saved."""
    out = dry(tmp_path, capsys, optimizer, workers=1)
    told, model = parts(out), Tower()
    real = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    saved: dict[int, Tensor] = {}
    x = torch.randint(512, (1000,))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t
    ):
        loss = nn.functional.cross_entropy(model(x), x)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved.values()}
    activations = sum(size for at, size in kept.items() if at not in own)
    loss.backward()
    real.step()
    held = held_bytes(model, [], real)
    for part in ("parameters", "gradients", "optimizer"):
        assert told.get(part, 0.0) == pytest.approx(held[part] / 2**20, abs=0.06), part
    assert told["activations"] == pytest.approx(activations / 2**20, abs=0.06)
    assert "of them frozen, " in out


def test_modes_differ_as_their_table_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ddp, zero1, zero2, fsdp = (
        parts(dry(tmp_path, capsys, dp_mode=mode, bucket_mb=0.01))
        for mode in ("ddp", "zero1", "zero2", "fsdp")
    )
    assert "in flight" not in ddp
    assert zero1["in flight"] > 0
    assert (
        zero1["optimizer"]
        == zero2["optimizer"]
        == fsdp["optimizer"]
        == pytest.approx(ddp["optimizer"] / 4, abs=0.1)
    )
    assert zero1["gradients"] == ddp["gradients"]
    assert zero2["gradients"] == fsdp["gradients"] == pytest.approx(ddp["gradients"] / 4, abs=0.1)
    assert fsdp["parameters"] == pytest.approx(ddp["parameters"] / 4, abs=0.1)
    assert ddp["activations"] == fsdp["activations"]
    assert "mirror" in zero1
    assert "mirror" not in parts(dry(tmp_path, capsys, dp_mode="zero1", mirror="off"))


def test_bf16_keeps_smaller_activations_and_nothing_is_changed() -> None:
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)),
        torch.randn(1000, 64),
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    fp32, bf16 = (
        probe_on_fakes(model, loss, x, x, precision).kept for precision in ("fp32", "bf16")
    )
    assert bf16 < fp32
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert kept_per_element(OPTIMIZERS["amsgrad"](model.parameters())) == 3
