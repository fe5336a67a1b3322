"""bench mig: plans against NVIDIA's figures, the matrix on made-up cards, rows against closed
forms, real stand-ins.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench import mig
from nanoray.bench.engine import time_rank
from nanoray.bench.harness.report import Report
from nanoray.bench.predicted import VOCAB
from nanoray.config import load_config
from nanoray.machine.device import Device
from nanoray.models.gpt import GPT, ModelShape
from tests.unit.test_devices import FakeNvml, discover_gpus, h200

H200 = "NVIDIA H200"
NEW, OLD = (2, 31, 0), (2, 29, 7)


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def found(*cards: dict[str, Any]) -> list[Device]:
    return discover_gpus(FakeNvml(*cards))


def by_name(arms: list[mig.Experiment]) -> dict[str, mig.Experiment]:
    assert len({arm.name for arm in arms}) == len(arms)
    return {arm.name: arm for arm in arms}


# The plan


@pytest.mark.parametrize(
    ("card", "names", "tflops", "gbps", "sms"),
    [
        (
            H200,  # 989.4 TFLOP/s, 4800 GB/s
            "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
            (141.34, 141.34, 282.69, 424.03, 565.37, 989.4),
            (600, 1200, 1200, 2400, 2400, 4800),
            (None,) * 6,
        ),
        (
            "NVIDIA H100 80GB HBM3",  # 989.4 TFLOP/s, 3350 GB/s
            "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
            (119.93, 194.88, 239.85, 449.73, 479.71, 989.4),  # of 132 SMs
            (418.75, 837.5, 837.5, 1675, 1675, 3350),
            (16, 26, 32, 60, 64, 132),
        ),
        (
            "NVIDIA A100-SXM4-40GB",  # 312 TFLOP/s, 1555 GB/s; here 1g.10gb is two eighths
            "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
            (40.444, 40.444, 80.889, 121.33, 161.78, 283.11),  # of 108 SMs
            (194.375, 388.75, 388.75, 777.5, 777.5, 1555),
            (14, 14, 28, 42, 56, 98),
        ),
        (
            "NVIDIA A100-SXM4-80GB",  # 312 TFLOP/s, 2039 GB/s; here 1g.10gb is one
            "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
            (40.444, 40.444, 80.889, 121.33, 161.78, 283.11),
            (254.875, 509.75, 509.75, 1019.5, 1019.5, 2039),
            (14, 14, 28, 42, 56, 98),
        ),
    ],
)
def test_plan_against_data_sheets(
    card: str, names: str, tflops: tuple, gbps: tuple, sms: tuple
) -> None:
    profiles = mig.plan(card)
    assert [p.slice.profile for p in profiles] == names.split()
    assert [p.fit for p in profiles] == [7, 4, 3, 2, 1, 1]
    assert [mig.peaks(p.slice)["peak_tflops"] for p in profiles] == pytest.approx(tflops, rel=1e-4)
    assert [mig.peaks(p.slice)["peak_gbps"] for p in profiles] == pytest.approx(gbps)
    assert tuple(p.sms for p in profiles) == sms


@pytest.mark.parametrize("card", mig.CARDS)
def test_a_slice_that_nvml_reports_is_the_planned_one(card: str) -> None:
    for part, fit, _ in mig.plan(card):
        raw = {"uuid": "MIG-1", "name": part.name, "mib": part.memory_bytes >> 20, "slices": 1}
        gpu = {
            "uuid": "GPU-1",
            "name": card,
            "mib": mig.CARDS[card] << 10,
            "capability": (9, 0),
            "mig": 1,
        }
        real = found(gpu | {"slices": [raw]})[1]
        assert (real.profile, real.name) == (part.profile, part.name)
        assert mig.peaks(real) == mig.peaks(part)
        assert fit * part.compute_fraction <= 1
        assert fit * part.bandwidth_fraction <= 1


# The matrix


def test_seven_slices() -> None:
    arms = by_name(mig.matrix(H200, found(h200("a", *["1g.18gb"] * 7)), 7, OLD))
    assert list(arms)[:4] == ["1 × 1g.18gb", "1 × 1g.35gb", "2 × 1g.18gb", "3 × 1g.18gb"]
    for n in range(1, 8):
        arm = arms[f"{n} × 1g.18gb"]
        assert not arm.skipped
        assert len({d.uuid for d in arm.devices}) == n == arm.ranks
    assert arms["1 × 1g.35gb"].skipped == "needs 1 × 1g.35gb on one card, found 0"
    assert (arms["2 × 1g.18gb over gloo"].backend, arms["2 × 1g.18gb over gloo"].skipped) == (
        "gloo",
        "",
    )
    assert "NCCL 2.29.7 refuses slices of one GPU" in arms["2 × 1g.18gb over nccl"].skipped
    assert arms[f"whole {H200}"].skipped.startswith(f"needs a whole {H200}, out of MIG mode")
    newer = by_name(mig.matrix(H200, found(h200("a", *["1g.18gb"] * 7)), 7, NEW))[
        "2 × 1g.18gb over nccl"
    ]
    assert (newer.backend, newer.skipped, len(newer.devices)) == ("nccl", "", 2)


# Rows


def events(step_ms: float, copy_gbps: float, ranks: int) -> list[dict[str, Any]]:
    """What the ranks would emit: steps, copies and, from two ranks on, an all_reduce of 4 MiB in 1
    ms.
    """
    reduced = {
        "op": "all_reduce",
        "dtype": "float32",
        "bytes": 1 << 22,
        "blocking_us": [1500.0],
        "wrong": 0,
    }
    alone: list[dict[str, Any]] = [
        {"step_ms": [step_ms], "sms": 16, "wrong": 0},
        {"copy_gbps": [copy_gbps]},
    ]
    return alone + ([reduced | {"pipelined_us": [1000.0]}] if ranks > 1 else [])


def filled(*cards: dict[str, Any]) -> Report:
    """A report of every arm that these cards could run; each rank does a step in 100 ms and copies
    240 GB/s.
    """
    report, config = (
        Report("mig", {"versions": {}, "command": "python -m nanoray.bench mig"}),
        load_config(preset="tiny"),
    )
    report.conditions["card"] = H200
    for arm in mig.matrix(H200, found(*cards), 7, NEW):
        if not arm.skipped:
            copy = 240 * (2 if arm.name == "1 × 1g.35gb" else 1)
            how = {"backend": "nccl", "backend_reason": "made up"}
            mig.add_rows(report, arm, config, events(100, copy, arm.ranks), how)
    mig._compare(report)
    return report


def test_rows_against_closed_forms() -> None:
    report = filled(h200("a", "1g.35gb", *["1g.18gb"] * 5))
    config = load_config(preset="tiny")
    model = GPT(ModelShape.of(config, VOCAB[config.tokenizer]))
    layers, width, block = config.n_layer, config.n_embd, config.block_size
    per_token = (
        6 * (sum(p.numel() for p in model.parameters()) - block * width)
        + 12 * layers * width * block
    )
    tokens_per_s = 3 * config.global_batch_size * block / 0.1  # three ranks, 100 ms

    def median(arm: str, metric: str) -> float:
        row = report.row(arm, metric)
        assert row is not None
        return row.median

    assert median("3 × 1g.18gb", "throughput") == pytest.approx(tokens_per_s)
    assert median("3 × 1g.18gb", "of peak FLOP/s") == pytest.approx(
        100 * tokens_per_s * per_token / (3 * 989.4e12 / 7)
    )
    assert median("3 × 1g.18gb", "of peak bandwidth") == pytest.approx(100 * 2 * 240 / (4800 / 8))
    assert median("1 × 1g.35gb", "of peak bandwidth") == pytest.approx(100 * 2 * 480 / (4800 / 4))
    assert median("3 × 1g.18gb", "all_reduce of 4 MiB") == pytest.approx(
        (2**22 / 1e-3 / 1e9) * 2 * 2 / 3
    )
    assert median("3 × 1g.18gb / 1 × 1g.18gb", "throughput") == pytest.approx(3)
    assert median("1 × 1g.35gb / 1 × 1g.18gb", "throughput") == pytest.approx(1)
    assert median("1 × 1g.35gb / 1 × 1g.18gb", "memory copy") == pytest.approx(2)
    keys = report.rows[-1].extra | next(r for r in report.rows if r.arm == "3 × 1g.18gb").to_dict()
    assert (keys["ranks"], keys["profile"], keys["sms"], keys["experiment"]) == (
        3,
        "1g.18gb",
        16,
        "slices",
    )
    assert keys["peak_gbps"] == pytest.approx(600)
    assert [mig.ideal(row) for row in mig._series(report)] == [1, 2, 3, 4, 5]
    assert not report.failed


def test_ranks_that_share_one_gpu_have_its_peak_together() -> None:
    gpu, report = found(h200("b"))[0], Report("mig", {"card": H200})
    for n in (1, 2):
        arm = mig.Experiment("stand-in", f"stand-in: {n}", n, (gpu,))
        how = {"backend": "gloo", "backend_reason": "made up"}
        mig.add_rows(report, arm, load_config(preset="tiny"), events(100 * n, 1200 / n, n), how)
    mig._compare(report)
    for metric in ("of peak FLOP/s", "of peak bandwidth"):
        one, two = (report.row(f"stand-in: {n}", metric) for n in (1, 2))
        assert one is not None
        assert two is not None
        assert one.median == pytest.approx(two.median)
    assert one.median == pytest.approx(100 * 2 * 1200 / 4800)
    assert report.rows[-1].values == pytest.approx((1.0,))
    assert [mig.ideal(row) for row in mig._series(report)] == [1, 1]


def test_slices_against_a_whole_card_and_the_figure(tmp_path: Path) -> None:
    report = filled(h200("a", *["1g.18gb"] * 7), h200("b"))
    row = report.row(f"7 × 1g.18gb / whole {H200}", "throughput")
    assert row is not None
    assert row.median == pytest.approx(7)
    mig.MIGBenchmark().draw(report, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    for text in (
        "slices 1g.18gb of one NVIDIA H200",
        "peak 141 TFLOP/s, 600 GB/s",
    ):
        assert text in drawn
    assert "7 × 1g.18gb" in "\n".join(mig.MIGBenchmark().format_markdown(report))


# Real ranks


def apart(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Train without DDP: every rank goes its own way, as with a broken all-reduce."""
    from nanoray.parallel import ddp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "apply_ddp", lambda model, *_: model)
        time_rank(mesh, order, emit)


