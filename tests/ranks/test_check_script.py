"""`nanoray check SCRIPT.py`: what a script does otherwise than plain torch has a line and a name."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from nanoray.lab import check, check_script, local_ranks
from tests.harness.commands import start_process

# One script with a mistake of each kind. The words behind -- choose it.
SCRIPT = """
import argparse, os, random
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nanoray

parser = argparse.ArgumentParser()
parser.add_argument("kind")
kind = parser.parse_args().kind

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        names = ["a", "bc", "def", "ghij", "klmno", "pqrstu"]
        if kind == "set":
            names = set(names)
        self.branches = nn.ModuleList(nn.Linear(3, len(name)) for name in names)
        self.head = nn.Linear(21, 1)
        if kind == "norm":
            layers = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4, 1)
            self.norm = nn.Sequential(*layers)
        self.calls = 0
        self.seen = None
        self.generator = random.Random(0)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        hidden = torch.cat([branch(x) for branch in self.branches], 1)
        self.seen = hidden  # of this step alone
        if kind == "counter":
            self.calls += 1
            hidden = hidden * (1 + 0.1 * self.calls)
        if kind == "generator":
            hidden = hidden * self.generator.random()
        if kind == "raises":
            raise ValueError("this model is unhappy")
        if kind == "norm":
            self.steps += 1 + x[0, 0].abs()  # rank 0 decides
            hidden = nn.functional.dropout(hidden / self.steps, 0.2, self.training)
            return self.head(hidden) + self.norm(x[:, None])
        return self.head(hidden)

def weighted(output, targets):
    return nanoray.Weighted(sum=(output - targets).square().sum(), weight=(targets > 0).sum())

def main(run):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    if kind == "samples":
        x = x * random.Random(os.getpid()).random()
    model = Net()
    loss = nn.MSELoss(reduction="sum" if kind == "sum" else "mean")
    if kind == "rank":
        loss = lambda output, y: nn.functional.mse_loss(output, y) * (1 + run.rank)
    if kind == "weighted":
        loss = weighted
    data = TensorDataset(x, x.sum(1, keepdim=True))
    config = {"lr": 1e-2} if kind == "norm" else {"lr": 1e-2, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **config)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 20)
    if kind == "loader":
        data = DataLoader(data, 3, shuffle=True, drop_last=True)
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss, scheduler=rates)
    engine.fit(data, steps=20)

config = {"workers": 4, "grad_clip": 1.0, "tensorboard": True, "device": "cuda", "grad_accum_steps": 2}
if kind != "loader":
    config["global_batch_size"] = 12
if kind == "plain":
    main(config)
if kind != "nothing":
    nanoray.launch(main, config)
"""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the processes be forked, and the temporary folders of the check lie in the test's."""
    monkeypatch.setattr(local_ranks, "start_process", start_process)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")


def checked(
    capsys: pytest.CaptureFixture[str], folder: Path, kind: str, *flags: str
) -> tuple[int, dict[str, str]]:
    """Check the script; return the exit code, and the lines by their first word."""
    code = check.main([str(folder / "train.py"), *flags, "--", kind])
    assert not list(folder.glob("nanoray-check-*")), "nothing is left"
    output = capsys.readouterr()
    lines = {}
    for line in [*output.out.splitlines(), *output.err.splitlines()]:
        name, _, text = line.partition(" ")
        lines[name] = text.strip()
    return code, lines


def test_a_script_without_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, lines = checked(capsys, tmp_path, "good", "--dp_mode", "zero2", "--steps", "4")
    assert code == 0, lines
    assert lines["plain"].startswith("Net: 4 steps of 12 samples in plain torch")
    assert lines["resume"] == "1 rank(s): equal to an unbroken run to the bit after 4 steps"
    assert lines["zero2"].startswith("2 rank(s): equal to plain torch ")
    assert list(lines) == ["plain", "resume", "zero2", "equal:"]


def test_a_counter_in_an_attribute(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A resume begins it anew, and the trial and the warm-up count, too."""
    code, lines = checked(capsys, tmp_path, "counter", "--dp_mode", "ddp", "--steps", "4")
    assert code == 1
    assert lines["attribute"].startswith("Net.calls changes in each step, and no checkpoint has it")
    assert lines["resume"].startswith("DIFFERS: ")
    assert " away from an unbroken run after 4 steps" in lines["resume"]
    assert lines["ddp"].startswith("DIFFERS: ")


def test_a_sum_in_place_of_a_mean(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plain torch in the same pieces is equal: the number of ranks decides what is learned."""
    code, lines = checked(capsys, tmp_path, "sum", "--dp_mode", "ddp", "--steps", "2")
    assert code == 1
    assert lines["loss"].startswith("WRONG: the loss of two samples is not the mean of their own")
    assert "equal to plain torch" in lines["ddp"]
    assert lines["wrong:"] == "1 of these differ or fail"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["norm", "weighted", "loader"])
def test_every_mode(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    """Dropout, a buffer that counts, a loss over targets, a DataLoader; on three ranks.

    A bias before a batch norm has a gradient that is only rounding, of which Adam makes whole steps.
    """
    ranks = "2" if kind == "weighted" else "3"
    code, lines = checked(capsys, tmp_path, kind, "--ranks", ranks)
    assert code == 0, lines
    assert kind != "norm" or "rounding" in lines
    for mode in check_script.MODES:
        assert lines[mode].startswith(f"{ranks} rank(s): equal to plain torch "), lines


@pytest.mark.full
def test_a_function_that_depends_on_the_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, lines = checked(capsys, tmp_path, "rank", "--dp_mode", "ddp,fsdp")
    assert code == 1
    assert "equal to an unbroken run to the bit" in lines["resume"]
    for mode in ("ddp", "fsdp"):
        assert "DIFFERS: " in lines[mode], lines


@pytest.mark.full
@pytest.mark.parametrize(("kind", "what"), [("set", "other weights"), ("samples", "other samples")])
def test_what_differs_from_process_to_process(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
) -> None:
    """Modules in the order of a set follow the hash seed, which each new process draws."""
    monkeypatch.setattr(local_ranks, "start_process", subprocess.Popen)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code, lines = checked(capsys, tmp_path, kind)
    assert code == 1
    assert f"{what} in another process" in lines["script"], lines
