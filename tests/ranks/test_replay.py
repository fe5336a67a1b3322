"""A step done again in one process has the bits of the run's, and two runs that differ tell where
they first do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.tensorfile import read_file, tensors_in
from nanoray.data.tokens import TokenData
from nanoray.lab.replay import bisect
from nanoray.lab.replay.__main__ import main as replay
from nanoray.lab.replay.again import reenact
from nanoray.lab.replay.player import InTurn
from nanoray.lab.replay.recorded import read_past, tensors_apart
from nanoray.train.guard.replicas import hash_tensors
from nanoray.train.guard.state_hashes import read
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


# One process plays all ranks.


def test_two_ranks_of_ddp_are_played_to_the_same_bits(
    pair: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, replay([str(pair.folder), "--step", "6"]), 0)
    assert "from the checkpoint of step 3, in one process that plays 2 rank(s)" in out
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


FSDP = {"dp_mode": "fsdp", "optimizer": "sgd", "grad_accum_steps": 2, "weight_decay": 0.0}


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (3, {"dp_mode": "zero2", "grad_accum_steps": 2}),
        pytest.param(1, {}, marks=pytest.mark.full),
        (2, {"precision": "bf16"}),  # with attention auto, which on some CPUs is plain
        pytest.param(4, {"dp_mode": "zero1", "grad_accum_steps": 3}, marks=pytest.mark.full),
        pytest.param(3, FSDP, marks=pytest.mark.full),
        pytest.param(2, {"experts": 4, "dp_mode": "ddp_by_hand"}, marks=pytest.mark.full),
    ],
)
def test_other_modes_are_played_to_the_same_bits(
    made: Made, world: int, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = made(world, **settings)
    out = said(capsys, replay([str(spec.folder), "--step", "6"]), 0)
    assert "tensors with the checkpoint of step 6" in out
    assert "equal    to the bit" in out


def test_a_sum_in_another_order_is_found(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: micro batches are summed first, as zero1 does; so the test above can fail."""
    spec = made(3, dp_mode="zero2", grad_accum_steps=2)
    right = InTurn.__init__

    def init(self: InTurn, *args: Any) -> None:
        right(self, *args)
        self._each = False

    monkeypatch.setattr(InTurn, "__init__", init)
    assert "differs  first in step 4, hash of " in said(
        capsys, replay([str(spec.folder), "--step", "4"]), 1
    )


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


def test_the_dump_is_what_the_rank_saw(
    pair: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--step", "5", "--rank", "1", "--dump", str(tmp_path / "seen")]
    said(capsys, replay([str(pair.folder), *flags]), 0)
    file = tmp_path / "seen.safetensors"
    tensors = tensors_in(
        read_file(file, {"bytes": file.stat().st_size, "sha256": sha(file)}), file.name
    )
    told = json.loads((tmp_path / "seen.json").read_text())
    data = TokenData(pair.dataset, 16, pair.config.seed)
    # Three sequences each; a step has twelve, and rank 1 has the second of two shares
    for micro in (0, 1):
        x, y = data.train_batch(4 * 12 + (2 * micro + 1) * 3, 3)
        assert torch.equal(tensors[f"inputs.{micro}"], x)
        assert torch.equal(tensors[f"targets.{micro}"], y)
    own = read(pair.folder).states[5]["losses"][1]
    assert sum(told["losses"]) / 2 == pytest.approx(own, rel=1e-6)
    gradients = {
        name: t
        for key, t in tensors.items()
        for kind, _, name in (key.partition("."),)
        if kind == "gradient"
    }
    assert gradients.keys() == told["gradient_hashes"].keys()
    hashed = dict(zip(*hash_tensors(gradients), strict=True))
    assert {name: f"{value % 2**64:016x}" for name, value in hashed.items()} == told[
        "gradient_hashes"
    ]


def sha(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "settings", "cut"),
    [
        (2, {"tp": 2}, "tp = 2"),
        # Groups add up within themselves first: another order than one process has.
        (4, {"dp_mode": "zero1", "replicas": 2}, "replicas = 2"),
    ],
    ids=["tp", "replicas"],
)
def test_processes_do_the_steps_of_a_model_that_is_cut(
    made: Made,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    settings: dict[str, Any],
    cut: str,
) -> None:
    spec = made(ranks, **settings)
    assert f"{cut}: one process cannot play {ranks} rank(s)" in said(
        capsys, replay([str(spec.folder), "--step", "5"]), 2
    )
    assert "equal    to the bit" in said(
        capsys, replay([str(spec.folder), "--step", "6", "--processes"]), 0
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "own"}, "model = own: a script brings the model"),
        ({"model": "resnet"}, "model = resnet: one process cannot play"),
        ({"cp": 2}, "cp = 2: one process cannot play 2 rank(s) of it; add --processes"),
        (
            {"grad_compress": "topk"},
            "grad_compress = topk: one process cannot play 2 rank(s) of it; add --processes",
        ),
        (
            {"dp_mode": "zero1", "replicas": 2},
            "replicas = 2: one process cannot play 2 rank(s) of it; add --processes",
        ),
    ],
)
def test_modes_that_one_process_cannot_play_are_refused(
    pair: RunSpec,
    tmp_path: Path,
    settings: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(pair.folder, tmp_path / "copy")
    lines = (run / "hashes.jsonl").read_text().splitlines()
    group = json.loads(lines[0])
    group["config"] |= settings
    (run / "hashes.jsonl").write_text("\n".join([json.dumps(group), *lines[1:]]) + "\n")
    assert message in said(capsys, replay([str(run), "--step", "5"]), 2)


# Where two runs first differ.


def test_a_flipped_bit_is_found_by_a_re_enactment(
    flipped: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, bisect.main([str(flipped.folder)]), 1)
    assert "step     5 is the first that differs; equal up to step 4" in out
    assert "rank     2 of " in out
    assert f"tensor   {PLACE}: rank 2 has another one than other ranks of " in out


def test_a_flipped_bit_is_found_between_two_runs(
    flipped: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clean one is a re-enactment, which is a run as well; both end alike, as the majority
    healed the rank.
    """
    reenact(read_past(flipped.folder), 0, 8, tmp_path)
    clean = tmp_path / "from_0"
    out = said(capsys, bisect.main([str(clean), str(flipped.folder)]), 1)
    assert "setup    ranks: 1 and 3" in out
    assert "setup    faults: '' and 'bitflip@rank=2,step=5,phase=log'" in out
    assert "step     5 is the first that differs; equal up to step 4" in out
    assert f"tensor   {PLACE}: rank 2 has another one than other ranks of " in out
    assert "equal    in all that both have of 8 steps" in said(
        capsys, bisect.main([str(clean), str(clean)]), 0
    )


def test_a_bit_in_a_checkpoint_is_named(
    pair: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanoray.checkpoint.files import load, save

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
