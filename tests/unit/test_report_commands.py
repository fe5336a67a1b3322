"""The commands with which a report starts its run again, for each launcher."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest

from nanoray.__main__ import COMMANDS
from nanoray.base.atomic import write_json
from nanoray.cli import parse_args
from nanoray.config import Config
from nanoray.host.launchers import describe_start
from nanoray.tools.report.commands import first_command, other_commands
from nanoray.tools.report.gather import RunFiles, settings
from tests.unit.test_launchers import OPEN_MPI, SRUN, TORCHRUN

TRAIN = ["/opt/nanoray/train/__main__.py", "--preset", "tiny", "--name", "a b"]
FLAGS = "--preset tiny --name 'a b'"
JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "raysubmit_1"}}'}
KUBERAY = JOB | {"RAY_USAGE_STATS_KUBERAY_IN_USE": "1"}
ONE_HOST = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
LEFT_OVER = {"RANK": "0"}  # an incomplete set of variables, which the Ray driver does not read


@pytest.mark.parametrize(
    ("env", "argv", "line"),
    [
        ({}, TRAIN, f"python -m nanoray.train {FLAGS}"),
        (
            {},
            ["/opt/nanoray/launch/__main__.py", "--workers=2"],
            "python -m nanoray.launch --workers=2",
        ),
        ({}, ["/opt/nanoray/__main__.py", "train"], "python -m nanoray train"),
        ({}, ["/opt/bin/nanoray", "launch"], "/opt/bin/nanoray launch"),
        ({}, ["my script.py", "--lr", "1"], "python 'my script.py' --lr 1"),
        (LEFT_OVER, TRAIN, f"python -m nanoray.train {FLAGS}"),
        (
            TORCHRUN | ONE_HOST,
            TRAIN,
            f"torchrun --nproc-per-node 2 -m nanoray.train {FLAGS}",
        ),
        (
            TORCHRUN,
            ["own.py"],
            "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "--nproc-per-node 2 own.py",
        ),
        (SRUN, TRAIN, f"srun --ntasks 4 python -m nanoray.train {FLAGS}"),
        (OPEN_MPI, ["own.py"], "mpirun -np 2 python own.py"),
        (
            JOB,
            ["/opt/nanoray/launch/__main__.py"],
            "ray job submit --working-dir . -- python -m nanoray.launch",
        ),
        (
            KUBERAY,
            ["/opt/nanoray/launch/__main__.py", "--out_dir", "/data/runs/x"],
            "python -m nanoray.launch --out_dir /data/runs/x",
        ),
    ],
)
def test_the_first_command_has_its_launcher(
    env: dict[str, str], argv: list[str], line: str
) -> None:
    command = first_command({"command": argv, "launcher": describe_start(env)})
    assert command
    assert command.line == line


@pytest.mark.parametrize("given", [["--env", "TOKEN=hunter2"], ["--env=TOKEN=hunter2"]])
def test_a_report_shows_no_value_of_a_variable(given: list[str]) -> None:
    command = first_command({"command": [*TRAIN, *given, "--lr", "1"]})
    assert command
    assert command.line.endswith(f"{' '.join(given).removesuffix('=hunter2')} --lr 1")
    # With the name alone a command takes the value from its environment
    assert parse_args(["--env", "PATH"], "x", "y")

    runs = []
    for value in ("hunter2", "other"):
        config = {"env": {"TOKEN": value}}
        runs.append(RunFiles(Path("a"), config, {}, {}, [], [], [], None, [], [], []))
    row = next(row for row in settings(runs) if row.key == "env")
    assert row.marked
    assert row.values == ['{"TOKEN": "..."}', '{"TOKEN": "..."}']


def commands_of(folder: Path, ranks: int = 2, **keys: Any) -> dict[str, str]:
    config = Config(name="again", micro_batch_size=2, **keys).model_dump()
    write_json(folder / "config.json", config)
    return dict(other_commands(folder, config, ranks, "cpu"))


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_each_launcher_accepts_its_command(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads the run's config.json, and none resumes the run."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    folder = tmp_path / "a run"
    folder.mkdir()
    commands = commands_of(folder, resume=resume, dataset="stdlib", workers=4)
    hows = {"torchrun", "srun", "mpirun", "Ray", "a job on a Ray cluster", "KubeRay"}
    assert commands.keys() == hows
    for how, line in commands.items():
        words = shlex.split(line)
        if how == "KubeRay":
            assert words[:5] == ["python", "-m", "nanoray", "kube", "submit"]
            kube = importlib.import_module(COMMANDS["kube"][0])
            assert kube.main([*words[4:], "--dry_run"]) == 0
            continue
        module = next(word for word in words if word.startswith("nanoray."))
        config = parse_args(words[words.index(module) + 1 :], "x", "y").config
        assert (config.name, config.workers, config.resume) == ("again", 2, "none")


def test_one_rank_needs_no_launcher_and_a_local_file_no_pod(tmp_path: Path) -> None:
    commands = commands_of(tmp_path, ranks=1, dataset="/home/me/my.txt")
    config = shlex.quote(str(tmp_path / "config.json"))
    assert commands["one process"] == (f"python -m nanoray.train --config {config} --workers 1")
    assert "KubeRay" not in commands


def test_only_its_script_can_build_a_model_of_ones_own(tmp_path: Path) -> None:
    assert other_commands(tmp_path, {"model": "own"}, 2, "cpu") == []
