"""The commands that a run prints at its end: each is run as printed, from another working folder."""

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
    """Return the words of each command after `next`."""
    lines = output[output.index("\nnext ") :].strip().splitlines()
    return [shlex.split(line.removeprefix("next")) for line in lines]


@pytest.mark.full
def test_the_printed_commands_work_in_another_folder(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Everything was relative to the first folder: the runs, the text, and the cache of tokens."""
    here = tmp_path / "one folder"
    elsewhere = tmp_path / "another"
    here.mkdir()
    elsewhere.mkdir()
    shutil.copy(text, here / "my text.txt")
    values = TINY | {"dataset": "my text.txt", "data_dir": "cache", "checkpoint_every": 4}
    (here / "recipe.json").write_text(json.dumps(values | {"tokenizer": "char"}))
    flags = ("--config", "recipe.json", "--out_dir", "runs of mine", "--tensorboard", "true")
    done = run("nanoray.train", *flags, cwd=here)
    assert done.returncode == 0, done.stderr

    board, sample, resume = printed_commands(done.stdout)
    assert [words[:2] for words in (board, sample, resume)] == [[sys.executable, "-m"]] * 3
    # TensorBoard would serve the page until it is stopped. With --inspect it lists the runs.
    done = run(*board[2:], "--inspect", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert only_run(here / "runs of mine").name in done.stdout
    done = run(*sample[2:], "--max_new_tokens", "5", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    done = run(*resume[2:], env=cluster.env, cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr

    # It has continued in the same folder, and nothing was written elsewhere.
    assert list(losses(here / "runs of mine")) == list(range(1, 2 * int(TINY["max_steps"]) + 1))
    assert list(elsewhere.iterdir()) == []
