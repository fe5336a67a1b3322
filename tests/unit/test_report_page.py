"""The page about a run: how it ended, four figures, the loss, then the rest; nothing that is empty."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.run_folder import lock_run
from nanoray.observe.report.__main__ import page
from nanoray.observe.report.gather import read_run

FINISHED = {
    "exit_reason": "finished",
    "exit_code": 0,
    "total_s": 61.0,
    "world_size": 2,
    "device": "cpu",
}
# As RUN/program.json of `nanoray run`; `trace_every` is 0 without --trace
PROGRAM = {"words": ["train.py"], "trace_every": 0, "started": 1000.0, "command": ["train.py"]}
MOST = FINISHED | {
    "steps": 2,
    "step_ms": 20.0,
    "tok_per_sec": 1234.0,
    "train_loss": 2.5,
    "comm": {"busy_ms": 4.0, "exposed_ms": 2.0, "exposed_share": 10.0, "step_ms": 20.0},
    "sample": "To be",
}


def fault(step: int, recovery: str) -> dict[str, Any]:
    return {
        "event": "fault",
        "time": 1001.0,
        "cause": "killed",
        "title": "rank 1 died",
        "log_tail": [],
        "consequences": [],
        "recovery": recovery,
        "phase": "",
        "step": step,
        "steps_repeated": 0,
    }


def record(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + 30 * step} | values


def trained(step: int) -> dict[str, Any]:
    """A record of our own loop."""
    values = {"train/loss": 3.0 - step / 4, "train/tokens": 96.0, "val/loss": 2.75}
    return record(step, **values, **{"perf/tok_per_sec": 1000.0})


def write_run(
    folder: Path,
    summary: dict[str, Any] | None = None,
    records: list[dict[str, Any]] | None = None,
    faults: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    program: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    if program:
        (folder / "program.json").write_text(json.dumps(program))
    else:
        (folder / "config.json").write_text(json.dumps(config or {"max_steps": 2}))
        (folder / "run.json").write_text(json.dumps({"started": 1000.0}))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    for name, rows in (("metrics", records), ("faults", faults)):
        lines = "".join(json.dumps(row) + "\n" for row in rows or [])
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def page_of(*folders: Path) -> str:
    return page([read_run(folder) for folder in folders])


def badge_of(html: str) -> tuple[str, ...]:
    found = re.search(r'<span class="badge (\w+)">(.*?)</span>(.*?)</p>', html)
    assert found
    return found.groups()


def numbers_of(html: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))


def test_the_page_begins_with_what_matters(tmp_path: Path) -> None:
    records = [trained(1), trained(2)]
    run = write_run(tmp_path / "run", MOST, records, [fault(1, "in_place")])
    html = page_of(run)
    order = (
        "<h1>",
        'class="badge good"',
        'class="numbers"',
        'id="loss"',
        "<h2>Faults",
        'id="charts"',
        'id="figures"',
        "<h2>Sample",
        'id="settings"',
    )
    places = [html.index(part) for part in order]
    assert places == sorted(places), order
    # The loss is wider than each of the other charts.
    assert html.index('id="loss"') < html.index('<div class="charts">') < html.index("<h2>Sample")


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        (FINISHED, ("good", "finished", "")),
        (FINISHED | {"exit_reason": "stopped_by_script"}, ("good", "stopped by script", "")),
        ({"exit_reason": "stopped", "exit_code": 130}, ("open", "stopped", "")),
        (
            {"exit_reason": "failed: rank 1 died: killed by SIGKILL", "exit_code": 1},
            ("bad", "failed", " rank 1 died: killed by SIGKILL"),
        ),
        (
            None,
            ("bad", "not ended", " its command was killed, or runs on another machine"),
        ),
    ],
)
def test_how_a_run_ended(
    tmp_path: Path, summary: dict[str, Any] | None, shown: tuple[str, str, str]
) -> None:
    run = write_run(tmp_path / "run", summary)
    assert badge_of(page_of(run)) == shown


def test_a_run_whose_folder_is_locked_is_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[trained(1)])
    lock, _ = lock_run(run)
    assert lock
    assert badge_of(page_of(run)) == ("open", "running", "")
    assert numbers_of(page_of(run))["time"] == "0:30"
    del lock
    assert badge_of(page_of(run))[1] == "not ended"


@pytest.mark.parametrize(
    ("files", "numbers"),
    [
        # Our own loop.
        (
            {"summary": MOST, "records": [trained(1)], "faults": [fault(1, "in_place")]},
            {
                "validation loss": "2.7500",
                "speed": "1.23k tok/s",
                "time": "1:01",
                "faults survived": "1",
            },
        ),
        # A loop of its own in main(run), which logs a loss.
        (
            {
                "summary": FINISHED,
                "records": [record(1, loss=0.5), record(2, loss=0.25)],
                "faults": [fault(1, "restart"), fault(2, "none")],
            },
            {
                "training loss": "0.2500",
                "time": "1:01",
                "faults survived": "1 of 2",
                "ranks": "2 x cpu",
            },
        ),
        # nanoray run, with --trace and without.
        (
            {
                "summary": FINISHED | {"comm": MOST["comm"]},
                "records": [record(3, **{"mem/rss_gib": 0.5})],
                "program": PROGRAM | {"trace_every": 10},
            },
            {
                "time per step": "20 ms",
                "time": "1:01",
                "faults survived": "0",
                "exposed communication": "10.0 %",
            },
        ),
        (
            {
                "summary": FINISHED,
                "records": [record(5, **{"mem/rss_gib": 0.5})],
                "program": PROGRAM,
            },
            {
                "time": "1:01",
                "faults survived": "0",
                "memory of the largest rank": "0.50 GiB",
                "ranks": "2 x cpu",
            },
        ),
    ],
    ids=["engine", "own loop", "traced program", "program"],
)
def test_four_numbers(tmp_path: Path, files: dict[str, Any], numbers: dict[str, str]) -> None:
    html = page_of(write_run(tmp_path / "run", **files))
    assert numbers_of(html) == numbers
    # They are not repeated in the table.
    assert not set(re.findall(r'<th scope="row">(.*?)</th>', html)) & set(numbers)


def test_the_loss_of_a_loop_of_its_own_is_drawn(tmp_path: Path) -> None:
    records = [record(step, loss=1 / step) for step in (1, 2, 3)]
    assert 'id="loss"' in page_of(write_run(tmp_path / "run", FINISHED, records))


@pytest.mark.parametrize("program", [None, PROGRAM], ids=["run", "program"])
def test_what_is_empty_is_not_on_the_page(tmp_path: Path, program: dict[str, Any] | None) -> None:
    """A run that has just begun: no record, no summary, no fault, and settings without a value."""
    config = {"max_steps": 2, "upload": "", "env": {}, "seed": 1337}
    html = page_of(write_run(tmp_path / "run", config=config, program=program))
    assert "–" not in html
    assert re.findall(r"<t[dh][^>]*>\s*</t[dh]>", html) == []
    assert re.findall(r"<(?:tbody|dl|pre)[^>]*>\s*</", html) == []
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", html)
    assert headings == (["Command"] if program else ["Settings"])
    assert numbers_of(html) == {"faults survived": "0"}


def test_a_comparison_has_the_rows_that_some_run_has(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", FINISHED | {"step_ms": 20.0})
    two = write_run(tmp_path / "two", {"exit_reason": "failed: it broke", "exit_code": 1})
    html = page_of(one, two)
    rows = dict(re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html))
    assert rows["time per step"] == '<td>20 ms</td><td class="differs">–</td>'
    assert "it broke" in rows["ended"]
    assert not rows.keys() & {"MFU", "speed", "validation loss", "dataset"}
