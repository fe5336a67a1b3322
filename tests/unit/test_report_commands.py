"""The command of a run, as a report shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoray.cli import parse_args
from nanoray.observe.report.command import typed_command
from nanoray.observe.report.gather import RunFiles, settings

TRAIN = ["/opt/nanoray/train/__main__.py", "--preset", "tiny", "--name", "a b"]


@pytest.mark.parametrize("given", [["--env", "TOKEN=hunter2"], ["--env=TOKEN=hunter2"]])
def test_a_report_shows_no_value_of_a_variable(given: list[str]) -> None:
    command = typed_command({"command": [*TRAIN, *given, "--lr", "1"]})
    assert command.endswith(f"{' '.join(given).removesuffix('=hunter2')} --lr 1")
    # With the name alone a command takes the value from its environment
    assert parse_args(["--env", "PATH"], "x", "y")

    runs = []
    for value in ("hunter2", "other"):
        config = {"env": {"TOKEN": value}}
        runs.append(RunFiles(Path("a"), config, {}, {}, [], [], [], None))
    row = next(row for row in settings(runs) if row.key == "env")
    assert row.marked
    assert row.values == ['{"TOKEN": "..."}', '{"TOKEN": "..."}']
