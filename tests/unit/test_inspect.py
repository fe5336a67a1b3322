"""The dump of a model: its tree, one real batch, a run and a script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.files import load
from nanoray.errors import ConfigError
from nanoray.lab.inspect.__main__ import main
from nanoray.lab.inspect.one_batch import measure
from nanoray.lab.inspect.target import InspectTarget, find_target
from nanoray.lab.inspect.text import lines
from nanoray.lab.inspect.tree import dump
from nanoray.models.build import build_model
from nanoray.models.precision import autocast
from tests.harness.ranks import make_spec, run_ranks
from tests.harness.saving import save

RESNET = [
    "--model",
    "resnet",
    "--resnet_depth",
    "8",
    "--micro_batch_size",
    "2",
    "--global_batch_size",
    "2",
]


def subject_of(*flags: str) -> InspectTarget:
    return find_target("tiny", [*flags])


def modules(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in told["modules"]}


# Figures.


def test_the_tree_of_a_gpt() -> None:
    told = dump(subject_of())
    rows = modules(told)
    qkv = rows["blocks.1.attn.qkv"]
    assert qkv["outputs"] == [((12, 32, 96), "float32")]
    tokens = 12 * 32
    assert qkv["flops"] == 2 * 32 * 96 * tokens
    assert qkv["kept"] == 4 * 32 * tokens, "its input"
    block = 2 * 12 * 32**2 + 4 * 32 * 32  # its matrices, and attention to 32 positions
    assert sum(row["flops"] for row in told["modules"]) == tokens * (2 * block + 2 * 32 * 65)


def test_layers_that_repeat_take_one_line() -> None:
    shown = "\n".join(lines(dump(subject_of())))
    assert re.search(r"^    1 +as blocks\.0$", shown, re.MULTILINE)
    assert shown.count(" qkv ") == 1


# One batch.


def batch_of(subject: InspectTarget) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets in the shapes of the subject's micro batch."""
    source = torch.Generator().manual_seed(1)
    x, _ = subject.example
    if x.is_floating_point():
        images = torch.randn(x.shape, generator=source)
        return images, torch.randint(10, x.shape[:1], generator=source)
    tokens = torch.randint(65, x.shape, generator=source)
    return tokens, torch.randint(65, x.shape, generator=source)


def new_model(subject: InspectTarget) -> nn.Module:
    torch.manual_seed(1)
    return build_model(subject.config, subject.dataset.vocab_size)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--precision=bf16", "--activation_checkpointing=block", "--loss_chunk=32"),
        ("--experts=4", "--experts_per_token=2", "--shared_experts=1"),
        tuple(RESNET),
    ],
)
def test_one_batch_has_the_numbers_of_plain_torch(flags: tuple[str, ...]) -> None:
    subject = subject_of(*flags)
    model = new_model(subject)
    batch = batch_of(subject)
    found = measure(subject, dump(subject), model, *batch)
    assert found["problems"] == []

    # The same by hand: a model with the same weights, and a hook on one of its layers.
    plain = new_model(subject)
    name = "stem" if subject.config.model == "resnet" else "blocks.1.norm1"
    results: list[Tensor] = []
    layer = plain.get_submodule(name)
    layer.register_forward_hook(lambda module, args, output: results.append(output.float()))
    with autocast("cpu", subject.config.precision):
        loss = subject.loss(plain, *batch)
    loss.backward()

    (row,) = [row for row in found["modules"] if row["name"] == name]
    own = layer.parameters(recurse=False)
    gradients = torch.cat([p.grad.flatten() for p in own if p.grad is not None])
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["output_mean"] == pytest.approx(results[0].mean().item(), abs=1e-6)
    assert row["output_rms"] == pytest.approx(results[0].square().mean().sqrt().item(), rel=1e-5)
    assert row["grad_rms"] == pytest.approx(gradients.square().mean().sqrt().item(), rel=1e-4)
    assert row["outputs"][0][0] == tuple(results[0].shape)


