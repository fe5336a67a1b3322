"""Processes that a benchmark starts and ends, each with a log and a time limit.

Every child leads a session of its own, and what it starts stays in that session (Ray's daemons and
workers do), so ending a child means SIGTERM, and then SIGKILL for what is left of its session.
Nothing is found by name: `ray stop` would end every Ray of this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoray.bench.harness.report import DISTORTING, Emit, Record
from nanoray.machine.host import available_cpus
from nanoray.machine.proc import session_members
from nanoray.machine.slots import Slots

TAIL_LINES = 12
GRACE_S = 10.0  # between the request to end and the kill
CLUSTER_START_S = 90.0
# What a launcher sets for its ranks, or Ray for its clients, must not reach an arm from outside,
# nor what changes its times.
_NOT_INHERITED = (
    *DISTORTING,
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RAY_ADDRESS",
)


# Tests replace it with a faster way to start Python
start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


class ChildFailed(Exception):
    """A child ended badly or too late; the message ends with the last lines of its output."""


class Child:
    """A child process and everything it starts. Leaving the `with` block ends all of it."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, pipes: bool = False
    ) -> None:
        """Start `command`; its output goes to `log`, or with `pipes` only stderr does."""
        self.log = log
        self._rest = b""  # after the last complete line of a child with pipes
        pipe = subprocess.PIPE if pipes else None
        with log.open("wb") as stream:
            self.started = time.time()  # wall clock, as the children's records are
            self.began = time.monotonic()
            self.process = start_process(
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

    def wait(
        self, timeout_s: float, meanwhile: Callable[[], object] | None = None, every_s: float = 60.0
    ) -> float:
        """Wait for exit code 0, calling `meanwhile` every `every_s` seconds.

        Return the seconds from start to exit. Raises ChildFailed.
        """
        code = None
        deadline = time.monotonic() + timeout_s
        while code is None:
            left = max(0.0, deadline - time.monotonic())
            try:
                code = self.process.wait(min(left, every_s))
            except subprocess.TimeoutExpired:
                if left <= every_s:
                    raise ChildFailed(f"no end within {timeout_s:g} s\n{self.tail()}") from None
            if meanwhile and code is None:
                meanwhile()
        seconds = time.monotonic() - self.began
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

    def read(self) -> list[Record]:
        """Return the JSON lines that have come from a child with pipes, or wait for more of them.

        Raises ChildFailed when it has ended.
        """
        assert self.process.stdout is not None
        part = os.read(self.process.stdout.fileno(), 1 << 16)
        if not part:
            code = self.process.wait(GRACE_S)
            if code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
            else:
                how = f"ended with exit code {code}"
            raise ChildFailed(f"it {how}\n{self.tail()}")
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines]

    def tail(self) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-TAIL_LINES:])
        return ""

    def kill(self) -> int:
        """Kill all processes of the child's session at once; return their number."""
        members = session_members(self.process.pid)
        send_signal(members, signal.SIGKILL)
        return len(members)

    def end(self) -> None:
        """End the child with SIGTERM, and after GRACE_S kill what is left of its session."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        # The child itself may tidy up
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)

        # What it has started may still live. A process that is killed may just have started another
        # one: repeat until the session is empty.
        deadline = time.monotonic() + GRACE_S
        while self.kill() and time.monotonic() < deadline:
            time.sleep(0.02)

        if self.process.poll() is None:  # where there is no /proc
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each of these processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


@contextmanager
def scratch_folder(prefix: str = "nrb-") -> Iterator[Path]:
    """Yield a folder for the runs of a benchmark, and remove it.

    Its tmp/ is meant as the TMPDIR of the children. Its path is short: Ray's sockets lie below it,
    and a socket's path has at most 107 characters.
    """
    long = len(tempfile.gettempdir()) > 30
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp" if long else None))
    try:
        (folder / "tmp").mkdir()  # torchrun and killed daemons leave things in TMPDIR
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def arm_environment() -> dict[str, str]:
    """Return the environment of every arm.

    It holds a token for Ray: a cluster without one runs code for anyone.
    """
    env = {}
    for key, value in os.environ.items():
        if key not in _NOT_INHERITED and not key.startswith("TORCHELASTIC_"):
            env[key] = value
    env["RAY_AUTH_MODE"] = "token"
    env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    env["RAY_USAGE_STATS_ENABLED"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    return env


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into KeyboardInterrupt(signal).

    Later signals are ignored while processes are ended.
    """

    def interrupt(signum: int, frame: Any) -> None:
        for each in old:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signum)

    old = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in old:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)


