"""The Ray actor of one rank of any program: it owns the program's process, and answers the driver.

The output of the process goes to a file of the run's folder, from which the driver reads on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from nanoray.faults.exit_record import oom_kills
from nanoray.launch.devices import bound_devices
from nanoray.launch.program.counts import Counts
from nanoray.launch.program.folder import digest, unpack
from nanoray.launch.program.observed import RankObserver
from nanoray.machine.interfaces import free_port, interface_for_gloo
from nanoray.machine.proc import session_members

STANDBY = Path(__file__).with_name("standby.py")
# What a program of torch imports before it is known
MODULES = ("torch.distributed", "torch.utils.data")
# What DDP, FSDP and optimizers import when they are first used: as long as torch itself. Only for a
# restart, since a program that uses none of them should not begin later.
LATER_MODULES = ("torch._dynamo",)
# A standby imports torch, which takes a core for seconds: not while the program itself starts.
STANDBY_AFTER_S = 10.0
MOST_BYTES = 1 << 20  # of output in one answer
TAIL_BYTES = 1 << 16  # of output that is not shown, enough for a traceback
OUTPUT_S = 0.25  # between two answers with output, which a person reads
# Ray's group of the methods that wait, and how many do at a time: for the end, and for output
WAIT = "wait"
CONCURRENCY = {WAIT: 2}
# Of Ray's for its own workers: a debugger that waits for `ray debug`
OF_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")


class ProgramRank:
    """One rank. All methods return at once, but for those of the group WAIT.

    These return when there is something to say, so that the driver need not ask again and again: on
    a small machine that would take the CPU from the program.
    """

    def __init__(
        self, log: str, threads: int, warm: bool, variables: dict[str, str] | None = None
    ) -> None:
        """log: the file of the output. threads: of OpenMP, unless the program sets another number.

        warm: the program is Python, and torch is imported before it starts. variables: that the user
        gives, also for that import.
        """
        self._log = Path(log)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._printed = self._log.stat().st_size if self._log.exists() else 0  # before this actor
        self._threads = threads
        self._warm = warm
        self._variables = variables or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._end: Future[tuple[int, float]] = Future()  # of the program: exit code, when
        self._ooms = 0
        self._answered = 0.0  # when output was last sent, in monotonic seconds
        self._devices = bound_devices(ray)
        self._observer = RankObserver(self._log)
        self._standby: subprocess.Popen[bytes] | None = self._new_standby(MODULES)

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

    def start(self, order: dict[str, Any], variables: dict[str, str]) -> int:
        """Start the program and return its pid.

        order: see standby.py. variables: besides this process' own.
        """
        self.end_group()  # what the program before has left
        process = self._standby or self._new_standby(MODULES)
        self._standby = None
        self._observer.begin()
        line = json.dumps(order | {"variables": self._own_variables() | variables})
        assert process.stdin
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        self._process = process
        self._reaper = reaper_of(process.pid)
        self._end = Future()
        self._ooms = oom_kills()
        threading.Thread(target=self._wait_for, args=(process, self._end), daemon=True).start()
        return process.pid

    @ray.method(concurrency_group=WAIT)
    def wait_for_begin(self, patience_s: float) -> None:
        """Return when the program begins, which is when its process has imported torch, or is late."""
        assert self._process
        assert self._process.stdin
        poll = select.poll()
        # The process closes its stdin then. That a pipe has no reader is reported without being asked for.
        poll.register(self._process.stdin, 0)
        poll.poll(1e3 * patience_s)

    @ray.method(concurrency_group=WAIT)
    def wait_for_end(self) -> dict[str, Any]:
        """Return, when the program has ended: its exit code, when that was, and the size of its output.

        oom: whether the kernel has ended it for want of memory. A program that runs for a while gets
        a standby beside it.
        """
        if not wait([self._end], STANDBY_AFTER_S).done:
            self._standby = self._new_standby(MODULES + LATER_MODULES)
        code, at = self._end.result()
        oom = code == -signal.SIGKILL and oom_kills() > self._ooms
        return {"code": code, "at": at, "oom": oom, "size": self._log.stat().st_size}

    @ray.method(concurrency_group=WAIT)
    def wait_for_output(self, offset: int) -> dict[str, Any]:
        """Return the output from `offset` on, when there is some, or the program has ended."""
        ended = False
        while not ended:
            left_s = self._answered + OUTPUT_S - time.monotonic()
            if left_s <= 0 and self._log.stat().st_size > offset:
                break
            ended = bool(wait([self._end], left_s if left_s > 0 else OUTPUT_S).done)
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
        cpu = sum(session_members(self._process.pid).values()) if self._process else 0.0
        counts = self._observer.counts()
        size = self._log.stat().st_size
        return {"output": size, "cpu": cpu, "ended": counts.ended, "waits": counts.waits}

    def observe(self, offset: int) -> dict[str, Any]:
        """Return the program's memory and GPUs, and the notes of its collectives from `offset` on."""
        members = session_members(self._process.pid) if self._process else {}
        return self._observer.observe(members, self._devices, offset)

    def counts(self) -> Counts:
        """Return the collectives that the program has begun and ended."""
        return self._observer.counts()

    def clock(self) -> float:
        """Return the clock in which this node's programs note moments."""
        return time.perf_counter()

    def stop(self, signum: int) -> None:
        """Send a signal to the program and all that it has started."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signum)

    def show_stacks(self) -> None:
        """Let the program write the stacks of its threads into its output."""
        if self._process and not self._end.done() and self._warm:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR2)

    def close(self) -> None:
        """End whatever is left of this rank's processes."""
        self.end_group()
        if self._standby:
            self._standby.kill()

    def end_group(self) -> None:
        """End what is left of the program, and of all that it has started."""
        self.stop(signal.SIGKILL)
        if self._reaper:
            self._reaper.communicate()
            self._reaper = None

    def _own_variables(self) -> dict[str, str]:
        """Return this process' variables, without those of Ray's for its own workers."""
        own = {
            k: v
            for k, v in os.environ.items()
            if k == "RAY_ADDRESS" or not k.startswith(("RAY_", *OF_RAY))
        }
        # Ray sets a number of threads of its own. Progress bars must not wait in a buffer.
        own |= {"OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        return own | self._variables

    def _new_standby(self, modules: tuple[str, ...]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(STANDBY), *(modules if self._warm else ())]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._own_variables(),  # OpenMP reads its own when torch is imported
                start_new_session=True,
            )

    @staticmethod
    def _wait_for(process: subprocess.Popen[bytes], end: Future[tuple[int, float]]) -> None:
        """Note when a program has ended. (in a thread)"""
        end.set_result((process.wait(), time.time()))


def reaper_of(group: int) -> subprocess.Popen[bytes]:
    """Start a process that ends a process group when its stdin is closed, or this process is gone.

    The kernel ends the program itself with its actor, but not what the program has started: the
    script of a shell, or the workers of a DataLoader.
    """
    command = ["sh", "-c", 'read -r _; kill -9 "-$0" 2>&-', str(group)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
