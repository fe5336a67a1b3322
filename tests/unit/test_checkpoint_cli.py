"""`nanoray checkpoint` on checkpoints that a real run wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nanoray.checkpoint.files import load
from nanoray.cli.checkpoint import main
from nanoray.models.gpt import GPT, ModelShape
from tests.harness.ranks import make_spec, run_ranks


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 4 and 8."""
    spec = make_spec(text, tmp_path / "runs", checkpoint_every=4, eval_every=4)
    assert all("error" not in outcome for outcome in run_ranks(spec, 1))
    return spec.folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_list_and_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "step_00000008", "step_00000004"]
    assert float(lines[1].split()[3]) == pytest.approx(
        load(run / "checkpoints" / "step_00000008").meta["val_loss"], abs=1e-4
    )
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == "step_00000008  ok\nstep_00000004  ok\n"


def test_a_flipped_bit_is_found_and_passed_over(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints" / "step_00000008" / "model-00000.safetensors")
    assert main(["list", str(run)]) == 0, "sizes agree, and list reads no more"
    capsys.readouterr()
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert "step_00000008  DAMAGED: checkpoint" in out
    assert "(model-00000.safetensors: sha256 differs)" in out
    assert "step_00000004  ok\nFAILED  1 damaged" in out
    assert main(["export", str(run), "--out", str(tmp_path / "model.pt")]) == 0
    exported = capsys.readouterr()
    assert "step 4, " in exported.out
    assert exported.err.startswith("warning: checkpoint step_00000008 is damaged")
    assert exported.err.endswith("; using step_00000004\n")
    (run / "checkpoints" / "step_00000004" / "optimizer-00000.safetensors").write_bytes(b"short")
    assert main(["list", str(run)]) == 1
    assert "5 bytes instead of" in capsys.readouterr().out


def test_export_is_one_file_that_makes_the_model_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    assert main(["export", str(run), "--out", str(out)]) == 0
    with safe_open(out, "pt") as file:
        header = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    gpt = GPT(ModelShape(**json.loads(header["model_shape"])))
    gpt.load_state_dict(weights)
    state = load(run / "checkpoints" / "step_00000008")
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.model.items())
    assert main(["export", str(run), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "none" / "m")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["list", "absent"], "no run in absent; give the folder of a run"),
        (["burn"], "unknown command burn; one of list, verify, export"),
        (
            ["verify", "step_00000001"],
            "DAMAGED: checkpoint step_00000001 is damaged (manifest.json: missing)",
        ),
    ],
)
def test_refusals(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) != 0
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
