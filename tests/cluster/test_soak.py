"""The soak, in short: a few random faults, and the weights of a run without any; and what it is
made of.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import pytest

from tests.harness import leaks
from tests.harness.cluster import ROOT
from tests.harness.commands import wait_for
from tests.stress import soak
from tests.stress.chaos import KILL_NODE, WEIGHTS, SeenRun, kinds

SHORT = (
    "--minutes",
    "0.6",
    "--share",
    "0.4",
    "--every",
    "4",
    "--most",
    "5",
    "--nodes",
    "1",
    "--seed",
    "7",
    "--shared",
)


@pytest.mark.full
def test_a_short_soak_ends_with_the_weights_of_a_run_without_faults(
    text: Path, tmp_path: Path
) -> None:
    found, log = tmp_path / "soak.json", tmp_path / "output.txt"
    flags = ["--json", str(found), "--figure", str(tmp_path / "soak.svg"), "--dataset", str(text)]
    with log.open("w") as stream:
        command = [sys.executable, "-m", "tests.stress", "soak", *SHORT, *flags]
        code = subprocess.run(
            command, cwd=ROOT, stdout=stream, stderr=stream, timeout=600
        ).returncode
    assert code == 0, log.read_text()
    report = json.loads(found.read_text())
    rows = {(row["arm"], row["metric"]): row for row in report["rows"]}
    thrown = rows["faulty", "faults"]["faults"]
    assert len({fault["kind"] for fault in thrown}) >= 3, thrown
    assert len(thrown) == 5
    assert (
        rows["faulty", "model: tensors"]["wrong"]
        == rows["faulty", "optimizer: tensors"]["wrong"]
        == 0
    )
    assert rows["faulty", "logged values"]["median"] > 10
    assert rows["faulty", "drivers"]["median"] > 1
    assert [row.get("wrong") for (arm, _), row in rows.items() if arm == "left behind"] == [
        0,
        0,
        0,
        None,
    ]
    assert (tmp_path / "soak.svg").stat().st_size > 1000


def test_the_seed_chooses_the_order_of_kinds_and_weights_their_number() -> None:
    first = list(islice(kinds(7, 2), 2 * sum(WEIGHTS.values())))
    assert first == list(islice(kinds(7, 2), len(first)))
    assert first != list(islice(kinds(8, 2), len(first)))
    assert {kind: first.count(kind) for kind in WEIGHTS} == {
        kind: 2 * n for kind, n in WEIGHTS.items()
    }
    assert KILL_NODE not in islice(kinds(7, 1), 50)


def test_gaps_are_no_training_and_rates_leave_them_out() -> None:
    points = [(1.0, 0), (1.1, 10), (1.2, 20), (5.2, 21), (5.3, 21), (5.4, 25), (5.5, 30)]
    seen = SeenRun(points)
    assert soak.gaps(seen) == [(1.2, 5.2)]
    assert soak.rates(seen, 30, 1) == pytest.approx([29 / 0.5])
    assert soak.rates(seen, 30, 3) == pytest.approx([100.0, 100.0, 9 / 0.3])


def test_steps_are_repeated_from_the_base_of_the_next_attempt_only() -> None:
    """A new rank 0 whose first group breaks, too, is no attempt from step 0."""
    seen = SeenRun()
    first = [
        (0, "init", 0),
        (41, "forward", 0),
        (0, "init", 0),
        (1, "regroup", 0),
        (41, "data", 40),
    ]
    assert [seen.at(0, *where) for where in first] == [0, 40, 0, 0, 40]
    assert seen.repeated == 0
    assert [
        seen.at(0, *where) for where in [(56, "data", 40), (0, "init", 0), (51, "data", 50)]
    ] == [55, 0, 50]
    assert seen.at(1, 31, "data", 30) == 30
    assert seen.repeated == 5, "of rank 0, from the checkpoint of step 50"


def test_what_differs_or_is_left_behind_fails_the_report(tmp_path: Path) -> None:
    """The comparison sees one bit of one moment, and one record that is missing."""
    import torch

    from nanoray.checkpoint.state.state_dict import StateDict
    from tests.harness.saving import save

    runs = [tmp_path / name for name in ("clean", "faulty")]
    for run, value in zip(runs, (1.0, 1.0000001), strict=True):
        state = StateDict(
            {"w": torch.ones(2)}, {"exp_avg.w": torch.tensor([1.0, value])}, [{}], meta={"step": 5}
        )
        save(run / "checkpoints", state, keep=1)
        records = [{"step": 1, "train/loss": 2.0}, {"step": 5, "train/loss": 1.0}][
            : 2 if value == 1.0 else 1
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = soak.Report("soak", {})
    soak._compare_runs(report, *runs, 5)
    assert [(row.metric, row.wrong) for row in report.rows] == [
        ("model: tensors", 0),
        ("optimizer: tensors", 1),
        ("logged values", 1),
    ]
    assert report.failed
    soak._compare_runs(report, *runs, 6)
    assert report.failures == ["no final checkpoint: found [5, 5] of 6"]


def test_leaks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SETTLE_S", 1.0)
    before = leaks.entries()
    file = Path(f"/tmp/nanoray-test-{os.getpid()}")
    sleeps = [
        sys.executable,
        "-c",
        "import time; print(flush=True); time.sleep(600)",
        str(tmp_path / "marker"),
    ]
    sleeper = subprocess.Popen(sleeps, stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout
        sleeper.stdout.readline()  # a process that has just begun has no command line yet
        file.touch()
        assert any(
            str(sleeper.pid) in line for line in leaks.processes(str(tmp_path / "marker"), 0.0)
        )
        assert str(file) in leaks.abandoned(before)
        assert str(file) not in leaks.abandoned(leaks.entries())
    finally:
        file.unlink()
        sleeper.kill()
        sleeper.communicate()
    assert not leaks.processes(str(tmp_path / "marker"), 0.0)


@pytest.mark.full
def test_an_interrupted_soak_ends_all_that_it_started(text: Path) -> None:
    temp = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # a short path, as /tmp is
    command = [sys.executable, "-m", "tests.stress", "soak", *SHORT, "--dataset", str(text)]
    soaking = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": temp}, stderr=subprocess.PIPE, text=True
    )

    def folder() -> str:
        mine = [str(path) for path in Path(temp).glob("nrs-*")]
        return next(
            (
                path
                for path in mine
                if any("exit_record" in line for line in leaks.processes(path, 0.0))
            ),
            "",
        )

    wait_for(folder, 300, soaking)
    place = folder()
    soaking.send_signal(signal.SIGTERM)
    _, said = soaking.communicate(timeout=200)
    assert soaking.returncode == 128 + signal.SIGTERM
    assert "interrupted" in said
    assert not leaks.processes(place, 60.0)
    os.rmdir(temp)  # raises when something is in it
