"""The recipe on real ranks over gloo: the same training at every world size, and a resume that
changes no bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoray
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.data.tokens import TokenData
from nanoray.errors import CheckpointError
from nanoray.models.gpt import GPT, ModelShape
from nanoray.train.agree import find_checkpoint
from tests.harness.commands import Command, run
from tests.harness.ports import free_port
from tests.harness.ranks import TINY, make_spec, records, run_ranks, series

# Plain SGD without clipping: AdamW and clipping would hide a constant factor on the gradient.
PLAIN = {"optimizer": "sgd", "grad_clip": 0.0, "lr": 0.5, "min_lr": 0.1}


def train(spec: RunSpec, world: int) -> list[dict[str, Any]]:
    outcomes = run_ranks(spec, world)
    assert not [o for o in outcomes if "error" in o], outcomes
    return outcomes


def reference_losses(spec: RunSpec, steps: int) -> list[float]:
    """One process, one big batch, a bare PyTorch loop: what every arrangement of ranks must
    reproduce.
    """
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
def test_every_arrangement_trains_like_the_reference(
    text: Path, tmp_path: Path, world: int, accum: int
) -> None:
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
    recipe = {
        "dropout": 0.1,
        "max_steps": 9,
        "micro_batch_size": 12 // world // (1 if world == 4 else 2) or 1,
    }
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


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_target_loss_ends_the_run_with_a_checkpoint_that_goes_on(
    text: Path, tmp_path: Path, world: int
) -> None:
    """At the first evaluation that reaches it, on all ranks alike; and the losses are those of a
    run without.
    """
    whole = make_spec(text, tmp_path / "whole", eval_every=2)
    train(whole, world)
    evaluations = series(whole, "val/loss")
    assert sorted(evaluations) == [2, 4, 6, 8]
    assert evaluations[2] > evaluations[4] > evaluations[8]
    parts = {"eval_every": 2, "resume": "auto"}
    for _ in range(2):  # the second command finds it reached, and does no step
        spec = make_spec(text, tmp_path / "parts", **parts, target_loss=evaluations[4])
        outcomes = train(spec, world)
        assert {(o["exit_reason"], o["step"], o["val_loss"]) for o in outcomes} == {
            ("target_loss", 4, evaluations[4])
        }
        assert newest_valid(spec.checkpoints)[0].path.name == "step_00000004"  # type: ignore[union-attr]
    later = {"target_loss": evaluations[8] - 1, **parts}
    (outcome, *_) = train(make_spec(text, tmp_path / "parts", **later), world)
    assert (outcome["exit_reason"], outcome["step"]) == ("finished", 8)
    assert series(spec) == series(whole)
    assert series(spec, "val/loss") == evaluations


def another_day() -> None:
    """Move this process' clock by a day, forward or back; monotonic clocks stay."""
    real, shift = time.time, 86400.0 if os.getpid() % 2 else -86400.0
    time.time = lambda: real() + shift  # type: ignore[assignment]


def test_clocks_that_differ_by_days_change_nothing(text: Path, tmp_path: Path) -> None:
    """A planned fault has fired, too, whatever the time of its record."""
    plan = {
        "checkpoint_every": 4,
        "faults": "slow@rank=0,step=3,seconds=0;slow@rank=1,step=3,seconds=0",
    }
    spec, clean = (
        make_spec(text, tmp_path / "skewed", **plan),
        make_spec(text, tmp_path / "clean", **plan),
    )
    for outcome in run_ranks(clean, 2) + run_ranks(spec, 2, first=another_day):
        assert outcome["exit_reason"] == "finished"
    assert series(spec) == series(clean)
    shutil.rmtree(spec.checkpoints)  # the next attempt does step 3 again
    spec.checkpoints.mkdir()
    run_ranks(spec.next_attempt(), 2, first=another_day)
    events = [json.loads(line) for line in (spec.folder / "faults.jsonl").read_text().splitlines()]
    assert [event["rank"] for event in events] in ([0, 1], [1, 0])
    assert newest_valid(spec.checkpoints)[0].path.name == f"step_{max(series(clean)):08d}"  # type: ignore[union-attr]


