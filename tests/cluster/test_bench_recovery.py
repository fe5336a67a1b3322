"""bench recovery: short runs with real kills, of every arm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import recovery
from nanoray.bench.harness.launchers import RANK_PID
from nanoray.bench.harness.processes import session_members
from nanoray.bench.killed import longest_pause, wrong_among
from nanoray.bench.peers.torchft import missing
from nanoray.bench.recovery import (
    ARMS,
    DRAIN_STANDSTILL,
    DRAINED_ARMS,
    GOODPUT,
    ON_TORCHFT,
    PEER,
    REPEATED,
    STANDSTILL,
    TORCHFT,
    TORCHFT_DEFAULTS,
    TORCHRUN,
)
from nanoray.errors import ConfigError

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
        if arm == "restart":
            assert rows[arm, REPEATED]["values"][0] in (kill["step"] % 8, kill["step"] % 8 + 8)
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_no_arm_is_without_a_test() -> None:
    kinds = {"in_place", "restart", "spare", "shrink", PEER, TORCHFT, TORCHFT_DEFAULTS, TORCHRUN}
    assert set(ARMS) == kinds
    assert set(DRAINED_ARMS) == {"in_place", "spare", PEER, TORCHFT}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arm", DRAINED_ARMS)
def test_a_real_drained_node_in_every_arm(
    arm: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node is announced and killed; the losses are those of a run without that."""
    if arm in ON_TORCHFT and (why := missing()):
        pytest.skip(why)
    out = tmp_path / "r.json"
    flags = ["--kills", "0", "--goodput_s", "0", "--drains", "1", "--notice_s", "6"]
    flags += ["--drain_at", "100", "--watch_s", "10", "--checkpoint_every", "50"]
    flags += ["--timeout_s", "400", "--device", "cpu", "--workers", "2", "--dataset", str(text)]
    code = bench.main(["recovery", *flags, "--arms", arm, f"--json={out}"])
    told = capsys.readouterr()
    assert code == 0, told
    rows = {(r["arm"], r["metric"]): r for r in json.loads(out.read_text())["rows"]}
    row = rows[arm, DRAIN_STANDSTILL]
    (drain,) = row["drains"]
    assert (row["n"], row["wrong"]) == (1, 0)
    assert drain["standstill_s"] > 0.05
    if arm in ("in_place", "spare", TORCHFT):
        assert drain["repeated"] == 0
    if arm == PEER:
        # Ray Train waits until the end of the notice, then begins again from a checkpoint
        assert drain["after_s"] > 6
        assert drain["repeated"] > 0
    assert f"| {arm} | " in told.out


def test_the_longest_pause_counts_new_steps_only() -> None:
    """Steps 1 to 5, then 4 and 5 again in another attempt, then 6 to 8."""
    done = {(0, step): 10.0 + step for step in range(1, 6)}
    done |= {(1, 4): 20.0, (1, 5): 21.0, (1, 6): 23.0, (1, 7): 24.0, (1, 8): 26.5}
    pause = longest_pause(done, 14.5)
    assert pause == (8.0, 5, 2, 23.0)
    # A pause that had begun before the moment counts from the moment on.
    assert longest_pause(done, 16.0) == (7.0, 5, 2, 23.0)
    assert longest_pause(done, 23.5) == (2.5, 7, 0, 26.5)
    assert longest_pause({}, 0.0) is None


def test_losses_are_compared_up_to_the_last_step_of_both() -> None:
    reference = {step: float(step) for step in range(1, 6)}
    assert wrong_among({1: 1.0, 2: 2.0, 3: 3.0}, reference, 0.0) == 0
    assert wrong_among({1: 1.0, 3: 3.0}, reference, 0.0) == 1
    assert wrong_among({step: float(step) for step in range(1, 9)}, reference, 0.0) == 0
    assert wrong_among({1: 1.0, 2: 2.1}, reference, 0.0) == 1
    assert wrong_among({1: 1.0, 2: 2.1}, reference, 0.1) == 0


@pytest.mark.full
def test_a_peer_asks_for_notices_only_where_ray_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not at the top, which each worker imports for its list of tests: it takes seconds
    import ray.train

    from nanoray.bench.peers import ray_train

    settings = ray_train.preemption_settings()
    assert settings == {"max_preemption_failures": -1, "preemption_grace_s": 0.0}
    assert ray.train.FailureConfig(**settings).max_preemption_failures == -1

    @dataclass
    class Older:
        max_failures: int = 0

    monkeypatch.setattr(ray_train.ray.train, "FailureConfig", Older)
    with pytest.raises(
        ConfigError, match=r"has no max_preemption_failures; use Ray 2\.60 or newer"
    ):
        ray_train.preemption_settings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drains", "-1"], "drains = -1; give 0 or more, or leave it out for 0"),
        (["--kills", "0", "--goodput_s", "0"], "drains = 0: nothing to measure"),
        (["--drains", "1", "--watch_s", "0"], "watch_s = 0; give a number above 0"),
        (
            ["--drains", "1", "--arms", "torchrun"],
            "none of the arms torchrun can lose a drained node",
        ),
        (["--drains", "1", "--workers", "3"], "drains = 1 needs 2 ranks on CPUs, but there are 3"),
    ],
)
def test_drains_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["recovery", "--device", "cpu", *flags]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_peer_that_is_not_installed_is_skipped_and_says_how(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "torchft is not installed: pip install it"
    monkeypatch.setattr(recovery, "missing", lambda: why)
    flags = ["--quick", *SHORT, "--dataset", str(text), "--arms", f"{TORCHFT},{TORCHRUN}"]
    assert bench.main(["recovery", *flags, f"--json={tmp_path / 'r.json'}"]) == 0, (
        capsys.readouterr()
    )
    rows = {
        (r["arm"], r["metric"]): r for r in json.loads((tmp_path / "r.json").read_text())["rows"]
    }
    assert rows[TORCHFT, STANDSTILL]["skipped"] == why
    assert rows[TORCHRUN, STANDSTILL]["n"] == 1
    assert bench.main(["recovery", *SHORT, "--dataset", str(text), "--arms", TORCHFT]) == 0
    told = capsys.readouterr()
    assert f"skipped  {TORCHFT}: {why}" in told.err
    assert [TORCHFT, "skipped", "0"] in [line.split() for line in told.out.splitlines()]


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


@pytest.mark.full
def test_ctrl_c_ends_the_ranks_as_well(text: Path) -> None:
    """torchrun gives each rank a session of its own."""
    temp = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # a short path, as /tmp is
    argv = [sys.executable, "-m", "nanoray.bench", "recovery", "--arms", "torchrun", "--kills", "0"]
    run = subprocess.Popen(
        [*argv, "--device", "cpu", "--dataset", str(text)],
        env=os.environ | {"TMPDIR": temp},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline, ranks = time.monotonic() + 60, []
    while len(ranks) < 2 and time.monotonic() < deadline and run.poll() is None:
        logs = Path(temp).glob("nrb-*/*/*/logs/rank*.log")
        ranks = [int(found[1]) for log in logs if (found := RANK_PID.search(log.read_text()))]
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=200)
    assert len(ranks) == 2
    assert run.returncode == 130
    assert "no report was written" in err
    assert not any(session_members(pid) for pid in ranks)
    os.rmdir(temp)  # raises when something is in it
