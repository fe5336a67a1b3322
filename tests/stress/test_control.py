"""The stress test of the driver: it runs at small sizes, finds planted quadratic code, and fails if the wrong rank
is named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.harness.report import Report
from nanoray.faults.cause import CAUSES, Failure, FailureCollector
from tests.stress import __main__ as stress
from tests.stress import control
from tests.stress.control import (
    CPU,
    EVENTS,
    HEARTBEATS,
    HUNG,
    KILLED,
    MEMORY,
    RSS,
    START,
    WAITS,
    ControlBenchmark,
    finding,
)

DECISION = ["--part", "decision"]


@pytest.fixture(autouse=True)
def _own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test beside this one that looks for abandoned folders in /tmp does not see those of the
    benchmark.
    """
    get_temp_dir()  # multiprocessing keeps using the one that it makes first
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def run(tmp_path: Path, *flags: str) -> tuple[int, Report, dict[str, Any]]:
    """Run the benchmark; return its exit code, its report, and its JSON."""
    code = stress.main(["control", *flags, "--json", str(tmp_path / "c.json")])
    return code, Report.read(tmp_path / "c.json"), json.loads((tmp_path / "c.json").read_text())


def test_the_decision_is_right_and_linear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, report, found = run(tmp_path, *DECISION, "--workers", "200,50", "--rounds", "5")
    assert code == 0, capsys.readouterr().out
    rows = {(r.arm, r.metric): r for r in report.rows}
    for n in (50, 200):
        assert all(rows[f"decision, {n}", kind].wrong == 0 for kind in (KILLED, WAITS, HUNG))
        assert rows[f"decision, {n}", EVENTS].median > 1000
        assert rows[f"decision, {n}", MEMORY].n == 5
    assert {t["verdict"] for t in found["targets"]} == {"ok"}
    assert len(found["targets"]) == 4
    assert not list(tmp_path.glob("nanoray-control-*"))


def test_quadratic_code_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(FailureCollector):
        def ended(self, rank: int, failure: Failure | None, now: float) -> None:
            super().ended(rank, failure, now)
            sum(CAUSES[earlier.cause] for earlier in self.failures)

    monkeypatch.setattr(control, "FailureCollector", Slow)
    code, _, found = run(tmp_path, *DECISION, "--workers", "300,1200", "--rounds", "5")
    verdicts = {t["target"]: t["verdict"] for t in found["targets"]}
    assert code == 1
    assert verdicts[f"decision: growth of {KILLED!r}, 300 to 1200 ranks"] == "MISSED"
    assert "MISSED" in capsys.readouterr().out.splitlines()[-1]


def test_naming_the_wrong_rank_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAUSES, "peer_lost", -1)
    code, report, _ = run(tmp_path, *DECISION, "--workers", "40", "--rounds", "3")
    wrong = {r.metric: r.wrong for r in report.rows if r.wrong is not None}
    assert code == 1
    assert wrong == {KILLED: 3, WAITS: 0, HUNG: 0}


@pytest.mark.full
def test_the_drivers_loop_on_a_real_ray(
    tmp_path: Path,
    forked_ray: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in forked_ray.items():
        monkeypatch.setenv(key, value)
    files = [f"--figure={tmp_path / 'c.png'}"]
    flags = ["--part", "driver", "--workers", "2,6", "--rounds", "1", "--window_s", "1.5"]
    code, report, found = run(tmp_path, *flags, *files)
    out = capsys.readouterr().out
    assert code == 0, out
    rows = {(r.arm, r.metric): r for r in report.rows}
    for n in (2, 6):
        arm = f"driver, {n}"
        assert [rows[arm, kind].wrong for kind in (HEARTBEATS, KILLED, WAITS, HUNG)] == [0, 0, 0, 0]
        assert 0 < rows[arm, HEARTBEATS].median <= 2.5 * n
        assert 0 < rows[arm, CPU].median < 200
        assert 20 < rows[arm, RSS].median < 4000
        assert rows[arm, START].n == 2
        assert 0 < rows[arm, KILLED].median < 60e3
    assert len(found["targets"]) == 4
    assert all("not judged: n =" in t["verdict"] for t in found["targets"])
    assert finding(report)[0].startswith("6 ranks: ")
    assert ControlBenchmark().format_markdown(report)[0] == "|  | 2 ranks | 6 ranks | exponent |"
    assert out.startswith("|  | 2 ranks"), "stdout is the report's"
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
