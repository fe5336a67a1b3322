"""The command lines as a user types them: train, torchrun, a StatefulSet's variables, sample, the
console script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoray.__main__ import main
from nanoray.cli import sample
from tests.harness.commands import Command, run, wait_for
from tests.harness.ports import free_port
from tests.harness.ranks import TINY


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipe with a space")
    values = TINY | {
        "dataset": str(text),
        "data_dir": str(folder / "cache"),
        "max_steps": 20,
        "eval_every": 10,
    }
    path = folder / "words.yaml"
    path.write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items() if key != "name")
    )
    return path


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m args`, or a script."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | env
    return run(*args, env=clean)


def only_run(out: Path) -> Path:
    (run,) = out.iterdir()
    return run


def losses(out: Path) -> dict[int, float]:
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["train/loss"] for r in map(json.loads, lines)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("one process")
    done = python(
        "nanoray.train", "--config", str(recipe), "--out_dir", str(out), "--sample_tokens", "30"
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_train_in_this_process(one_process: tuple[Path, str]) -> None:
    out, printed = one_process
    assert list(losses(out)) == list(range(1, 21))
    assert "1 rank(s) = dp 1 · backend none (one rank: no process group)" in printed
    assert "finished 20 steps" in printed
    assert "sample\n" in printed
    result = json.loads((only_run(out) / "summary.json").read_text())
    assert (result["exit_reason"], result["exit_code"], result["world_size"]) == ("finished", 0, 1)


@pytest.mark.slow
def test_torchrun_is_the_same_recipe(
    recipe: Path, tmp_path: Path, one_process: tuple[Path, str], forked: dict[str, str]
) -> None:
    done = python(
        *(
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
        ),
        *("--rdzv-endpoint", "127.0.0.1:0", "-m", "nanoray.train", "--config", str(recipe)),
        *("--out_dir", str(tmp_path), "--workers", "2"),
        **forked,
    )
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path).values()) == pytest.approx(
        list(losses(one_process[0]).values()), abs=1e-3
    )
    assert "2 rank(s) = dp 2 · backend gloo" in done.stdout
    assert done.stdout.count("step 20/20") == 1, "only rank 0 prints"
    assert (only_run(tmp_path) / "logs" / "rank1.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_restart_of_torchrun_goes_on_in_the_same_run(
    world: int, recipe: Path, tmp_path: Path, one_process: tuple[Path, str], forked: dict[str, str]
) -> None:
    done = python(
        *("torch.distributed.run", "--nproc-per-node", str(world), "--rdzv-backend", "c10d"),
        *(
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "--max-restarts",
            "1",
            "-m",
            "nanoray.train",
            "--config",
            str(recipe),
        ),
        *("--out_dir", str(tmp_path), "--checkpoint_every", "5", "--checkpoint_mode", "sync"),
        *("--faults", f"kill@rank={world - 1},step=13"),
        **forked,
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert json.loads((run / "faults.jsonl").read_text())["step"] == 13, "the fault did not fire"
    assert losses(tmp_path) == pytest.approx(losses(one_process[0]), abs=1e-3)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["attempt"] for r in records] == [0] * 10 + [1] * 10
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == 1
    assert summary["resumed_from"].endswith("step_00000010")


def test_the_variables_of_a_statefulset(recipe: Path, tmp_path: Path) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and nothing else, as a pod would set them."""
    flags = ("nanoray.train", "--config", str(recipe), "--out_dir", str(tmp_path))
    env = dict(os.environ) | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for rank in [Command(*flags, env=env | {"RANK": str(r)}) for r in (1, 0)]:
        output, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, output
    assert list(losses(tmp_path)) == list(range(1, 21))


def test_resume_of_a_path_needs_no_other_flag(recipe: Path, tmp_path: Path) -> None:
    """As the last lines of every run suggest: the run's own configuration, and more steps."""
    done = python(
        "nanoray.train", "--config", str(recipe), "--out_dir", str(tmp_path), "--stop_at", "5"
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    done = python(
        "nanoray.train", "--resume", str(run), "--out_dir", str(tmp_path), "--max_steps", "8"
    )
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert json.loads((run / "config.json").read_text())["n_embd"] == TINY["n_embd"]


def test_sigterm_checkpoints_and_exits_143(recipe: Path, tmp_path: Path) -> None:
    flags = ("--config", str(recipe), "--out_dir", str(tmp_path), "--max_steps", "100000")
    with Command("nanoray.train", *flags) as process:
        wait_for(
            lambda: list(tmp_path.glob("*/metrics.jsonl")) and losses(tmp_path), process=process
        )
        process.terminate()
        assert process.wait(200) == 143
    steps = json.loads((only_run(tmp_path) / "summary.json").read_text())["steps"]
    assert (only_run(tmp_path) / "checkpoints" / f"step_{steps:08d}" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("top_k", "0"),
        ("top_k", "-1"),
        ("max_new_tokens", "-2"),
        ("num_samples", "0"),
    ],
)
def test_sample_refuses_numbers_that_mean_nothing(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main([f"--{flag}", value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {flag} = {value}; give ")


def test_sample_continues_a_prompt(one_process: tuple[Path, str]) -> None:
    run = only_run(one_process[0])
    args = ("nanoray", "sample", "--prompt", "abc", "--max_new_tokens", "20", "--num_samples", "2")
    first, second = python(*args, str(run)), python(*args, str(one_process[0]))
    assert first.returncode == 0, first.stderr
    texts = first.stdout.split("---\n")
    assert len(texts) == 2
    assert all(t.startswith("abc") for t in texts)
    assert first.stdout == second.stdout, "a run folder and its out_dir's newest run are the same"
    assert "step 20" in first.stderr


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ("closed", "stderr"),
        ("a pipe that nobody reads", "stdout"),
        pytest.param("closed", "stdout", marks=pytest.mark.full),
    ],
)
def test_a_lost_stream_ends_no_command(
    one_process: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    lost: str,
) -> None:
    run, page = str(only_run(one_process[0])), str(tmp_path / "page.html")
    commands = [
        ["check"],
        ["faults", run],
        ["report", "ledger", run],
        ["report", run, "--output", page],
    ]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if "pipe" in how else "/dev/full", "w", buffering=1) as stream:
        monkeypatch.setattr(sys, lost, None if how == "closed" else stream)
        for argv in [
            *commands,
            ["checkpoint", "list", run],
            ["checkpoint"],
            ["--help"],
            ["--version"],
            ["lunch"],
            [],
        ]:
            assert main(argv) == 2 * (argv in (["checkpoint"], ["lunch"], []))
            assert main(["faults", "/nowhere"]) == 2
    assert Path(page).exists()


@pytest.mark.full
@pytest.mark.slow
def test_example_kill_a_worker_recovers(
    recipe: Path, tmp_path: Path, forked_ray: dict[str, str]
) -> None:
    """On a Ray of its own, as a user would run it."""
    flags = ("--config", str(recipe), "--out_dir", str(tmp_path), "--max_steps", "40")
    done = python("examples/kill_a_worker.py", *flags, **forked_ray)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failure  rank 1" in done.stdout
    assert "replace  1/3 rank 1" in done.stdout
    assert list(losses(tmp_path)) == list(range(1, 41))
    assert (only_run(tmp_path) / "faults.jsonl").exists(), "the fault fired"
