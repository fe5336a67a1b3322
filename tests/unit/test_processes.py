"""How tests and benchmarks start a Ray head: by a path without a space, on ports of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoray.bench.harness import processes


def test_a_head_is_started_by_a_path_without_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout whose path has one: Ray starts jobs through an unquoted shell line."""
    spaced = tmp_path / "a folder" / "venv"
    spaced.parent.mkdir()
    spaced.symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "prefix", str(spaced))
    command = processes.head_command(tmp_path / "ray", "--num-cpus=2")
    assert not [word for word in command if " " in word]
    assert command[-1] == "--num-cpus=2"
    code = "import importlib.util as u, sys; print(sys.executable, sys.prefix, u.find_spec('torch').origin, sep='\\n')"
    done = subprocess.run([command[0], "-c", code], capture_output=True, text=True, check=True)
    assert all(line.startswith(f"{tmp_path}/ray/venv") for line in done.stdout.splitlines()), (
        done.stdout
    )


def test_a_head_has_no_fixed_port(tmp_path: Path) -> None:
    """Another Ray of this host may have Ray's usual ones."""
    command = processes.head_command(tmp_path / "ray")
    ports = {word for word in command if "port=" in word}
    assert ports == {f"--{name}=0" for name in (
        "port", "dashboard-port", "dashboard-agent-listen-port", "min-worker-port", "max-worker-port"
    )}  # fmt: skip
    module, _, hook = processes.HEAD_ENV["RAY_START_HOOK"].rpartition(".")
    params = SimpleNamespace(ray_client_server_port=10001)
    getattr(sys.modules[module], hook)(params, True)
    assert params.ray_client_server_port is None
