"""Output that cannot end a command: a closed pipe, a full disk or a lost terminal only mute it.

On a terminal one line of status may stand below everything that is printed.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class StatusLine:
    """A line below all output of a terminal.

    Other output erases it, and draws it again after its own last line.
    """

    def __init__(self) -> None:
        self.text = ""
        self._is_drawn = False
        self._at_line_start = True  # the last output ended with a newline

    def around(self, output: str) -> str:
        """Return the characters to write so that `output` stands above this line."""
        erase = "\r\x1b[2K" if self._is_drawn else ""
        if output:
            self._at_line_start = output.endswith("\n")

        # Within a line of output it would be appended to that line, so it waits for the end.
        self._is_drawn = bool(self.text) and self._at_line_start
        return erase + output + (self.text if self._is_drawn else "")


class LastingStream:
    """A text stream on a file descriptor.

    What cannot be written is dropped; the first failure calls `on_failure`.
    """

    encoding = "utf-8"

    def __init__(
        self, stream: TextIO, on_failure: Any = None, status: StatusLine | None = None
    ) -> None:
        """Take over the descriptor of `stream`. Raises OSError if it has none of its own.

        `status` is used if it is a terminal.
        """
        # A notebook's stream shows the output of a cell, and its descriptor is that of the terminal
        # in which the server was started.
        if not isinstance(stream, io.TextIOWrapper):
            raise io.UnsupportedOperation("not the stream of a file")
        self._stream = stream
        self._fd = stream.fileno()
        self._status = status if stream.isatty() else None
        self._text = ""  # an incomplete line
        self._on_failure = on_failure

    def write(self, text: str) -> int:
        """Write the complete lines; keep the rest for the next call."""
        self._text += text
        lines, newline, self._text = self._text.rpartition("\n")
        if newline:
            self._send(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line, if there is one."""
        text = self._text
        self._text = ""
        if text:
            self._send(text)

    @property
    def has_status(self) -> bool:
        """Whether this is a terminal that can erase a line."""
        terminal = os.environ.get("TERM", "dumb")
        return self._status is not None and terminal not in ("", "dumb", "unknown")

    def show(self, status: str) -> None:
        """Show one line, which may have colours, below all output. Needs has_status.

        An empty one removes it.
        """
        assert self._status
        self._status.text = status
        self._send("")

    def _send(self, text: str) -> None:
        if self._status:
            text = self._status.around(text)
        data = text.encode(self.encoding, "replace")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            on_failure = self._on_failure
            self._on_failure = None  # once
            if on_failure:
                on_failure(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let sys.stdout and sys.stderr outlive their readers while the context is open.

    When stdout fails, a warning goes to stderr, once.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the command was started with it closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    stdout, stderr = sys.stdout, sys.stderr
    status = StatusLine()

    def warn(error: OSError) -> None:
        print(
            f"warning  what this command prints is lost ({error.strerror}); it goes on",
            file=sys.stderr,
            flush=True,
        )

    with suppress(OSError, ValueError):
        stdout.flush()
        sys.stdout = LastingStream(stdout, warn, status)
    with suppress(OSError, ValueError):
        stderr.flush()
        sys.stderr = LastingStream(stderr, status=status)
    try:
        yield
    finally:
        status.text = ""
        if isinstance(sys.stdout, LastingStream) and sys.stdout.has_status:
            sys.stdout.show("")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout = stdout
        sys.stderr = stderr
