"""Processes that a benchmark starts, and ends: each with a log, a time limit and nothing left behind.

Every child leads a session of its own, and what it starts stays in that session (Ray's daemons and workers do), so
ending a child means: ask it, then kill what is left of its session. Nothing is found by name; `ray stop` would end
every Ray of this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoray.devices import Slots, available_cpus

TAIL_LINES = 12
GRACE_S = 10.0  # between the request to end and the kill
CLUSTER_START_S = 90.0
# What a launcher sets for its ranks, or Ray for its clients, must not reach an arm from outside.
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")


class ChildFailed(Exception):
    """A child ended badly or too late; the message ends with the last lines of its output."""


class Child:
    """A child process and everything it starts. Leaving the `with` block ends all of it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, pipes: bool = False) -> None:
        """Start `command`; its output goes to `log`, or with `pipes` only stderr does."""
        self.log = log
        pipe = subprocess.PIPE if pipes else None
        with log.open("wb") as stream:
            self.started = time.time()  # wall clock, as the children's records are
            self.process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or stream,
                stderr=stream if pipes else subprocess.STDOUT,
                start_new_session=True,
                bufsize=0,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, timeout_s: float) -> float:
        """Wait for a good end; return the seconds from start to exit. Raises ChildFailed."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"no end within {timeout_s:g} s\n{self.tail()}") from None
        seconds = time.time() - self.started
        if code:
            raise ChildFailed(f"exit code {code}\n{self.tail()}")
        return seconds

    def ask(self, line: str) -> None:
        """Send one line to a child with pipes."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except OSError:
            raise ChildFailed(f"it is gone\n{self.tail()}") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the JSON line that a child with pipes writes. Raises ChildFailed when none comes in time."""
        assert self.process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise ChildFailed(f"no answer within {timeout_s:g} s\n{self.tail()}")
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                self.process.wait(GRACE_S)
                raise ChildFailed(f"exit code {self.process.returncode} before it answered\n{self.tail()}")
            line += part
        return json.loads(line)

    def tail(self) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
        return ""

    def end(self) -> None:
        """End the child: SIGTERM to it and time to tidy up, then SIGKILL to whatever its session still holds."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        deadline = time.monotonic() + GRACE_S
        while (left := session_members(self.process.pid)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.process.poll() is None:  # where there is no /proc
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def session_members(session: int) -> dict[int, float]:
    """Return the living processes of a session and the CPU seconds each has used; empty where there is no /proc."""
    members = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid, rest = stat.read_text().split(" (", 1)
            fields = rest.rsplit(") ", 1)[1].split()  # state ppid pgrp session ... utime stime
            if int(fields[3]) == session and fields[0] not in "ZX":
                members[int(pid)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return members


def arm_environment() -> dict[str, str]:
    """Return the environment of every arm. Ray's token is set here: a cluster without one lets strangers run code."""
    env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED and not k.startswith("TORCHELASTIC_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return env | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Return a port that was free just now. Only for programs that cannot take port 0: somebody may be faster."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def ray_head(folder: Path, env: Mapping[str, str], slots: Slots, cpus: int = 0) -> Iterator[tuple[str, Child]]:
    """Run a Ray head with `cpus` CPUs (0: this machine's) and `slots.devices`; yield its address. Ends it at the end.

    Ray listens on all interfaces, also when told 127.0.0.1: the token in `env` keeps strangers out.

    `folder` must have a short path: Ray's sockets lie in it, and a socket's path has at most 107 characters.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--dashboard-host=127.0.0.1", "--port=0"]
    command += [f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
    command += [f"--num-cpus={cpus or max(1, int(available_cpus()))}", f"--num-gpus={len(slots.devices)}"]
    command += [f"--object-store-memory={80 * 2**20}", f"--temp-dir={folder}"]
    if slots.devices:
        env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(d.uuid for d in slots.devices)}
    with Child(command, env, folder.with_suffix(".log")) as head:
        deadline = time.monotonic() + CLUSTER_START_S
        while "Ray runtime started" not in head.log.read_text(encoding="utf-8", errors="replace"):
            if head.process.poll() is not None or time.monotonic() > deadline:
                raise ChildFailed(f"`ray start --head` did not come up\n{head.tail()}")
            time.sleep(0.1)
        yield (folder / "ray_current_cluster").read_text(encoding="utf-8").strip(), head
