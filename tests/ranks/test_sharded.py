"""DDP by hand and ZeRO: equal to each other bit for bit, and to one process; at odd numbers of
ranks, too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.run_folder import RunSpec
from tests.harness.axes import equal, final, require_one_process
from tests.harness.ranks import make_spec, records, run_ranks, series
from tests.ranks.conftest import Pools
from tests.stress.equivalence import ADAMW, ENTRY, SGD

HOW = ("selective", "block")  # of activation checkpointing
BY_HAND = ["ddp_by_hand", "zero1", "zero2"]
ALL = [*BY_HAND, "fsdp"]


def run(
    pools: Pools, ranks: int, modes: list[str], cases: list[dict[str, Any]], alone: bool = False
) -> list[Any]:
    arms = {mode: {"dp_mode": mode} for mode in modes}
    return [*pools(ranks).run(ENTRY, {"arms": arms, "cases": cases, "alone": alone})]


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_mode": "zero1", "bias": True, "n_embd": 36},
        pytest.param(
            {"dp_mode": "ddp_by_hand", "bias": True, "n_embd": 36}, marks=pytest.mark.full
        ),
        pytest.param(
            {
                "dp_mode": "ddp_by_hand",
                "bias": True,
                "grad_compress": "bf16",
                "n_embd": 36,
                "grad_clip": 0.0,
            },
            marks=pytest.mark.full,
        ),
    ],
    ids=["zero1", "ddp_by_hand", "bf16"],
)
def test_a_step_that_is_left_out_leaves_nothing_between_the_parameters(
    text: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A bucket has room between its parameters, which counts in the norm and gets no gradient."""
    spec = make_spec(text, tmp_path, on_nan="skip", faults="nan@rank=1,step=3", **settings)
    assert [outcome["exit_reason"] for outcome in run_ranks(spec, 3)] == ["finished"] * 3
    assert records(spec)[-1]["fault/skipped_steps"] == 1


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 5, 7))]
)
def test_modes_by_hand_agree_bit_for_bit(pools: Pools, ranks: int) -> None:
    cases = [
        {"accum": 1, "settings": SGD},
        {"accum": 1, "settings": ADAMW},
        {"accum": 2, "settings": ADAMW},
    ]
    for case in cases:
        # zero2 sums micro batches in another order
        modes = BY_HAND if case["accum"] == 1 else BY_HAND[:2]
        # AdamW rounds the last elements of a tensor otherwise
        modes = ALL if case["settings"] == SGD else modes
        found = run(pools, ranks, modes, [case])
        digests = {rank["digest"] for each in found for rank in each["ranks"]}
        assert len(digests) == 1, f"{ranks} ranks, {case}"
        assert (
            len({(*rank["losses"], *rank["norms"]) for each in found for rank in each["ranks"]})
            == 1
        )


@pytest.mark.parametrize(
    ("ranks", "accum"),
    [
        (3, 2),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 1), (3, 1), (2, 2))),
    ],
)
def test_every_mode_trains_as_one_process_does(pools: Pools, ranks: int, accum: int) -> None:
    """Plain SGD without clipping shows a wrong factor; one process takes the whole batch in one
    micro batch.
    """
    for settings in (SGD, ADAMW):
        found = run(
            pools, ranks, ["ddp", *ALL], [{"accum": accum, "settings": settings}], alone=True
        )
        require_one_process(found, settings)


def test_by_hand_has_the_bits_of_torchs_ddp_at_two_ranks(pools: Pools) -> None:
    """At two ranks a sum has one order, and 1/2 loses no bit wherever it is multiplied in."""
    found = run(pools, 2, ["ddp", "ddp_by_hand"], [{"accum": 2, "settings": SGD}])
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


