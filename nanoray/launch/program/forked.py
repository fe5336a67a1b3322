"""Programs that are forked from a process with torch imported: the side of those who ask for it.

    driver, before it imports Ray ─► ForkServer ◄─ connect ── the actors of ranks on the same machine
    actor of any other rank ─► a ForkServer of its own

fork_server.py is the other side. A server is shared by ranks that would import the same in the same
surroundings; import_settings says what that is.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORK_SERVER = Path(__file__).with_name("fork_server.py")
# What a program of torch imports before it is known
MODULES = ("torch.distributed", "torch.utils.data")
CLOSE_S = 5.0  # for a keeper to end what a program has left
MOST_RANKS = 256  # that may wait to be served
# Of Ray's for its own workers: a debugger that waits for `ray debug`
OF_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")
# Variables that Python, the loader of libraries, OpenMP and torch read when they begin
READ_AT_IMPORT = (
    *("PYTHON", "LANG", "LC_", "TZ", "LD_", "MALLOC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH", "PYTORCH", "ATEN_"),
)


@dataclass(frozen=True)
class Shared:
    """A server that others may use: where it listens, and what it has imported how."""

    address: str
    settings: list[Any]

    def connect(self) -> socket.socket:
        """Return a connection for one program. Raises OSError where the server is gone."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self.address)
        except OSError:
            connection.close()
            raise
        return connection


class ForkServer:
    """A process that imports modules and forks programs. Who makes it must close it."""

    def __init__(
        self, modules: Sequence[str], variables: Mapping[str, str], output: int | None = None
    ) -> None:
        """output: a file for what the modules print; None: where this process prints."""
        # The path of a socket has 107 characters at most.
        parent = "/tmp" if os.access("/tmp", os.W_OK) else None
        self._folder = tempfile.mkdtemp(prefix="nanoray-", dir=parent)
        self.shared = Shared(f"{self._folder}/fork", import_settings(variables))
        with socket.socket(socket.AF_UNIX) as home:
            home.bind(self.shared.address)
            home.listen(MOST_RANKS)
            self._process = subprocess.Popen(
                [sys.executable, str(FORK_SERVER), str(os.getpid()), *modules],
                stdin=home.fileno(),
                stdout=output,
                stderr=output,
                env=dict(variables),
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server. Programs run on until their ranks' actors are gone."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process.kill()
        self._process.wait()


def import_settings(variables: Mapping[str, str]) -> list[Any]:
    """Return what a program's imports, and the limits that it runs in, depend on. Linux only."""
    return [
        [sys.version, os.path.realpath(sys.prefix)],
        sorted(os.sched_getaffinity(0)),
        Path("/proc/self/cgroup").read_text(),
        [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "net", "ipc")],
        {k: v for k, v in sorted(variables.items()) if k.startswith(READ_AT_IMPORT)},
    ]


def program_variables(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return this process' variables for a program, without those of Ray's for its own workers.

    threads: of OpenMP. given: by the user, which count more.
    """
    own = {
        k: v
        for k, v in os.environ.items()
        if k == "RAY_ADDRESS" or not k.startswith(("RAY_", *OF_RAY))
    }
    # Ray sets a number of threads of its own. Progress bars must not wait in a buffer.
    return own | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"} | dict(given)


class ForkedProgram:
    """A program that a server forks as soon as it can."""

    def __init__(self, connection: socket.socket, order: dict[str, Any], output: Path) -> None:
        """connection: its own, which it closes. order: see the fork server's `become`.

        output: the file to which the program's is added.
        """
        self._connection = connection
        self.begun: Future[int] = Future()  # its pid, which leads a session
        self.end: Future[tuple[int, float]] = Future()  # exit code, and when
        self._signal = 0  # to send when it begins
        of_this_process = {
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
        }
        line = json.dumps(order | of_this_process).encode() + b"\n"
        with output.open("ab") as file:
            sent = socket.send_fds(connection, [line], [file.fileno()])
        connection.sendall(line[sent:])
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    @property
    def pid(self) -> int:
        """Its pid; 0: it has not begun."""
        return self.begun.result() if self.begun.done() else 0

    def send_signal(self, signum: int) -> None:
        """Send a signal to the program and all that it has started, at once or when it begins."""
        self._signal = signum
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def close(self) -> None:
        """End the program and all that it has started, and wait for that."""
        with suppress(OSError):  # its keeper is gone
            self._connection.shutdown(socket.SHUT_WR)
        self._follower.join(CLOSE_S)
        self._connection.close()

    def _follow(self) -> None:
        """Note when it begins and ends, until its keeper closes the connection. (in a thread)"""
        with suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                answer = json.loads(line)
                if "code" in answer:
                    self._ended(answer["code"], answer["at"])
                    continue
                self.begun.set_result(answer["pid"])
                if self._signal:
                    self.send_signal(self._signal)
        if not self.end.done():  # its keeper was killed, and the program with it
            self._ended(-signal.SIGKILL, time.time())

    def _ended(self, code: int, at: float) -> None:
        if not self.begun.done():
            self.begun.set_result(0)
        self.end.set_result((code, at))
