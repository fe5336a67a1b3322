"""make bench-gpu on a CPU: with hidden packages, with parts and features that end badly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import gpu
from tests.gpu import day as gpu_day
from tests.gpu.day import DayPart

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
