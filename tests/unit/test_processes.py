"""How tests and benchmarks start a Ray head: by a path without a space, on ports of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from nanoray.bench.harness import processes


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
