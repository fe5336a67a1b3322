"""The sweep of bucket sizes: a real run, a wrong gradient, and the finding worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench.overlap import BUSY, COST, EXPOSED, NO_SYNC, STEP, finding, paste
from nanoray.bench.report import Report, Row, ratio

FLAGS = ["overlap", "--preset", "tiny", "--device", "cpu", "--rounds", "2", "--steps", "2"]


def test_a_real_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many small buckets, and one that holds all; both give the gradients of the first."""
    files = ["--json", str(tmp_path / "o.json"), "--figure", str(tmp_path / "o.png")]
    assert bench.main([*FLAGS, "--workers", "3", "--buckets", "0.01,100", *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    assert "on this machine" in out
    rows = {(r["arm"], r["metric"], r["unit"]): r for r in json.loads((tmp_path / "o.json").read_text())["rows"]}
    for arm in ("0.01 MB", "100 MB"):
        assert rows[arm, STEP, "ms"]["wrong"] == 0
        assert 0 < rows[arm, EXPOSED, "ms"]["median"] <= rows[arm, BUSY, "ms"]["median"]
        assert rows[arm, STEP, "ms"]["n"] == rows[arm, COST, "ms"]["n"] == 2
    assert rows["100 MB", STEP, "ms"]["note"].startswith("1 bucket(s)")
    assert int(rows["0.01 MB", STEP, "ms"]["note"].split()[0]) > 3
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--workers", "1"], "one rank has nothing to hide"),
        (["--buckets", "1,x"], "buckets = 1,x: not numbers"),
        (["--buckets", "0,1"], "a bucket needs a size above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*FLAGS, *flags]) == 2
    assert text in capsys.readouterr().err


def swept(times: dict[str, tuple[float, float, float]]) -> Report:
    """A report with (step, busy, exposed) ms of each arm, three rounds alike, and a bare step of 40 ms."""
    bare = Row(NO_SYNC, STEP, "ms", (40.0,) * 3)
    report = Report("overlap", {}, [bare])
    for arm, (step, busy, exposed) in times.items():
        own = Row(arm, STEP, "ms", (step,) * 3)
        report.rows += [own, Row(arm, BUSY, "ms", (busy,) * 3), Row(arm, EXPOSED, "ms", (exposed,) * 3)]
        report.rows += [Row(arm, COST, "ms", (step - 40.0,) * 3), ratio(f"{arm} / {NO_SYNC}", STEP, own, bare)]
    return report


def test_the_finding_says_so_when_hiding_more_is_slower() -> None:
    """The figures of field experience: small buckets hide 92 % and are slower than one bucket that hides nothing."""
    lines = finding(swept({"1 MB": (61.0, 10.0, 0.8), "25 MB": (55.0, 9.0, 9.0)}))
    assert "fastest: 25 MB buckets, a step takes 1.375 x" in lines[0]
    assert "--bucket_mb 25 on this machine" in lines[0]
    assert "most hidden: 1 MB buckets, 92 %, yet 1.525 x" in lines[1]


def test_the_finding_is_one_line_when_the_most_hidden_is_the_fastest() -> None:
    assert len(finding(swept({"1 MB": (50.0, 10.0, 1.0), "25 MB": (55.0, 9.0, 9.0)}))) == 1


def test_a_table_for_the_readme() -> None:
    lines = paste(swept({"1 MB": (50.0, 10.0, 1.0)}))
    assert lines[3] == "| 1 MB | 50.0 (50.0–50.0) | 10.0 (10.0–10.0) | 1.00 (1.00–1.00) | 10.0 (10.0–10.0) |"
