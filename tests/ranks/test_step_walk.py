"""A plain step enters few files and no option that is off; docs/step-by-step.md names its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "step-by-step.md"
MOST_FILES = 20
MOST_FUNCTIONS = 55  # named ones
# Each belongs to an option that a plain run leaves off, or to a step that is logged.
OPTIONS = [
    "models/activation_checkpointing.py",
    "models/batch_norm.py",
    "models/dropout.py",
    "models/fp8.py",
    "models/moe.py",
    "parallel/buckets.py",
    "parallel/compress.py",
    "parallel/ep.py",
    "parallel/fsdp.py",
    "parallel/running_statistics.py",
    "parallel/tp.py",
    "observe/trace/comm_log.py",
    "observe/trace/recorder.py",
    "train/evaluate.py",
    "train/guard/audit.py",
    "train/guard/bad_step.py",
    "train/guard/replicas.py",
    "train/mirror.py",
    "train/read_vote.py",
    "train/record.py",
    "train/saving.py",
    "observe/watch/profile.py",
    "observe/watch/routing.py",
    "observe/watch/statistics.py",
    "observe/watch/throughput.py",
    "observe/watch/tracing.py",
]


@pytest.fixture(scope="module")
def walk(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of a real run, in a process of its own."""
    file = tmp_path_factory.mktemp("walk") / "walk.json"
    flags = (f"--dataset={text}", f"--json={file}")
    done = run("tests.harness.step_walk", *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_plain_step_passes_through_few_files(walk: dict[str, Any]) -> None:
    assert 10 < walk["files"] <= MOST_FILES
    assert 40 < walk["functions"] <= MOST_FUNCTIONS, "fewer would be no training"
    assert {"models/gpt.py", "train/engine.py"} <= set(walk["order_of_files"])


def test_what_is_off_does_not_run(walk: dict[str, Any]) -> None:
    missing = [file for file in OPTIONS if not (ROOT / "nanoray" / file).exists()]
    assert not missing, f"rename these in OPTIONS: {missing}"
    assert not set(OPTIONS) & set(walk["order_of_files"])


def test_the_page_names_the_files_in_the_order_of_the_walk(walk: dict[str, Any]) -> None:
    headings = re.findall(r"^## \d+\. `nanoray/(.+)`$", PAGE.read_text(encoding="utf-8"), re.M)
    assert headings == walk["order_of_files"]


def test_the_page_quotes_lines_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.M)[1:]
    engine = (ROOT / "nanoray/train/engine.py").read_text(encoding="utf-8")
    quoted = 0
    for section in sections:
        named = re.match(r"\d+\. `(.+)`", section)
        sources = engine
        if named:
            sources += (ROOT / named[1]).read_text(encoding="utf-8")
        lines_of_code = {line.strip() for line in sources.splitlines()}
        for block in re.findall(r"```python\n(.*?)```", section, re.S):
            for line in filter(None, map(str.strip, block.splitlines())):
                assert line in lines_of_code, f"{section.splitlines()[0]}: {line}"
                quoted += 1
    assert quoted > 10
