"""make bench-gpu on a CPU: with hidden packages, with parts and features that end badly."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pydantic
import pytest

from nanoray.bench import gpu
from nanoray.bench.harness.processes import arm_environment, scratch_folder
from nanoray.bench.harness.report import Report, conditions
from tests.gpu import bundle as gpu_bundle
from tests.gpu import day as gpu_day
from tests.gpu import features
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
# Of each wheel, the modules
BUNDLED = {
    "pydantic": ("pydantic",),
    "pydantic_core": ("pydantic_core",),
    "annotated_types": ("annotated_types",),
    "typing_inspection": ("typing_inspection",),
    "pyyaml": ("yaml", "_yaml"),
    "nvidia_ml_py": ("pynvml.py",),
}


def bundle_of_installed(folder: Path) -> None:
    """Make a bundle of wheels from what is installed here: a test has no package index."""
    site = Path(pydantic.__file__).parents[1]
    wheels = gpu_bundle.wheels_for(folder, OWN_PYTHON, platform.machine())
    wheels.mkdir(parents=True)
    for name, modules in BUNDLED.items():
        with zipfile.ZipFile(wheels / f"{name}-1.0-any.whl", "w") as wheel:
            for module in modules:
                top = site / module
                for path in [top] if top.is_file() else top.rglob("*"):
                    if "__pycache__" not in path.parts:
                        wheel.write(path, path.relative_to(site))
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", "")


def test_without_the_packages_one_line_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, hidden="numpy,pydantic,yaml,pynvml,ray,pytest,matplotlib")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{sys.executable} lacks numpy, pydantic, yaml, pynvml: run `make bench-gpu-bund" in line
    assert f'ARGS="--python {OWN_PYTHON} --machine ' in line
    assert not (tmp_path / "the results").exists()


@pytest.mark.full
def test_packages_that_are_missing_come_from_the_bundle(tmp_path: Path, text: Path) -> None:
    """The parts and what they start find them, too."""
    bundle_of_installed(tmp_path / "bundle")
    names = {Path(module).stem for modules in BUNDLED.values() for module in modules}
    flags = ["--parts", "seconds to 1.47", "--dataset", str(text)]
    hidden = ",".join([*names, "ray", "rich", "tensorboard", "matplotlib"])
    done = run(tmp_path, *flags, hidden=hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read(tmp_path)
    assert set(report["conditions"]["from the bundle"]) == names - {"_yaml"}
    assert report["conditions"]["missing"] == ["matplotlib", "ray"]
    assert [row["n"] for row in report["rows"]] == [1]
    rows = {row["arm"]: row for row in read(tmp_path, "gpu-baby-cpu.json")["rows"]}
    assert rows["seconds to 1.47 (CUDA graphs)"]["skipped"]


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


def test_a_part_that_takes_what_is_left_has_all_of_it_when_it_is_alone(tmp_path: Path) -> None:
    (tmp_path / "quick_part.py").write_text("print('done')")
    with scratch_folder() as folder:
        day = a_day(folder, tmp_path, budget_s=30.0)
        day.run([DayPart("quick", ("quick_part",), 0.0, least_s=25.0)])
    (row,) = day.report.rows
    assert row.n == 1, row


@pytest.mark.full
def test_a_feature_that_crashes_hangs_or_errs_costs_its_own_row(tmp_path: Path) -> None:
    out = tmp_path / "features.json"
    names = ["facts", "wrong", "crash", "hang", "broken", "fp8", "bf16", "parent"]
    command = [sys.executable, "-m", "tests.harness.planted_features", "cpu", "--feature_s", "5"]
    process = subprocess.Popen(
        [*command, "--features", ",".join(names), "--json", str(out)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, told = process.communicate()
    assert process.returncode == 1, told
    report = json.loads(out.read_text())
    rows = {r["arm"]: r for r in report["rows"] if r["metric"] in ("distance", "feature")}
    assert [*rows] == names[1:]
    assert "torch " in report["conditions"]["facts"]
    assert rows["bf16"]["wrong"] == 0
    assert rows["crash"]["error"] == "exit code -11 before it answered"
    assert rows["hang"]["error"] == "no answer within 5 s"
    assert rows["broken"]["error"] == "RuntimeError: no kernel for these shapes"
    assert rows["wrong"]["wrong"] == 1
    assert rows["fp8"]["skipped"] == "only on GPUs"
    assert rows["parent"]["values"] != [process.pid], "it has counted the GPUs"
    assert not report["ok"]


def test_what_no_time_is_left_for_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert features.main(["cpu", "--features", "bf16,fp8", "--budget_s", "1"]) == 0
    assert capsys.readouterr().out.count("no time was left of budget_s = 1\n") == 2
    with scratch_folder() as folder:
        day = a_day(folder, tmp_path)
        day.run_part(DayPart("late", ("nothing",), 1.0), 1.0)
    assert [row.skipped for row in day.report.rows] == ["no time was left of budget_s = 60"]
    assert not day.report.failed


@pytest.mark.parametrize(
    ("flags", "hidden", "code", "message"),
    [
        ([], "torch", 2, "has no torch; name another one: make bench-gpu GPU_PYTHON="),
        (["--device", "cuda"], "", 1, "shows no GPU here; ARGS="),
        (["--parts", "gpt2"], "", 2, "unknown part gpt2; known: search for gpt2-124m, ladder"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(
    flags: list[str], hidden: str, code: int, message: str, tmp_path: Path
) -> None:
    if hidden:
        # Its metadata, too, which a hidden module leaves
        script = "import importlib.metadata as m, sys\nm.version = lambda name: m.distribution('no ' + name).version\n"
        script += "from tests.gpu import day as gpu_day\nraise SystemExit(gpu_day.main(['--device', 'cpu']))"
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
        )
    else:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tests.gpu.day", *flags, "--out", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {}
    for version in ("2.10.1", "2.11.0+cu130", "3.0"):
        monkeypatch.setattr(gpu_day.importlib.metadata, "version", lambda name, v=version: v)
        problems[version] = gpu_day.lacking_torch()
    assert problems["2.10.1"].startswith("torch 2.10.1 is older than 2.11")
    assert [problems["2.11.0+cu130"], problems["3.0"]] == [None, None]


def test_a_bundle_gives_only_what_is_missing(tmp_path: Path) -> None:
    own, other = (
        gpu_bundle.wheels_for(tmp_path, version, platform.machine())
        for version in (OWN_PYTHON, "2.7")
    )
    for folder, name in ((own, "missing_here"), (own, "numpy"), (other, "of_another_python")):
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", "")
    lib = tmp_path / "lib"
    try:
        assert gpu_bundle.unpack(tmp_path, lib) == ["missing_here"]
        assert [path.name for path in lib.iterdir() if path.suffix == ""] == ["missing_here"]
        assert gpu_bundle.is_there("missing_here")
    finally:
        sys.path.remove(str(lib))


@pytest.mark.full
def test_the_bundle_says_what_it_could_not_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip itself fails here, because there is no Python 1.0."""
    monkeypatch.setattr(gpu_bundle, "FOLDER", tmp_path / "gpu-day")
    monkeypatch.setattr(gpu_bundle, "ARCHIVE", tmp_path / "gpu-day.tar")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert gpu_bundle.main(["--python", "3.12"]) == 1
    assert "gpu_bundle: pip ended with exit code 1" in capsys.readouterr().err
    why = gpu_bundle.copy_text(str(tmp_path / "nothing.txt"))
    assert why.startswith("no text: ")
    assert "the baby GPT trains on another text" in why
    assert gpu_bundle.archive() > 1


def test_make_installs_nothing_for_it() -> None:
    told = subprocess.run(
        # In a test that make has started, it would say which folder it enters.
        [
            "make",
            "--no-print-directory",
            "-n",
            "bench-gpu",
            "GPU_PYTHON=some python",
            "ARGS=--device cpu",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert told.stdout.splitlines()[-1] == '"some python" -m tests.gpu.day --device cpu'
    assert "venv" not in told.stdout
    assert "pip" not in told.stdout


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


@pytest.mark.full
def test_a_copy_of_shakespeare_under_any_name_is_trained_on(
    shakespeare: Path, tmp_path: Path
) -> None:
    """It is recognised by its bytes, and must not be looked for again."""
    copy = tmp_path / "a text.txt"
    copy.write_bytes(shakespeare.read_bytes())
    done = run(tmp_path, "--parts", "seconds to 1.47", "--dataset", str(copy))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [r for r in read(tmp_path, "gpu-baby-cpu.json")["rows"] if r["n"] and r["unit"] == "s"]
    assert row["text"] == "shakespeare"