def test_ranks_agree_or_are_counted_as_wrong(pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(preset="tiny", overrides={"precision": "fp32"})
    right = mig.time_steps(pools(2), config, 2, 0.01)
    infinite = mig.time_steps(pools(2), config.model_copy(update={"lr": 1e30}), 2, 0.01)
    monkeypatch.setattr(mig, "ENTRY", "tests.ranks.test_bench_mig:apart")
    wrong = mig.time_steps(pools(2), config, 2, 0.01)
    assert (right["wrong"], len(right["step_ms"]), right["sms"]) == (0, 2, None)
    assert infinite["wrong"] == 2
    assert wrong["wrong"] == 1


@pytest.mark.full
def test_a_stand_in_run(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(mig)
    out, picture = tmp_path / "mig.json", tmp_path / "mig.svg"
    argv = [
        "mig",
        "--quick",
        "--device",
        "cpu",
        "--workers",
        "2",
    ]
    assert bench.main([*argv, "--json", str(out), "--figure", str(picture)]) == 0
    printed = capsys.readouterr()
    written = json.loads(out.read_text())
    measured = [r for r in written["rows"] if r["values"]]
    assert len(measured) == 8
    assert all(r["arm"].startswith("stand-in: ") for r in measured)
    assert {r["skipped"] for r in written["rows"] if not r["values"]} > {
        "needs 7 × 1g.18gb on one card, found 0"
    }
    (reduced,) = [r for r in measured if r.get("op") == "all_reduce"]
    assert (reduced["wrong"], reduced["ranks"], reduced["dtype"], reduced["bytes"]) == (
        0,
        2,
        "float32",
        1 << 22,
    )
    assert written["conditions"]["slices"] == []
    assert written["ok"]
    assert "stand-in:" in picture.read_text()
    assert printed.out.rstrip().splitlines()[-1].startswith("OK  ")
    assert len(printed.err.splitlines()) == 2
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


# What is refused
