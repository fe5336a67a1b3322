"""Ray's workers, forked from a process that has imported torch: saves four CPU seconds each.

    raylet ─ starts ─► python default_worker.py ─ command, environment, streams ─► server, which has torch
                       waits until the worker ends                                   │ forks
                                                                                     ▼
                       worker of another pid, which it tells the raylet when it registers, as one in a container does

When the raylet ends the process that it has started, the worker ends. But what freezes a raylet's
children has to look for the worker with `workers_of`, too. Workers with files of their own, as those
of jobs, start as Ray starts them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tests.harness.commands import become, forkserver

_FOLDER = "nr-workers-"
_SITE = Path(__file__).with_name("forked_workers")
# A rank's exit status is read from its entry in /proc, which is gone when its parent has asked for
# it
REAP_S = 0.2


@contextmanager
def forked_workers() -> Iterator[dict[str, str]]:
    """Give the environment variables with which a Ray, started meanwhile, has forked workers."""
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER) as folder,
        socket.socket(socket.AF_UNIX) as home,
    ):
        home.bind(f"{folder}/socket")
        home.listen(64)
        until, held = forkserver.Pipe(duplex=False)
        server = forkserver.Process(target=_serve, args=(home, Path(folder), until), daemon=True)
        server.start()
        with held:
            yield {"NANORAY_TEST_RAY_WORKERS": f"{folder}/socket", "PYTHONPATH": str(_SITE)}
        server.join(10)


def workers_of(callers: list[int]) -> list[int]:
    """Return the workers that were forked for processes that a raylet has started."""
    pairs = [note.name.split("-") for note in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/*-*")]
    return [int(worker) for caller, worker in pairs if int(caller) in callers]


def _serve(home: socket.socket, folder: Path, until: Connection) -> None:
    """Fork a worker for each caller, and note both in `folder`, until `until` is closed."""
    while not (ready := select.select([home, until], [], [], REAP_S)[0]) or until not in ready:
        # A note goes while its worker's pid is still a zombie's: the numbers of both are soon those
        # of other processes.
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                for note in folder.glob(f"*-{ended.si_pid}"):
                    note.unlink()
                os.waitpid(ended.si_pid, 0)
        if ready:
            caller, _ = home.accept()
            with caller:
                pid, _, _ = struct.unpack(
                    "3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                )
                if worker := os.fork():
                    (folder / f"{pid}-{worker}").touch()
                else:
                    home.close()
                    until.close()
                    _work(caller)


def _work(caller: socket.socket) -> None:
    """Become the worker that was ordered; end when the caller ends."""
    os.setsid()  # Ray may end the whole process group of a worker
    size, streams, *_ = socket.recv_fds(caller, 4, 3)
    with caller.makefile("rb") as stream:
        command, cwd, env = json.loads(stream.read(int.from_bytes(size, "little")))

    def end_with_caller() -> None:
        caller.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_caller, daemon=True).start()
    become(command, env, cwd, dict(enumerate(streams)))
