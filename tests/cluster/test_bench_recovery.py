"""bench recovery: short runs with real kills, of every arm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench.peers.torchft import missing
from nanoray.bench.recovery import (
    ARMS,
    GOODPUT,
    OF_SCRIPT,
    ON_TORCHFT,
    PEER,
    REPEATED,
    RUN,
    STANDSTILL,
    TORCHFT,
    TORCHFT_DEFAULTS,
    TORCHRUN,
    TORCHRUN_SCRIPT,
)

SHORT = [
    "--steps",
    "30",
    "--between",
    "10,20",
    "--checkpoint_every",
    "8",
    "--timeout_s",
    "300",
    "--device",
    "cpu",
]


@pytest.mark.usefixtures("shared_head")
@pytest.mark.timeout(600)  # for machines that are busy with other tests
@pytest.mark.parametrize(
    "arms",
    [
        ("in_place",),
        pytest.param(("restart", "spare", "shrink"), marks=pytest.mark.full),
        pytest.param((PEER,), marks=pytest.mark.full),
        pytest.param((TORCHFT,), marks=pytest.mark.full),
        pytest.param((TORCHFT_DEFAULTS,), marks=pytest.mark.full),
        pytest.param((TORCHRUN,), marks=pytest.mark.full),
        pytest.param((RUN, TORCHRUN_SCRIPT), marks=pytest.mark.full),
    ],
)
def test_a_real_kill_in_every_arm(
    arms: tuple[str, ...], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if set(arms) & set(ON_TORCHFT) and (why := missing()):
        pytest.skip(why)
    files = [f"--json={tmp_path / 'r.json'}"]
    flags = [
        "--quick",
        "--dataset",
        str(text),
        f"--figure={tmp_path / 'r.png'}",
        "--arms",
        ",".join(arms),
    ]
    assert bench.main(["recovery", *SHORT, *flags, *files]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK  ")
    rows = {
        (r["arm"], r["metric"]): r for r in json.loads((tmp_path / "r.json").read_text())["rows"]
    }
    for arm in arms:
        row = rows[arm, STANDSTILL]
        (kill,) = row["kills"]
        assert (row["n"], row["wrong"], row["values"]) == (1, 0, [kill["standstill_s"]])
        assert kill["standstill_s"] > 0.01
        assert 10 <= kill["step"] < 30
        if arm in ("in_place", "spare"):
            assert rows[arm, REPEATED]["values"] == [0]
        # From the newest checkpoint; the one of the very last steps may not have been complete
        if arm in ("restart", *OF_SCRIPT):
            assert rows[arm, REPEATED]["values"][0] in (kill["step"] % 8, kill["step"] % 8 + 8)
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_no_arm_is_without_a_test() -> None:
    kinds = {"in_place", "restart", "spare", "shrink", PEER, TORCHFT, TORCHFT_DEFAULTS, TORCHRUN}
    assert set(ARMS) == {*kinds, *OF_SCRIPT}


@pytest.mark.full
def test_a_real_plan_of_kills(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, which starts all ranks anew in the run's folder: most of this short time is
    lost to that.
    """
    flags = [
        "--arms",
        "torchrun",
        "--kills",
        "0",
        "--goodput_s",
        "5",
        "--mean_s",
        "2",
        "--dataset",
        str(text),
    ]
    assert bench.main(["recovery", *SHORT, *flags, f"--json={tmp_path / 'r.json'}"]) == 0, (
        capsys.readouterr()
    )
    (row,) = [
        r for r in json.loads((tmp_path / "r.json").read_text())["rows"] if r["metric"] == GOODPUT
    ]
    assert 0 < row["median"] < 100
    assert any(hit for _, _, hit in row["kills"])
    assert row["repeated"] >= 0
    assert row["clean_per_s"] > 1