def test_fsdp_has_the_bits_of_zero2_where_slices_are_aligned(pools: Pools) -> None:
    """Two ranks and a width of 32: each rank's rows are a multiple of 16 elements, also those of a
    norm's weight.
    """
    cases = [
        {"accum": 1, "settings": ADAMW | {"n_embd": 32, "fsdp_reshard": r}}
        for r in ("full", "grad_op")
    ]
    found = run(pools, 2, ["fsdp"], cases) + run(
        pools, 2, ["zero2"], [{"accum": 1, "settings": ADAMW | {"n_embd": 32}}]
    )
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(mode, marks=pytest.mark.full) for mode in ("ddp", *BY_HAND)),
        "fsdp",
    ],
)
def test_activation_checkpointing_changes_no_bit(pools: Pools, ranks: int, mode: str) -> None:
    """With dropout, and over accumulated micro batches."""
    settings = ADAMW | {"dropout": 0.2}
    cases = [
        {"accum": 2, "settings": settings | {"activation_checkpointing": how}}
        for how in ("none", *HOW)
    ]
    found = run(pools, ranks, [mode], cases)
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


def test_the_size_of_buckets_changes_no_bit(pools: Pools) -> None:
    cases = [{"accum": 1, "settings": ADAMW | {"bucket_mb": mb}} for mb in (0.0005, 0.004, 100.0)]
    found = run(pools, 3, ["zero1"], cases)
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


def test_each_rank_keeps_its_share_only(pools: Pools) -> None:
    found = {
        each["arm"]: each["ranks"] for each in run(pools, 3, ALL, [{"accum": 1, "settings": ADAMW}])
    }
    total = found["zero1"][0]["elements"]
    padding = 0.05 * total
    assert {rank["state_elements"] for rank in found["ddp_by_hand"]} == {2 * total}, "two moments"
    for mode in ("zero1", "zero2", "fsdp"):
        assert sum(rank["state_elements"] for rank in found[mode]) == 2 * total, (
            "each element has one owner"
        )
        assert max(rank["state_elements"] for rank in found[mode]) < 2 * total / 3 + padding
        assert max(rank["gradient_elements"] for rank in found[mode]) < total / 3 + padding


# The whole program: the loop, checkpoints, resume.

RECIPE: dict[str, Any] = {
    "dropout": 0.1,
    "max_steps": 9,
    "global_batch_size": 24,
    "precision": "fp32",
}


def trained(text: Path, folder: Path, world: int, **settings: Any) -> RunSpec:
    spec = make_spec(text, folder, **RECIPE | settings)
    outcomes = run_ranks(spec, world)
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return spec


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.full) for mode in ("zero1", "zero2")), "fsdp"]
)
def test_a_sharded_run_is_the_run_by_hand_and_resumes_to_the_bit(
    text: Path, tmp_path: Path, mode: str
) -> None:
    """Checkpoints are written beside training; the run is cut after the first of them."""
    world = 2 if mode == "fsdp" else 3
    whole = trained(text, tmp_path / "hand", world, dp_mode="ddp_by_hand")
    first = trained(text, tmp_path / mode, world, dp_mode=mode, checkpoint_every=4, stop_at=5)
    four = first.checkpoints / "step_00000004"
    assert json.loads((four / "manifest.json").read_text())["format"] == 2
    assert len([*four.glob("optimizer-*")]) == world
    shutil.rmtree(first.checkpoints / "step_00000005")
    rest = trained(text, tmp_path / mode, world, dp_mode=mode, resume="auto")
    assert series(rest)[5] == series(whole)[5]
    assert series(rest) == series(whole)
    assert equal(final(rest), final(whole))


def test_a_run_goes_on_with_another_mode_and_other_ranks(text: Path, tmp_path: Path) -> None:
    """From zero1 at 3 ranks to torch's DDP at 2, to fsdp at 4, to zero2 at 3: the losses stay those
    of one process.
    """
    alone = trained(text, tmp_path / "alone", 1, dropout=0.0)
    for mode, world, stop in (("zero1", 3, 2), ("ddp", 2, 4), ("fsdp", 4, 6), ("zero2", 3, 0)):
        spec = trained(
            text, tmp_path / "run", world, dp_mode=mode, stop_at=stop, resume="auto", dropout=0.0
        )
    assert series(spec) == pytest.approx(series(alone), abs=2e-5)
    assert len([*spec.folder.parent.iterdir()]) == 1, "all in one run"


