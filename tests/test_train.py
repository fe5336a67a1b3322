"""The recipe on real ranks over gloo: the same training at every world size, and a resume that changes no bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.data import TokenData
from nanoray.errors import CheckpointError
from nanoray.model import GPT, ModelShape
from nanoray.run import RunSpec
from tests.ranks import TINY, make_spec, records, run_ranks, series

# Plain SGD without clipping: AdamW and clipping would hide a constant factor on the gradient.
PLAIN = {"optimizer": "sgd", "grad_clip": 0.0, "lr": 0.5, "min_lr": 0.1}


def train(spec: RunSpec, world: int) -> list[dict[str, Any]]:
    outcomes = run_ranks(spec, world)
    assert not [o for o in outcomes if "error" in o], outcomes
    return outcomes


def reference_losses(spec: RunSpec, steps: int) -> list[float]:
    """One process, one big batch, a bare PyTorch loop: what every arrangement of ranks must reproduce."""
    cfg, total = spec.config, spec.config.global_batch_size
    torch.manual_seed(cfg.seed)
    gpt = GPT(ModelShape.of(cfg, spec.dataset.vocab_size))
    data = TokenData(spec.dataset, cfg.block_size, cfg.seed, torch.device("cpu"))
    losses = []
    for step in range(steps):
        lr = cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
        if step >= cfg.warmup_steps:
            progress = (step - cfg.warmup_steps) / (cfg.max_steps - cfg.warmup_steps)
            lr = cfg.min_lr + 0.5 * (cfg.lr - cfg.min_lr) * (1 + math.cos(math.pi * progress))
        loss = gpt(*data.train_batch(step * total, total))
        loss.backward()
        with torch.no_grad():
            for p in gpt.parameters():
                p -= lr * p.grad
                p.grad = None
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("world", "accum"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2)])
def test_every_arrangement_trains_like_the_reference(text: Path, tmp_path: Path, world: int, accum: int) -> None:
    spec = make_spec(text, tmp_path, grad_accum_steps=accum, **PLAIN)
    train(spec, world)
    losses = series(spec)
    reference = reference_losses(spec, TINY["max_steps"])
    assert list(losses) == list(range(1, TINY["max_steps"] + 1))
    assert list(losses.values()) == pytest.approx(reference, abs=2e-5)
    assert reference[-1] < reference[0] - 0.3, "the comparison means nothing if nothing was learned"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resume_is_bit_identical(text: Path, tmp_path: Path, world: int) -> None:
    """With AdamW, clipping, accumulation and dropout, and stopped between two logged steps."""
    recipe = {"dropout": 0.1, "max_steps": 9, "micro_batch_size": 12 // world // (1 if world == 4 else 2) or 1}
    recipe |= {"global_batch_size": 24, "eval_every": 3}
    whole = make_spec(text, tmp_path / "whole", **recipe)
    train(whole, world)
    train(make_spec(text, tmp_path / "parts", **recipe, stop_at=4), world)
    rest = make_spec(text, tmp_path / "parts", **recipe, resume="auto")
    outcomes = train(rest, world)
    assert outcomes[0]["resumed_from"].endswith("step_00000004")
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(rest, key) == series(whole, key), key
    assert [r["step"] for r in records(rest)] == list(range(1, 10)), "one record per logged step"


def test_resume_at_another_world_size_agrees_closely(text: Path, tmp_path: Path) -> None:
    whole = make_spec(text, tmp_path / "whole")
    train(whole, 2)
    train(make_spec(text, tmp_path / "parts", stop_at=4), 2)
    rest = make_spec(text, tmp_path / "parts", resume="auto")
    train(rest, 3)
    assert list(series(rest).values()) == pytest.approx(list(series(whole).values()), abs=1e-4)
    log = rest.log(0).read_text()
    assert "written by 2 ranks, now 3" in log


def test_validation_loss_is_the_same_at_every_world_size(text: Path, tmp_path: Path) -> None:
    specs = [make_spec(text, tmp_path / str(w), eval_every=4, eval_samples=23, **PLAIN) for w in (1, 3)]
    for spec, world in zip(specs, (1, 3), strict=True):
        train(spec, world)
    one, three = (series(s, "val/loss") for s in specs)
    assert list(one) == [4, 8]
    assert list(one.values()) == pytest.approx(list(three.values()), abs=2e-5)


def test_eval_every_0_never_evaluates(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, eval_every=0, max_steps=2)
    (outcome,) = train(spec, 1)
    assert outcome["val_loss"] is None
    assert not series(spec, "val/loss")


def test_fp16_skips_the_same_steps_on_every_rank(text: Path, tmp_path: Path) -> None:
    """A loss scale that overflows at first: both ranks skip, the scale falls, training goes on."""
    spec = make_spec(text, tmp_path, precision="fp16", max_steps=12)
    train(spec, 2)
    scales = list(series(spec, "train/loss_scale").values())
    skipped = list(series(spec, "train/skipped_steps").values())
    assert scales[-1] == 2.0**16 / 2 ** skipped[-1]
    losses = list(series(spec).values())
    assert losses[-1] < losses[0]
    fp32 = make_spec(text, tmp_path / "fp32", max_steps=12)
    train(fp32, 2)
    assert losses[-1] == pytest.approx(list(series(fp32).values())[-1], abs=0.05)


def test_bf16_stays_near_fp32(text: Path, tmp_path: Path) -> None:
    spec, fp32 = make_spec(text, tmp_path / "a", precision="bf16"), make_spec(text, tmp_path / "b", precision="fp32")
    train(spec, 2)
    train(fp32, 2)
    ours, theirs = list(series(spec).values()), list(series(fp32).values())
    assert ours == pytest.approx(theirs, abs=0.05)
    assert ours != theirs, "bf16 did not take effect"


def test_divergence_stops_all_ranks_and_spares_the_checkpoints(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, optimizer="sgd", grad_clip=0, lr=1e30, warmup_steps=0, checkpoint_every=1)
    outcomes = run_ranks(spec, 2)
    assert [o["error"] for o in outcomes] == ["TrainingDiverged"] * 2
    assert "lower lr" in outcomes[1]["message"]
    saved = [p.name for p in spec.checkpoints.iterdir()]
    assert saved == ["step_00000001"], "only the step whose loss was still finite"


def test_ranks_that_disagree_are_refused(text: Path, tmp_path: Path) -> None:
    a, b = (make_spec(text, tmp_path / str(lr), lr=lr, timeout_s=3, init_timeout_s=3) for lr in (1e-3, 2e-3))
    outcomes = run_ranks([a, b], 2)
    assert outcomes[1]["error"] == "RendezvousError"
    assert "rank 1 has configuration (sha256) = " in outcomes[1]["message"]
    assert "start every rank with the same code" in outcomes[1]["message"]


def test_resume_names_the_other_shape(text: Path, tmp_path: Path) -> None:
    train(spec := make_spec(text, tmp_path, max_steps=2, warmup_steps=1), 1)
    with pytest.raises(CheckpointError, match="n_layer is 2 there and 3 here"):
        make_spec(text, tmp_path, n_layer=3, resume=str(spec.folder))


def test_run_folder_holds_what_it_should(text: Path, tmp_path: Path) -> None:
    spec = make_spec(
        text, tmp_path, max_steps=3, warmup_steps=1, tensorboard=True, checkpoint_every=1, keep_checkpoints=1
    )
    train(spec, 1)
    assert json.loads((spec.folder / "config.json").read_text())["max_steps"] == 3
    assert list((spec.folder / "tb").glob("events.*"))
    assert [p.name for p in spec.checkpoints.iterdir()] == ["step_00000003"]
    assert "attempt 0" in spec.log(0).read_text()
    assert [r["step"] for r in records(spec)] == [1, 2, 3]


def test_learns_shakespeare(shakespeare: Path, tmp_path: Path) -> None:
    """200 steps of the main recipe, shrunk: far below the 4.17 of a uniform guess and the 3.3 of letter frequencies."""
    recipe = {"n_embd": 64, "block_size": 32, "max_steps": 200, "eval_every": 200, "lr": 3e-3, "log_every": 50}
    spec = make_spec(shakespeare, tmp_path, **recipe, eval_samples=240, tokenizer="char")
    (outcome, _) = train(spec, 2)
    assert outcome["val_loss"] < 2.75
