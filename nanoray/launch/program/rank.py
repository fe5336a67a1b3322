"""The Ray actor of one rank of any program: it owns the program's process, and answers the driver.

The output of the process goes to a file of the run's folder, from which the driver reads on.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from nanoray.faults.exit_record import oom_kills
from nanoray.launch.devices import bound_devices
from nanoray.launch.program.counts import Counts
from nanoray.launch.program.folder import digest, unpack
from nanoray.launch.program.forked import (
    MODULES,
    ForkedProgram,
    ForkServer,
    Shared,
    import_settings,
    program_variables,
)
from nanoray.launch.program.rank_observer import RankObserver
from nanoray.machine.interfaces import free_port, interface_for_gloo
from nanoray.machine.proc import session_members

MOST_BYTES = 1 << 20  # of output in one answer
TAIL_BYTES = 1 << 16  # of output that is not shown, enough for a traceback
OUTPUT_S = 0.25  # between two answers with output, which a person reads
# Ray's group of the methods that wait, and how many do at a time: for begin, end and output
WAIT = "wait"
CONCURRENCY = {WAIT: 3}


class ProgramRank:
    """One rank. All methods return at once, but for those of the group WAIT.

    These return when there is something to say, so that the driver need not ask again and again: on
    a small machine that would take the CPU from the program.
    """

    def __init__(
        self,
        log: str,
        threads: int,
        warm: bool,
        variables: dict[str, str] | None = None,
        shared: Shared | None = None,
    ) -> None:
        """log: the file of the output. threads: of OpenMP, unless the program sets another number.

        warm: the program is Python, and torch is imported before it starts. variables: that the user
        gives, also for that import. shared: a server of the driver's, for ranks on its machine.
        """
        self._variables = program_variables(threads, variables or {})
        self._log = Path(log)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._printed = self._log.stat().st_size if self._log.exists() else 0  # before this actor
        self._warm = warm
        self._shared = shared
        self._server: ForkServer | None = None
        # That of the program to come: what keeps it is ready when the program is ordered.
        self._connection: socket.socket | None = self._connect()
        self._program: ForkedProgram | None = None
        self._ooms = 0
        self._answered = 0.0  # when output was last sent, in monotonic seconds
        self._devices = bound_devices(ray)
        self._observer = RankObserver(self._log)

    def _connect(self) -> socket.socket:
        """Connect to the driver's server, if it is as one of this rank's would be; else to its own."""
        if self._shared and self._shared.settings == import_settings(self._variables):
            with suppress(OSError):
                return self._shared.connect()
        self._shared = None
        if self._server:
            with suppress(OSError):
                return self._server.shared.connect()
            self._server.close()  # it was killed
        modules = MODULES if self._warm else ()
        with self._log.open("ab") as log:
            self._server = ForkServer(modules, self._variables, log.fileno())
        return self._server.shared.connect()

    def describe(self, folder: str, marker: str, script: str) -> dict[str, Any]:
        """Return this actor's node, address and devices, and what it sees of the driver's files.

        folder: the driver's working directory; it is the program's where it exists. marker: a file
        in the run's folder on the driver's node. script: of a Ray job, in each node's copy.
        """
        ip = ray.util.get_node_ip_address()
        # Of the node's own name gloo would take the loopback, where no other host connects.
        given = "GLOO_SOCKET_IFNAME" in os.environ
        return {
            "actor": ray.get_runtime_context().get_actor_id(),
            "node": ray.get_runtime_context().get_node_id(),
            "ip": ip,
            "interface": "" if given else interface_for_gloo([ip, ""], 0),
            "devices": self._devices,
            "folder": folder if folder and Path(folder).is_dir() else os.getcwd(),
            "shares_run": Path(marker).exists(),
            "printed": self._printed,
            "sees": Path(script).exists() if script else True,
            "shares_server": self._shared is not None,
        }

    def digest(self, folder: str, files: list[str]) -> str:
        """Return a hash of files of this node; empty where one is missing."""
        return digest(Path(folder), files)

    def unpack(self, archive: bytes, folder: str) -> None:
        """Unpack the program's folder on this node."""
        unpack(archive, Path(folder))

    def free_port(self) -> int:
        """Return a port of this node that nothing listens on."""
        return free_port("")

    def start(self, order: dict[str, Any], variables: dict[str, str]) -> None:
        """Start the program; what the one before has left is ended.

        order: kind, words, folder and trace; see fork_server.py. variables: besides the rank's own.
        """
        if self._program:  # which has ended, as a rule
            self._program.close()
        connection = self._connection or self._connect()
        self._connection = None
        self._observer.begin()
        self._ooms = oom_kills()
        order = order | {"variables": self._variables | variables}
        self._program = ForkedProgram(connection, order, self._log)

    @ray.method(concurrency_group=WAIT)
    def wait_for_begin(self, patience_s: float) -> int:
        """Return the program's pid when it begins, which is when torch is imported; 0: it is late."""
        assert self._program
        wait([self._program.begun], patience_s)
        return self._program.pid

    @ray.method(concurrency_group=WAIT)
    def wait_for_end(self) -> dict[str, Any]:
        """Return, when the program has ended: its exit code, when that was, its output's size, its pid.

        oom: whether the kernel has ended it for want of memory.
        """
        assert self._program
        code, at = self._program.end.result()
        oom = code == -signal.SIGKILL and oom_kills() > self._ooms
        size = self._log.stat().st_size
        return {"code": code, "at": at, "oom": oom, "size": size, "pid": self._program.pid}

    @ray.method(concurrency_group=WAIT)
    def wait_for_output(self, offset: int) -> dict[str, Any]:
        """Return the output from `offset` on, when there is some, or the program has ended."""
        assert self._program
        end = self._program.end
        ended = False
        while not ended:
            left_s = self._answered + OUTPUT_S - time.monotonic()
            if left_s <= 0 and self._log.stat().st_size > offset:
                break
            ended = bool(wait([end], left_s if left_s > 0 else OUTPUT_S).done)
        self._answered = time.monotonic()
        return self.read(offset)

    def read(self, offset: int, shown: bool = True) -> dict[str, Any]:
        """Return the output from `offset` on; of output that is not `shown` its newest part.

        from, to: the offset that was asked for, and that of what follows.
        """
        begin = offset
        with self._log.open("rb") as file:
            if not shown:
                begin = max(begin, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(begin)
            output = file.read(MOST_BYTES)
        return {"output": output, "from": offset, "to": begin + len(output)}

    def movement(self) -> dict[str, Any]:
        """Return what shows whether the program moves: see the driver's Movement."""
        cpu = sum(self._members().values())
        counts = self._observer.counts()
        size = self._log.stat().st_size
        return {"output": size, "cpu": cpu, "ended": counts.ended, "waits": counts.waits}

    def observe(self, offset: int) -> dict[str, Any]:
        """Return the program's memory and GPUs, and the notes of its collectives from `offset` on."""
        return self._observer.observe(self._members(), self._devices, offset)

    def counts(self) -> Counts:
        """Return the collectives that the program has begun and ended."""
        return self._observer.counts()

    def clock(self) -> float:
        """Return the clock in which this node's programs note moments."""
        return time.perf_counter()

    def _members(self) -> dict[int, float]:
        """Return the processes of the program, and the CPU time of each in seconds."""
        pid = self._program.pid if self._program else 0
        return session_members(pid) if pid else {}

    def stop(self, signum: int) -> None:
        """Send a signal to the program and all that it has started."""
        if self._program:
            self._program.send_signal(signum)

    def show_stacks(self) -> None:
        """Let the program write the stacks of its threads into its output."""
        program = self._program
        if program and program.pid and not program.end.done() and self._warm:
            with suppress(ProcessLookupError):
                os.kill(program.pid, signal.SIGUSR2)

    def close(self) -> None:
        """End whatever is left of this rank's processes."""
        if self._connection:
            self._connection.close()
        if self._program:
            self._program.close()
        if self._server:
            self._server.close()
