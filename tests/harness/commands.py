"""Commands as `python -m` runs them, in processes forked from a server that has imported torch.

Such a process starts in milliseconds instead of seconds, of which most would be spent on imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from nanoray.parallel.rendezvous import open_store

ROOT = Path(__file__).resolve().parents[2]
# For a Ray head, a node or a run to come up, on a machine that is busy with other tests
START_S = 180.0


class _Process(ForkServerProcess):
    """A forked process that starts its own, such as the workers of a DataLoader, as any other does.

    They would be forked from a server of its own, which would import all of the below first.
    """

    _start_method = None


class _Context(ForkServerContext):
    Process = _Process


forkserver = _Context()
# The first optimizer of a process imports torch._dynamo, which takes longer than torch itself and
# than most tests. Ray is not among them: it reads its settings from the environment when it is
# imported. But what it imports in turn is, which is two fifths of its time.
_TORCH = ["torch._dynamo", "torch.distributed.nn.functional", "torch.utils.tensorboard"]
_OF_RAY = ["requests", "jsonschema", "google.protobuf.internal.builder", "filelock", "msgpack"]
_OURS = ["nanoray.train.rank", "nanoray.train.report", "nanoray.cli", "nanoray.script.program"]
_OURS += ["nanoray.script.engine"]
_OF_BENCH = ["nanoray.bench.arm", "tests.stress.equivalence", "matplotlib.pyplot"]
# A rank whose function stands in a file of tests imports that file, and what it imports.
_OF_TESTS = ["pytest", "hypothesis", __name__]
_OF_TESTS += [f"tests.harness.{name}" for name in ("elastic", "ranks", "zoo_ranks", "frozen")]
forkserver.set_forkserver_preload([*_TORCH, *_OF_RAY, *_OURS, *_OF_BENCH, *_OF_TESTS])

# Where the workers of pytest-xdist find the server of their controller; nothing that they start needs
# to know it.
_SHARED = "NANORAY_TEST_FORKSERVER"


def start_for_workers(env: Mapping[str, str]) -> None:
    """Start the server in the controller of pytest-xdist, with these variables, for all its workers.

    What it imports takes four CPU-seconds; each worker would have a server of its own. What it forks
    prints nothing among the results of the tests: who wants to read the output of one redirects it.
    """
    before = dict(os.environ)
    os.environ.update(env)
    with _silent():
        multiprocessing.forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)
    os.environ[_SHARED] = multiprocessing.forkserver._forkserver._forkserver_address


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Let processes that start meanwhile print to nowhere."""
    sys.stdout.flush()
    streams = (1, 2)
    before = [os.dup(stream) for stream in streams]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    try:
        yield
    finally:
        for stream, copy in zip(streams, before, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def _use_shared(address: str) -> None:
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address = address
    # The server ends with its controller. What it forks gets this one, and has no use for it.
    server._forkserver_alive_fd = os.pipe()[1]
    server.ensure_running = lambda: None


if _SHARED in os.environ:
    _use_shared(os.environ.pop(_SHARED))

# Starting a process also looks at the ends of all others. Two threads that look at one end at the
# same time both read its exit code from the same pipe, and the second, which finds nothing, reports
# 255.
_one_at_a_time = threading.Lock()


class Command:
    """`python -m MODULE ...` or `python SCRIPT.py ...`, with the methods of `subprocess.Popen`.

    The process leads a session of its own. Its environment is `env` whole (default: this process').
    stdout and stderr go to one file, or with `apart` to two.
    """

    def __init__(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        apart: bool = False,
    ) -> None:
        self.args = args
        # The Ray cluster (tests.harness.cluster) that it uses, if that is known
        self.cluster: Any = None
        # They go with this object
        self._files = [
            tempfile.NamedTemporaryFile(prefix="nr-out-")  # noqa: SIM115
            for _ in range(1 + apart)
        ]
        names = self._files[0].name, self._files[-1].name
        streams = {1: names[0], 2: names[1]}
        self._process = fork(
            list(args), dict(os.environ if env is None else env), str(cwd), streams
        )
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        """The exit code; negative after a signal, None before the end."""
        return self.poll()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self._read(0)

    @property
    def errors(self) -> str:
        """What it has written to stderr so far."""
        return self._read(-1)

    def _read(self, which: int) -> str:
        return Path(self._files[which].name).read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, or None."""
        with _one_at_a_time:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end and return the output."""
        self.wait(timeout)
        return self.output, None

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        if self.poll() is None:
            # It has ended just now: the server waits for it, not we
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()


class ForkedPopen(Command):
    """A command with pipes or files as its streams, in the place of `subprocess.Popen`."""

    def __init__(
        self, command: list[str], env: dict[str, str], stdin: Any, stdout: Any, stderr: Any
    ) -> None:
        self.args, self.cluster = tuple(command), None
        streams: dict[int, Any] = {}
        self.stdin, self.stdout = None, None
        if stdin == subprocess.PIPE:
            streams[0], own = forkserver.Pipe(duplex=False)
            self.stdin = os.fdopen(os.dup(own.fileno()), "wb", buffering=0)
            own.close()
        if stdout == subprocess.PIPE:
            own, streams[1] = forkserver.Pipe(duplex=False)
            self.stdout = os.fdopen(os.dup(own.fileno()), "rb", buffering=0)
            own.close()
        else:
            streams[1] = stdout.name
        streams[2] = streams[1] if stderr == subprocess.STDOUT else stderr.name
        self._process = fork(command[2:], env, os.getcwd(), streams)
        self.pid = int(self._process.pid or 0)
        for stream in streams.values():
            if not isinstance(stream, str):
                stream.close()


def start_process(command: list[str], **how: Any) -> Any:
    """Start a process as `subprocess.Popen` does; a module of nanoray is forked."""
    if command[1] != "-m" or not command[2].startswith("nanoray."):
        return subprocess.Popen(command, **how)
    return ForkedPopen(command, how["env"], how["stdin"], how["stdout"], how["stderr"])


def fork(args: list[str], env: dict[str, str], cwd: str, streams: Mapping[int, Any]) -> Any:
    """Start `python -m args`. `streams`: file descriptor -> a file's path, or a connection."""
    process = forkserver.Process(target=_run, args=(args, env, cwd, streams), daemon=True)
    with _one_at_a_time:
        process.start()
    return process


def run(
    *args: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run` would. Raises AssertionError at the time limit."""
    with Command(*args, env=env, cwd=cwd, apart=True) as command:
        return _completed(command, timeout)


def torchrun_environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables with which torchrun starts one rank of one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def torchrun(
    ranks: int,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 400,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command on some ranks, with the variables that torchrun sets and without its agent."""
    store = open_store("127.0.0.1", ranks, 30)
    env = dict(os.environ if env is None else env)
    env |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    env |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
    }
    with contextlib.ExitStack() as stack:
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        commands = [
            stack.enter_context(Command(*args, env=env | place, cwd=cwd, apart=True))
            for place in places
        ]
        return [_completed(command, timeout) for command in commands]


def _completed(command: Command, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        code = command.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(
            f"{command.args}: no end within {timeout:g} s\n{command.output}\n{command.errors}"
        ) from None
    return subprocess.CompletedProcess(command.args, code, command.output, command.errors)


def _run(args: list[str], env: dict[str, str], cwd: str, streams: Mapping[int, Any]) -> None:
    """Become `python -m args`, in the forked process."""
    os.setsid()
    files = {
        fd: os.open(s, os.O_WRONLY | os.O_APPEND) if isinstance(s, str) else s.fileno()
        for fd, s in streams.items()
    }
    become(args, env, cwd, files)


def become(args: list[str], env: dict[str, str], cwd: str, streams: Mapping[int, int]) -> None:
    """Become `python -m args`, or `python args` of a script, in a forked process; it ends here.

    `streams`: the file descriptors that become its standard streams, and are closed: nobody else
    would see it end.
    """
    multiprocessing.current_process().daemon = False  # which may have no children
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # that of the server's environment
    for fd, stream in streams.items():
        os.dup2(stream, fd)
    for stream in streams.values():
        os.close(stream)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.argv = list(args)
    # What `python -m` runs is executed anew, as in a process of its own, and not found imported
    for name in list(sys.modules):
        is_package = hasattr(sys.modules[name], "__path__")
        if name.endswith(".__main__") or (name == args[0] and not is_package):
            del sys.modules[name]
    code = 1
    try:
        if "OMP_NUM_THREADS" in env:  # which the server has not seen when it imported torch
            sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
        if args[0].endswith(".py"):
            sys.path.insert(0, os.path.dirname(args[0]))
            runpy.run_path(args[0], run_name="__main__")
        else:
            runpy.run_module(args[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def watchers_of(path: Path) -> list[int]:
    """The processes that watch ranks whose exit records are at this path, or under it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"exit_record.py" in command and str(path).encode() in command:
                found.append(int(process.name))
    return found


def no_watchers_left(path: Path, seconds: float = 30.0) -> bool:
    """Whether the watchers of ranks at this path have ended, as each does after its rank."""
    end = time.monotonic() + seconds
    while watchers_of(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def killed_saves(folder: Path, save_forever: Callable[..., None], *args: object) -> Iterator[int]:
    """Kill a process that saves checkpoints 25 times, at any moment; yield its last printed step.

    `save_forever` is called with the arguments and with a shared value: where it tells the step
    that it has saved.
    """
    rng, in_save = random.Random(0), 0
    for _ in range(25):
        done = forkserver.RawValue("q", 0)  # no lock: a process killed while it holds one keeps it
        process = forkserver.Process(target=save_forever, args=(*args, done), daemon=True)
        process.start()
        while not done.value and process.is_alive():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        in_save += any(folder.glob(".*"))
        yield done.value
    assert in_save >= 5, "the kills did hit saves"


def wait_for(
    ready: Callable[[], object],
    seconds: float = START_S,
    process: subprocess.Popen[Any] | Command | None = None,
    said: Callable[[], str] = str,
) -> None:
    """Wait until `ready` returns something true. Raises AssertionError in time, or at the end."""

    def output() -> str:
        return (process.output if isinstance(process, Command) else "") + said()

    end = time.monotonic() + seconds
    while not ready():
        if process is not None and process.poll() is not None and not ready():
            raise AssertionError(f"ended with {process.returncode}: {output()}")
        assert time.monotonic() < end, f"not ready after {seconds} s: {output()}"
        time.sleep(0.05)
