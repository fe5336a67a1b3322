"""`nanoray run`: unmodified programs as ranks on Ray, compared with torchrun, and their faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "harness" / "plain_ddp.py"
RUN = [sys.executable, "-m", "nanoray", "run", "--workers", "2", "--device", "cpu"]


def run(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
    command = [*RUN, "--ray_address", "local", "--out_dir", str(folder / "runs"), *flags, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def lines_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("epoch", "end __main__"))]


def failures(folder: Path) -> list[dict[str, object]]:
    (path,) = (folder / "runs").glob("*/faults.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ((str(SCRIPT), "--epochs", "3"), 4),
        pytest.param((str(SCRIPT.with_name("hf_trainer.py")),), 1, marks=pytest.mark.full),
    ],
    ids=["a plain loop", "the Trainer of transformers"],
)
def test_a_script_prints_what_it_prints_under_torchrun(
    tmp_path: Path, words: tuple[str, ...], lines: int
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    plain = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *words], capture_output=True, text=True, timeout=240
    )
    code, output = run(tmp_path, *words)
    assert (code, plain.returncode) == (0, 0), output + plain.stderr
    assert "dashboard" not in output, "its own Ray starts a second sooner without"
    assert len(lines_of(output)) == lines
    assert lines_of(output) == lines_of(plain.stdout)
    assert len([*(tmp_path / "runs").glob("*/logs/rank*.log")]) == 2


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("kill", "died: killed by SIGKILL"),
        pytest.param("segv", "a segmentation fault", marks=pytest.mark.full),
        pytest.param("raise", "failed: ValueError: a bad value", marks=pytest.mark.full),
        pytest.param("exit", "exited with code 3", marks=pytest.mark.full),
        pytest.param("sleep", "rank 1 in misbehave (plain_ddp.py", marks=pytest.mark.full),
    ],
)
def test_the_rank_that_failed_first_is_named_and_all_start_again(
    tmp_path: Path, fault: str, how: str
) -> None:
    flags = ("--hang_timeout", "5") if fault == "sleep" else ()
    code, output = run(tmp_path, str(SCRIPT), "--fault", fault, flags=flags)
    assert code == 0, output
    (failure,) = failures(tmp_path)
    assert how in str(failure["title"])
    assert failure["rank"] == (-1 if fault == "sleep" else 1)
    assert "restart  1 of 3: all ranks" in output
    assert lines_of(output)[-1].startswith("end __main__")


@pytest.mark.parametrize(
    ("words", "code", "how"),
    [
        ((str(SCRIPT), "--fault", "import"), 1, "failed: ModuleNotFoundError"),
        pytest.param((str(SCRIPT), "--wrong"), 2, "exited with code 2", marks=pytest.mark.full),
        pytest.param(("-m", "no_such_module"), 1, "failed: ", marks=pytest.mark.full),
    ],
)
def test_what_no_restart_can_cure_is_not_tried_again(
    tmp_path: Path, words: tuple[str, ...], code: int, how: str
) -> None:
    ended, output = run(tmp_path, *words)
    assert ended == code, output
    assert how in str(failures(tmp_path)[-1]["title"])
    assert "restart  " not in output


@pytest.mark.full
def test_a_module_and_a_command_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nprint('module', __name__, os.environ['RANK'])\n")
    code, output = run(tmp_path, "-m", "mine")
    assert (code, "module __main__ 0" in output) == (0, True), output
    show = "echo rank $RANK of $WORLD_SIZE"
    code, output = run(tmp_path, "--", "sh", "-c", show, flags=("--tee", "all"))
    assert code == 0, output
    assert "[0] rank 0 of 2" in output
    assert "[1] rank 1 of 2" in output


def test_ctrl_c_gives_time_to_save_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    open('saved' + os.environ['RANK'], 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(1000)\n"
    )
    command = [*RUN, "--ray_address", "local", "--out_dir", str(tmp_path / "runs"), "saves.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        deadline = time.monotonic() + 120
        while not all(path.exists() and path.read_text() for path in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.full
def test_the_example_of_diloco_learns(tmp_path: Path) -> None:
    script = SCRIPT.parents[2] / "examples" / "diloco.py"
    code, output = run(tmp_path, str(script), "--rounds", "6")
    assert code == 0, output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("round")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
