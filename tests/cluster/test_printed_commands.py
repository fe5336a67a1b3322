"""The commands that a run prints at its end: each is run as printed."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, losses
from tests.harness.commands import run
from tests.harness.ranks import TINY, only_run


def printed_commands(output: str) -> list[list[str]]:
    """Return module and words of each command after `next`, which begins with `nanoray` or Python."""
    lines = output[output.index("\nnext ") :].strip().splitlines()
    commands = [shlex.split(line.removeprefix("next")) for line in lines]
    python = [sys.executable, "-m"]
    return [words[2:] if words[:2] == python else words for words in commands]


@pytest.mark.full
def test_the_printed_commands_work(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    """Paths are relative: the runs, the text, and the cache of tokens, with spaces in their names."""
    here = tmp_path / "one folder"
    here.mkdir()
    shutil.copy(text, here / "my text.txt")
    values = TINY | {"dataset": "my text.txt", "data_dir": "cache", "checkpoint_every": 4}
    (here / "recipe.json").write_text(json.dumps(values | {"tokenizer": "char"}))
    flags = ("--config", "recipe.json", "--out_dir", "runs of mine")
    done = run("nanoray.train", *flags, cwd=here)
    assert done.returncode == 0, done.stderr

    report, sample, resume = printed_commands(done.stdout)
    assert [words[:2] for words in (report, sample, resume)] == [
        ["nanoray", "report"],
        ["nanoray", "sample"],
        ["nanoray", "train"],
    ]
    done = run(*report, cwd=here)
    assert done.returncode == 0, done.stderr
    assert (only_run(here / "runs of mine") / "report.html").is_file()
    done = run(*sample, "--max_new_tokens", "5", cwd=here)
    assert done.returncode == 0, done.stderr
    done = run(*resume, env=cluster.env, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr

    # It has continued in the same folder.
    assert list(losses(here / "runs of mine")) == list(range(1, 2 * int(TINY["max_steps"]) + 1))
