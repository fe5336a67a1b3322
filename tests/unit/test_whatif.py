"""What a run's own trace says of another link, bucket size or number of ranks: steps worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.trace import whatif
from nanoray.trace.log import merge
from nanoray.trace.recorder import ClockOffset

RING = 1e-4, 1e-9  # seconds a message and a byte: a ring of two sends 2 messages, and its bytes once
SMALL, LARGE = 1_000_000, 4_000_000


def rank_notes(step: int, late_ms: float = 0.0, **bucket: Any) -> dict[str, Any]:
    """One rank's step: forward 10 ms; buckets ready at 16 and 20, sent in 1.2 and 4.2 ms; optimizer and log 3 ms."""

    def at(ms: float) -> float:
        return 100.0 + ms / 1e3

    phases = [("forward", 0.0, 10.0), ("backward", 10.0, 24.2), ("optimizer", 24.2, 26.2), ("eval", 26.2, 50.0)]
    spans = [(SMALL, 16.0 - late_ms, 16.0, 17.2), (LARGE, 20.0 - late_ms, 20.0, 24.2)]
    base = {"op": "all_reduce", "what": "gradients", "group": "default", "phase": "backward", "dtype": "float32"}
    found = [
        base | {"size_bytes": size, "timing": "queue", "bucket": i, "last": i == 1, "enqueue": at(ready)}
        | {"start": at(start), "end": at(end)} | bucket
        for i, (size, ready, start, end) in enumerate(spans)
    ]  # fmt: skip
    marks = [[name, at(start), at(end)] for name, start, end in [*phases, ("log", 50.0, 51.0)]]
    return {"step": step, "phases": marks, "collectives": found, "no_sync_s": None, "profiled": False}


def write_run(folder: Path, steps: int = 4, config: dict[str, Any] | None = None, **bucket: Any) -> Path:
    (folder / "comm").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"allreduce": "backend", "dp_mode": "ddp"} | (config or {})))
    made = (
        merge([rank_notes(n, 0.5, **bucket), rank_notes(n, **bucket)], [ClockOffset(0, 0)] * 2) | {"attempt": 0}
        for n in range(1, steps + 1)
    )
    (folder / "comm" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in made))
    return folder


def asked(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], dict[str, float]]:
    """The lines before the table, and the step of each of its rows in ms."""
    assert whatif.main([str(run), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[:3], {row.split("  ")[0]: float(row.split()[-4]) for row in lines[4:]}


def test_the_run_as_it_was_is_predicted_beside_its_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last bucket is exposed: 10 + 10 + 4.2 + 3 ms. The slower rank counts; an evaluation does not."""
    said, rows = asked(write_run(tmp_path / "run"), capsys)
    assert said[0] == "run    run: 2 ranks, 2 bucket(s) of 0.954 to 3.81 MB, all-reduce backend"
    assert said[1] == "link   100 us a message, 1 GB/s (median error 0 %)"
    assert said[2].startswith("error  predicted 27.2 ms, measured 27.2 ms (27.2-27.2, n = 2): ")
    assert said[2].endswith("0 %, for the run as it was")
    assert rows == {"as it was": 27.2}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--bandwidth_gb_per_s", "0.5"), {"as it was": 27.2, "another link": 31.2}),  # 0.2 + 8 ms exposed
        (("--latency_us", "1000"), {"as it was": 27.2, "another link": 29.0}),  # 2 + 4
        (("--bucket_mb", "100"), {"as it was": 27.2, "bucket_mb 100": 28.2}),  # one of 5 MB: 0.2 + 5
        (("--ranks", "1,4"), {"as it was": 27.2, "ranks 1": 23.0, "ranks 4": 29.6}),  # 0.6 + 1.5 times the bytes
        (
            ("--ranks", "4", "--allreduce", "halving_doubling"),  # four messages
            {"as it was": 27.2, "ranks 4, allreduce halving_doubling": 29.4},
        ),
    ],
)  # fmt: skip
def test_each_question_has_the_answer_worked_out_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: dict[str, float]
) -> None:
    assert asked(write_run(tmp_path / "run"), capsys, *flags)[1] == expected


def test_a_topology_brings_its_own_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.yaml"
    link = "{alpha_us: 100, bandwidth_gb_per_s: 0.5}"
    file.write_text(f"ranks_per_node: 1\nintra: fit\ninter: {link}\n")
    assert asked(write_run(tmp_path / "run"), capsys, "--topology", str(file))[1]["another link"] == 31.2


def test_the_error_is_that_of_steps_that_taught_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every second traced step is slower by 12.8 ms in its forward: the prediction does not know it."""
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "comm" / "steps.jsonl").read_text().splitlines()]
    for step in lines[1::2]:
        step["figures"]["step_ms"] += 12.8
    (run / "comm" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in lines))
    assert "predicted 27.2 ms, measured 40.0 ms (40.0-40.0, n = 2): -32 %" in asked(run, capsys)[0][2]


def test_time_in_flight_together_is_shared() -> None:
    assert whatif.shared([(0.0, 4.0), (2.0, 6.0)]) == [3.0, 3.0]
    assert whatif.shared([(0.0, 6.0), (2.0, 4.0), (7.0, 8.0)]) == [5.0, 1.0, 1.0]


def test_smaller_buckets_get_ready_between_the_known_moments(tmp_path: Path) -> None:
    past = whatif.read_past(write_run(tmp_path / "run"))
    cut = whatif.cut_anew(past.step.buckets, 2_500_000 / 2**20)
    assert [b.nbytes for b in cut] == [2_500_000, 2_500_000]
    assert [1e3 * b.ready_s for b in cut] == pytest.approx([6 + 4 * 1.5 / 4, 10])


def test_one_size_of_buckets_has_no_latency_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, _ = asked(write_run(tmp_path / "run", size_bytes=SMALL), capsys)
    assert "(all buckets have one size, so latency counts as transfer)" in said[1]


@pytest.mark.parametrize(
    ("run", "flags", "text"),
    [
        ({"config": {"dp_mode": "zero1"}}, [], "has dp_mode = zero1: only steps whose buckets are summed by one"),
        ({"config": {"tp": 2, "grad_compress": "int8"}}, [], "has grad_compress = int8, tp = 2"),
        ({"bucket": None}, [], "have no buckets; trace a run of 2 ranks or more"),
        ({}, ["--allreduce", "magic"], "allreduce = magic: use one of ring, tree"),
        ({}, ["--ranks", "0"], "0: sizes, ranks and speeds are above 0"),
        ({}, ["--topology", "ethernet-25g", "--latency_us", "1"], "topology has links of its own; drop latency_us"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: dict[str, Any], flags: list[str], text: str
) -> None:
    assert whatif.main([str(write_run(tmp_path / "run", **run)), *flags]) == 2
    assert text in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif.main([str(tmp_path)]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
