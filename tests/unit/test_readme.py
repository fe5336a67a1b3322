"""The README tells the truth: every command runs and every path exists. tests/unit/test_figures.py
holds its figures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.commands import run
from tests.harness.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_and_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for name in re.findall(r"^((?:nanoray|examples|tests|docs)/\S*)", README, re.M):
        assert (ROOT / name).exists(), name


def test_the_script_of_the_readme_trains(tmp_path: Path) -> None:
    """As one rank of torchrun, which needs no Ray."""
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(script)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = python(
        str(tmp_path / "mine.py"),
        cwd=tmp_path,
        **ranks,
        MASTER_PORT=str(free_port()),
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step +100/100 \| loss \d", done.stdout), done.stdout


def python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return run(*args, cwd=cwd, env=clean | env)


@pytest.mark.full
@pytest.mark.slow
def test_the_first_minute_as_a_new_user_without_internet(
    forked_ray: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """examples/train_shakespeare.py from another folder, nothing cached, a proxy that leads
    nowhere: a short run.
    """
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    folder = tmp_path / "a folder"
    folder.mkdir()
    script = str(ROOT / "examples" / "train_shakespeare.py")
    done = python(
        script,
        "--max_steps",
        "10",
        "--eval_every",
        "10",
        "--log_every",
        "10",
        cwd=folder,
        **forked_ray,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stdlib: source text of Python" in done.stdout
    assert "Shakespeare is not cached and the download failed" in done.stdout
    assert re.search(r"step +10/10 \| loss \d\.\d+ \| val \d\.\d+", done.stdout)
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["dataset"] == "stdlib"
    next_commands = [line[7:] for line in done.stdout.splitlines() if "nanoray sample " in line]
    sampled = subprocess.run(
        next_commands[0], shell=True, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.strip()


def test_dry_run_of_the_large_preset(tmp_path: Path) -> None:
    """The 124 M parameter recipe on 8 ranks, planned on a machine with none of them."""
    done = python(
        *("nanoray.launch", "--preset", "gpt2-124m", "--workers", "8", "--dry_run"),
        *(
            "--tokenizer",
            "byte",
            "--dataset",
            "stdlib",
            "--device",
            "cpu",
            "--ray_address",
            "10.0.0.1:6379",
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "12 seq × 5 accum × 8 dp × 1,024 tok = 491,520 tok/step" in done.stdout
    assert not (tmp_path / "runs").exists()
