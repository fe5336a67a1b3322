"""The notebooks run from the first cell to the last, are valid, and are committed without output."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.harness.commands import ROOT, run

FOLDER = ROOT / "examples" / "notebooks"


def execute(name: str, folder: Path, python: dict[str, str], **values: Any) -> str:
    """Run a notebook in a folder of its own and return what it printed."""
    settings = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    env = (
        os.environ
        | python
        | {
            "MPLBACKEND": "Agg",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
    )
    script = str(ROOT / "tests/harness/notebook.py")
    done = run(script, str(FOLDER / f"{name}.ipynb"), *settings, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart(text: Path, tmp_path: Path, forked: dict[str, str]) -> None:
    flags = ["--device", "cpu", "--data_dir", str(tmp_path / "cache"), "--tensorboard", "false"]
    printed = execute(
        "quickstart",
        tmp_path,
        forked,
        PRESET="tiny",
        TEXT=str(text),
        STEPS=20,
        RUNS="my runs",
        MORE=flags,
    )
    assert re.search(r"^step 20/20 \| loss \d\.\d+ \| val ", printed, re.M)
    assert "To be" in printed
    assert re.search(r"^finished 24 steps ", printed, re.M), "it was continued, quietly"
    assert len(list((tmp_path / "my runs").iterdir())) == 1


def test_ddp_by_hand(tmp_path: Path) -> None:
    printed = execute("ddp_by_hand", tmp_path, {})
    assert "[[3.0, 30.0], [3.0, 30.0]]" in printed
    assert "2 buckets; weights differ from section 3 by" in printed
    assert "4 ranks: 72 bytes sent by each, of 48;  2(n-1)/n x 48 = 72" in printed
