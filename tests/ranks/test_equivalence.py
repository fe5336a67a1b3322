"""The matrix of equivalence: green as it is, red with each planted bug."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.stress.__main__ as stress
from nanoray.bench.harness import benchmark
from nanoray.bench.strategies import MODES
from tests.ranks.conftest import Wrong
from tests.stress import equivalence
from tests.stress.equivalence import CASES, SGD, arms_for, largest, must_equal

FLAGS = ["equivalence", "--device", "cpu"]


# The files of each way of parallelism train in the same way, through the same function.
@pytest.mark.full
@pytest.mark.parametrize(
    ("cases", "checkpointing"),
    [(["SGD", "SGD, 2 micro batches"], False), ([*CASES], True)],
    ids=["SGD", "all"],
)
def test_every_mode_trains_as_one_process_does(
    tmp_path: Path,
    shared_ranks: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cases: list[str],
    checkpointing: bool,
) -> None:
    """The whole matrix at two ranks; or without what test_sharded.py and its like have of
    activation checkpointing.
    """
    shared_ranks(equivalence)
    monkeypatch.setattr(equivalence, "CASES", {case: CASES[case] for case in cases})
    files = [f"--json={tmp_path / 'e.json'}", f"--figure={tmp_path / 'e.png'}"]
    assert (
        stress.main([*FLAGS, "--workers", "2", *([] if checkpointing else ["--quick"]), *files])
        == 0
    )
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    arms = arms_for(2, checkpointing)
    assert {"zero1", "tp 2", "pp 2 gpipe", "experts, pp 2"} <= arms.keys()
    assert checkpointing == (
        {"zero1 + block", "tp 2 + selective", "pp 2 1f1b + block"} <= arms.keys()
    )
    for arm in arms:
        assert f"\n{arm} " in out
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    alone = sum(CASES[case]["accum"] == 1 for case in cases)
    others = len(arms) * len(cases) - alone
    assert len(rows) == others * 4, "interleaved takes no single micro batch"
    assert all(row["wrong"] == 0 and row["median"] is not None for row in rows)
    same = {row["arm"]: row["same"] for row in rows if row["metric"] == "SGD: bits"}
    assert set(same["zero1"]) >= {"ddp_by_hand", "zero2", "fsdp full", "fsdp grad_op"}
    assert checkpointing == ("zero2 + block" in same["zero1"])
    assert (tmp_path / "e.png").read_bytes()[:4] == b"\x89PNG"


def test_a_planted_bug_makes_it_red(planted: Callable[..., Wrong]) -> None:
    arms = arms_for(3, checkpointing=False)
    wrong = planted("share", 3, {mode: arms[mode] for mode in MODES})
    by_hand = {"ddp_by_hand", "zero1", "zero2", "fsdp full", "fsdp grad_op"}
    assert by_hand <= {arm for arm in MODES if wrong[arm]}
    assert not wrong["ddp"]


def test_a_planted_bug_of_tensor_parallelism_makes_it_red(planted: Callable[..., Wrong]) -> None:
    wrong = planted("qkv", 2, {"ddp": {}, "tp 2": {"tp": 2}})
    assert f"SGD: {equivalence.WEIGHT}" in wrong["tp 2"]
    assert not wrong["ddp"]


def test_a_planted_bug_of_a_pipeline_makes_it_red(planted: Callable[..., Wrong]) -> None:
    case = "SGD, 2 micro batches"
    arms = {"ddp": {}, "pp 2": {"pp": 2}, "pp 2 gpipe": {"pp": 2, "pp_schedule": "gpipe"}}
    wrong = planted("loose_ends", 2, arms, case)
    for arm in ("pp 2", "pp 2 gpipe"):
        assert f"{case}: {equivalence.WEIGHT}" in wrong[arm]
    assert not wrong["ddp"]


def test_which_modes_must_have_the_same_bits() -> None:
    one, two = {"accum": 1, "settings": SGD}, {"accum": 2, "settings": SGD}
    assert must_equal("zero2", one) == ["ddp_by_hand"]
    assert must_equal("zero2", two) == []
    assert must_equal("zero2 + block", two) == ["zero2"]
    assert must_equal("fsdp full", one) == must_equal("fsdp grad_op", two) == ["zero1"]
    assert must_equal("fsdp grad_op", CASES["AdamW, clipped"]) == ["fsdp full"]
    assert must_equal("ddp + selective", one) == ["ddp"]
    assert must_equal("tp 2 × zero1 + block", two) == ["tp 2 × zero1", "tp 2 × ddp_by_hand"]
    assert must_equal("tp 2 × fsdp full", one) == ["tp 2 × zero1"]
    assert must_equal("tp 2", one) == []
    assert must_equal("pp 2 gpipe", one) == ["pp 2 1f1b"]
    assert must_equal("2 replicas × zero1", one) == []
    assert must_equal("2 replicas × zero2", one) == ["2 replicas × zero1"]
    assert must_equal("2 replicas × zero2", two) == []
    assert must_equal("2 replicas × fsdp full", two) == ["2 replicas × zero1"]
    assert must_equal("pp 2 × zero1 + block", two) == ["pp 2 × zero1", "pp 2 × ddp_by_hand"]


def test_which_arms_run_at_how_many_ranks() -> None:
    split = {arm for arm in arms_for(2, checkpointing=False) if "tp" in arm}
    assert split == {"tp 2", "tp 2, sequence", "experts, tp 2"}
    assert not {arm for arm in arms_for(3) if "tp" in arm}
    cut = {arm for arm in arms_for(4, False) if arm.startswith("tp")}
    assert cut == {"tp 4", "tp 4, sequence", *(f"tp 2 × {mode}" for mode in MODES)}
    assert {arm for arm in arms_for(3, False) if arm.startswith("cp")} == {
        *(f"cp 3 × {mode}" for mode in MODES),
        "cp 3, rotary",
    }
    apart = {arm for arm in arms_for(4, False) if arm.startswith("cp 2")}
    assert apart == {
        *(f"cp 2 × {mode}" for mode in (*MODES, "tp 2", "pp 2")),
        "cp 2, rotary",
    }
    piped = {arm for arm in arms_for(4, False) if arm.startswith("pp")}
    assert piped == {
        *(f"pp 4 {kind}" for kind in equivalence.SCHEDULES),
        *(f"pp 2 × {mode}" for mode in ("ddp_by_hand", "zero1", "zero2", "tp 2")),
    }
    sharded = ("zero1", "zero2", "fsdp full", "fsdp grad_op")
    for ranks, replicas in ((4, 2), (6, 3)):
        grouped = {arm for arm in arms_for(ranks, False) if "replicas" in arm}
        assert grouped == {f"{replicas} replicas × {mode}" for mode in sharded}
    assert not {arm for arm in arms_for(3, False) if "replicas" in arm}
    assert {arm for arm in arms_for(3, False) if "pp" in arm} == {
        f"pp 3 {kind}" for kind in equivalence.SCHEDULES
    }
    assert not equivalence.fits({"pp": 2, "pp_schedule": "interleaved"}, 1)


@pytest.mark.parametrize("workers", ["1", "8"])
def test_ranks_that_do_not_divide_the_batch_are_refused(
    workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stress.main([*FLAGS, "--workers", workers]) == 2
    assert (
        f"workers = {workers}: one rank shares nothing, and 168 samples" in capsys.readouterr().err
    )


def test_a_word_chooses_arms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RankPool", lambda where: pytest.fail("it started ranks"))
    assert stress.main([*FLAGS, "--workers", "3", "--quick", "--only", "replicas"]) == 2
    assert "only = replicas: none of the arms at 3 ranks; they are ddp, " in capsys.readouterr().err


def test_what_is_not_finite_is_not_overlooked() -> None:
    assert math.isnan(largest([1.0, math.nan, 2.0]))
    assert largest([1.0, math.inf, 2.0]) == math.inf
    alone = {"losses": [1.0, 1.0], "norms": [1.0]}
    rank = {
        "losses": [1.0, math.nan],
        "norms": [1.0],
        "digest": "a",
        "off": math.nan,
        "alone": alone,
    }
    loss, weight, norm, _ = equivalence._make_rows(
        "SGD", CASES["SGD"], "zero1", [rank], {"zero1": [rank]}
    )
    assert [row.problem for row in (loss, weight, norm)] == ["not finite", "not finite", ""]
