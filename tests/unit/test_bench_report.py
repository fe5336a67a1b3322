"""What all benchmarks share: statistics against closed forms, verdicts, flags, processes, and the
files of runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench.harness.launchers import LAUNCHERS, CpuTime, Moments, command, moments
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment
from nanoray.bench.harness.report import (
    DISTORTING,
    MIN_JUDGED,
    Measurement,
    Report,
    Target,
    conditions,
    markdown,
    number,
    ratio,
    table,
)
from nanoray.bench.harness.trainings import chosen, rotated
from nanoray.bench.registry import BENCHMARKS
from nanoray.errors import ConfigError
from nanoray.machine.environment import environment
from nanoray.machine.proc import session_members

ROOT = Path(__file__).resolve().parents[2]


def row(*values: float, arm: str = "a", metric: str = "m", error: str = "") -> Measurement:
    return Measurement(arm, metric, "s", values, "", error)


# Statistics


def test_median_range_and_quartiles() -> None:
    five = row(5, 1, 4, 2, 3)
    assert (five.n, five.median, five.quartiles) == (5, 3, (2, 4))
    assert row(1, 2, 3, 10).median == 2.5
    assert row(7).quartiles == (7, 7)
    assert {k: five.to_dict()[k] for k in ("min", "max", "n", "values")} == {
        "min": 1,
        "max": 5,
        "n": 5,
        "values": [5, 1, 4, 2, 3],
    }


def test_a_ratio_pairs_values_of_the_same_round() -> None:
    """The machine is three times slower in round 2: pairs do not see it, a ratio of medians would."""
    upper, lower = row(2, 6, 2.2), row(1, 3, 2)
    paired = ratio("u / l", "m", upper, lower)
    assert paired.values == pytest.approx((2, 2, 1.1))
    assert paired.median == 2 != upper.median / lower.median
    assert ratio("u / l", "m", row(2, 6), row(1)).values == (2,)  # the arm below failed in round 2


def test_a_ratio_of_a_failed_arm_is_failed() -> None:
    failed = ratio("u / l", "m", row(1), row(error="exit code 3"))
    assert failed.to_dict() == {
        "arm": "u / l",
        "metric": "m",
        "unit": "ratio",
        "note": "",
        "error": "exit code 3",
        "n": 0,
        "values": [],
        "median": None,
    }


def test_a_skipped_row_is_no_failure_and_says_why() -> None:
    skipped = Measurement(
        "ring", "64 GiB", "us", (), skipped="needs 128 GiB, 4 free", extra={"bytes": 2**36}
    )
    report = Report("x", {}, [skipped, row(1.0)])
    assert not report.failed
    assert report.lines()[-1] == "OK  2 rows, 0 target(s), 1 skipped"
    assert table(report.rows)[1].split(maxsplit=5) == [
        "ring",
        "64",
        "GiB",
        "us",
        "skipped",
        "0  needs 128 GiB, 4 free",
    ]
    written = skipped.to_dict()
    assert (written["bytes"], written["skipped"], written["median"]) == (
        2**36,
        "needs 128 GiB, 4 free",
        None,
    )
    assert not {"error", "wrong", "extra"} & written.keys()
    paired = ratio("u / l", "m", row(1.0), skipped)
    assert (paired.skipped, paired.problem) == ("needs 128 GiB, 4 free", "")
    assert Target("t", paired, "<=", 1.0).verdict == "does not apply: needs 128 GiB, 4 free"
    assert ratio("u / l", "m", row(error="gone"), skipped).problem == "gone"


def test_wrong_elements_fail_the_report_and_have_a_column() -> None:
    right, bad = (
        Measurement(arm, "1 KiB", "us", (5.0,), wrong=n) for arm, n in (("ring", 0), ("tree", 3))
    )
    good, report = Report("x", {}, [right, row(1.0)]), Report("x", {}, [right, bad, row(1.0)])
    assert (good.failed, report.failed) == (False, True)
    assert report.lines()[-1] == "FAILED  tree, 1 KiB: 3 wrong"
    header, *lines = table(report.rows)
    assert [line[: header.index("wrong") + 5].split()[-1] for line in lines] == ["0", "3", "1"]
    assert [r.to_dict().get("wrong") for r in report.rows] == [0, 3, None]
    assert "wrong" not in table([row(1.0)])[0]


@pytest.mark.parametrize(
    ("values", "relation", "verdict", "failed"),
    [
        ([1.0] * 5, "<=", "ok", False),
        ([1.02] * 5, "<=", "ok", False),
        ([1.0, 1.0, 1.03, 1.03, 1.03], "<=", "MISSED", True),
        ([1.03] * 5, ">=", "ok", False),
        ([1.01] * 5, ">=", "MISSED", True),
        ([1.03] * (MIN_JUDGED - 1), "<=", "missed, not judged: n = 4 < 5", False),
        ([1.0], "<=", "ok, not judged: n = 1 < 5", False),
        ([], "<=", "not measured", True),
    ],
)
def test_verdicts(values: list[float], relation: str, verdict: str, failed: bool) -> None:
    target = Target("t", row(*values), relation, 1.02)
    assert (target.verdict, target.failed) == (verdict, failed)


def test_a_target_that_does_not_apply_says_why() -> None:
    target = Target("t", row(1.0), ">=", 1.9, "no such unit")
    assert (target.verdict, target.failed) == ("does not apply: no such unit", False)


# What is printed and written


def report_of(*rows: Measurement) -> Report:
    return Report("train", conditions("python -m nanoray.bench train", ["--quick"]), list(rows))


def test_the_table_is_aligned_and_a_failed_row_says_failed() -> None:
    lines = table(
        [row(1.5, 2.5), row(arm="longer name", error="exit code 3\nsecond line"), row(250.4)]
    )
    assert lines[0].split() == [
        "arm",
        "metric",
        "unit",
        "median",
        "quartiles",
        "min",
        "..",
        "max",
        "n",
    ]
    assert lines[1].split() == [
        "a",
        "m",
        "s",
        "2.00",
        "1.75",
        "..",
        "2.25",
        "1.50",
        "..",
        "2.50",
        "2",
    ]
    assert lines[2].split(maxsplit=5) == ["longer", "name", "m", "s", "FAILED", "0  exit code 3"]
    assert lines[3].split()[3:] == ["250", "250", "..", "250", "250", "..", "250", "1"]
    assert len({line.index(" m ") for line in lines[1:]}) == 1


def test_numbers_keep_three_digits() -> None:
    assert [number(v) for v in (1234.5, 12.345, -1.2345, 0.12345)] == [
        "1234",
        "12.3",
        "-1.23",
        "0.123",
    ]
    assert [number(v) for v in (0.00123456, 0.0, 1e-30)] == ["0.00123", "0", "0.000000000000"]


def test_the_markdown_table() -> None:
    assert markdown(("arm", "s"), [("a", "1")]) == ["| arm | s |", "| --- | ---: |", "| a | 1 |"]


def test_json_shape(tmp_path: Path) -> None:
    report = report_of(row(1, 2, 3), row(error="gone", arm="b"))
    report.targets.append(Target("t", report.rows[0], "<=", 2))
    report.write(tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert {"conditions", "rows", "targets", "failures", "ok"} <= written.keys()
    assert {"command", "date", "versions", "cpu", "gpus", "load"} <= written["conditions"].keys()
    assert {"nanoray", "torch", "ray", "python"} == written["conditions"]["versions"].keys()
    assert written["conditions"]["command"] == "python -m nanoray.bench train --quick"
    assert [r["n"] for r in written["rows"]] == [3, 0]
    assert written["targets"][0]["measured"] == 2
    assert os.listdir(tmp_path) == ["r.json"]


# The command line


def test_help_lists_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(entry.words in out and entry.summary in out for entry in bench.BENCHMARKS.values())
    assert bench.main([]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown bench trian; did you mean train?"),
        (["overlap"], "unknown bench overlap; did you mean bench communication overlap?"),
        (["xyz"], "unknown bench xyz; known: train, communication, "),
        (["train", "--round", "3"], "unknown flag --round; did you mean --rounds?"),
        (["train", "--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
        (["train", "--arms", "plain,horovod"], "unknown arm horovod; known: plain, torchrun, "),
        (["train", "--steps", "1"], "steps = 1; at least 2 are needed"),
        (
            ["train", "--figure", "f.docx"],
            "figure = f.docx: unknown kind of file; end it in .png, .svg, .pdf",
        ),
        (["all", "--figure", "f.png"], "unknown flag --figure; known: "),
        (["all", "--rounds", "3"], "unknown flag --rounds; known: "),
        (
            ["train", "--json", "nowhere/f.json"],
            "cannot write nowhere/f.json: its folder is missing or read-only",
        ),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(argv) == 2
    assert message in capsys.readouterr().err


def test_every_launcher_gets_the_same_recipe() -> None:
    recipe = ["--preset", "tiny"]
    address = "127.0.0.1:6379"
    commands = {arm: command(arm, 3, recipe, address, Path("run")) for arm in LAUNCHERS}
    assert all(argv[-2:] == recipe for argv in commands.values())
    assert "--nproc-per-node=3" in commands["torchrun"]
    placed = [arm for arm in LAUNCHERS if arm not in ("plain", "torchrun", "torchrun-script")]
    assert all("--workers 3" in " ".join(commands[arm]) for arm in placed)
    for arm in ("ray", "torchtrainer"):
        assert "--ray_address 127.0.0.1:6379" in " ".join(commands[arm])
        assert "--ray_address local" in " ".join(commands[f"{arm}-init"])


def test_arms_keep_their_own_order_and_rotate() -> None:
    arms = ["a", "b", "c"]
    assert [rotated(arms, turn) for turn in range(4)] == [
        arms,
        ["b", "c", "a"],
        ["c", "a", "b"],
        arms,
    ]
    assert rotated([], 1) == []
    assert chosen("c, a", arms) == ["a", "c"]
    assert chosen("all", arms) == arms
    with pytest.raises(ConfigError, match="unknown arm d; known: a, b, c"):
        chosen("a,d", arms)


def test_a_cell_says_median_and_spread() -> None:
    report = Report("x", {}, [row(1, 2, 3, 4, 10), row(7, arm="one"), row(error="gone", arm="bad")])
    assert [report.cell("a", "m", how) for how in ("quartiles", "range", "none")] == [
        "3.00 (2.00–4.00)",
        "3.00 (1.00–10.0)",
        "3.00",
    ]
    assert [report.cell(arm, "m") for arm in ("one", "bad", "absent")] == ["7.00", "FAILED", ""]


# Processes


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANORAY_OLD", "1")
    monkeypatch.delenv("NANORAY_NEW", raising=False)
    with environment({"NANORAY_OLD": "2", "NANORAY_NEW": "3"}):
        assert (os.environ["NANORAY_OLD"], os.environ["NANORAY_NEW"]) == ("2", "3")
    assert os.environ["NANORAY_OLD"] == "1"
    assert "NANORAY_NEW" not in os.environ


def child(code: str, log: Path, pipes: bool = False) -> Child:
    return Child([sys.executable, "-c", code], arm_environment(), log, pipes)


def test_a_failed_child_shows_its_last_lines(tmp_path: Path) -> None:
    bad = child("print('the reason'); raise SystemExit(3)", tmp_path / "log")
    with bad, pytest.raises(ChildFailed, match=r"exit code 3\nthe reason"):
        bad.wait(20)
    with child("import time; print('busy', flush=True); time.sleep(60)", tmp_path / "log") as slow:
        while "busy" not in slow.tail():
            time.sleep(0.01)
        with pytest.raises(ChildFailed, match=r"no end within 0.1 s\nbusy"):
            slow.wait(0.1)
    assert slow.process.returncode == -signal.SIGTERM


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc")
def test_ending_a_child_ends_what_it_started(tmp_path: Path) -> None:
    """The grandchild ignores SIGTERM, has its own process group, and its parent is gone: as Ray's
    daemons can be.
    """
    code = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setpgid(0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(60)\n"
    )
    with child(code, tmp_path / "log") as parent:
        parent.wait(20)
        while "up" not in parent.tail():
            time.sleep(0.01)
        assert len(session_members(parent.process.pid)) == 1
    assert not session_members(parent.process.pid)


def test_arms_inherit_no_ranks_and_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "RAY_ADDRESS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    env = arm_environment()
    assert not {"RANK", "WORLD_SIZE", "RAY_ADDRESS", "TORCHELASTIC_RUN_ID"} & env.keys()
    assert env["RAY_AUTH_MODE"] == "token"
    assert len(env["RAY_AUTH_TOKEN"]) == 64


def test_variables_that_change_times_are_recorded_and_kept_from_the_arms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in DISTORTING:
        monkeypatch.delenv(name, raising=False)
    report = Report("x", conditions("python -m nanoray.bench train", []))
    assert report.conditions["variables"] == {}
    assert any(line.split() == ["variables", "none"] for line in report.lines())

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    expected = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "2"}
    assert conditions("python -m nanoray.bench train", [])["variables"] == expected
    assert not arm_environment().keys() & set(DISTORTING)


# What a run's files say


def write_run(folder: Path, steps: list[int], started: float) -> None:
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"started": started + 1.5}))
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started + 4)) + ",250"
    (run / "logs" / "rank0.log").write_text(f"{stamp} INFO attempt 0\n")
    times = {"time/step_ms": 20.0}
    records: list[dict[str, Any]] = [
        {"step": s, "time": started + 6 + s, "train/loss": 4.0 - s} for s in steps
    ]
    for i, record in enumerate(records[1:]):
        record |= {"time/step_ms": times["time/step_ms"] + 10 * i}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_the_moments_of_a_run_add_up(tmp_path: Path) -> None:
    started = 1_700_000_000.0
    write_run(tmp_path, [1, 2, 3, 4], started)
    found = moments(tmp_path, started, whole_s=12.0, steps=4)
    assert found == Moments(7.0, 12.0, 30.0, 1.5, 2.75, 2.75, 2.0, 0.0)
    assert found.imports_s + found.until_rank_s + found.until_step_s == found.first_step_s
    log = tmp_path / "run" / "logs" / "rank0.log"
    stamps = {
        "met the group": 0.5,
        "built the model": 1.5,
        "note    of two": 1.6,
        "warmed up": 2.25,
    }
    for text, after in [*stamps.items(), ("met the group", 5.0)]:  # once more, after a fault
        at = started + 4.25 + after
        stamp = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f",{round(at % 1 * 1000):03d}"
        )
        log.write_text(log.read_text() + f"{stamp} INFO {text}\n")
    found = moments(tmp_path, started, whole_s=12.0, steps=4)
    assert (found.group_s, found.model_s, found.warm_up_s, found.one_step_s) == (
        0.5,
        1.0,
        0.75,
        0.5,
    )


def test_a_run_with_other_steps_is_no_measurement(tmp_path: Path) -> None:
    write_run(tmp_path, [1, 2, 3], time.time())
    with pytest.raises(ValueError, match="steps 1 to 3 instead of 1 to 4"):
        moments(tmp_path, time.time(), 1.0, steps=4)


def test_cpu_time_is_that_of_the_steps_between_the_records(tmp_path: Path) -> None:
    """10 steps a second from second 100 on; ranks use 1.5 s of CPU a second then, and more before
    and after.
    """
    used = CpuTime(tmp_path, set())
    used.samples = [
        (99.0, 5.0, 9.0),
        (100.5, 20.0, 30.0),
        (101.5, 21.5, 32.0),
        (102.5, 23.0, 34.0),
        (110.0, 99.0, 99.0),
    ]
    records = [(100.0, 1), (101.0, 11), (103.0, 31)]
    assert used.per_step(records) == pytest.approx((150.0, 200.0))  # 3 s and 4 s in 20 steps
    assert used.per_step(records[:2]) is None, "one sample between two records says nothing"


def test_cpu_time_is_that_of_ranks_and_of_sessions(tmp_path: Path) -> None:
    """A rank in a session of its own, as torchrun's, and a busy launcher; the test's own processes
    do not count.
    """
    busy = "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(60)"
    with child(busy, tmp_path / "1") as launcher, child(busy, tmp_path / "2") as rank:
        (tmp_path / "run" / "logs").mkdir(parents=True)
        used = CpuTime(tmp_path, {launcher.process.pid})
        used.look()
        assert used.samples == [], "no rank has begun its log"
        (tmp_path / "run" / "logs" / "rank0.log").write_text(
            f"INFO attempt 0, pid {rank.process.pid}, nice 0\n"
        )
        deadline = time.monotonic() + 60
        while (
            not used.samples
            or min(used.samples[-1][1], used.samples[-1][2] - used.samples[-1][1]) < 0.27
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            used.look()
        _, of_rank, of_all = used.samples[-1]
        assert 0.25 <= of_rank <= 0.5  # /proc counts in ticks of 10 ms
        assert of_all <= 1.0
    used.look()
    assert used.samples[-1][2] == pytest.approx(of_all, abs=0.1), (
        "what has ended keeps what it had used"
    )


@pytest.mark.parametrize(
    ("rounds", "draws"), [(1, False), (2, False), (4, False), (5, True), (20, True)]
)
def test_few_rounds_draw_no_finding(rounds: int, draws: bool) -> None:
    """Not in a benchmark's own words either."""
    committed = Report.read(ROOT / "docs/results/overlap-cpu.json")
    rows = [replace(row, values=row.values[:1] * rounds) for row in committed.rows if row.values]
    text = "\n".join(BENCHMARKS["overlap"].load().format_text(replace(committed, rows=rows)))
    assert ("fastest: " in text) == draws
    assert (f"no finding: n = {rounds}, and fewer than 5 rounds" in text) != draws
