"""Context parallelism: equal to one process, alone and beside every other axis; attention beside
torch's; checkpoints, traces; red where a bug is planted.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli.sample import main as sample
from tests.harness.axes import Runs, final, require_one_process, run
from tests.harness.ranks import series
from tests.ranks.conftest import Pools
from tests.ranks.context import BUGS, WRONG_ATTENTION
from tests.stress.equivalence import ADAMW, MODES, SGD, WEIGHT_LIMIT

MEASURE = "tests.ranks.context:measure_rank"
ATTENTION = "tests.ranks.context:attention"
# Of results and gradients up to 100, by how exact the numbers are
CLOSE = {"float64": 1e-11, "float32": 2e-3}


# Attention alone.


def cases(kernels: tuple[str, ...] = ("plain", "flash")) -> list[dict[str, Any]]:
    """Both kernels and dtypes, with chunks of one position and of three."""
    found = []
    for kernel, dtype, chunk in itertools.product(kernels, CLOSE, (1, 3)):
        found.append({"way": "ring", "kernel": kernel, "dtype": dtype, "chunk": chunk})
    return found


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_parts_of_a_sequence_attend_as_a_whole_one_does(pools: Pools, ranks: int) -> None:
    """Results and gradients, beside torch's attention in float64."""
    found = [*pools(ranks).run(ATTENTION, {"cases": cases()})]
    assert len(found) == len(cases())
    for each in found:
        assert each["off"] < CLOSE[each["dtype"]], each


def test_a_bug_in_the_ring_shows_in_attention_alone(pools: Pools) -> None:
    """Three ranks, because with two the next rank is the one before."""
    rows = []
    for bug in WRONG_ATTENTION:
        rows.append({"way": "ring", "kernel": "plain", "dtype": "float64", "chunk": 3, "bug": bug})
    for each in pools(3).run(ATTENTION, {"cases": rows}):
        assert each["off"] > 1.0, each


# Training.


def own(ranks: int, **more: Any) -> dict[str, Any]:
    """An arm of `ranks` parts of sequences, with chunks of two positions."""
    return {"cp": ranks, "block_size": 4 * ranks, **more}


PLAIN = {"attention": "plain"}
ROTARY = {"positions": "rotary", "n_head": 2}


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (2, 4))]
)
def test_it_trains_as_one_process_does(pools: Pools, ranks: int) -> None:
    """Both kernels, learned and rotary positions: losses, weights, norms, in two micro batches
    beside one.
    """
    arms = {
        "flash": own(ranks),
        "rotary, plain, zero2": own(ranks, **ROTARY, **PLAIN, dp_mode="zero2"),
    }
    found = run(pools, ranks, arms, [{"accum": 2, "settings": SGD}], alone=True)
    assert len(found) == len(arms)
    require_one_process(found, SGD)


@pytest.mark.full
def test_beside_one_mode_and_each_axis_it_trains_as_one_process_does(pools: Pools) -> None:
    two = own(2)
    arms = {
        "fsdp": two | {"dp_mode": "fsdp"},
        "sequence, rotary": two | ROTARY | {"tp": 2, "sequence_parallel": True},
        "1f1b": two | {"pp": 2, "n_layer": 4, "dp_mode": "ddp_by_hand"},
    }
    found = run(pools, 4, arms, [{"accum": 2, "settings": SGD}], alone=True)
    assert len(found) == len(arms)
    require_one_process(found, SGD)


@pytest.mark.full
def test_beside_other_axes_it_trains_as_one_process_does(pools: Pools) -> None:
    """cp 2 beside dp in every mode, tp, sequence_parallel and every schedule. Equal to the bit: the
    modes by hand with fsdp, and the schedules.
    """
    two = own(2)
    arms = {mode: two | settings for mode, settings in MODES.items()}
    arms["tp"] = two | {"tp": 2}
    arms["sequence"] = two | {"tp": 2, "sequence_parallel": True}
    arms["sequence, rotary"] = two | ROTARY | {"tp": 2, "sequence_parallel": True}
    deep = two | {"pp": 2, "n_layer": 4, "dp_mode": "ddp_by_hand"}
    for kind in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        arms[kind] = deep | {"pp_schedule": kind}
    found = run(pools, 4, arms, [{"accum": 2, "settings": SGD}], alone=True)
    assert len(found) == len(arms)
    require_one_process(found, SGD)

    digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
    by_hand = {digests[mode] for mode in ("ddp_by_hand", "zero1", "fsdp full", "fsdp grad_op")}
    assert len(by_hand) == 1
    assert len({digests[kind] for kind in ("gpipe", "1f1b", "interleaved", "zero_bubble")}) == 1