def answers_only() -> Emit:
    """Keep stdout for JSON lines, and return the function that writes one.

    Everything else that is printed goes to stderr.
    """
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(message: Record) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return write


def python_in(folder: Path) -> str:
    """Return a path of this interpreter below `folder`.

    Ray writes the path unquoted into shell lines, so it must not contain a space.
    """
    python = folder / "venv" / "bin" / Path(sys.executable).name
    folder.mkdir(exist_ok=True)
    if not python.parent.parent.is_symlink():
        python.parent.parent.symlink_to(sys.prefix)
    return str(python)


def current_cluster(folder: Path) -> str:
    """Return the address of the head that keeps its files in `folder`.

    The head writes it a moment after it reports that it runs.
    """
    file = folder / "ray_current_cluster"
    deadline = time.monotonic() + CLUSTER_START_S
    while True:
        address = file.read_text(encoding="utf-8").strip() if file.exists() else ""
        if address:
            return address
        if time.monotonic() > deadline:
            raise ChildFailed(f"`ray start --head` runs, but did not write {file}")
        time.sleep(0.05)


def head_command(folder: Path, *flags: str) -> list[str]:
    """Return a `ray start --head` with ports and files of its own, apart from other Rays here.

    Ray keeps its files in `folder`. The path must be short: sockets lie below it, and theirs may
    have 107 characters.
    """
    command = [python_in(folder), "-m", "ray.scripts.scripts", "start"]
    command += ["--head", "--block", "--disable-usage-stats"]
    ports = (
        "port",
        "dashboard-port",
        "dashboard-agent-listen-port",
        "min-worker-port",
        "max-worker-port",
    )
    command += [f"--{port}=0" for port in ports]  # 0: any free one
    return [*command, "--dashboard-host=127.0.0.1", f"--temp-dir={folder}", *flags]


def without_client_server(params: Any, head: bool) -> None:
    """Start Ray without the server of Ray Client: it wants a fixed port, and nothing here uses it."""
    params.ray_client_server_port = None


# The environment of a `ray start`. Ray calls the hook with its parameters. A drain at SIGTERM would
# take 30 s, and no benchmark needs it. Ranks run as any program would, as in kuberay/base.
FEW_OBJECTS = f"--object-store-memory={80 * 2**20}"  # the least that Ray takes is 75 MiB
HEAD_ENV = {
    "RAY_START_HOOK": f"{__name__}.{without_client_server.__name__}",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_worker_niceness": "0",
}


def is_up(ray: Child) -> bool:
    """Return whether a `ray start` has come up."""
    return "Ray runtime started" in ray.log.read_text(encoding="utf-8", errors="replace")


def wait_until_up(ray: Child, what: str) -> None:
    """Wait until a `ray start` has come up. Raises ChildFailed at its end, or in CLUSTER_START_S."""
    deadline = time.monotonic() + CLUSTER_START_S
    while not is_up(ray):
        if ray.process.poll() is not None or time.monotonic() > deadline:
            raise ChildFailed(f"{what} did not come up\n{ray.tail()}")
        time.sleep(0.1)


@contextmanager
def ray_head(
    folder: Path, env: Mapping[str, str], slots: Slots, cpus: int | None = None
) -> Iterator[tuple[str, Child]]:
    """Run a Ray head with `cpus` CPUs and `slots.devices`; yield its address and process.

    Without `cpus` it takes all CPUs of this machine. Ray listens on all interfaces even when it is given
    127.0.0.1: the token in `env` keeps others out.

    `folder` must have a short path: Ray's sockets lie in it, and a socket's path has at most 107
    characters.
    """
    if cpus is None:
        cpus = max(1, int(available_cpus()))
    resources = [
        f"--num-cpus={cpus}",
        f"--num-gpus={len(slots.devices)}",
    ]
    command = head_command(folder, *resources, FEW_OBJECTS)
    env = {**env, **HEAD_ENV}
    if slots.devices:
        env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(d.uuid for d in slots.devices)}
    with Child(command, env, folder.with_suffix(".log")) as head:
        wait_until_up(head, "`ray start --head`")
        yield current_cluster(folder), head
