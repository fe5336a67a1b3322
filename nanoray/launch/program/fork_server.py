"""Forks the programs of ranks from a process that has imported torch.

    import modules ─► for each connection: fork ─► a rank's keeper ─► fork ─► the program
                                                        │
                                                        └─► its pid and its end, back to the rank's actor

A program thus begins as soon as its rank does, and a restart, which is a connection of its own, takes
the time of the program alone. The server is started as a file, with the socket on which it listens as
stdin, so that a program finds nothing of nanoray in it but what --trace needs. Neither a server nor a
keeper computes, has threads when it forks, or asks the driver of a GPU for anything: no import of torch
2.13 does. A keeper ends its program, and all that the program has started, when its connection closes:
then the rank's actor is gone, or done with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

# What DDP, FSDP and optimizers import when they are first used: as long as torch itself. Only for a
# restart, since a program that uses none of them should not begin later.
LATER_MODULES = ("torch._dynamo",)
# It takes a core for seconds: not while the programs themselves start, and with a quarter of the share
# of one where they leave no core free. A restart waits for it, so it must get on.
LATER_AFTER_S = 10.0
NICER = 5  # than the programs; the kernel takes 19 for more than that
MOST_BYTES = 1 << 16  # of an order, at a time
PEER = struct.Struct("3i")  # of a socket: process, user and group
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Import modules, and fork a keeper for each connection. Command line: who starts it, the modules."""
    home = socket.socket(fileno=os.dup(0))

    def leave(*_: object) -> None:
        shutil.rmtree(os.path.dirname(home.getsockname()), ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    end_with_parent(signal.SIGTERM, int(sys.argv[1]))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # no program waits for a keyboard that no rank has
    os.close(nothing)
    modules = sys.argv[2:]
    import_all(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # how a keeper ends is of no interest
    importer: threading.Thread | None = None
    niceness = 0  # of the programs
    while True:
        try:
            connection, _ = home.accept()
        except TimeoutError:  # all ranks' programs run
            home.settimeout(None)
            importer = in_thread(import_later, niceness)
            continue
        niceness = niceness_of(connection)
        if importer:
            importer.join()  # no thread may run at a fork
        if not os.fork():
            home.close()
            keep(connection)
            return
        connection.close()
        if modules and importer is None:
            home.settimeout(LATER_AFTER_S)


def import_all(modules: Iterable[str]) -> None:
    """Import modules, without collecting garbage among what stays anyway, a tenth of the time."""
    gc.disable()
    for module in modules:
        with suppress(Exception):  # the program may need no torch; else its own import says why
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def niceness_of(connection: socket.socket) -> int:
    """Return the niceness of the process at the other end, which is that of its program."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    pid, _, _ = PEER.unpack(data)
    with suppress(ProcessLookupError):
        return os.getpriority(os.PRIO_PROCESS, pid)
    return 0  # it is gone


def import_later(niceness: int) -> None:
    """Import what a restart needs soon, beside programs of this niceness. (in a thread)

    A thread has a niceness of its own; that of a process would stay its programs' for ever.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)  # which it cannot go below
    nicer = max(own, niceness + NICER)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nicer)
    import_all(LATER_MODULES)


def keep(connection: socket.socket) -> None:
    """Run one program of a rank, until its connection ends. It returns in a program that has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, "wb") as nothing:  # what the server prints is none of its
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    keeper = os.getpid()
    order, output = receive(connection)
    if order is None:
        os._exit(0)
    program = os.fork()
    if not program:
        become(order, output, connection, keeper)
        return
    os.close(output)
    in_thread(report_end, program, connection)
    with suppress(ConnectionError):
        connection.recv(1)  # nothing follows but its end
    for kill in (
        os.killpg,
        os.kill,
    ):  # the program and what it has left, or one without a session yet
        with suppress(ProcessLookupError):
            kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    os._exit(0)


def in_thread(work: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a thread that does this."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """Return an order, and the file for the program's output; None when the rank's actor is gone."""
    try:
        data, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
        while data and not data.endswith(b"\n"):
            data += connection.recv(MOST_BYTES)
    except ConnectionError:
        data = b""
    return (json.loads(data), files[0]) if data else (None, -1)


def report_end(program: int, connection: socket.socket) -> None:
    """Wait for a program, and say how and when it has ended. (in a thread)"""
    with suppress(OSError):  # the rank's actor is gone, and the program with it
        # It stays a zombie until all that it has started is ended, so that its pid is no other's.
        end = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        assert end
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        connection.sendall(json.dumps({"code": code, "at": time.time()}).encode() + b"\n")


def become(order: dict[str, Any], output: int, connection: socket.socket, keeper: int) -> None:
    """Be the program of an order. (in a fork)"""
    os.setsid()
    end_with_parent(signal.SIGKILL, keeper)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    # As a process that the rank's actor had started
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, order["files"])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, order["niceness"])
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(order["oom_score_adj"])
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    os.environ["PWD"] = os.getcwd()  # that of a shell, which some programs read
    # Ray blocks and ignores Ctrl-C in what it starts; a program that sends it to itself gets it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # What modules keep from the server's time: random numbers, and the folder for temporary files
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    connection.close()

    words: list[str] = order["words"]
    if order["kind"] == "command":
        os.execvp(words[0], words)
    # The stacks of all threads, on stderr, when the driver finds that no rank moves.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.argv = words
    sys.excepthook = show_error
    if "torch._dynamo" in sys.modules:
        hold_groups()
    if order["trace"]:
        start_trace(order["trace"])
    if order["kind"] == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        run_script(words[0])


def hold_groups() -> None:
    """Let default process groups live as long as the program.

    Elsewhere the first one does, by accident: a DDP model imports torch._dynamo after its group was
    made, and with it torch.distributed.nn.functional, whose functions have the group as a default.
    Imported before, they have none. Then the end of the model is that of the group, and with torch
    2.13 and gloo it may never come: it waits, with Python's lock held, for a thread that needs it.
    """
    distributed = importlib.import_module("torch.distributed")
    init = distributed.init_process_group
    held: list[Any] = []

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        held.append(distributed.group.WORLD)

    vars(distributed)["init_process_group"] = init_process_group


def start_trace(order: list[Any]) -> None:
    """Note the program's collectives: traced.py, which is below this file's package."""
    package = str(Path(__file__).parents[3])
    sys.path.append(package)
    try:
        from nanoray.launch.program.traced import trace
    except ImportError as error:
        print(f"trace    nothing is traced: {error}", file=sys.stderr)
    else:
        trace(*order)
    sys.path.remove(package)


def show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an error of the program as Python does, without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def end_with_parent(signum: int, parent: int) -> None:
    """Let the kernel send this process a signal when the one that has started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it has ended meanwhile
        signal.raise_signal(signum)


def run_script(path: str) -> None:
    """Run a file as Python would: its folder is sys.path[0], and the module is __main__ to the end."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        # Annotations stay what they are in the script, whatever this file imports from __future__.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
