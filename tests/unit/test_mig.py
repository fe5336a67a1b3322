"""`nanoray check mig`: plans by hand, and lists of made-up cards."""

from __future__ import annotations

from typing import Any

import pytest

from nanoray.cli.mig import CARDS, plan_lines, show_lines
from nanoray.machine.device import Device

H200 = "NVIDIA H200"


def test_a_plan_by_hand() -> None:
    """An H200: 989 TFLOP/s and 4.8 TB/s, in sevenths and eighths."""
    lines = plan_lines(H200)
    rows = {line.split()[0]: line.split() for line in lines if line[:1].isdigit()}
    assert list(rows) == ["1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"]
    assert rows["1g.18gb"][1:6] == ["7", "?", "17.6", "600", "141"]
    assert rows["7g.141gb"][4:6] == ["4800", "989"]
    assert "-cgi 1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb" in "\n".join(lines)


@pytest.mark.parametrize("card", CARDS)
def test_every_card_has_a_plan(card: str) -> None:
    assert len([line for line in plan_lines(card) if line[:1].isdigit()]) == 6


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
