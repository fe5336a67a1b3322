"""What a run's own trace says of another link, bucket size or number of ranks: steps worked out by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.forecast import whatif
from nanoray.trace.log import merge
from nanoray.trace.recorder import ClockOffset

# Seconds a message and a byte: a ring of two sends 2 messages, and its bytes once
RING = 1e-4, 1e-9
SMALL, LARGE = 1_000_000, 4_000_000


def rank_notes(step: int, late_ms: float = 0.0, **bucket: Any) -> dict[str, Any]:
    """One rank's step: forward 10 ms; buckets ready at 16 and 20, sent in 1.2 and 4.2 ms; optimizer
    and log 3 ms.
    """

    def at(ms: float) -> float:
        return 100.0 + ms / 1e3

    phases = [
        ("forward", 0.0, 10.0),
        ("backward", 10.0, 24.2),
        ("optimizer", 24.2, 26.2),
        ("eval", 26.2, 50.0),
    ]
    spans = [(SMALL, 16.0 - late_ms, 16.0, 17.2), (LARGE, 20.0 - late_ms, 20.0, 24.2)]
    base = {
        "op": "all_reduce",
        "what": "gradients",
        "group": "default",
        "phase": "backward",
        "dtype": "float32",
    }
    found = [
        base | {"size_bytes": size, "timing": "queue", "bucket": i, "last": i == 1, "enqueue": at(ready)}
        | {"start": at(start), "end": at(end)} | bucket
        for i, (size, ready, start, end) in enumerate(spans)
    ]  # fmt: skip
    marks = [[name, at(start), at(end)] for name, start, end in [*phases, ("log", 50.0, 51.0)]]
    return {
        "step": step,
        "phases": marks,
        "collectives": found,
        "no_sync_s": None,
        "profiled": False,
    }


def sharded_notes(step: int, mode: str, late_ms: float = 0.0, accum: int = 1) -> dict[str, Any]:
    """One rank's step where the state is sharded. Half an all-reduce: the small one takes 0.6 ms,
    the large one 2.1 ms.

    fsdp: both are gathered in forward, and scattered in backward. zero1: buckets are ready at 16
    and 20; the gathers take 2.7 ms, of which 1 ms passes in the log and the rest is waited for in
    forward.
    """

    def at(ms: float) -> float:
        return 100.0 + ms / 1e3

    def note(
        op: str, phase: str, size: int, start: float, end: float, bucket: int | None = None
    ) -> dict[str, Any]:
        what = "weights" if op == "all_gather" else "gradients"
        moments = {
            "enqueue": at(start - late_ms * (bucket is not None)),
            "start": at(start),
            "end": at(end),
        }
        base = {
            "op": op,
            "what": what,
            "group": "dp",
            "phase": phase,
            "dtype": "float32",
            "timing": "call",
        }
        return base | {"size_bytes": size, "bucket": bucket, "last": bucket == 1} | moments

    if mode == "fsdp":
        found = [
            note("all_gather", "forward", SMALL, 0.0, 0.6),
            note("all_gather", "forward", LARGE, 3.0, 5.1),
            note("reduce_scatter", "backward", LARGE, 14.0, 16.1),
            note("reduce_scatter", "backward", SMALL, 18.0, 18.6),
            note("all_gather", "eval", LARGE, 23.0, 25.1),
        ]
        ends = (10.0, 20.0)
    else:
        found = [
            note("all_gather", "forward", SMALL, 0.0, 0.6),
            note("all_gather", "forward", LARGE, 0.6, 1.7),
        ]
        found += [note("reduce_scatter", "backward", SMALL, 16.0, 16.6, 0)] * accum
        found += [note("reduce_scatter", "backward", LARGE, 20.0, 22.1, 1)]
        ends = (10.0, 22.1)
    names = [("forward", 0.0, ends[0]), ("backward", *ends), ("optimizer", ends[1], ends[1] + 2.0)]
    names += [("eval", ends[1] + 2.0, 50.0), ("log", 50.0, 51.0)]
    marks = [[name, at(start), at(end)] for name, start, end in names]
    return {
        "step": step,
        "phases": marks,
        "collectives": found,
        "no_sync_s": None,
        "profiled": False,
    }


def write_run(
    folder: Path, steps: int = 4, config: dict[str, Any] | None = None, **bucket: Any
) -> Path:
    (folder / "comm").mkdir(parents=True)
    values = {"allreduce": "backend", "dp_mode": "ddp", "device": "cpu"} | (config or {})
    (folder / "config.json").write_text(json.dumps(values))

    def notes(step: int, late_ms: float) -> dict[str, Any]:
        if values["dp_mode"] == "ddp":
            return rank_notes(step, late_ms, **bucket)
        return sharded_notes(step, values["dp_mode"], late_ms, **bucket)

    made = (
        merge([notes(n, 0.5), notes(n, 0.0)], [ClockOffset(0, 0)] * 2) | {"attempt": 0}
        for n in range(1, steps + 1)
    )
    (folder / "comm" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in made))
    return folder


def asked(
    run: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[list[str], dict[str, float]]:
    """The lines before the table, and the step of each of its rows in ms."""
    assert whatif.main([str(run), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[:3], {row.split("  ")[0]: float(row.split()[-4]) for row in lines[4:]}


def test_the_run_as_it_was_is_predicted_beside_its_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last bucket is exposed: 10 + 10 + 4.2 + 3 ms. The slower rank counts; an evaluation
    does not.
    """
    said, rows = asked(write_run(tmp_path / "run"), capsys)
    assert said[0] == "run    run: 2 ranks, 2 bucket(s) of 0.954 to 3.81 MB, all-reduce backend"
    assert said[1] == "link   100 us a message, 1 GB/s (median error 0 %)"
    assert said[2].startswith("error  predicted 27.2 ms, measured 27.2 ms (27.2-27.2, n = 2): ")
    assert said[2].endswith("0 %, for the run as it was")
    assert rows == {"as it was": 27.2}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # 0.2 + 8 ms exposed
        (("--bandwidth_gb_per_s", "0.5"), {"as it was": 27.2, "another link": 31.2}),
        (("--latency_us", "1000"), {"as it was": 27.2, "another link": 29.0}),  # 2 + 4
        # One of 5 MB: 0.2 + 5
        (("--bucket_mb", "100"), {"as it was": 27.2, "bucket_mb 100": 28.2}),
        # 0.6 + 1.5 times the bytes
        (("--ranks", "1,4"), {"as it was": 27.2, "ranks 1": 23.0, "ranks 4": 29.6}),
        (
            ("--ranks", "4", "--allreduce", "halving_doubling"),  # four messages
            {"as it was": 27.2, "ranks 4, allreduce halving_doubling": 29.4},
        ),
    ],
)  # fmt: skip
def test_each_question_has_the_answer_worked_out_by_hand(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    expected: dict[str, float],
) -> None:
    assert asked(write_run(tmp_path / "run"), capsys, *flags)[1] == expected


