"""The benchmark of two nodes on a slow link: what it refuses, its table, and a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import hybrid
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.harness.thin_links import LinkSpeed, parse_links, why_not
from nanoray.bench.hybrid import ARMS, BETWEEN, FORMULA, STEP, HybridBenchmark


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ranks_per_node", "1"], "a group of one rank shards nothing"),
        (["--rounds", "0"], "rounds = 0"),
        (["--links", "fast"], "links = fast: fast is no MS/MBIT; write for example none,1/1000"),
        (["--links", "1/0"], "1/0 is no link; a delay is at least 0 ms, and a speed above 0"),
        (["--arms", "zero3"], "unknown arm zero3"),
        (["--settings", "n_emd=3"], "n_emd; did you mean n_embd?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "RankPool", lambda _: pytest.fail("it started ranks"))
    assert bench.main(["layouts", "hybrid", "--quick", *flags]) == 2
    assert text in capsys.readouterr().err


def test_links_by_hand() -> None:
    assert parse_links("none,0.5/100", "1/100") == [None, LinkSpeed(0.5, 100)]


def test_a_line_per_link_and_mode() -> None:
    """Ratios compare a mode in groups with itself over all ranks, at the same link."""
    report = Report("hybrid", {"gpus": []})
    for link, plain, grouped in (("one node", 100.0, 110.0), ("1 ms, 100 Mbit/s", 900.0, 450.0)):
        report.rows += [
            Measurement(f"zero2 at {link}", STEP, "ms", (plain,) * 5),
            Measurement(f"zero2 hybrid at {link}", STEP, "ms", (grouped,) * 5),
        ]
        hybrid._compare(report, ["zero2", "zero2 hybrid"], link)
    hybrid._add_rows(report, "zero2 at slow", (1.0,), [10.3], 10.0)
    (target,) = report.targets
    assert target.row.median == pytest.approx(3.0)
    assert target.verdict.startswith("ok")

    text = [line.split("  ") for line in HybridBenchmark().format_text(report)]
    lines = [[cell.strip() for cell in line if cell.strip()] for line in text]
    assert [line[:2] for line in lines[1:5]] == [
        ["one node", "zero2"],
        ["one node", "zero2 hybrid"],
        ["1 ms, 100 Mbit/s", "zero2"],
        ["1 ms, 100 Mbit/s", "zero2 hybrid"],
    ]
    assert lines[4][2].startswith("0.500")


@pytest.mark.full
def test_two_nodes_on_a_thin_link(tmp_path: Path) -> None:
    """Real TCP: what the relay counts is what the formula says, with the headers."""
    if reason := why_not():
        pytest.skip(reason)
    files = [f"--json={tmp_path / 'h.json'}", f"--figure={tmp_path / 'h.png'}"]
    flags = ["--preset", "tiny", "--settings", "n_embd=128", "--links", "none,1/1000"]
    bench.main(["layouts", "hybrid", "--quick", *flags, *files])
    found = json.loads((tmp_path / "h.json").read_text())
    assert found["failures"] == []
    rows = {(row["arm"], row["metric"]): row for row in found["rows"]}
    for arm in ARMS:
        for link in ("one node", str(LinkSpeed(1, 1000))):
            assert rows[f"{arm} at {link}", STEP]["median"] > 0
        assert (f"{arm} at one node", BETWEEN) not in rows
        counted = rows[f"{arm} at {link}", BETWEEN]["median"]
        assert counted == pytest.approx(rows[f"{arm} at {link}", FORMULA]["median"], rel=0.05), arm
    assert (tmp_path / "h.png").read_bytes()[:4] == b"\x89PNG"