def test_a_parameter_without_gradient_is_found() -> None:
    subject = subject_of()
    model = new_model(subject)
    down = model.get_submodule("blocks.1.mlp.down")
    down.forward = lambda x: nn.functional.linear(x, down.weight.detach())  # type: ignore
    found = measure(subject, dump(subject), model, *batch_of(subject))
    assert found["problems"] == ["blocks.1.mlp.down.weight has no gradient"]


# Runs and checkpoints.


def told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, dict[str, Any], str]:
    """Run the command, and return its exit code, its JSON, which is strict, and its text."""
    code = main([*argv, "--json", str(tmp_path / "dump.json")])
    told = json.loads((tmp_path / "dump.json").read_text(), parse_constant=no_json)
    return code, told, capsys.readouterr().out


def no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def test_a_run_and_its_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(text, tmp_path / "runs")
    assert "error" not in run_ranks(spec, 1)[0]
    new = spec.checkpoints / "step_00000008"
    code, told, out = told_of(tmp_path, capsys, str(new), "--verify")
    assert (code, told["step"]) == (0, 8), out
    rows = {row["name"]: row for row in told["verify"]["modules"]}
    weight = load(new).model["blocks.0.mlp.up.weight"].double()
    expected = weight.square().mean().sqrt().item()
    assert rows["blocks.0.mlp.up"]["weight_rms"] == pytest.approx(expected)
    assert f"{expected:.3g}" in out
    assert main([str(new), "--n_embd=64", "--verify"]) != 0
    assert "drop the flags that change the model" in capsys.readouterr().err

    # A loss that is not finite: exit code 1, and null in the JSON.
    state = load(new)
    state.model["blocks.0.mlp.up.weight"][0, 0] = torch.nan
    poisoned = save(tmp_path / "poisoned" / "checkpoints", state, keep=1)
    (tmp_path / "poisoned" / "config.json").write_text((spec.folder / "config.json").read_text())
    code, told, out = told_of(tmp_path, capsys, str(poisoned), "--verify")
    assert code == 1
    assert "problem: the loss is nan" in out
    assert told["verify"]["loss"] is None


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import nanoray

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.extra = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = self.inner(x).relu()
        for layer in self.layers:
            x = x + layer(x)
        EXTRA
        return self.out(x)

def main(run):
    x = torch.randn(64, 2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.cross_entropy)
    engine.fit(TensorDataset(x, (x[:, 0] > 0).long()), steps=4)

if __name__ == "__main__":
    raise SystemExit(nanoray.launch(main, {"micro_batch_size": 8, "device": "cpu"}, ray=False))
"""


def test_a_script_with_its_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT.replace("EXTRA", "x = self.extra(x)"))
    code, told, out = told_of(tmp_path, capsys, str(path), "--verify")
    assert code == 0, out
    rows = modules(told)
    assert rows["out"]["outputs"] == [[[8, 4], "float32"]], "the configuration is the script's"
    assert rows["out"]["flops"] == 2 * 8 * 8 * 4
    path.write_text(SCRIPT.replace("EXTRA", ""))
    code, told, out = told_of(tmp_path, capsys, str(path), "--micro_batch_size=4", "--verify")
    assert modules(told)["out"]["outputs"] == [[[4, 4], "float32"]], "and flags go over it"
    assert code == 1
    (extra,) = [line for line in out.splitlines() if line.startswith("extra  ")]
    assert "is not called" in extra
    assert "problem: extra.weight has no gradient" in out


@pytest.mark.parametrize("flag", ["--tp=2", "--cp=2", "--dp_mode=zero1", "--replicas=2"])
def test_a_flag_that_divides_the_work_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="would be ignored: inspect shows the whole model"):
        find_target("tiny", [flag])


def test_a_model_beside_a_script_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT.replace("EXTRA", ""))
    with pytest.raises(ConfigError, match=r"model = gpt would be ignored: .* drop --model"):
        find_target(str(path), ["--model", "gpt"])
