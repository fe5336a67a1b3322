"""A rank notices that its launcher is gone, also through scripts; others may outlive their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Writes `watching`, and how it ends: `gone` with the name of its launcher, or `alive`.
WATCH = """
import os, sys, threading
from nanoray.machine.launchers import place_of
from nanoray.train.launcher_watch import watch_launcher

with open(sys.argv[1], "a") as file:
    ended, names = threading.Event(), []
    watch_launcher(place_of(os.environ), lambda name: (names.append(name), ended.set()))
    print("watching", file=file, flush=True)
    gone = ended.wait(float(sys.argv[2]))
    print(f"gone {names[0]}" if gone else "alive", file=file, flush=True)
"""
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "watched"} | ADDRESS
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
SRUN |= {"SLURM_LOCALID": "1"}
MPIRUN = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPIRUN |= ADDRESS
STATEFULSET = {"RANK": "0", "WORLD_SIZE": "1"} | ADDRESS


@pytest.mark.parametrize(
    ("variables", "script", "ends"),
    [
        # The launcher starts the rank, or a script that replaces itself.
        (TORCHRUN, "python", "gone"),
        pytest.param(TORCHRUN, "sh -c 'exec python'", "gone", marks=pytest.mark.full),
        (SRUN, "python", "gone"),
        pytest.param(MPIRUN, "python", "gone", marks=pytest.mark.full),
        # No launcher: a shell in a pod, or a terminal that is closed
        (STATEFULSET, "python", "alive"),
        pytest.param({}, "sh -c 'python; true'", "alive", marks=pytest.mark.full),
    ],
)
def test_the_end_of_a_launcher_is_noticed(
    tmp_path: Path, variables: dict[str, str], script: str, ends: str
) -> None:
    seen = tmp_path / "seen"
    seconds = "60" if ends == "gone" else "2"
    watcher = tmp_path / "watch.py"
    watcher.write_text(WATCH)
    # Paths may have spaces, and the shells are nested: they read the words from variables.
    command = script.replace("python", '"$PYTHON" "$WATCHER" "$SEEN" "$SECONDS_TO_WAIT"')
    words = {
        "PYTHON": sys.executable,
        "WATCHER": str(watcher),
        "SEEN": str(seen),
        "SECONDS_TO_WAIT": seconds,
    }
    exports = " ".join(f"{name}={value}" for name, value in variables.items())
    # The launcher sets the variables for what it starts, and has none of them itself.
    launcher = subprocess.Popen(
        ["sh", "-c", f"env {exports} {command} & wait"], env=os.environ | words
    )
    try:
        _wait_for(seen, "watching")
        launcher.kill()
        launcher.wait()
        last = _wait_for(seen, ends)
        if ends == "gone":
            assert last.endswith(f"(pid {launcher.pid})")
    finally:
        launcher.kill()
        launcher.wait()


def test_a_launcher_that_lives_is_not_gone(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    watcher = tmp_path / "watch.py"
    watcher.write_text(WATCH)
    command = [sys.executable, str(watcher), str(seen), "2"]
    subprocess.run(command, env=os.environ | TORCHRUN, check=True, timeout=120)
    assert seen.read_text().splitlines() == ["watching", "alive"]


def _wait_for(path: Path, word: str) -> str:
    """Wait until a file's last line begins with a word, and return the line."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[-1].startswith(word):
            return lines[-1]
        time.sleep(0.02)
    raise AssertionError(f"no line {word} in {path}")
