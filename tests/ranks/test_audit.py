"""The audit finds a finite but wrong gradient before any weight has it, and names its rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint import files
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import WrongGradient
from tests.harness.messages import find_line
from tests.harness.ranks import make_spec, run_ranks, series

RECIPE: dict[str, Any] = {
    "audit_every": 2,
    "dropout": 0.1,
    "checkpoint_every": 6,
    "hash_every": 0,
    "precision": "fp32",
}
ALWAYS = "times=1000"


def weights_of(spec: RunSpec, step: int) -> dict[str, torch.Tensor]:
    return files.load(spec.checkpoints / f"step_{step:08d}").model


def test_of_three_ranks_two_name_the_wrong_one(text: Path, tmp_path: Path) -> None:
    """A rank's own gradient is wrong once, then its copy of another's, then all that it computes.

    Until the last of these the run equals a clean one without audits, to the bit: the wrong steps
    were repeated.
    """
    once = "gradflip@rank=1,step=2,phase=data;gradflip@rank=0,step=4,phase=forward"
    spec = make_spec(
        text,
        tmp_path / "wrong",
        **RECIPE,
        faults=f"{once};gradflip@rank=2,step=8,phase=data,{ALWAYS}",
    )
    outcomes = run_ranks(spec, 3)
    assert [o["error"] for o in outcomes] == ["WrongGradient"] * 3, outcomes
    log = spec.log(0).read_text()
    last_layer = "blocks.1.mlp.down.weight"  # the first gradient of a backward pass
    own = find_line(log, "step 2", "rank 1", "rank 1's micro batch 0", "ranks 0 and 2", last_layer)
    copy = find_line(log, "step 4", "rank 0", "rank 1's micro batch 0", "ranks 1 and 2")
    assert own != copy
    assert log.count("is done again") == 3
    (message,) = {o["message"] for o in outcomes}
    find_line(message, "step 8", "twice", "rank 2", "rank 0's micro batch 0")
    find_line(message, "rank 2", "rank 2's micro batch 0", "ranks 1 and 0")
    find_line(message, "newest audit without a difference", "step 6")
    assert not WrongGradient.retry, "on the same devices it would come again"
    clean = make_spec(text, tmp_path / "clean", **RECIPE | {"audit_every": 0, "stop_at": 6})
    assert [o["exit_reason"] for o in run_ranks(clean, 3)] == ["stop_at"] * 3
    expected = weights_of(clean, 6)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(spec, 6).items())
    assert {step: loss for step, loss in series(spec).items() if step <= 6} == series(clean)


def test_of_two_ranks_both_are_named(text: Path, tmp_path: Path) -> None:
    """With two micro batches a step, one of them is audited in turn."""
    settings = {
        "dp_mode": "zero2",
        "grad_accum_steps": 2,
        "faults": f"gradflip@rank=1,step=5,phase=data,{ALWAYS}",
    }
    spec = make_spec(text, tmp_path, **RECIPE | settings)
    outcomes = run_ranks(spec, 2)
    assert [o["error"] for o in outcomes] == ["WrongGradient"] * 2, outcomes
    message = outcomes[0]["message"]
    find_line(message, "step 6", "twice", "ranks 0 and 1", "different gradients of rank 0's")
    find_line(message, "ranks 1 and 0", "different gradients of rank 1's micro batch 1", "blocks.1")
    find_line(message, "no third rank")


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"dp_mode": "zero1", "precision": "bf16"},
        {"dp_mode": "ddp_by_hand", "precision": "fp16", "grad_accum_steps": 2},
        {"dp_mode": "ddp_by_hand", "grad_compress": "bf16", "activation_checkpointing": "block"},
        {"experts": 4, "precision": "bf16"},
        {"precision": "bf16_pure"},
        {"precision": "fp8", "n_embd": 64},
        {"model": "resnet", "resnet_depth": 8, "dataset": "cifar10-generated", "dropout": 0.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_equal_devices_raise_no_alarm(text: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """In every mode that has whole models; and the audit is none that sees nothing: a flipped bit
    is named.
    """
    keys = RECIPE | {"audit_every": 1, "max_steps": 4} | settings
    clean, spec = (
        make_spec(text, tmp_path / name, **keys, faults=faults)
        for name, faults in (
            ("clean", ""),
            ("wrong", f"gradflip@rank=1,step=2,phase=data,bit=22,{ALWAYS}"),
        )
    )
    assert [o.get("exit_reason") for o in run_ranks(clean, 2, timeout_s=250)] == ["finished"] * 2
    assert "is done again" not in clean.log(0).read_text()
    assert [o.get("error") for o in run_ranks(spec, 2, timeout_s=250)] == ["WrongGradient"] * 2
