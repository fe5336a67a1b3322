"""The collectives bench: formulas by hand, exact counts of wrong elements, and what happens when
something breaks.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import collectives
from nanoray.bench.__main__ import main
from nanoray.bench.collectives import (
    DTYPES,
    PLACEMENTS,
    elements,
    exact_period,
    measure_rank,
    sizes,
    wrong_elements,
)
from nanoray.bench.harness.rank_pool import RankPool
from nanoray.bench.harness.report import Measurement, Report, number
from nanoray.machine.metrics import algbw_gbps, busbw_factor

HERE = "tests.ranks.test_bench_collectives"
ORDER = {
    "ops": ["all_reduce"],
    "dtypes": ["float32"],
    "sizes": [1024],
    "budget_s": 0.0,
    "rounds": 1,
    "timeout_s": 30,
}


def order(ranks: int, **values: Any) -> dict[str, Any]:
    return ORDER | {"sharing": [ranks] * ranks} | values


# Formulas


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """4 ranks all-reduce 1 GB in half a second: 2 GB/s, and every link carries 2 * 3/4 of it."""
    assert algbw_gbps(1e9, 0.5) == 2.0
    assert busbw_factor("all_reduce", 4) == 1.5
    assert [busbw_factor(op, 4) for op in ("reduce_scatter", "all_gather", "all_to_all")] == [
        0.75
    ] * 3
    assert [busbw_factor(op, 4) for op in ("broadcast", "sendrecv")] == [1.0, 1.0]
    assert busbw_factor("all_reduce", 2) == 1.0
    assert [busbw_factor(op, 1) for op in PLACEMENTS] == [None] * 6


def test_sizes_and_counts() -> None:
    assert sizes(5000) == [1024, 4096]
    assert sizes(1 << 20, quick=True) == [1 << 10, 1 << 16, 1 << 20]
    assert sizes(1024, quick=True) == [1024]
    assert elements("all_reduce", 1024, 4, 3) == (1024, 256)
    # S is the output; nccl-tests counts per rank
    assert elements("all_gather", 1024, 4, 3) == (1020, 85)
    assert elements("all_to_all", 8, 4, 3) == (12, 1)  # at least one element for everybody


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 100])
def test_sums_of_the_data_are_exact(name: str, ranks: int) -> None:
    """Every sum that can occur is held by the dtype, or the case is refused; an odd period shows a
    shifted block.
    """
    import torch

    period = exact_period(name, ranks)
    assert period % 2 == 1
    if period >= 3:
        largest = ranks * (period - 1)
        held = torch.arange(largest + 1, dtype=torch.float32)
        assert torch.equal(held.to(getattr(torch, name)).float(), held)


def test_wrong_elements_are_counted_bit_by_bit() -> None:
    import torch

    for name in DTYPES:
        expected = torch.arange(8, dtype=torch.float32).to(getattr(torch, name))
        got = expected.clone()
        assert wrong_elements(got, expected) == 0
        got[2], got[7] = 5.0, float("nan")
        assert wrong_elements(got, expected) == 2


# Real ranks


@pytest.fixture
def three(pools: Any) -> RankPool:
    return pools(3)


def test_every_collective_is_right_at_three_ranks(three: RankPool) -> None:
    names = ["float32", "bfloat16", "float16"]
    asked = order(3, ops=list(PLACEMENTS), dtypes=names, sizes=[4, 1024, 65536])
    copy, *cases = three.run(collectives.ENTRY, asked)
    assert len(copy["copy_gbps"]) == 1
    assert {(c["op"], c["dtype"], c["in_place"]) for c in cases} == {
        (op, name, in_place) for op in PLACEMENTS for name in names for in_place in PLACEMENTS[op]
    }
    assert len(cases) == 3 * 3 * 8
    for case in cases:
        assert case["wrong"] == 0, case
        assert len(case["blocking_us"]) >= 5
        assert len(case["pipelined_us"]) == 1
        assert min(case["blocking_us"] + case["pipelined_us"]) > 0


def spoil(mesh: Any, spoiled: dict[str, Any], emit: Any) -> None:
    """Measure with collectives of which those of the last rank come out wrong in their last two
    elements.
    """
    import torch.distributed as dist

    real = {
        name: getattr(dist, name)
        for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single")
    }

    def wrong(name: str) -> Any:
        def collective(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = real[name](tensor, *args, **kwargs)
            if mesh.rank == mesh.world_size - 1 and kwargs.get("group") is not mesh.control_group:
                work.wait()
                tensor[-2:] += 1
            return work

        return collective

    for name in real:
        setattr(dist, name, wrong(name))
    try:
        measure_rank(mesh, spoiled, emit)
    finally:
        for name in real:
            setattr(dist, name, real[name])


def test_wrong_results_are_counted_over_all_ranks(three: RankPool) -> None:
    ops = ["all_reduce", "all_gather", "all_to_all", "broadcast"]
    cases = list(three.run(f"{HERE}:spoil", order(3, ops=ops)))[1:]
    assert [(c["op"], c["wrong"]) for c in cases] == [
        ("all_reduce", 2),
        ("all_gather", 2),
        ("all_gather", 2),
        ("all_to_all", 2),
        ("broadcast", 0),
    ]


def test_what_the_backend_lacks_is_told_and_the_next_sums_are_right(three: RankPool) -> None:
    asked = order(
        3, ops=["all_reduce", "all_gather"], dtypes=["float8_e4m3fn", "float32"], sizes=[1024, 4096]
    )
    cases = list(three.run(collectives.ENTRY, asked))[1:]
    # Once per dtype and placement, not per size.
    lacking = [c for c in cases if c["dtype"] == "float8_e4m3fn"]
    assert [c["skipped"] for c in lacking] == [
        "backend gloo: RuntimeError: Invalid scalar type"
    ] * 3
    assert [c["wrong"] for c in cases if c["dtype"] == "float32"] == [0] * 6


def break_broadcast(mesh: Any, asked: dict[str, Any], emit: Any) -> None:
    """Measure while the first broadcast raises on rank 1, and is left waiting for it elsewhere."""
    import torch.distributed as dist

    real, calls = dist.broadcast, iter([mesh.rank])
    abandoned = []

    class Done:
        def wait(self) -> None:
            """Go on."""

    def broadcast(tensor: Any, **kwargs: Any) -> Any:
        rank = next(calls, None)
        if rank == 1:
            raise ValueError("no broadcast today")
        work = real(tensor, **kwargs)
        abandoned.append(work)
        return work if rank is None else Done()

    dist.broadcast = broadcast
    try:
        measure_rank(mesh, asked, emit)
    finally:
        dist.broadcast = real


def test_an_error_of_one_rank_is_a_failed_row_and_all_ranks_go_on(three: RankPool) -> None:
    """The group is out of step then: rank 1 is one call behind. The next collectives are right in a
    new one.
    """
    asked = order(3, ops=["broadcast", "all_reduce"], dtypes=["float32", "float16"])
    cases = list(three.run(f"{HERE}:break_broadcast", asked))[1:]
    assert [c.get("error") or c["wrong"] for c in cases] == [
        "ValueError: no broadcast today",
        0,
        0,
        0,
    ]
    (again,) = list(three.run(collectives.ENTRY, order(3)))[1:]
    assert again["wrong"] == 0


# The command


def rows_of(path: Path) -> dict[tuple[str, str, int, bool], dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    return {(r["op"], r["dtype"], r["bytes"], r["in_place"]): r for r in rows if "op" in r}


@pytest.mark.full
def test_two_ranks_from_the_command_line(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(collectives)
    flags = [
        "--quick",
        "--device",
        "cpu",
        "--workers",
        "2",
        "--max_bytes",
        "4096",
        "--ops",
        "all_reduce,all_gather",
    ]
    code = main(
        [
            "communication",
            "collectives",
            *flags,
            "--json",
            str(tmp_path / "c.json"),
            "--figure",
            str(tmp_path / "c.png"),
        ]
    )
    out = capsys.readouterr().out
    assert code == 0, out
    rows = rows_of(tmp_path / "c.json")
    row = rows["all_gather", "float32", 4096, False]
    assert (row["ranks"], row["count"], row["wrong"], row["unit"]) == (2, 512, 0, "GB/s")
    assert row["algbw_gbps"] == pytest.approx(4096 / row["pipelined_us"] * 1e-3)
    assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] / 2) == pytest.approx(row["median"])
    assert 0 < row["time_us"] <= row["p99_us"]
    (copy,) = [
        r
        for r in json.loads((tmp_path / "c.json").read_text())["rows"]
        if r["arm"] == "memory copy"
    ]
    assert row["share_of_copy"] == pytest.approx(row["busbw_gbps"] / copy["median"])
    assert (tmp_path / "c.png").stat().st_size > 10_000
    lines = [line for line in out.splitlines() if line.startswith("all_gather float32 4096 B")]
    assert ["out of place" in line for line in lines] == [True, False]
    # Torch has no all_reduce out of place
    assert "all_reduce float32 4096 B in place" in out
    assert "all_reduce float32 4096 B out of place" not in out
    assert "OK  7 rows" in out


@pytest.mark.parametrize(("calls", "words"), [(100, "p99 99.0 us"), (99, "max 99.0 us")])
def test_a_percentile_needs_a_hundred_calls(calls: int, words: str) -> None:
    """The 99th of 1 .. 100 us; of 99 calls nobody knows one, and 99 us is their slowest. Out of
    place comes first.
    """
    report = Report("collectives", {}, [Measurement(collectives.COPY, "copied", "GB/s", (10.0,))])
    for in_place, times in ((True, [7.0] * 5), (False, [1.0 + i for i in range(calls)])):
        event = {
            "op": "all_gather",
            "dtype": "float32",
            "in_place": in_place,
            "bytes": 1024,
            "count": 128,
            "wrong": 0,
        }
        collectives._add(
            report, event | {"blocking_us": times, "pipelined_us": [1024.0]}, 2, "gloo"
        )
    row = report.rows[-1]
    assert (row.extra["p99_us"], row.extra["latencies"]) == (99.0, calls)
    assert (
        row.note
        == f"algbw 0.00100 GB/s; {calls} blocking calls: p50 {number(row.extra['time_us'])}, {words}"
    )
    page = collectives.CollectivesBenchmark().format_markdown(report)
    assert page[-1].startswith(f"| all_gather | {number(row.extra['time_us'])} | 99.0 | ")


def test_operations_stand_in_the_order_in_which_they_ran() -> None:
    report = Report("collectives", {}, [Measurement(collectives.COPY, "copied", "GB/s", (10.0,))])
    for op, placements in (("all_reduce", [True]), ("all_gather", [False, True])):
        for in_place in placements:
            for size in (1024, 4096):
                event = {"op": op, "dtype": "float32", "in_place": in_place, "bytes": size}
                times = {"blocking_us": [5.0], "pipelined_us": [3.0 if in_place else 2.0]}
                collectives._add(report, event | times | {"count": 1, "wrong": 0}, 2, "gloo")
    curves = collectives._curves(report)
    assert list(curves) == ["all_reduce", "all_gather"]
    assert [(p["bytes"], p["in_place"]) for p in curves["all_gather"]] == [
        (1024, False),
        (4096, False),
    ]


def die(mesh: Any, asked: dict[str, Any], emit: Any) -> None:
    """Measure until rank 1 is killed in its first all_gather."""
    import torch.distributed as dist

    if mesh.rank == 1:
        dist.all_gather_into_tensor = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    measure_rank(mesh, asked, emit)


@pytest.mark.full
def test_a_killed_rank_leaves_the_rows_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "ENTRY", f"{HERE}:die")
    flags = [
        "--quick",
        "--device",
        "cpu",
        "--workers",
        "2",
        "--max_bytes",
        "1024",
        "--ops",
        "all_reduce,all_gather",
    ]
    assert (
        main(
            [
                "communication",
                "collectives",
                *flags,
                "--timeout_s",
                "60",
                "--json",
                str(tmp_path / "c.json"),
            ]
        )
        == 1
    )
    assert [key[0] for key in rows_of(tmp_path / "c.json")] == ["all_reduce"]
    (failure,) = json.loads((tmp_path / "c.json").read_text())["failures"]
    assert failure.startswith("rank 1 (pid ")
    assert failure.endswith(f"in {HERE}:die: it was ended by SIGKILL")
    assert "FAILED  rank 1" in capsys.readouterr().out.splitlines()[-1]
