"""`python -m nanoray.bench scaling`: its buckets against DDP's own, and a real quick run on 2 and 3
ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanoray.bench import __main__ as bench
from nanoray.bench import scaling
from nanoray.bench.engine import time_rank
from nanoray.bench.harness.rank_pool import RankPool, Where
from nanoray.bench.harness.report import Report
from nanoray.bench.scaling import RANKS
from nanoray.bench.simulate import ERROR, MEASURED, PREDICTED, VOCAB, gradient_buckets, model_work
from nanoray.cli.forecast.fit import Fit
from nanoray.cli.forecast.links import load_topology
from nanoray.config import load_config
from nanoray.models.costs import count_parameters, flops_per_token
from nanoray.models.gpt import GPT, ModelShape

SHAPE = ModelShape(n_layer=3, n_head=2, n_embd=64, block_size=16, bias=True, vocab_size=100)


@pytest.mark.parametrize("cap_mb", [0.01, 0.1, 0.25, 25])
def test_gradient_buckets_are_ddps(cap_mb: float) -> None:
    params = list(GPT(SHAPE).parameters())[::-1]
    indices, _ = dist._compute_bucket_assignment_by_size(params, [int(cap_mb * 2**20)])
    expected = [4 * sum(params[i].numel() for i in bucket) for bucket in sorted(indices)]
    buckets = gradient_buckets(SHAPE, cap_mb)
    assert [nbytes for _, nbytes in buckets] == expected
    assert sum(nbytes for _, nbytes in buckets) == 4 * count_parameters(SHAPE)
    shares = [share for share, _ in buckets]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_the_first_bucket_waits_for_lm_heads_product() -> None:
    """A bucket per parameter: the last norm's bias is ready after lm_head's share of backward and
    its own.
    """
    share, nbytes = gradient_buckets(SHAPE, 1e-6)[0]
    assert nbytes == 4 * 64
    assert share == pytest.approx((SHAPE.padded_vocab * 64 + 64) / count_parameters(SHAPE))


def test_the_work_of_a_preset_by_hand() -> None:
    config, topology = load_config(preset="gpt2-124m"), load_topology("nvlink-400g")
    shape = ModelShape.of(config, VOCAB["gpt2"])
    work = model_work(config, topology)
    flops = flops_per_token(shape) * 1024  # of a sequence
    assert work.forward_s + work.backward_s == pytest.approx(flops / (989.4e12 * 0.4))
    assert (work.micro, work.backward_s) == (12, pytest.approx(2 * work.forward_s))
    given = model_work(config, topology, compute_ms=120).step(12)
    assert (given.forward_s, given.backward_s) == pytest.approx((0.04, 0.08))
    assert given.buckets[-1].ready_s == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--workers", "3", "--check", "3,4"],
            "workers = 3, check = 3,4; fit at 2 ranks or more, and check at more than that",
        ),
        (["--workers", "1"], "workers = 1"),
        (["--check", "x"], "check = x"),
        (["--rounds", "0", "--steps", "-1"], "rounds = 0; give a number above 0"),
        (["--compute_ms", "-3"], "compute_ms = -3.0; it must be above 0"),
        (["--topology", "nvlink"], "unknown topology nvlink; known: ethernet-25g, "),
        (["--model", "gpt2-124"], "unknown preset .* gpt2-124; did you mean gpt2-124m?"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "nanoray.bench.scaling.RankPool", lambda where: pytest.fail("it started ranks")
    )
    assert bench.main(["scaling", "--device", "cpu", *flags]) == 2
    assert re.search(message.replace("?", r"\?"), capsys.readouterr().err)


@pytest.mark.full
def test_a_real_quick_run(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(scaling)
    files = ["--json", str(tmp_path / "r.json"), "--figure", str(tmp_path / "r.svg")]
    argv = [
        "scaling",
        "--quick",
        "--device",
        "cpu",
        "--check",
        "3",
        "--steps",
        "2",
        "--rounds",
        "1",
    ]
    assert bench.main([*argv, *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    for once in (
        r"^OK  ",
        r"^command  ",
        r"^target  .*, weak 3 ranks ",
        r"^step ms \(efficiency %\)",
    ):
        assert len(re.findall(once, out, re.MULTILINE)) == 1, once
    assert "| weak 3 ranks | " in out
    written = json.loads((tmp_path / "r.json").read_text())
    rows: dict[tuple[str, str], Any] = {(r["arm"], r["metric"]): r for r in written["rows"]}

    fits = [r for r in written["rows"] if r["metric"] == "alpha"]
    assert {r["arm"] for r in fits} >= {"fit backend", "fit ring", "fit tree", "fit double_tree"}
    assert all(
        r["wrong"] == 0 and r["ranks"] == 2 and r["smallest_bytes"] < r["largest_bytes"]
        for r in fits
    )
    beta = rows["fit ring", "beta"]["median"] / 1e12
    alpha = rows["fit ring", "alpha"]["median"] / 1e6
    residuals = rows["fit ring", "residual"]
    for (nbytes, seconds), percent in zip(residuals["points"], residuals["values"], strict=True):
        assert 100 * abs((2 * alpha + nbytes * beta) / seconds - 1) == pytest.approx(
            percent, abs=1e-6
        )

    for arm, sequences in (("weak 2", 6), ("weak 3", 6), ("strong 3", 4)):
        measured, predicted, error = (rows[arm, metric] for metric in (MEASURED, PREDICTED, ERROR))
        assert measured["sequences"] == sequences
        assert error["median"] == pytest.approx(abs(predicted["median"] / measured["median"] - 1))
        # The simulated buckets are those that DDP showed.
        config = load_config(preset="shakespeare-cpu")
        buckets = gradient_buckets(ModelShape.of(config, VOCAB[config.tokenizer]), 8.0)
        assert sum(event[1].startswith("bucket") for event in predicted["events"]) == len(buckets)
    assert [t["target"] for t in written["targets"]] == [
        "error of the predicted step, weak 3 ranks",
        "error of the predicted step, strong 3 ranks",
    ]

    for topology in ("this-machine", "nvlink-400g", "ethernet-25g", "mig-slices"):
        weak = [rows[f"{topology} weak {n}", "efficiency"] for n in RANKS]
        assert weak[0]["median"] == pytest.approx(100)
        assert all(
            0 < r["median"] <= 100.0001
            and r["step_ms"]["best"] <= min(r["step_ms"].values()) + 1e-9
            for r in weak
        )
        assert rows[f"{topology} strong 4096", "efficiency"]["sequences"] == 1
        assert (f"{topology} strong 8192", "efficiency") not in rows
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
    assert torch.distributed.is_initialized() is False


def die(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Let rank 1 of three be killed before its first step."""
    if mesh.rank == 1 and mesh.world_size == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time_rank(mesh, order, emit)


