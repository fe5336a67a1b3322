"""bench train: short runs of every arm, arms that fail, and an interrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench import train
from nanoray.bench.harness import launchers
from nanoray.bench.harness.launchers import METRICS, SCRIPT_LAUNCHERS, Moments
from nanoray.bench.harness.processes import ChildFailed

SLOW_S = 600  # a limit for machines that are busy with other tests
FLAGS = ["--quick", "--preset", "tiny", "--steps", "6", "--rounds", "1"]


def measure(text: Path, tmp_path: Path, *flags: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Run the benchmark to a good end; return its rows by arm and metric."""
    out = tmp_path / "r.json"
    assert bench.main(["train", *FLAGS, "--dataset", str(text), "--json", str(out), *flags]) == 0
    return {(row["arm"], row["metric"]): row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.usefixtures("shared_head")
@pytest.mark.timeout(SLOW_S)
@pytest.mark.full
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_traffic_of_ray_is_measured(
    workers: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launchers, "SAMPLE_S", 0.05)  # the steps take less than a second
    figure = tmp_path / "r.png"
    flags = (
        "--arms",
        "torchrun,ray",
        "--workers",
        workers,
        "--steps",
        "300",
        "--figure",
        str(figure),
    )
    rows = measure(text, tmp_path, *flags)
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    for arm in ("torchrun", "ray"):
        assert f"\n{arm} " in out
        assert 0 < rows[arm, train.FIRST]["median"] < rows[arm, train.WHOLE]["median"]
        assert rows[arm, train.STEP]["median"] > 0
        ranks, everything = rows[arm, train.RANKS_CPU]["median"], rows[arm, train.ALL_CPU]["median"]
        assert 0 < ranks <= everything * (1 + 1e-9), "the launcher and Ray are not ranks"
    assert rows["ray / torchrun", train.RANKS_CPU]["n"] == 1
    assert rows["idle Ray head", "CPU use"]["median"] >= 0
    assert figure.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("shared_head")
@pytest.mark.timeout(SLOW_S)
@pytest.mark.full
def test_a_plain_script_trains_in_the_same_way_under_torchrun_and_nanoray_run(
    text: Path, tmp_path: Path
) -> None:
    rows = measure(
        text,
        tmp_path,
        "--arms",
        "torchrun-script,run,run-trace,run-init",
        "--workers",
        "2",
        "--device",
        "cpu",
    )
    for arm in SCRIPT_LAUNCHERS:
        assert 0 < rows[arm, train.FIRST]["median"] < rows[arm, train.WHOLE]["median"]
    assert rows["run / torchrun-script", train.STEP]["n"] == 1
    last = {rows[arm, METRICS["last_loss"][0]]["median"] for arm in ("torchrun-script", "run")}
    assert len(last) == 1


@pytest.mark.timeout(SLOW_S)
@pytest.mark.full
def test_what_a_trace_costs_is_measured(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "SAMPLE_S", 0.05)  # the steps take less than a second
    arms = ["torchrun", *train.TRACED]
    flags = ["--workers", "2", "--device", "cpu", "--steps", "300", "--arms", ",".join(arms)]
    rows = measure(text, tmp_path, *flags)
    for arm in train.TRACED:
        assert rows[f"{arm} / torchrun", train.STEP]["n"] == 1
        assert rows[f"{arm} / torchrun", train.RANKS_CPU]["median"] > 0
        assert rows[arm, train.BUSY]["median"] > 0


def test_no_arm_is_without_a_test() -> None:
    tested = ("torchrun", "ray", "plain", "torchtrainer", "ray-init", "torchtrainer-init")
    assert {*tested, *SCRIPT_LAUNCHERS, *train.TRACED} == set(train.ARMS)


def test_a_failed_arm_is_reported_and_the_others_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun is replaced by a command that fails, ray-init by one whose loss is wrong."""

    def fake(argv: list[str], env: object, folder: Path, *_: object) -> Moments:
        arm = folder.name.rsplit("-", 1)[0]
        if arm == "torchrun":
            raise ChildFailed("exit code 3\nthe last line of its output")
        return Moments(
            2.0, 3.0, 20.0, 0.5, 0.5, 1.0, 1.0, {"plain": 2.0, "ray-init": 2.3}[arm], 30.0, 31.0
        )

    monkeypatch.setattr(train, "run_once", fake)
    argv = [
        "train",
        *FLAGS,
        "--dataset",
        str(text),
        "--arms",
        "plain,torchrun,ray-init",
        "--rounds",
        "2",
    ]
    assert bench.main([*argv, "--json", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out
    assert "FAILED  torchrun: exit code 3\n  | the last line of its output" in out
    cells = [line.split() for line in out.splitlines()]
    assert ["torchrun", "FAILED", "FAILED", "FAILED"] in cells
    spread = ["2.00", "(2.00–2.00)", "3.00", "(3.00–3.00)", "20.0", "(20.0–20.0)"]
    assert any(line[:7] == ["plain", *spread] for line in cells)
    assert "ray-init: wrong: loss 2.3000 after 6 steps, others 2.0000" in out
    assert out.splitlines()[-1].startswith("FAILED  ")
    failed = [
        r for r in json.loads((tmp_path / "r.json").read_text())["rows"] if r["arm"] == "torchrun"
    ]
    assert {r["metric"] for r in failed} == {train.FIRST, train.WHOLE, train.STEP}
    assert all(r["values"] == [] and r["error"] for r in failed)


def test_arms_take_turns_at_going_first(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fake(argv: list[str], env: object, folder: Path, *_: object) -> Moments:
        order.append(folder.name)
        return Moments(*[1.0] * 8)

    monkeypatch.setattr(train, "run_once", fake)
    arms = ["--arms", "plain,torchrun,ray-init", "--rounds", "3"]
    assert bench.main(["train", "--preset", "tiny", "--dataset", str(text), *arms]) == 0
    assert [name.rsplit("-", 1)[0] for name in order[::3]] == ["plain", "torchrun", "ray-init"]
    assert [name.rsplit("-", 1)[1] for name in order] == list("000111222")