def test_a_resumed_run_continues_its_average_its_clock_and_its_summary(
    text: Path, tmp_path: Path
) -> None:
    """Stopped between two logged steps, which adds records; the parts add up to one run all the
    same.
    """
    recipe: dict[str, Any] = {"max_steps": 12, "log_every": 4, "precision": "fp32"}
    whole = make_spec(text, tmp_path / "whole", **recipe)
    train(whole, 2)
    first = make_spec(text, tmp_path / "parts", **recipe, stop_at=6)
    (before, _) = train(first, 2)
    (after, _) = train(make_spec(text, tmp_path / "parts", **recipe, resume="auto"), 2)
    expected, ours = series(whole, "train/loss_ema"), series(first, "train/loss_ema")
    assert sorted(expected) == [4, 8, 12]
    assert sorted(ours) == [4, 6, 7, 8, 12], "the last of one part, and the first of the next"
    assert {step: ours[step] for step in expected} == expected
    assert ours[6] == ours[7] == ours[4]
    assert 0 < before["train_s"] < after["train_s"], "the clock goes on"
    clock = [value for _, value in sorted(series(first, "time/train_s").items())]
    assert clock == sorted(clock)
    assert after["step_ms"] * 10 == pytest.approx(1e3 * after["train_s"]), (
        "all steps but the first of each part"
    )
    tokens = 12 * TINY["global_batch_size"] * TINY["block_size"]
    assert series(first, "train/tokens")[12] == tokens


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
    specs = [
        make_spec(text, tmp_path / str(w), eval_every=4, eval_samples=23, **PLAIN) for w in (1, 3)
    ]
    for spec, world in zip(specs, (1, 3), strict=True):
        train(spec, world)
    one, three = (series(s, "val/loss") for s in specs)
    assert list(one) == [4, 8]
    assert list(one.values()) == pytest.approx(list(three.values()), abs=2e-5)


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
    spec, fp32 = (
        make_spec(text, tmp_path / "a", precision="bf16"),
        make_spec(text, tmp_path / "b", precision="fp32"),
    )
    train(spec, 2)
    train(fp32, 2)
    ours, theirs = list(series(spec).values()), list(series(fp32).values())
    assert ours == pytest.approx(theirs, abs=0.05)
    assert ours != theirs, "bf16 did not take effect"


def test_divergence_stops_all_ranks_and_no_bad_checkpoint_is_written(
    text: Path, tmp_path: Path
) -> None:
    """The loss of step 1 is finite, the weights after it are not: the checkpoint of step 1 must not
    exist.
    """
    spec = make_spec(
        text, tmp_path, optimizer="sgd", grad_clip=0, lr=1e30, warmup_steps=0, checkpoint_every=1
    )
    outcomes = run_ranks(spec, 2)
    assert [o["error"] for o in outcomes] == ["TrainingDiverged"] * 2
    assert "after step 1 the weights are not finite; lower lr" in outcomes[1]["message"]
    assert not list(spec.checkpoints.iterdir())


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(text: Path, tmp_path: Path) -> None:
    """In mid-run it costs a warning; at the end it would cost the run."""
    spec = make_spec(text, tmp_path, checkpoint_every=5)
    spec.checkpoints.rmdir()
    spec.checkpoints.write_text("not a folder")
    (outcome,) = run_ranks(spec, 1)
    assert outcome["error"] == "CheckpointError"
    assert len(records(spec)) == TINY["max_steps"]
    assert "checkpoint of step 5 skipped, training goes on" in spec.log(0).read_text()


def test_a_restart_before_the_first_own_checkpoint_goes_back_to_where_the_run_came_from(
    text: Path, tmp_path: Path
) -> None:
    origin = make_spec(text, tmp_path / "a", stop_at=4)
    train(origin, 1)
    copy = tmp_path / "best"  # any name will do
    shutil.copytree(origin.checkpoints / "step_00000004", copy)
    spec = make_spec(text, tmp_path / "b", resume=str(copy))
    assert spec.folder.parent == tmp_path / "b"
    assert find_checkpoint(spec) == (str(copy), 4, ())
    assert find_checkpoint(spec.next_attempt()) == (str(copy), 4, ())
    train(spec, 1)
    assert list(series(spec)) == [5, 6, 7, 8]
    assert find_checkpoint(spec.next_attempt())[1] == 8, "now its own newest comes first"


def test_only_damaged_checkpoints_are_not_a_fresh_start(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path)
    train(spec, 1)
    (spec.checkpoints / "step_00000008" / "model-00000.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        CheckpointError,
        match=r"every checkpoint of .* is damaged: .*start again with --resume none",
    ):
        find_checkpoint(spec.next_attempt())
    assert find_checkpoint(spec) == ("", 0, ()), "a fresh first attempt does not look"


def test_a_gpu_without_memory_for_one_sequence_says_what_needs_less(
    text: Path, tmp_path: Path
) -> None:
    """torch raises as it does on a full GPU, in every try; the run ends with the remedies, and not as
    a failure to try again.
    """
    full = """
import sys, torch
def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nMore lines.")
torch.nn.functional.cross_entropy = no_memory
from nanoray.train.__main__ import main
sys.exit(main(sys.argv[1:]))"""
    flags = [
        "--preset",
        "tiny",
        "--dataset",
        str(text),
        "--data_dir",
        str(tmp_path / "c"),
        "--out_dir",
        str(tmp_path),
    ]
    (tmp_path / "full.py").write_text(full)
    done = run(str(tmp_path / "full.py"), *flags)
    assert done.returncode == 2, done.stderr
    assert "memory  rank 0 ran out of memory while it warmed up (CUDA out of memory" in done.stdout
    assert "micro batch 3 -> 1, accumulation 4 -> 12" in done.stdout
    assert "with 1 sequence at a time; to need less memory, in the order of what" in done.stderr


