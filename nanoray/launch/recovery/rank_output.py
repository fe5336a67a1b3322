"""What a rank prints: it goes to the rank's log, and from a script on rank 0 to the console, too.

    print, logging, warnings ─► sys.stdout, sys.stderr ─► logs/rankN.log
                                        └─► lines ─► the driver polls them ─► its stdout, stderr
    C libraries ─► descriptors 1 and 2 ─► logs/rankN.log

The descriptors are those of the log itself, not of a pipe: so what a process printed right before it
died is in the log.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Send = Callable[[str, str], None]  # takes stdout or stderr, and a line

LONGEST_LINE = 1 << 13  # bytes; a longer one is sent in parts
STREAMS = {"stdout": 1, "stderr": 2}


class RankOutput:
    """Sends this process's output to a rank's log. It lasts as long as the process."""

    def __init__(self, path: Path, send: Send) -> None:
        """Take over stdout and stderr; `send` receives each line.

        Raises OSError if the log cannot be opened.
        """
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in STREAMS.values():
            os.dup2(log, descriptor)
        os.close(log)

        self._tees = [_Tee(name, send) for name in STREAMS]
        for tee in self._tees:
            stream = io.TextIOWrapper(
                tee,
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
                write_through=True,
            )
            setattr(sys, tee.name, stream)

    def finish(self) -> None:
        """Send what is printed so far: the script has ended."""
        for tee in self._tees:
            tee.finish()


class _Tee(io.BufferedIOBase):
    """Writes bytes to a descriptor, and passes complete lines on."""

    def __init__(self, name: str, send: Send) -> None:
        self.name = name
        self._send = send
        self._line = b""  # the incomplete last one
        self._lock = threading.Lock()

    def write(self, data: object) -> int:
        """Write all bytes; a log that cannot be written must not end the run."""
        content = bytes(data)  # type: ignore[call-overload]
        with suppress(OSError):
            rest = content
            while rest:
                rest = rest[os.write(self.fileno(), rest) :]

        with self._lock:
            *lines, self._line = (self._line + content).split(b"\n")
            if len(self._line) > LONGEST_LINE:
                lines.append(self._line)
                self._line = b""
        for line in lines:
            # A bar of progress draws its line again after each carriage return: show the last one.
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]
            self._send(self.name, shown.decode("utf-8", "replace"))
        return len(content)

    def fileno(self) -> int:
        return STREAMS[self.name]

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Stay open: the streams last as long as the process."""

    def finish(self) -> None:
        """Pass an incomplete last line on, such as that of print(..., end="")."""
        with self._lock:
            line = self._line
            self._line = b""
        if line:
            self._send(self.name, line.decode("utf-8", "replace"))