def test_fp16_skips_the_same_steps_on_all_ranks(text: Path, tmp_path: Path) -> None:
    """The first scales overflow; the norm, which all ranks know, decides for all of them."""
    settings = {"precision": "fp16", "dropout": 0.0, "max_steps": 6}
    by_hand = trained(text, tmp_path / "hand", 2, dp_mode="ddp_by_hand", **settings)
    zero = trained(text, tmp_path / "zero", 2, dp_mode="zero2", **settings)
    assert series(zero) == series(by_hand)
    assert equal(final(zero), final(by_hand))
    assert final(zero).scaler == final(by_hand).scaler


@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(m, marks=pytest.mark.full) for m in ("ddp_by_hand", "zero1", "zero2")),
        "fsdp",
    ],
)
def test_tracing_comparing_evaluating_and_sampling_work_in_every_mode(
    text: Path, tmp_path: Path, mode: str
) -> None:
    # A token, a character
    same = {"max_steps": 6, "eval_every": 3, "eval_samples": 5, "tokenizer": "char"}
    settings = same | {"comm_trace": "always", "hash_every": 2, "sample_tokens": 8, "dp_mode": mode}
    spec = make_spec(text, tmp_path, **RECIPE | settings)
    outcomes = run_ranks(spec, 2)
    assert "error" not in outcomes[0], outcomes[0]
    assert len(outcomes[0]["sample"]) == 8
    plain = trained(text, tmp_path / "plain", 2, dp_mode="ddp", **same)
    assert series(spec, "val/loss") == pytest.approx(series(plain, "val/loss"), abs=2e-5)
    steps = [
        json.loads(line) for line in (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    ]
    found = {(c["op"], c["what"]) for step in steps for c in step["collectives"]}
    weights = (
        {("all_gather", "weights")} if mode != "ddp_by_hand" else {("all_gather", "gradients")}
    )
    assert found >= {("reduce_scatter", "gradients"), *weights}
    assert outcomes[0]["comm"]["traced_steps"] == 6
    gradients = sum(c["bytes"] for c in steps[2]["collectives"] if c["op"] == "reduce_scatter")
    parameters = sum(t.numel() for name, t in final(spec).model.items() if name != "lm_head.weight")
    assert 4 * parameters <= gradients <= 4.2 * parameters, (
        "each gradient travels once, plus padding"
    )


@pytest.mark.parametrize(
    "mode", [*(pytest.param(m, marks=pytest.mark.full) for m in BY_HAND[:2]), "zero2", "fsdp"]
)
def test_a_step_that_is_not_finite_is_named_in_every_mode(
    text: Path, tmp_path: Path, mode: str
) -> None:
    spec = make_spec(text, tmp_path, **RECIPE | {"dp_mode": mode, "faults": "nan@rank=1,step=4"})
    outcomes = run_ranks(spec, 2)
    assert {outcome["error"] for outcome in outcomes} == {"TrainingDiverged"}
    assert "at step 4 the loss is nan" in outcomes[0]["message"]
    assert "Not finite on rank 1" in outcomes[0]["message"]


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"experts": 4}, marks=pytest.mark.full),
        pytest.param({"experts": 4, "precision": "bf16"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_weights_that_are_gathered_in_bf16_train(
    text: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    found = [
        trained(text, tmp_path / kind, 2, dp_mode="fsdp", fsdp_gather=kind, **settings)
        for kind in ("bf16", "fp32")
    ]
    assert series(found[0]) == pytest.approx(series(found[1]), rel=3e-2)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["zero1", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_rollback_loads_every_ranks_shard(text: Path, tmp_path: Path, mode: str) -> None:
    """The bad step is left out, as in a run on one process: its samples are skipped."""
    settings = {
        "on_nan": "rollback",
        "checkpoint_every": 3,
        "faults": "nan@rank=0,step=5",
        "dropout": 0.0,
    }
    spec = trained(text, tmp_path / mode, 2, dp_mode=mode, **settings)
    alone = trained(text, tmp_path / "alone", 1, **settings)
    assert series(spec) == pytest.approx(series(alone), abs=2e-5)
    assert records(spec)[-1]["fault/rollbacks"] == 1
