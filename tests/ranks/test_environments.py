"""Odd machines, limits and variables: a run there has the losses of any other, or one line says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.harness.commands import become, forkserver
from tests.harness.environments import TABLE, Surroundings
from tests.harness.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {row.name: row for row in TABLE}
PLAIN = Surroundings("plain")
Losses = list[float]


def command(row: Surroundings, recipe: Path, out: Path) -> list[str]:
    words = ["nanoray.train", "--config", str(recipe), "--out_dir", str(out)]
    return [*words, "--max_steps", "3", "--tensorboard", "false", *row.flags]


def environment_of(row: Surroundings) -> dict[str, str]:
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    for name, value in row.variables.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def be_ranks(name: str, words: list[str], env: dict[str, str], out: Path, log: Path) -> None:
    """Become the command's ranks in the row's surroundings, in a forked process."""
    row = BY_NAME.get(name, PLAIN._replace(ranks=int(name[-1]) if name[-1].isdigit() else 1))
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(env)
    if row.before:
        row.before(out)
    folder = "." if row.before else str(ROOT)  # its own may have been removed
    if row.ranks == 1:
        become(words, env, folder, {})
    # They share the surroundings.
    children = []
    for rank in range(row.ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(row.ranks)}
        own |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(row.ranks)}
        child = os.fork()
        if child == 0:
            become(words, env | own, folder, {})
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    os._exit(max(os.waitstatus_to_exitcode(status) for status in statuses))


def losses_of(out: Path) -> Losses:
    (records,) = out.glob("*/metrics.jsonl")
    return [json.loads(line)["train/loss"] for line in records.read_text().splitlines()]


def train(row: Surroundings, recipe: Path, folder: Path) -> tuple[int, str, Path]:
    """Train in these surroundings; return the exit code, what was printed, and out_dir."""
    out, log = folder / "runs", folder / "log"
    log.touch()
    words, env = command(row, recipe, out), environment_of(row)
    if row.python:
        shell = {"PYTHON": sys.executable, "RUN": f"-m {' '.join(words)}"}
        with log.open("wb") as stream:
            done = subprocess.run(
                ["sh", "-c", row.python], env=env | shell, stdout=stream, stderr=stream, timeout=300
            )
        return done.returncode, log.read_text(errors="replace"), out
    env |= {"MASTER_PORT": str(free_port())} if row.ranks > 1 else {}
    if row.ranks > 1:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    args = (row.name, words, env, out, log)
    process = forkserver.Process(target=be_ranks, args=args)
    process.start()
    process.join(120)
    code = process.exitcode
    process.kill()
    assert code is not None, log.read_text(errors="replace")
    return code, log.read_text(errors="replace"), out


@pytest.fixture(scope="module")
def plain(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Losses]:
    """The losses of so many ranks in the surroundings of these tests."""

    @cache
    def losses(ranks: int) -> Losses:
        row = PLAIN._replace(name=f"plain {ranks}", ranks=ranks)
        code, said, out = train(row, recipe, tmp_path_factory.mktemp("plain"))
        assert code == 0, said
        return losses_of(out)

    return losses


def parameters() -> list[object]:
    return [
        pytest.param(row, id=row.name, marks=() if row.everyday else pytest.mark.full)
        for row in TABLE
    ]


@pytest.mark.parametrize("row", parameters())
def test_a_run_has_the_same_losses_there_or_is_refused_in_one_line(
    row: Surroundings, recipe: Path, tmp_path: Path, plain: Callable[[int], Losses]
) -> None:
    if row.root and os.geteuid() != 0:
        pytest.skip("only root may make such surroundings")
    # Where the losses are compared, the token files are made before.
    expected = plain(row.ranks)
    code, said, out = train(row, recipe, tmp_path)
    assert "Traceback" not in said, said
    if row.refused:
        assert code != 0
        assert any(
            line.startswith("error: ") and row.refused in line for line in said.splitlines()
        ), said
    else:
        assert code == 0, said
        assert losses_of(out) == expected
