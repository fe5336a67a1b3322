"""Tensor parallelism: equal to one process, alone and under data parallelism; dropout, checkpoints,
refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.resume import newest_valid
from nanoray.cli.sample import main as sample
from tests.harness.axes import Runs, require_one_process, run
from tests.harness.ranks import series
from tests.ranks.conftest import Pools
from tests.stress.equivalence import ADAMW, SGD

MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        (SGD, ("zero2", "fsdp")),
        *(pytest.param(s, MODES, marks=pytest.mark.full) for s in (SGD, ADAMW)),
    ],
    ids=["sgd, two modes", "sgd", "adamw"],
)
def test_two_and_four_ranks_train_as_one_process_does(
    pools: Pools, settings: dict[str, Any], modes: tuple[str, ...], bias: bool
) -> None:
    """tp 2, tp 4, and dp 2 × tp 2 in modes of dp: losses, weights, norms. A vocabulary of 65 leaves
    tp 4's last rank with padding alone. The digests also say that what several ranks hold is equal
    to the bit on all of them.
    """
    case = {"accum": 2, "settings": settings | {"bias": bias}}
    arms = {"tp 4": {"tp": 4}} | {f"tp 2 × {mode}": {"tp": 2, "dp_mode": mode} for mode in modes}
    found = run(pools, 4, arms, [case], alone=True) + run(
        pools, 2, {"tp 2": {"tp": 2}}, [case], alone=True
    )
    assert len(found) == len(arms) + 1
    require_one_process(found, settings)


@pytest.mark.full
def test_by_hand_and_zero_agree_bit_for_bit_under_tp(pools: Pools) -> None:
    arms = {mode: {"tp": 2, "dp_mode": mode} for mode in ("ddp_by_hand", "zero1", "zero2")}
    for settings in (SGD, ADAMW):
        found = run(pools, 4, arms, [{"accum": 1, "settings": settings}])
        assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


def test_every_rank_keeps_its_share_only(pools: Pools) -> None:
    """Weights and optimizer state of what is cut are divided by tp, and by dp with zero1; the rest
    is small.
    """
    settings = ADAMW | {"n_embd": 64}
    arms = {"tp 4": {"tp": 4}, "tp 2 × zero1": {"tp": 2, "dp_mode": "zero1"}}
    for each in run(pools, 4, arms, [{"accum": 1, "settings": settings}]):
        for rank in each["ranks"]:
            assert rank["state_elements"] < 2 * rank["elements"] / 4 * 1.1, each["arm"]


@pytest.mark.full
@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])
def test_activation_checkpointing_changes_no_bit_under_tp(pools: Pools, mode: str) -> None:
    """With dropout: what is computed twice draws the same masks again, the rank's own and those of
    all.
    """
    hows = ("none", "selective", "block")
    settings = [ADAMW | {"dropout": 0.3, "activation_checkpointing": how} for how in hows]
    *found, undropped = run(
        pools,
        4,
        {"tp 2": {"tp": 2, "dp_mode": mode}},
        [{"accum": 2, "settings": s} for s in [*settings, ADAMW]],
    )
    digests = {rank["digest"] for each in found for rank in each["ranks"]}
    assert len(digests) == 1
    assert undropped["ranks"][0]["digest"] not in digests, "masks were drawn"


def test_dropout_is_equal_where_it_must_be_and_differs_where_it_must(pools: Pools) -> None:
    """dp 2 × tp 2: masks of the stream depend on the data rank alone, those of attention on both."""
    (found,) = pools(4).run("tests.harness.tensor:dropout_masks", {})
    for rank in found:
        del rank["stream_masks"]
    for d in (0, 1):
        one, other = found[2 * d], found[2 * d + 1]
        assert one["stream"] == other["stream"]
        assert not set(one["attention"]) & set(other["attention"])
    assert not set(found[0]["stream"]) & set(found[2]["stream"])
    assert not set(found[0]["attention"]) & set(found[2]["attention"])
    everything = [mask for rank in found[::2] for kind in rank.values() for mask in kind]
    assert len(set(everything)) == len(everything) == 2 * (1 + 3 * 2), (
        "no mask twice, in two blocks"
    )


# The whole program: the loop, checkpoints, resume.

RECIPE: dict[str, Any] = {
    "n_head": 4,
    "max_steps": 8,
    "global_batch_size": 24,
    "precision": "fp32",
    "bias": True,
}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "mode", "world"), [(2, "zero1", 4), pytest.param(2, "ddp", 2, marks=pytest.mark.full)]
)
def test_a_run_resumes_to_the_bit(runs: Runs, tp: int, mode: str, world: int) -> None:
    runs.resumed(world, 5, tp=tp, dp_mode=mode, dropout=0.1)


def test_tracing_comparing_evaluating_and_sampling_work(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "comm_trace": "always",
        "hash_every": 2,
        "eval_every": 3,
        "eval_samples": 5,
        "sample_tokens": 8,
    }
    spec, outcomes = runs.finished("cut", 4, **settings, max_steps=6, tp=2, dp_mode="ddp")
    assert 0 < len(outcomes[0]["sample"]) <= 8, "several bytes may be one character"
    alone = runs.trained("alone", 1, max_steps=6, eval_every=3, eval_samples=5)
    assert series(spec, "val/loss") == pytest.approx(series(alone, "val/loss"), abs=2e-5)
    assert series(spec, "train/grad_norm") == pytest.approx(
        series(alone, "train/grad_norm"), rel=1e-4
    )
    steps = [
        json.loads(line) for line in (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    ]
    sums = [c for c in steps[2]["collectives"] if c["group"] == "tp"]
    stream = 4 * 12 * 16 * 32  # bytes of (B, T, C)
    forward = [(c["what"], c["bytes"]) for c in sums if c["phase"] == "forward"]
    backward = [(c["what"], c["bytes"]) for c in sums if c["phase"] == "backward"]
    maximum, both = 4 * 12 * 16, 2 * 4 * 12 * 16
    assert forward == [*[("activations", stream)] * 5, ("logits", maximum), ("logits", both)], (
        "two per block, three more"
    )
    assert backward == [("activations", stream)] * 5, "two per block, and what enters lm_head"
    buckets = [c for c in steps[2]["collectives"] if c["bucket"] is not None]
    assert {c["group"] for c in buckets} == {"dp"}
    assert {c["ranks"] for c in [*sums, *buckets]} == {2}
    assert sample([str(spec.folder), "--max_new_tokens", "4"]) == 0
    assert len(capsys.readouterr().out) >= 4


@pytest.mark.full
def test_a_flipped_bit_is_found_among_the_ranks_that_hold_the_piece(runs: Runs) -> None:
    settings = {"tp": 2, "hash_every": 2, "checkpoint_every": 2, "faults": "bitflip@rank=2,step=5"}
    spec, message = runs.failed(4, "StateDiverged", **settings)
    assert "after step 6 ranks that hold the same piece of the state differ" in message
    found, _ = newest_valid(spec.checkpoints)
    assert found
    assert found.state.meta["step"] == 4


def test_a_step_that_is_not_finite_is_named(runs: Runs) -> None:
    _, message = runs.failed(2, "TrainingDiverged", tp=2, faults="nan@rank=1,step=4")
    assert "at step 4 the loss is nan" in message