def test_ranks_that_disagree_are_refused(text: Path, tmp_path: Path) -> None:
    a, b = (
        make_spec(text, tmp_path / str(lr), lr=lr, timeout_s=3, init_timeout_s=30)
        for lr in (1e-3, 2e-3)
    )
    outcomes = run_ranks([a, b], 2)
    assert [outcome["error"] for outcome in outcomes] == ["RendezvousError", "RankDiffers"]
    assert "rank 1 has configuration (sha256) = " in outcomes[1]["message"]
    assert "start every rank with the same code" in outcomes[1]["message"]


def test_a_rank_with_other_tokens_on_its_disk_is_refused(text: Path, tmp_path: Path) -> None:
    """Its node has another copy, and a record that agrees with it: nothing is averaged."""
    spec = make_spec(text, tmp_path / "a", init_timeout_s=30)
    folder = shutil.copytree(spec.dataset.path, tmp_path / "other")
    backwards = (folder / "train.bin").read_bytes()[::-1]
    (folder / "train.bin").write_bytes(backwards)
    digest = hashlib.sha256(backwards + (folder / "val.bin").read_bytes()).hexdigest()
    other = replace(spec, dataset=replace(spec.dataset, path=folder, tokens_sha256=digest))
    outcomes = run_ranks([spec, other], 2)
    assert [outcome["error"] for outcome in outcomes] == ["RendezvousError", "RankDiffers"]
    assert "rank 1 has dataset (sha256) = " in outcomes[1]["message"]


@pytest.mark.full
def test_a_rank_with_other_code_is_refused(text: Path, tmp_path: Path) -> None:
    """A constant of its sample order differs: before, it trained along without a word."""
    other = tmp_path / "other"
    # With what is compiled of the others
    ignore = shutil.ignore_patterns("order.*.pyc", "kube", "bench")
    shutil.copytree(Path(nanoray.__file__).parent, other / "nanoray", ignore=ignore)
    source = other / "nanoray" / "data" / "order.py"
    source.write_text(source.read_text().replace("0x9E3779B97F4A7C15", "0x9E3779B97F4A7C17"))
    flags = [
        "--preset",
        "tiny",
        "--dataset",
        str(text),
        "--data_dir",
        str(tmp_path / "c"),
        "--out_dir",
        str(tmp_path),
    ]
    port, ranks = free_port(), []
    for rank in (0, 1):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
        }
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(os.environ | env)
    command = [sys.executable, "-m", "nanoray.train", *flags]
    own = {"env": ranks[1] | {"PYTHONPATH": str(other)}, "cwd": other}
    with (
        Command("nanoray.train", *flags, env=ranks[0], apart=True) as ours,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **own) as theirs,
    ):
        said = [theirs.communicate(timeout=400)[1]]
        ours.wait(400)
        said.append(ours.errors)
    assert [theirs.returncode, ours.returncode] == [3, 3], said
    assert all("rank 1 has code of nanoray (sha256) = " in text for text in said)


def test_run_folder_holds_what_it_should(text: Path, tmp_path: Path) -> None:
    spec = make_spec(
        text,
        tmp_path,
        max_steps=3,
        warmup_steps=1,
        tensorboard=True,
        checkpoint_every=1,
        keep_checkpoints=1,
    )
    train(spec, 1)
    assert json.loads((spec.folder / "config.json").read_text())["max_steps"] == 3
    assert list((spec.folder / "tb").glob("events.*"))
    assert [p.name for p in spec.checkpoints.iterdir()] == ["step_00000003"]
    assert "attempt 0" in spec.log(0).read_text()
    assert [r["step"] for r in records(spec)] == [1, 2, 3]


def test_learns_shakespeare(shakespeare: Path, tmp_path: Path) -> None:
    """200 steps of the main recipe, shrunk: far below the 4.17 of a uniform guess and the 3.3 of
    letter frequencies.
    """
    recipe = {
        "n_embd": 64,
        "block_size": 32,
        "max_steps": 200,
        "eval_every": 200,
        "lr": 3e-3,
        "log_every": 50,
    }
    spec = make_spec(shakespeare, tmp_path, **recipe, eval_samples=240, tokenizer="char")
    (outcome, _) = train(spec, 2)
    assert outcome["val_loss"] < 2.75
