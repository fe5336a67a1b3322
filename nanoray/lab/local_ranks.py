"""Processes of this machine that meet as ranks: what torchrun would set for each."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from nanoray.cli.signals import stop_signals

# Tests replace it with a faster way to start Python
start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


def variables_of_ranks(store: Any, ranks: int) -> list[dict[str, str]]:
    """Return the variables of each rank of a group that meets in a store of this process."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def ended_by_signals() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: what it has started and written goes first."""
    return stop_signals(_end)


def _end(signum: int, frame: Any) -> None:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signum)
