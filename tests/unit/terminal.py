"""Commands on a terminal of their own: a real pty, and what came through it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

from tests.harness.commands import ROOT, fork


class Terminal:
    """A pty of 30 lines. After `run`, `written` is all that came through it."""

    def __init__(self, columns: int = 100) -> None:
        self.columns, self.written = columns, ""
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def run(self, *args: str, env: Mapping[str, str], cwd: Path = ROOT, hang_up: str = "") -> int:
        """Run `python -m args` here, return the exit code. `hang_up`: close it at this text."""
        name = os.ttyname(self._slave)
        process = fork(list(args), dict(env), str(cwd), {1: name, 2: name})
        data = b""
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while self._master in wait([self._master, process.sentinel]) and (
                part := os.read(self._master, 65536)
            ):
                if self._slave >= 0:  # the command has it open
                    os.close(self._slave)
                    self._slave = -1
                data += part
                if hang_up and hang_up in data.decode("utf-8", "replace"):
                    break
        os.close(self._master)
        process.join(200)
        process.kill()
        assert process.exitcode is not None, f"{args}: no end\n{data.decode()}"
        self.written = data.decode("utf-8", "replace").replace("\r\n", "\n")
        return process.exitcode
