"""make bench-gpu on a CPU: with hidden packages, with parts and features that end badly."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import gpu
from nanoray.bench.harness.processes import arm_environment, scratch_folder
from nanoray.bench.harness.report import Report, conditions
from tests.gpu import day as gpu_day
from tests.gpu.day import Day, DayPart

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ROOT / "tests" / "harness" / "hidden"


def run(
    tmp_path: Path, *flags: str, hidden: str = "", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run the day in a Python without some packages, from a folder with a space."""
    out = tmp_path / "the results"
    command = [sys.executable, "-m", "tests.gpu.day", "--device", "cpu"]
    env = os.environ | {"PYTHONPATH": str(HIDDEN), "NANORAY_TEST_HIDDEN": hidden}
    return subprocess.run(
        [*command, "--out", str(out), "--bundle", str(tmp_path / "bundle"), *flags],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def read(tmp_path: Path, name: str = "gpu-day-cpu.json") -> dict[str, Any]:
    report: dict[str, Any] = json.loads((tmp_path / "the results" / name).read_text())
    return report


OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_without_the_packages_one_line_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, hidden="numpy,pydantic,yaml,pynvml,ray,pytest,matplotlib")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{sys.executable} lacks numpy, pydantic, yaml, pynvml: run `make bench-gpu-bund" in line
    assert f'ARGS="--python {OWN_PYTHON} --machine ' in line
    assert not (tmp_path / "the results").exists()


@pytest.mark.full
def test_the_whole_trial_runs_to_its_end(tmp_path: Path, text: Path) -> None:
    flags = ("--dataset", str(text), "--feature_s", "150")
    done = run(tmp_path, *flags, hidden="ray", timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["arm"]: row for row in read(tmp_path)["rows"] if row["metric"] == "seconds"}
    ran = [name for name, row in rows.items() if row["n"]]
    assert ran == [part.name for part in parts("cpu") if part.name != gpu_day.TESTS]
    assert rows["tests/gpu"]["skipped"] == "tests/gpu needs a GPU"
    names = {path.name for path in (tmp_path / "the results").iterdir()}
    assert names >= {"gpu-features-cpu.json", "gpu-gpt2-cpu.json", "gpu-char-cpu.json"}
    assert "equivalence-cpu.json" in names


def parts(device: str) -> list[DayPart]:
    return gpu_day.parts_of(gpu_day.read_flags(["--device", "cpu"]), device)


def a_day(folder: Path, out: Path, **flags: Any) -> Day:
    args = argparse.Namespace(**{"out": out, "budget_s": 60.0} | flags)
    report = Report("gpu_day", conditions(gpu_day.COMMAND, []) | {"device": "cpu"})
    env = arm_environment() | {"PYTHONPATH": f"{ROOT}:{out}"}
    return Day(args, "cpu", folder, env, report)


@pytest.mark.full
def test_a_part_that_fails_or_hangs_costs_its_own_row(tmp_path: Path) -> None:
    """And the report is on disk after each part."""
    seen = tmp_path / "seen"
    look = f"import shutil; shutil.copy({str(tmp_path / 'gpu-day-cpu.json')!r}, {str(seen)!r})"
    scripts = {
        "fails": "print('FAILED  a rung: no kernel'); raise SystemExit(1)",
        "hangs": "import time; time.sleep(600)",
        "good": look,
    }
    # The second part has a second, and what the first one has left of its five
    shares = {"fails": 5.0, "hangs": 1.0, "good": 24.0}
    parts = []
    for name, script in scripts.items():
        (tmp_path / f"{name}_part.py").write_text(script)
        parts.append(DayPart(name, (f"{name}_part",), shares[name], least_s=0.5))
    with scratch_folder() as folder:
        day = a_day(folder, tmp_path, budget_s=30.0)
        day.run(parts)
    rows = {row.arm: row for row in day.report.rows}
    assert rows["fails"].error == "ChildFailed: FAILED  a rung: no kernel", day.report.failures
    assert rows["hangs"].error.startswith("ChildFailed: no end within")
    assert not rows["good"].error
    assert [text.partition(":")[0] for text in day.report.failures] == ["fails", "hangs"]
    assert day.report.failed
    assert [row["arm"] for row in json.loads(seen.read_text())["rows"]] == ["fails", "hangs"]


def test_every_part_names_rungs_and_presets_that_exist() -> None:
    for device in ("cuda", "cpu"):
        for part in parts(device):
            if "--arms" not in part.command:
                continue
            arms = part.command[part.command.index("--arms") + 1]
            known = {"ladder", "baby", *gpu.RUNGS, *gpu.BABIES}
            assert set(arms.split(",")) <= known, arms
            preset = part.command[part.command.index("--presets") + 1]
            assert preset in gpu.LADDERS
