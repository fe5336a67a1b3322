"""What many ranks cost the driver: real verdicts at toy sizes, planted quadratic code, and the driver's own habits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import control
from nanoray.bench.control import BEATS, CPU, HUNG, KILLED, MEMORY, NEWS, RSS, START, WAITS, finding, paste
from nanoray.bench.report import Report
from nanoray.config import load_config
from nanoray.data import DatasetInfo
from nanoray.failures import CAUSES, Failure, Inquest
from nanoray.gang import LOG_LINES, RECORD_S, Gang
from nanoray.launch import Campaign, Stop
from nanoray.placement import Placement
from nanoray.run import RunSpec

JUDGEMENT = ["control", "--part", "judgement"]


def run(tmp_path: Path, *flags: str) -> tuple[int, Report, dict[str, Any]]:
    """Run the benchmark; return its exit code, its report, and its JSON."""
    code = bench.main([*flags, "--json", str(tmp_path / "c.json")])
    return code, Report.read(tmp_path / "c.json"), json.loads((tmp_path / "c.json").read_text())


def test_the_judgement_is_right_and_linear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, told = run(tmp_path, *JUDGEMENT, "--workers", "200,50", "--rounds", "5")
    assert code == 0, capsys.readouterr().out
    rows = {(r.arm, r.metric): r for r in report.rows}
    for n in (50, 200):
        assert all(rows[f"judgement, {n}", kind].wrong == 0 for kind in (KILLED, WAITS, HUNG))
        assert rows[f"judgement, {n}", NEWS].median > 1000
        assert rows[f"judgement, {n}", MEMORY].n == 5
    assert {t["verdict"] for t in told["targets"]} == {"ok"}
    assert len(told["targets"]) == 4
    assert not list(Path("/tmp").glob("nanoray-control-*"))


def test_quadratic_code_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Inquest):
        def ended(self, rank: int, failure: Failure | None, now: float) -> None:
            super().ended(rank, failure, now)
            sum(CAUSES[earlier.cause] for earlier in self.failures)

    monkeypatch.setattr(control, "Inquest", Slow)
    code, _, told = run(tmp_path, *JUDGEMENT, "--workers", "300,1200", "--rounds", "5")
    verdicts = {t["target"]: t["verdict"] for t in told["targets"]}
    assert code == 1
    assert verdicts[f"judgement: growth of {KILLED!r}, 300 to 1200 ranks"] == "MISSED"
    assert "MISSED" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_name_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAUSES, "peer_lost", -1)
    code, report, _ = run(tmp_path, *JUDGEMENT, "--workers", "40", "--rounds", "3")
    wrong = {r.metric: r.wrong for r in report.rows if r.wrong is not None}
    assert code == 1
    assert wrong == {KILLED: 3, WAITS: 0, HUNG: 0}


def test_the_drivers_loop_on_a_real_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--figure={tmp_path / 'c.png'}", f"--html={tmp_path / 'c.html'}"]
    flags = ["--part", "driver", "--workers", "3,12", "--rounds", "1", "--window_s", "1.5"]
    code, report, told = run(tmp_path, "control", *flags, *files)
    out = capsys.readouterr().out
    assert code == 0, out
    rows = {(r.arm, r.metric): r for r in report.rows}
    for n in (3, 12):
        arm = f"driver, {n}"
        assert [rows[arm, kind].wrong for kind in (BEATS, KILLED, WAITS, HUNG)] == [0, 0, 0, 0]
        assert 0 < rows[arm, BEATS].median <= 2.5 * n
        assert 0 < rows[arm, CPU].median < 200
        assert 20 < rows[arm, RSS].median < 4000
        assert rows[arm, START].n == 2
        assert 0 < rows[arm, KILLED].median < 60e3
    assert len(told["targets"]) == 4
    assert all("not judged: n =" in t["verdict"] for t in told["targets"])
    assert finding(report)[0].startswith("12 ranks: ")
    assert paste(report)[0] == "|  | 3 ranks | 12 ranks | exponent |"
    assert out.startswith("|  | 3 ranks"), "stdout is the report's"
    assert control.WRONG[1:] in (tmp_path / "c.html").read_text()
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--workers", "1,64"], "workers = 1,64: one rank has no other that fails with it; give 2 or more"),
        (["--workers", "64,x"], "workers = 64,x: not whole numbers; write N,N like 64,1000,4000"),
        (["--rounds", "0"], "rounds = 0, window_s = None; both must be above 0: leave them out"),
        (["--window_s", "nan"], "rounds = 5, window_s = nan; both must be above 0"),
        (["--part", "judge"], "argument --part: invalid choice: 'judge'"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["control", *flags]) == 2
    assert text in capsys.readouterr().err


# The driver's habits that keep it linear.


def gang_of(folder: Path, n: int, **config: Any) -> Gang:
    """A gang of n seats that nobody has taken, all members."""
    (folder / "logs").mkdir(exist_ok=True)
    data = DatasetInfo("words", "", folder, "uint16", 65, 1000, 100, "", "", {})
    spec = RunSpec(load_config(preset="tiny", overrides=config), data, folder, 0.0)
    place = Placement(None, "cpu", {"CPU": 1.0}, tuple(range(n)))  # type: ignore[arg-type]
    facts: dict[int, dict[str, Any]] = {seat: {"pid": 1, "node": "a", "ip": "10.0.0.1"} for seat in range(n)}
    return Gang(spec, place, members=list(range(n)), facts=facts)


@pytest.mark.parametrize(
    ("ranks", "hang_timeout", "seconds"), [(2, 60.0, 1.0), (500, 60.0, 1.0), (4000, 60.0, 8.0), (4000, 8.0, 2.0)]
)
def test_many_ranks_answer_less_often(tmp_path: Path, ranks: int, hang_timeout: float, seconds: float) -> None:
    assert gang_of(tmp_path, ranks, hang_timeout=hang_timeout).beat_s == seconds
    assert gang_of(tmp_path, ranks, hang_timeout=0.0).beat_s == max(1.0, ranks / 500), "off: nothing to be in time for"


def test_death_records_are_waited_for_together(tmp_path: Path) -> None:
    """On a folder that the nodes do not share nobody leaves one, and thousands may die at once."""
    gang = gang_of(tmp_path, 50)
    gang.heard = began = time.monotonic()
    assert not any(gang._death_record(seat) for seat in range(50))
    assert RECORD_S <= time.monotonic() - began < 10 * RECORD_S


def test_the_end_of_a_long_log(tmp_path: Path) -> None:
    gang = gang_of(tmp_path, 1)
    gang.spec.log(0).write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert gang._log_tail(0).splitlines() == [
        "its log ends:",
        *(f"line {i}" for i in range(100_000 - LOG_LINES, 100_000)),
    ]


def test_a_newcomer_that_has_arrived_is_left_alone(tmp_path: Path) -> None:
    """Every failure seats its own rank; those before it may have their newcomer already."""
    seated = []

    class Seats(Gang):
        def seat(self, seat: int) -> None:
            seated.append(seat)

        def result(self, ref: Any, seat: int) -> tuple[None, Failure]:
            return None, Failure(seat, "killed", f"rank {seat} died")

    plain = gang_of(tmp_path, 4)
    gang = Seats(plain.spec, plain.place, members=plain.members, facts=plain.facts)
    campaign, inquest = Campaign(gang.spec, gang.place, Stop()), Inquest(range(4), True, 60.0, 1.5)
    for seat in (1, 2, 3):
        campaign._rank_ended(gang, inquest, seat, None)
    assert seated == [1, 2, 3]
