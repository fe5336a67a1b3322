"""Output that does not decide whether a command lives: a closed pipe, a full disk or a lost
terminal only mute it.

On a terminal one line of status may stand below everything that is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class StatusLine:
    """A line below all output of a terminal. Other output erases it, and draws it again after its
    own last line.
    """

    def __init__(self) -> None:
        self.text = ""
        # _line_over: the last output ended with a newline
        self._drawn, self._line_over = False, True

    def around(self, output: str) -> str:
        """Return what to write so that `output` stands above this line."""
        erase = "\r\x1b[2K" if self._drawn else ""
        self._line_over = output.endswith("\n") if output else self._line_over
        self._drawn = bool(self.text) and self._line_over
        return erase + output + self.text * self._drawn


class LastingStream:
    """A text stream on a file descriptor. What cannot be written is dropped; the first failure
    calls `on_failure`.
    """

    encoding = "utf-8"

    def __init__(
        self, stream: TextIO, on_failure: Any = None, status: StatusLine | None = None
    ) -> None:
        """Take over the descriptor of `stream`. Raises OSError if it has none. `status`: used if it
        is a terminal.
        """
        self._stream, self._fd = stream, stream.fileno()
        self._status = status if stream.isatty() else None
        self._text, self._on_failure = "", on_failure

    def write(self, text: str) -> int:
        """Write the complete lines; keep the rest for the next call."""
        self._text += text
        lines, newline, self._text = self._text.rpartition("\n")
        if newline:
            self._send(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Write what is left."""
        text, self._text = self._text, ""
        if text:
            self._send(text)

    @property
    def has_status(self) -> bool:
        """Whether this is a terminal that can erase a line."""
        return self._status is not None and os.environ.get("TERM", "dumb") not in (
            "",
            "dumb",
            "unknown",
        )

    def show(self, status: str) -> None:
        """Show one line, which may have colours, below all output; an empty one removes it. Needs
        has_status.
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
            call, self._on_failure = self._on_failure, None
            if call:
                call(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let sys.stdout and sys.stderr outlive their readers meanwhile. Says so once on stderr when
    stdout fails.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the command was started with it closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    before, status = (sys.stdout, sys.stderr), StatusLine()

    def tell(error: OSError) -> None:
        print(
            f"warning  what this command prints is lost ({error.strerror}); it goes on",
            file=sys.stderr,
            flush=True,
        )

    with suppress(OSError, ValueError):
        before[0].flush()
        sys.stdout = LastingStream(before[0], tell, status)
    with suppress(OSError, ValueError):
        before[1].flush()
        sys.stderr = LastingStream(before[1], status=status)
    try:
        yield
    finally:
        status.text = ""
        if isinstance(sys.stdout, LastingStream) and sys.stdout.has_status:
            sys.stdout.show("")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before
