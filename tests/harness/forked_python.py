"""A `python` that forks: for torchrun, whose ranks would import torch, and scripts with PYTHON.

    torchrun, or a script ─ starts ─► this file, as `python` ─ command, environment, streams ─► server, which has torch
                                      ends as the fork does, and passes on signals              │ forks
                                                                                                ▼
                                                                        `python -m MODULE ...` or `python SCRIPT.py ...`

Torchrun takes the path of its ranks' Python from PYTHON_EXEC.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ADDRESS = "NANORAY_TEST_FORKED_PYTHON"


@contextmanager
def forked_python(folder: Path) -> Iterator[dict[str, str]]:
    """Give the variables for a process whose `$PYTHON`, and whose ranks of torchrun, are forked."""
    from tests.harness.commands import forkserver

    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" "$@"\n')
    python.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as home:
        home.bind(str(folder / "socket"))
        home.listen(64)
        server = forkserver.Process(target=_serve, args=(home, os.getpid()), daemon=True)
        server.start()
        yield {_ADDRESS: str(folder / "socket"), "PYTHON": str(python), "PYTHON_EXEC": str(python)}
        server.terminate()
        server.join()


def _serve(home: socket.socket, owner: int) -> None:
    """Fork a process for each caller, and one beside it that reports how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    home.settimeout(1.0)
    while Path(f"/proc/{owner}").exists():
        with suppress(TimeoutError):
            caller, _ = home.accept()
            caller.setblocking(True)
            if not os.fork():
                home.close()
                _attend(caller)
            caller.close()


def _attend(caller: socket.socket) -> None:
    """Fork the caller's command, pass on its signals, and send the exit status. Does not return."""
    import select

    from nanoray.launch.program.fork_server import hold_groups
    from tests.harness.commands import become

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(caller, 4, 3)
    body = b""
    while len(body) < int.from_bytes(size, "little"):
        body += caller.recv(65536)
    command, cwd, env = json.loads(body)
    if not (worker := os.fork()):
        caller.close()
        os.setsid()
        if command[0].endswith(".py"):  # else a script's DDP model may hang as it ends
            hold_groups()
        become(command, env, cwd, dict(enumerate(streams)))
    for stream in streams:
        os.close(stream)
    watched = os.pidfd_open(worker)
    while watched not in (ready := select.select([watched, caller], [], [])[0]):
        # A byte is a signal's number; the end is that of a caller that was killed.
        number = caller.recv(1) if caller in ready else b""
        with suppress(ProcessLookupError):
            os.kill(worker, number[0] if number else signal.SIGKILL)
        if not number:
            break
    _, status = os.waitpid(worker, 0)
    with suppress(OSError):
        caller.sendall(status.to_bytes(4, "little"))
    os._exit(0)


def _main(words: list[str]) -> None:
    """Be `python` with these arguments. What the server does not know is left to the real one."""
    import array

    given = [word for word in words if word != "-u"]
    if (
        _ADDRESS not in os.environ
        or not given
        or (given[0] != "-m" and not given[0].endswith(".py"))
    ):
        os.execv(sys.executable, [sys.executable, *words])
    command = given[1:] if given[0] == "-m" else given
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ[_ADDRESS])
    order = json.dumps([command, os.getcwd(), dict(os.environ)]).encode()
    streams = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2])
    server.sendmsg([len(order).to_bytes(4, "little")], [streams])
    server.sendall(order)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = int.from_bytes(server.recv(4), "little")
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _main(sys.argv[1:])
