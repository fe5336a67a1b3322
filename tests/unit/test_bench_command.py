"""The command of benchmarks: families, arms, several in turn, and what ends badly."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench.registry import Entry

# bench all, with benchmarks that take no time

FAKE = """
import os, sys
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.processes import Child
from nanoray.bench.harness.report import Measurement
from nanoray.errors import ConfigError

class Fake(Benchmark):
    def add_flags(self, parser):
        parser.add_argument("--workers", type=int, default=2)

    def measure(self, args, report):
        report.rows.append(
            Measurement("ring", "1 KiB", "us", (float(args.workers), 3.0), f"quick {args.quick}", wrong=0)
        )
        ENDING

    def draw(self, report, path):
        from matplotlib import pyplot
        figure, axes = pyplot.subplots()
        axes.plot(report.rows[0].values)
        figure.savefig(path)
        pyplot.close(figure)

    def format_text(self, report):
        return ["a table of its own"]
"""
ENDINGS = {
    "fine": "",
    "broken": "raise ZeroDivisionError('by nothing')",
    "picky": "raise ConfigError('never')",
    "refused": "raise ConfigError('no such device')",
    "nothing_yet": "report.rows.clear(); raise KeyboardInterrupt",
    "waiting": "import subprocess; p = subprocess.Popen(['sleep', '60'])\n"
    "        try:\n            print('pid', p.pid, flush=True); p.wait()\n"
    "        finally:\n            p.kill(); "
    "p.wait()",
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, ending in ENDINGS.items():
        (folder / f"fake_{name}.py").write_text(FAKE.replace("ENDING", ending))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def choose(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", {name: entry_of(name) for name in names})


def entry_of(name: str) -> Entry:
    return Entry(name, f"is {name}", lambda: importlib.import_module(f"fake_{name}").Fake())


def test_all_goes_on_after_what_breaks(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "broken", "refused", "missing", "fine")
    files = ["--json", str(tmp_path / "all.json")]
    assert bench.main(["all", "--quick", *files]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "FAILED  broken, refused, missing"
    table = [line.split(maxsplit=3) for line in out.splitlines()[-5:-1]]
    assert [(words[0], words[1]) for words in table[:2]] == [
        ("broken", "FAILED"),
        ("refused", "FAILED"),
    ]
    assert table[0][3] == "ZeroDivisionError: by nothing"
    assert "no such device" in " ".join(table[1])
    assert "ModuleNotFoundError: No module named 'fake_missing'" in " ".join(table[2])
    assert (table[3][:2], table[3][3]) == (["fine", "OK"], "1 rows, 0 target(s)")
    written = json.loads((tmp_path / "all.json").read_text())
    assert (written["bench"], written["ok"]) == ("all", False)
    assert [report["ok"] for report in written["reports"]] == [False, False, False, True]
    assert [r["values"] for r in written["reports"][0]["rows"]] == [[2, 3]], (
        "what was measured before it broke"
    )
    assert written["reports"][3]["rows"][0]["note"] == "quick True"
    assert [r["values"] for r in written["reports"][1]["rows"]] == [[2, 3]], (
        "what was measured before it gave up"
    )


def test_a_family_without_an_arm_runs_all_of_its_arms(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"fine": "family fine", "broken": "family broken", "picky": "another"}
    entries = {name: replace(entry_of(name), words=words) for name, words in arms.items()}
    monkeypatch.setattr(bench, "BENCHMARKS", entries)
    assert bench.main(["family", "--quick"]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "FAILED  broken"
    assert captured.err == "== family fine\n== family broken\n"
    assert bench.main(["family", "fine"]) == 0
    assert "a table of its own" in capsys.readouterr().out
    assert bench.main(["family", "fein"]) == 2
    assert "unknown arm of bench family fein; did you mean fine?" in capsys.readouterr().err


def test_all_is_ok_when_all_are(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "fine")
    assert bench.main(["all"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "OK  1 benches"
    assert "a table of its own" in out


def test_a_benchmark_that_breaks_keeps_what_it_measured(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "broken")
    assert bench.main(["broken", "--json", str(tmp_path / "b.json")]) == 1
    out = capsys.readouterr().out
    assert "a table of its own" in out
    assert out.splitlines()[-1] == "FAILED  ZeroDivisionError: by nothing"
    assert "fake_broken.py" in out, "the traceback"
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["values"] == [2, 3]


def test_several_are_refused_under_a_launcher_too(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "fine")
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    slurm |= {"SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "here"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert bench.main(["all"]) == 2
    refused = "bench all starts its own ranks, but a launcher has started this process"
    assert refused in capsys.readouterr().err


def test_ctrl_c_ends_all_of_them_and_keeps_what_was_measured(fakes: Path, tmp_path: Path) -> None:
    code = (
        "import fake_waiting, fake_fine\n"
        "from nanoray.bench import __main__ as bench\n"
        "entry = bench.Entry\n"
        "bench.BENCHMARKS = {\n"
        "    'waiting': entry('waiting', '', fake_waiting.Fake), 'fine': entry('fine', '', fake_fine.Fake)\n"
        "}\n"
        "raise SystemExit(bench.main())\n"
    )
    env = os.environ | {"PYTHONPATH": f"{fakes}{os.pathsep}{Path(bench.__file__).parents[2]}"}
    argv = [sys.executable, "-c", code, "all", "--json", str(tmp_path / "all.json")]
    run = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    word, pid = run.stdout.readline().split()
    assert word == "pid"
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=200)
    assert run.returncode == 130
    assert "FAILED  interrupted by SIGINT with 2 round(s) measured" in out
    assert "fine" not in out + err
    assert not Path(f"/proc/{pid}").exists()
    (report,) = json.loads((tmp_path / "all.json").read_text())["reports"]
    assert report["rows"][0]["values"] == [2.0, 3.0]
    assert not report["ok"]
