"""`python -m nanoray.bench scaling`: its buckets against DDP's own, and a real quick run on 2 and 3
ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanoray.bench import __main__ as bench
from nanoray.bench import scaling
from nanoray.bench.scaling import RANKS
from nanoray.bench.simulate import ERROR, MEASURED, PREDICTED, VOCAB, gradient_buckets, model_work
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
    step = work.step(12)
    assert step.forward_s == pytest.approx(12 * work.forward_s)
    assert step.buckets[-1].ready_s == pytest.approx(step.backward_s)


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
    assert [r["arm"] for r in fits] == ["fit backend"]
    assert all(
        r["wrong"] == 0 and r["ranks"] == 2 and r["smallest_bytes"] < r["largest_bytes"]
        for r in fits
    )
    beta = rows["fit backend", "beta"]["median"] / 1e12
    alpha = rows["fit backend", "alpha"]["median"] / 1e6
    residuals = rows["fit backend", "residual"]
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


def test_the_check_is_at_one_and_two_more() -> None:
    assert scaling._checks(None, 2) == [3, 4]
    assert scaling._checks(None, 4) == [5, 6]
    assert scaling._checks("8", 4) == [8]