@pytest.mark.full
def test_bits_that_must_be_equal_are(pools: Pools) -> None:
    """zero2 too with one micro batch; activation checkpointing, which runs the ring again; and a ring
    that is run twice.
    """
    two = own(2)
    arms = {mode: two | {"dp_mode": mode} for mode in ("ddp_by_hand", "zero1", "zero2")}
    arms["again"] = arms["zero1"]
    for how in ("selective", "block"):
        arms[how] = arms["zero1"] | {"activation_checkpointing": how}
    found = run(pools, 4, arms, [{"accum": 1, "settings": ADAMW}])
    assert len(found) == len(arms)
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


@pytest.mark.full
def test_other_options_work_with_parts_of_sequences(pools: Pools) -> None:
    """AdamW and clipping, the loss in chunks, all-reduce by hand; compressed gradients are near."""
    two = own(2)
    arms = {"adamw": two, "chunks": two | {"loss_chunk": 5}, "ring": two | {"allreduce": "ring"}}
    found = run(pools, 4, arms, [{"accum": 2, "settings": ADAMW}], alone=True)
    require_one_process(found, ADAMW)
    arms = {mode: two | {"replicas": 2, "dp_mode": mode} for mode in ("zero1", "zero2", "fsdp")}
    found = run(pools, 4, arms, [{"accum": 2, "settings": SGD}], alone=True)
    require_one_process(found, SGD)
    arms = {"compressed": two | {"dp_mode": "ddp_by_hand", "grad_compress": "fp16"}}
    (found_one,) = run(pools, 4, arms, [{"accum": 2, "settings": SGD}], alone=True)
    assert max(rank["off"] for rank in found_one["ranks"]) < 1e-4


@pytest.mark.parametrize(
    "bug",
    [
        "",
        "mask",
        "home",
        *(pytest.param(bug, marks=pytest.mark.full) for bug in BUGS if bug not in ("mask", "home")),
    ],
)
def test_a_planted_bug_makes_training_differ(pools: Pools, bug: str) -> None:
    """Each is far above the limit, which a run without one keeps."""
    arm = own(3, **PLAIN)
    if bug == "turn":
        arm |= ROTARY
    order = {"arms": {"wrong": arm}, "cases": [{"accum": 2, "settings": SGD | {"lr": 1.0}}]}
    (found,) = pools(3).run(MEASURE, order | {"alone": True, "bug": bug})
    off = max(rank["off"] for rank in found["ranks"])
    limit = WEIGHT_LIMIT["sgd"]
    assert off > 5 * limit if bug else off < limit


# The whole program: the loop, evaluation, checkpoints, traces.

RECIPE: dict[str, Any] = {
    "n_head": 4,
    "max_steps": 6,
    "global_batch_size": 12,
    "grad_accum_steps": 2,
    "precision": "fp32",
    "bias": True,
}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


def require_alike(one: Any, other: Any, far: float = 2e-5) -> None:
    """Require two runs' losses, evaluations and weights to be near."""
    for key in ("train/loss", "val/loss"):
        assert series(one, key) == pytest.approx(series(other, key), abs=far), key
    mine = final(one).model
    for name, tensor in final(other).model.items():
        assert (mine[name] - tensor).abs().max() < far, name


