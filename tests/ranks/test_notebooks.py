"""The notebooks run from the first cell to the last, are valid, and are committed without output."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.harness.commands import ROOT, run

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SOURCE = {"type": "array", "items": {"type": "string"}}
CELL = {  # of nbformat 4.5, what Jupyter and Colab refuse to be without
    "type": "object",
    "required": ["cell_type", "id", "metadata", "source"],
    "properties": {
        "cell_type": {"enum": ["markdown", "code"]},
        "id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
        "metadata": {"type": "object"},
        "source": SOURCE,
        "outputs": {"type": "array", "maxItems": 0},
        "execution_count": {"type": "null"},
    },
    "additionalProperties": False,
    "if": {"properties": {"cell_type": {"const": "code"}}},
    "then": {"required": ["outputs", "execution_count"]},
    "else": {"properties": {"outputs": False, "execution_count": False}},
}
SCHEMA = {
    "type": "object",
    "required": ["cells", "metadata", "nbformat", "nbformat_minor"],
    "properties": {
        "cells": {"type": "array", "items": CELL},
        "metadata": {"type": "object", "required": ["kernelspec", "language_info"]},
        "nbformat": {"const": 4},
        "nbformat_minor": {"const": 5},
    },
    "additionalProperties": False,
}


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_its_links_lead_somewhere(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(book, SCHEMA)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    words = "".join(
        "".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown"
    )
    for target in re.findall(r"\]\(([^)#]+)\)", words):
        assert target.startswith("https://") or (FOLDER / target).exists(), target


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
