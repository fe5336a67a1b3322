"""The Ray actor of one rank of any program: it owns the program's process, and answers the driver.

The output of the process goes to a file of the run's folder, from which the driver reads on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
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
CPU_EVERY_S = 2.0  # between two looks at all processes of the node
# Of Ray's for its own workers: a debugger that waits for `ray debug`
OF_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")


class ProgramRank:
    """One rank. All methods return at once."""

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
        self._ended: tuple[int, float] | None = None  # exit code, when
        self._begun = 0.0  # monotonic seconds
        self._ooms = 0
        self._cpu = 0.0  # seconds, as of the newest look
        self._looked = 0.0  # when that was, in monotonic seconds
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
        process.stdin.close()
        self._process = process
        self._reaper = reaper_of(process.pid)
        self._ended = None
        self._ooms = oom_kills()
        self._begun = time.monotonic()
        self._looked = 0.0  # at the process before
        threading.Thread(target=self._wait_for, args=(process,), daemon=True).start()
        return process.pid

    def poll(self, offset: int, shown: bool = True) -> dict[str, Any]:
        """Return the output from `offset` on, how the program ended, and the CPU seconds it has used.

        Of output that is not `shown` the newest part is enough.
        """
        process = self._process
        assert process
        ended = self._ended  # before the output, of which nothing comes afterwards
        with self._log.open("rb") as file:
            if not shown:
                offset = max(offset, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(offset)
            output = file.read(MOST_BYTES)
        now = time.monotonic()
        if now - self._looked > CPU_EVERY_S:
            self._cpu, self._looked = sum(session_members(process.pid).values()), now

        answer: dict[str, Any] = {"code": None, "at": ended[1] if ended else 0.0, "oom": False}
        # Its code follows when the driver has all of its output.
        if ended and len(output) < MOST_BYTES:
            answer["code"] = ended[0]
            answer["oom"] = ended[0] == -signal.SIGKILL and oom_kills() > self._ooms
        elif not ended and not self._standby and now - self._begun > STANDBY_AFTER_S:
            self._standby = self._new_standby(MODULES + LATER_MODULES)
        counts = self._observer.counts()
        answer |= {"ended": counts.ended, "waits": counts.waits}
        return answer | {"output": output, "offset": offset + len(output), "cpu": self._cpu}

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
        if self._process and not self._ended and self._warm:
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

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        """Note when a program has ended. (in a thread)"""
        code = process.wait()
        if process is self._process:
            self._ended = code, time.time()


def reaper_of(group: int) -> subprocess.Popen[bytes]:
    """Start a process that ends a process group when its stdin is closed, or this process is gone.

    The kernel ends the program itself with its actor, but not what the program has started: the
    script of a shell, or the workers of a DataLoader.
    """
    command = ["sh", "-c", 'read -r _; kill -9 "-$0" 2>&-', str(group)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
