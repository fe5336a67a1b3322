"""The sweep of all-reduces: its words, and one real run on gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import algorithms as bench
from nanoray.bench.__main__ import main
from nanoray.bench.harness.report import Report, conditions


def event(algorithm: str, size: int, time_us: list[float], **more: Any) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "bytes": size,
        "ranks": 4,
        "time_us": time_us,
        "wrong": 0,
    } | more


def test_a_row_has_every_turn_and_what_was_wrong() -> None:
    row = bench.row_of(event("ring", 10**6, [1000.0, 3000.0, 2000.0], wrong=3))
    assert (row.metric, row.unit, row.median, row.problem) == (
        "976.562 KB",
        "us",
        2000.0,
        "3 wrong",
    )
    assert (row.extra["algorithm"], row.extra["bytes"], row.extra["ranks"]) == ("ring", 10**6, 4)


def test_an_algorithm_stands_beside_the_backend_in_the_same_turn(tmp_path: Path) -> None:
    """The machine was slow in the backend's first turn; fast and wrong is not drawn."""
    events = [
        event("backend", 1 << 10, [900.0, 9.0, 9.0]),
        event("tree", 1 << 10, [300.0, 3.0, 2.0]),
        event("flat", 1 << 10, [1.0] * 3, wrong=1),
    ]
    report = Report("algorithms", conditions("", []), [bench.row_of(e) for e in events])
    report.compare("backend", "tree", "1 KB")
    benchmark = bench.AlgorithmsBenchmark()
    assert benchmark.format_markdown(report)[2] == "| 1 KB | 9.00 | 3.00 (3.00 x) | 1.00 |"
    benchmark.draw(report, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<!-- tree -->" in drawn
    assert "<!-- flat -->" not in drawn


@pytest.mark.full
def test_one_real_sweep(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(bench)
    path = tmp_path / "rows.json"
    assert (
        main(
            [
                "communication",
                "algorithms",
                "--quick",
                "--workers",
                "3",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    rows = [row for row in json.loads(path.read_text())["rows"] if row["unit"] == "us"]
    assert {(row["arm"], row["bytes"]) for row in rows} == {
        (arm, size) for arm in ("backend", *bench.BY_HAND) for size in (1 << 10, 1 << 16, 1 << 20)
    }
    for row in rows:
        assert (row["op"], row["dtype"], row["ranks"], row["wrong"], row["n"]) == (
            "all_reduce",
            "float32",
            3,
            0,
            4,
        )
    printed = capsys.readouterr().out
    assert "all_reduce, us" in printed
    assert printed.splitlines()[-1].startswith("OK  ")