@pytest.mark.full
def test_a_run_is_that_of_one_process(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation, comparison of replicas, sample; the trace has the bytes of each message, and
    when a rank waited for it.
    """
    settings = SGD | {
        "eval_every": 3,
        "eval_samples": 5,
        "hash_every": 2,
        "sample_tokens": 8,
        "lr": 0.5,
    }
    alone, (of_one,) = runs.finished("alone", 1, **settings)
    traced = settings | {"cp": 2, "comm_trace": "always"}
    spec, outcomes = runs.finished("ring", 2, **traced)
    require_alike(spec, alone)
    assert outcomes[0]["sample"] == of_one["sample"]
    assert sample([str(spec.folder), "--max_new_tokens", "4"]) == 0
    assert len(capsys.readouterr().out) >= 4

    # Two micro batches, two layers; own keys and values are (2, B, H, T/cp, D) float32.
    block = 2 * 4 * 6 * 8 * 32
    lines = (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    found = []
    for c in json.loads(lines[2])["collectives"]:
        if c["group"] == "cp" and c["phase"] != "eval":
            found.append(c)
    for c in found:
        assert all(start <= wait for start, wait in zip(c["start_ms"], c["wait_ms"], strict=True))
    forward = ("forward", "send_recv", "keys_values", block)
    again = ("backward", "send_recv", "keys_values", block)
    back = ("backward", "send_recv", "keys_values_grad", block)
    kinds = [(c["phase"], c["op"], c["what"], c["bytes"]) for c in found]
    assert sorted(kinds) == sorted([forward, again, back, back] * 4)


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"dp_mode": "zero2"}, {"tp": 2, "dp_mode": "fsdp"}])
def test_a_run_resumes_to_the_bit(runs: Runs, more: dict[str, Any]) -> None:
    runs.resumed(4, 4, cp=2, grad_accum_steps=0, **more)


FEW: list[tuple[int, dict[str, Any]]] = [
    (2, {"cp": 2, "dp_mode": "zero1"}),
    (1, {}),
    (2, {"cp": 2}),
]
MANY: list[tuple[int, dict[str, Any]]] = [
    (4, {"cp": 2, "tp": 2}),
    (4, {"cp": 4, "dp_mode": "fsdp"}),
    (2, {"tp": 2}),
    (4, {"cp": 2, "pp": 2, "dp_mode": "zero2"}),
    (3, {}),
    (3, {"cp": 3, "dp_mode": "zero1"}),
]


@pytest.mark.parametrize("meshes", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
def test_any_mesh_goes_on_with_what_any_other_saved(
    runs: Runs, meshes: list[tuple[int, dict[str, Any]]]
) -> None:
    recipe = RECIPE | {"grad_accum_steps": 0, "max_steps": len(meshes), "block_size": 24}
    Runs(runs.text, runs.folder, recipe).gone_on(meshes, far=2e-4)


@pytest.mark.full
@pytest.mark.parametrize(("precision", "far"), [("bf16", 2e-2), ("fp16", 5e-3), ("fp8", 6e-2)])
def test_low_precision_stays_near_one_process(runs: Runs, precision: str, far: float) -> None:
    settings = {"precision": precision, "max_steps": 5}
    alone = runs.trained("alone", 1, **settings)
    ring = runs.trained("ring", 2, cp=2, **settings)
    assert series(ring) == pytest.approx(series(alone), abs=far)


@pytest.mark.full
def test_short_sequences_are_cut_after_they_are_made(runs: Runs) -> None:
    short = {"seq_warmup_steps": 4, "seq_warmup_from": 4} | SGD
    alone = runs.trained("alone", 1, **short)
    both = runs.trained("ring", 2, cp=2, **short)
    assert series(both) == pytest.approx(series(alone), abs=2e-5)


@pytest.mark.full
def test_a_flipped_bit_is_found_and_healed_or_named(runs: Runs) -> None:
    settings = {"cp": 2, "hash_every": 2, "faults": "bitflip@rank=1,step=3"}
    _, message = runs.failed(2, "StateDiverged", **settings)
    assert "after step 4" in message


@pytest.mark.full
@pytest.mark.skipif(
    any(map(str.isspace, sys.prefix)), reason="torch passes this environment's path to g++ unquoted"
)
def test_compiled_blocks_train_alike(runs: Runs) -> None:
    """The ring runs eagerly between what is compiled."""
    settings: dict[str, Any] = {"cp": 2, "max_steps": 3}
    eager = runs.trained("eager", 2, **settings)
    compiled = runs.trained("compiled", 2, compile=True, init_timeout_s=120, **settings)
    assert series(compiled) == pytest.approx(series(eager), rel=1e-4)
