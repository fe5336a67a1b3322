"""The page that shows our commands beside those of other tools: each of ours works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nanoray.__main__ import main as nanoray
from nanoray.train.__main__ import main as train
from tests.harness.commands import ROOT, run
from tests.harness.page_commands import check_command

PAGE = ROOT / "docs" / "coming-from.md"


def right_column() -> list[str]:
    """Return the code of the page's right columns, each text once."""
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    code = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    return list(dict.fromkeys(code))


COMMANDS = [
    line for line in right_column() if re.match(r"(nanoray|python|torchrun|srun|ray) ", line)
]
TRAINS = [line for line in COMMANDS if line.startswith("nanoray train")]
# What the right column names besides commands and calls: parts of both.
PARTS = {"torch.nn.Module", "engine.fit(...)", "main(run)", "metrics.jsonl", "--dp_mode ddp"}
PARTS |= {"engine.fit", "torchrun"}


@pytest.mark.parametrize("line", COMMANDS)
def test_each_flag_exists(line: str) -> None:
    check_command(line)


def test_each_training_command_plans_a_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--dry_run` goes as far as a run can without training; it names model and batch."""
    monkeypatch.chdir(tmp_path)
    data = [f"--dataset={text}", f"--data_dir={tmp_path}/data", "--device=cpu"]
    for line in TRAINS:
        flags = shlex.split(line)[2:]
        assert train([*flags, *data, "--dry_run"]) == 0, line
        assert "tok/step" in capsys.readouterr().out, line

    # The one command beside these that neither trains nor needs a run.
    inspect = next(line for line in COMMANDS if "nanoray inspect" in line)
    assert nanoray(shlex.split(inspect)[1:]) == 0


@pytest.mark.full  # the dry run of each is near to it
def test_each_training_command_trains(text: Path, tmp_path: Path) -> None:
    """Each with the flags of its line, on a model that is small enough."""
    small = ["--preset=tiny", f"--dataset={text}", f"--data_dir={tmp_path}/data", "--device=cpu"]
    for line in TRAINS:
        flags = shlex.split(line)[2:]
        if "--preset" in flags:
            continue
        steps = [] if "--max_steps" in flags and "4" in flags else ["--max_steps=9"]
        done = run("nanoray.train", *flags, *small, *steps, f"--out_dir={tmp_path}/runs")
        assert done.returncode == 0, line + done.stdout + done.stderr
