"""`nanoray check mig`: plans by hand, and lists of made-up cards."""

from __future__ import annotations

from typing import Any

import pytest

from nanoray.cli.mig import CARDS, main, plan_lines, show_lines
from nanoray.machine.device import Device
from nanoray.models.costs import flops_per_token
from nanoray.models.gpt import ModelShape

H200 = "NVIDIA H200"


def test_a_plan_by_hand() -> None:
    """An H200: 989 TFLOP/s and 4.8 TB/s, in sevenths and eighths; speed = share x peak x MFU /
    FLOPs of a token.
    """
    from nanoray.config import load_config

    lines = plan_lines(H200, "gpt2-124m", 0.4)
    rows = {line.split()[0]: line.split() for line in lines if line[:1].isdigit()}
    assert list(rows) == ["1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"]
    assert rows["1g.18gb"][1:6] == ["7", "?", "17.6", "600", "141"]
    assert rows["7g.141gb"][4:6] == ["4800", "989"]
    flops = flops_per_token(ModelShape.of(load_config(None, "gpt2-124m"), 50304))
    whole = float(rows["7g.141gb"][6].replace(",", ""))
    assert whole == pytest.approx(0.4 * 989.4e12 / flops, rel=1e-3)
    assert float(rows["1g.18gb"][7].replace(",", "")) == pytest.approx(whole, rel=1e-3), (
        "seven sevenths"
    )
    assert "-cgi 1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb" in "\n".join(lines)


@pytest.mark.parametrize(
    ("card", "first", "last"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            ["7·16/132 SMs, 7·1/8 bandwidth", "119"],
            ["1·132/132 SMs, 1·8/8 bandwidth", "989"],
        ),
        (
            "NVIDIA A100-SXM4-80GB",
            ["7·14/108 SMs, 7·1/8 bandwidth", "40"],
            ["1·98/108 SMs, 1·8/8 bandwidth", "283"],
        ),
        (
            H200,
            ["7·1/7 compute, 7·1/8 bandwidth", "141"],
            ["1·7/7 compute, 1·8/8 bandwidth", "989"],
        ),
    ],
)
def test_shares_speed_and_peak_agree_with_the_sms(
    card: str, first: list[str], last: list[str]
) -> None:
    rows = [line for line in plan_lines(card, "gpt2-124m", 0.4) if line[:1].isdigit()]
    speeds = [float(row.split()[6].replace(",", "")) for row in rows]
    peaks = [float(row.split()[5]) for row in rows]
    for i, (shares, tflops) in ((0, first), (-1, last)):
        assert rows[i].endswith(shares)
        assert peaks[i] == pytest.approx(float(tflops), abs=1)
    assert [speed / speeds[-1] for speed in speeds] == pytest.approx(
        [p / peaks[-1] for p in peaks], rel=0.02
    )


@pytest.mark.parametrize("card", CARDS)
def test_every_card_has_a_plan(card: str) -> None:
    assert len([line for line in plan_lines(card, "tiny", 0.3) if line[:1].isdigit()]) == 6


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["plan", "--card", "NVIDIA T4"],
            "'NVIDIA T4' is not known to have MIG; one of NVIDIA A100",
        ),
        (["plan", "--card", H200, "--mfu", "40"], "mfu = 40.0 is no share"),
        (["plan", "--card", H200, "--preset", "gtp2-124m"], "did you mean gpt2-124m"),
        (["cut"], "unknown command cut; one of plan, show"),
    ],
)
def test_refusals(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert text in capsys.readouterr().err


def gpu(**values: Any) -> Device:
    return Device("cuda", 0, "GPU-a", H200, 141 << 30, "GPU-a", bf16=True, **values)


def test_show_lists_slices_and_hands_them_over() -> None:
    parts = [
        Device(
            "mig",
            i,
            f"MIG-{i}",
            f"{H200} MIG 1g.18gb",
            18 << 30,
            "GPU-a",
            "1g.18gb",
            1 / 7,
            1 / 8,
            bf16=True,
        )
        for i in (0, 1)
    ]
    lines = "\n".join(show_lines([gpu(mig_mode=True), *parts]))
    assert "GPU 0  NVIDIA H200 GPU-a · 141 GiB · in MIG mode" in lines
    assert "1g.18gb   MIG-1 · 18.0 GiB · peak 141 TFLOP/s, 600 GB/s" in lines
    assert "CUDA_VISIBLE_DEVICES=MIG-0,MIG-1 ray start --head --num-gpus=2" in lines