@pytest.mark.parametrize(
    ("mode", "flags", "expected"),
    [
        # 8.3 + 1.7 waited, 10, 2.1 exposed, 3; with half the bandwidth 1.1 and 4.1 ms each
        ("zero1", ("--bandwidth_gb_per_s", "0.5"), {"as it was": 25.1, "another link": 8.3 + 4.2 + 10 + 4.1 + 3}),
        ("zero2", ("--ranks", "1,4"), {"as it was": 25.1, "ranks 1": 21.3, "ranks 4": 8.3 + 3.35 + 10 + 3.3 + 3}),
        ("zero1", ("--bucket_mb", "100"), {"as it was": 25.1, "bucket_mb 100": 8.3 + 1.6 + 10 + 2.6 + 3}),
        ("zero1", ("--bandwidth_gb_per_s", "100"), {"as it was": 25.1, "another link": 8.3 + 10 + 0.12 + 3}),
        ("fsdp", ("--bandwidth_gb_per_s", "0.5"), {"as it was": 23.0, "another link": 17.6 + 2 * 5.2}),
        ("fsdp", ("--ranks", "1,4"), {"as it was": 23.0, "ranks 1": 17.6, "ranks 4": 17.6 + 2 * 4.35}),
    ],
)  # fmt: skip
def test_sharded_modes_have_the_answers_worked_out_by_hand(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    flags: tuple[str, ...],
    expected: dict[str, float],
) -> None:
    said, rows = asked(write_run(tmp_path / "run", config={"dp_mode": mode}), capsys, *flags)
    what = "2 all-gather(s) and 2 reduce-scatter(s)" if mode == "fsdp" else "2 bucket(s)"
    assert said[0] == f"run    run: 2 ranks, {what} of 0.954 to 3.81 MB, {mode}"
    assert said[1] == "link   100 us a message, 1 GB/s (median error 0 %)"
    assert said[2].startswith(
        f"error  predicted {expected['as it was']:.1f} ms, measured {expected['as it was']:.1f} ms"
    )
    assert rows == pytest.approx(expected, abs=0.06)


def test_a_topology_brings_its_own_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.yaml"
    link = "{alpha_us: 100, bandwidth_gb_per_s: 0.5}"
    file.write_text(f"ranks_per_node: 1\nintra: fit\ninter: {link}\n")
    assert (
        asked(write_run(tmp_path / "run"), capsys, "--topology", str(file))[1]["another link"]
        == 31.2
    )


