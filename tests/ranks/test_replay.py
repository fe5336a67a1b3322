"""A step done again has the bits of the run's, and two runs that differ tell where they first do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import ConfigError, NanorayError
from nanoray.lab import local_ranks
from nanoray.lab.replay import bisect
from nanoray.lab.replay.__main__ import main as replay
from nanoray.lab.replay.again import QUIETLY, reenact
from nanoray.lab.replay.recorded import read_recorded, tensors_apart
from tests.harness.commands import Command, start_process, wait_for
from tests.harness.ranks import make_spec, run_ranks

RECIPE: dict[str, Any] = {
    "dropout": 0.1,
    "lr": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 3,
    "keep_checkpoints": 9,
    "hash_every": 1,
}
PLACE = "blocks.1.attn.proj.weight"
Made = Callable[..., RunSpec]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a replay be forked."""
    monkeypatch.setattr(local_ranks, "start_process", start_process)


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Train a run once for all tests of this file."""
    runs: dict[str, RunSpec] = {}

    def make(world: int, **settings: Any) -> RunSpec:
        key = f"{world} {settings}"
        if key not in runs:
            runs[key] = make_spec(text, tmp_path_factory.mktemp("runs"), **{**RECIPE, **settings})
            for outcome in run_ranks(runs[key], world):
                assert outcome.get("exit_reason") == "finished", outcome
        return runs[key]

    return make


@pytest.fixture
def pair(made: Made) -> RunSpec:
    return made(2, grad_accum_steps=2)


@pytest.fixture
def flipped(made: Made) -> RunSpec:
    """Three ranks, of which one has a flipped bit after the update of step 5; the majority heals
    it.
    """
    return made(3, dp_mode="ddp_by_hand", faults="bitflip@rank=2,step=5,phase=log")


def said(capsys: pytest.CaptureFixture[str], code: int, expected: int) -> str:
    captured = capsys.readouterr()
    assert code == expected, captured.out + captured.err
    return captured.out + captured.err


# A step again.


def test_two_ranks_of_ddp_do_a_step_again_to_the_same_bits(
    pair: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, replay([str(pair.folder), "--step", "6"]), 0)
    assert "from the checkpoint of step 3, in 2 process(es)" in out
    for name in (
        "own loss of rank 0",
        "own loss of rank 1",
        "loss",
        "gradient norm",
        "learning rate",
        "tokens so far",
    ):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{name} ")]
        assert line.endswith(" equal"), line
    assert (
        "compared 18 values and 180 hashes of 3 step(s), 61 tensors with the checkpoint of step 6"
        in out
    )
    assert "equal    to the bit" in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (3, {}),
        (3, {"dp_mode": "zero2", "grad_accum_steps": 2}),
        (2, {"precision": "bf16", "dp_mode": "fsdp"}),
        (2, {"tp": 2}),
        (4, {"dp_mode": "zero1", "replicas": 2}),
    ],
)
def test_other_modes_do_so(
    made: Made, world: int, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = made(world, **settings)
    out = said(capsys, replay([str(spec.folder), "--step", "6"]), 0)
    assert "tensors with the checkpoint of step 6" in out
    assert "equal    to the bit" in out


def test_a_recorded_value_that_is_not_the_replayed_one_is_named(
    pair: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(pair.folder, tmp_path / "copy")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[4]["train/loss"] += 1e-6
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = said(capsys, replay([str(run), "--step", "5"]), 1)
    loss = json.loads((pair.folder / "metrics.jsonl").read_text().splitlines()[4])["train/loss"]
    assert f"differs  first in step 5, loss: {loss!r} and {loss + 1e-6!r}" in out


def test_sigterm_leaves_no_rank_and_no_folder(made: Made, tmp_path: Path) -> None:
    arguments = ("nanoray.lab.replay", str(made(1).folder), "--step", "6")
    with Command(*arguments, env=os.environ | {"TMPDIR": str(tmp_path)}) as command:
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        # A sign of theirs: a signal in the midst of a start would come before the command has them
        wait_for(lambda: [*tmp_path.rglob("run.json")], process=command)
        (rank,) = (Path("/proc") / pid for pid in children.read_text().split())
        command.terminate()
        assert command.wait(60) == 143, command.output
        assert not rank.exists()
        assert not [*tmp_path.iterdir()]


def test_the_rank_that_ended_first_is_named(
    pair: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer has a lower number, and fails because of it or waits without an end."""

    def start(command: list[str], **how: Any) -> Any:
        words = "import time; time.sleep(600)"
        if how["env"]["RANK"] == "1":
            words = "print('the cause'); raise SystemExit(7)"
        return subprocess.Popen([sys.executable, "-c", words], **how)

    monkeypatch.setattr(local_ranks, "start_process", start)
    with pytest.raises(NanorayError, match=r"rank 1 of the re-enactment ended with 7.*the cause"):
        reenact(read_recorded(pair.folder), 3, 5, tmp_path)


def test_a_model_of_a_script_is_refused(pair: RunSpec, tmp_path: Path) -> None:
    run = read_recorded(pair.folder)
    run.spec = replace(run.spec, config=run.spec.config.model_copy(update={"model": "own"}))
    with pytest.raises(ConfigError, match="model = own: a script brings the model"):
        reenact(run, 3, 5, tmp_path)


def test_a_step_again_is_seen_by_nobody_else() -> None:
    """Neither a tracker nor object storage has a copy of it."""
    assert (QUIETLY["track"], QUIETLY["upload"], QUIETLY["resume"]) == ("none", "", "none")
    # What a step of the run depends on is that of the run.
    assert not QUIETLY.keys() & {"max_steps", "seq_warmup_steps", "on_nan", "lr", "seed"}


# Where two runs first differ.


def test_a_flipped_bit_is_found_by_a_re_enactment(
    flipped: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, bisect.main([str(flipped.folder)]), 1)
    assert "step     5 is the first that differs; equal up to step 4" in out
    assert "rank     2 of " in out
    assert f"{PLACE} of rank 2 is not that of the other ranks of " in out


def test_a_flipped_bit_is_found_between_two_runs(
    flipped: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clean one is a re-enactment, which is a run as well; both end alike, as the majority
    healed the rank.
    """
    clean = reenact(read_recorded(flipped.folder), 0, 8, tmp_path).folder
    out = said(capsys, bisect.main([str(clean), str(flipped.folder)]), 1)
    assert "setup    faults: '' and 'bitflip@rank=2,step=5,phase=log'" in out
    assert "step     5 is the first that differs; equal up to step 4" in out
    assert f"{PLACE} of rank 2 is not that of the other ranks of " in out
    assert "equal    in all that both have of 8 steps" in said(
        capsys, bisect.main([str(clean), str(clean)]), 0
    )


def test_a_bit_in_a_checkpoint_is_named(
    pair: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanoray.checkpoint.files import load
    from tests.harness.saving import save

    run = shutil.copytree(pair.folder, tmp_path / "copy")
    state = load(run / "checkpoints" / "step_00000006")
    state.model[PLACE].view(-1).view(torch.int32)[7] ^= 1 << 12
    save(run / "checkpoints", state, 9)
    out = said(capsys, bisect.main([str(pair.folder), str(run)]), 1)
    assert "checkpoint of step 6: 1 of 61 tensors differ" in out
    assert f"{PLACE}: 1 of 1024 elements, first 7: " in out
    assert ", bit 12 flipped" in out
    assert tensors_apart(
        run / "checkpoints" / "step_00000003", pair.checkpoints / "step_00000003"
    ) == ([], 61)