@pytest.mark.full
def test_a_killed_rank_leaves_the_fits(
    tmp_path: Path, pools: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pool(where: Where) -> Any:
        return nullcontext(pools(2)) if where.workers == 2 else RankPool(where)

    monkeypatch.setattr(scaling, "RankPool", pool)
    monkeypatch.setattr(scaling, "TIME_ENTRY", "tests.ranks.test_bench_scaling:die")
    files = [
        f"--{flag}={tmp_path / f'r.{end}'}" for flag, end in (("json", "json"), ("figure", "png"))
    ]
    assert (
        bench.main(
            ["scaling", "--quick", "--device", "cpu", "--check", "3", "--rounds", "1", *files]
        )
        == 1
    )
    written = json.loads((tmp_path / "r.json").read_text())
    assert {r["arm"] for r in written["rows"]} >= {"fit backend", "fit ring", "fit tree"}
    assert not [r for r in written["rows"] if r["metric"] == MEASURED]
    (failure,) = written["failures"]
    assert re.match(
        r"rank 1 \(pid \d+, cpu\) in tests.ranks.test_bench_scaling:die: it was ended by SIGKILL",
        failure,
    )
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert "FAILED  rank 1" in capsys.readouterr().out.splitlines()[-1]


def test_the_check_is_at_one_and_two_more() -> None:
    assert scaling._checks(None, 2) == [3, 4]
    assert scaling._checks(None, 4) == [5, 6]
    assert scaling._checks("8", 4) == [8]


def test_a_bucket_that_no_sweep_measured_is_named() -> None:
    """The one bucket of the preset is larger than all that the fit has seen."""
    config = load_config(preset="shakespeare-cpu")
    parts = {"forward_s": 0.01, "backward_s": 0.02, "update_s": 0.001}
    here = scaling.MachineSteps(2, config, 2.0, bucket_mb=8.0)
    here.compute[6].append(parts)
    here.steps[2, 6] = [0.03]
    report = Report("scaling", {})
    scaling._compare(report, here, Fit("backend", 2, 1e-5, 1e-9, (0.0,), 1024, 1 << 21))
    row = report.row("weak 2", PREDICTED)
    assert row is not None
    nbytes = 4 * count_parameters(ModelShape.of(config, VOCAB[config.tokenizer]))
    assert row.note.endswith(
        f" ms exposed; {nbytes} bytes are outside the measured 1024 .. 2097152"
    )
    # Compute of its own round, and after it one all-reduce over two ranks
    assert row.median == pytest.approx(31.0 + 1e3 * (2 * 1e-5 + nbytes * 1e-9))