def test_the_error_is_that_of_steps_that_taught_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second traced step is slower by 12.8 ms in its forward: the prediction does not know
    it.
    """
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "comm" / "steps.jsonl").read_text().splitlines()]
    for step in lines[1::2]:
        step["figures"]["step_ms"] += 12.8
    (run / "comm" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in lines))
    assert (
        "predicted 27.2 ms, measured 40.0 ms (40.0-40.0, n = 2): -32 %" in asked(run, capsys)[0][2]
    )


@pytest.mark.parametrize(("first", "second", "buckets"), [((0, 1), (0,), 1), ((0,), (0, 1), 2)])
def test_only_the_newest_command_is_asked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: tuple[int],
    second: tuple[int],
    buckets: int,
) -> None:
    """Each counts its attempts from 0, and may have other buckets."""
    run = write_run(tmp_path / "run", steps=6)
    steps = [json.loads(line) for line in (run / "comm" / "steps.jsonl").read_text().splitlines()]
    for step in steps:
        step["started"], kept = (1000.0, first) if step["step"] <= 3 else (2000.0, second)
        step["collectives"] = [c for c in step["collectives"] if c["bucket"] in kept]
    (run / "comm" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert f": 2 ranks, {buckets} bucket(s) of " in asked(run, capsys)[0][0]


def test_time_in_flight_together_is_shared() -> None:
    assert whatif.shared([(0.0, 4.0), (2.0, 6.0)]) == [3.0, 3.0]
    assert whatif.shared([(0.0, 6.0), (2.0, 4.0), (7.0, 8.0)]) == [5.0, 1.0, 1.0]


def test_smaller_buckets_get_ready_between_the_known_moments(tmp_path: Path) -> None:
    past = whatif.read_past(write_run(tmp_path / "run"))
    cut = whatif.cut_anew(past.step.buckets, 2_500_000 / 2**20)
    assert [b.nbytes for b in cut] == [2_500_000, 2_500_000]
    assert [1e3 * b.ready_s for b in cut] == pytest.approx([6 + 4 * 1.5 / 4, 10])


def test_one_size_of_buckets_has_no_latency_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = asked(write_run(tmp_path / "run", size_bytes=SMALL), capsys)
    assert "(all buckets have one size, so latency counts as transfer)" in said[1]


@pytest.mark.parametrize(
    ("run", "flags", "text"),
    [
        (
            {"config": {"dp_mode": "ddp_by_hand"}},
            [],
            "has dp_mode = ddp_by_hand: only what travels in ddp, zero1, ",
        ),
        (
            {"config": {"dp_mode": "zero2"}, "accum": 2},
            [],
            "sends each bucket in several backwards of a step (zero2",
        ),
        (
            {"config": {"dp_mode": "fsdp", "device": "auto"}},
            [],
            "fsdp on device = auto: gathers run beside compute",
        ),
        (
            {"config": {"dp_mode": "fsdp"}},
            ["--bucket_mb", "1"],
            "bucket_mb would be ignored: fsdp's units are",
        ),
        (
            {"config": {"dp_mode": "zero1"}},
            ["--allreduce", "ring"],
            "allreduce would be ignored: dp_mode = zero1 sums",
        ),
        ({"config": {"tp": 2, "grad_compress": "int8"}}, [], "has grad_compress = int8, tp = 2"),
        ({"config": {"sync_every": 50}}, [], "has sync_every = 50: only what travels in"),
        ({"bucket": None}, [], "have no buckets; trace a run of 2 ranks or more"),
        ({}, ["--allreduce", "magic"], "allreduce = magic: use one of ring, tree"),
        ({}, ["--ranks", "0"], "0: sizes, ranks and speeds are above 0"),
        ({}, ["--bandwidth_gb_per_s", "nan"], "nan: sizes, ranks and speeds are above 0"),
        ({}, ["--bandwidth_gb_per_s", "inf"], "inf: sizes, ranks and speeds are above 0"),
        (
            {},
            ["--latency_us", "inf"],
            "inf: sizes, ranks and speeds are above 0, a latency at least 0, and all are",
        ),
        (
            {},
            ["--latency_us", "nan", "--ranks", "2"],
            "2, nan: sizes, ranks and speeds are above 0",
        ),
        ({}, ["--bucket_mb", "nan"], "nan: sizes, ranks and speeds are above 0"),
        ({}, ["--bucket_mb", "1e-9"], "1e-09 makes more than 10,000 buckets; give 0.0005 or more"),
        (
            {},
            ["--topology", "ethernet-25g", "--latency_us", "1"],
            "topology has links of its own; drop latency_us",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: dict[str, Any],
    flags: list[str],
    text: str,
) -> None:
    assert whatif.main([str(write_run(tmp_path / "run", **run)), *flags]) == 2
    assert text in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whatif.main([str(tmp_path)]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
