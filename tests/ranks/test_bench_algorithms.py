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


def test_a_row_follows_the_definitions() -> None:
    row = bench.row_of(event("ring", 10**6, [1000.0, 3000.0, 2000.0], wrong=3))
    assert (row.metric, row.unit, row.median, row.problem) == (
        "976.562 KB",
        "us",
        2000.0,
        "3 wrong",
    )
    expected = {
        "op": "all_reduce",
        "dtype": "float32",
        "bytes": 10**6,
        "ranks": 4,
        "time_us": 2000.0,
    }
    expected |= {"p99_us": 3000.0, "algbw_gbps": 0.5, "busbw_gbps": 0.75}  # 1e6 B in 2 ms; 2 * 3/4
    assert {key: row.extra[key] for key in expected} == pytest.approx(expected)


def report_of(*events: dict[str, Any]) -> Report:
    return Report("algorithms", conditions("", []), [bench.row_of(e) for e in events])


def test_where_the_winner_changes_is_said_and_drawn(tmp_path: Path) -> None:
    report = report_of(
        *(event("backend", size, [9.0] * 5) for size in (1 << 10, 1 << 12, 1 << 26)),
        *(
            event("tree", size, [us] * 5)
            for size, us in ((1 << 10, 2.0), (1 << 12, 3.0), (1 << 26, 50.0))
        ),
        event("double_tree", 1 << 12, [2.8] * 5),  # 7 % faster than the tree: a tie
        event("flat", 1 << 10, [1.0] * 5, wrong=1),  # fast and wrong wins nothing
        event("ring", 1 << 10, [4.0] * 5),
        event("ring", 1 << 26, [10.0] * 5),
    )
    assert bench.winners(report) == [(1 << 10, "tree"), (1 << 12, "tree"), (1 << 26, "backend")]
    assert bench.crossovers(report) == [
        "fastest, or within 10 %, 1 KB to 4 KB: tree",
        "fastest, or within 10 %, 64 MB: backend",
    ]
    bench._add_targets(report, 4, "gloo")
    assert [(t.row.arm, t.row.median, t.verdict) for t in report.targets] == [
        ("backend / tree", 4.5, "ok"),
        ("ring / backend", pytest.approx(10 / 9), "ok"),
    ]
    figure = tmp_path / "plot.svg"
    bench.AlgorithmsBenchmark().draw(report, figure)
    assert "tree | backend" in figure.read_text()
    assert (
        "fastest, or within 10 %, 64 MB: backend"
        in bench.AlgorithmsBenchmark().format_markdown(report)[-1]
    )


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
        assert row["busbw_gbps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3 * 4 / 3)
    printed = capsys.readouterr().out
    assert "all_reduce, us" in printed
    assert "no finding: n = 4, and fewer than 5 rounds" in printed
