"""What nanoray prints, and output that cannot end a command.

What a rank does beside that is in its log file (logger `nanoray.rank`). A closed pipe, a full disk
or a lost terminal only mute a command.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


def say(text: str) -> None:
    """Print a line, or several. On a terminal a first word `failure` is red."""
    is_failure = text.split(maxsplit=1)[:1] == ["failure"]
    if is_failure and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = text.replace("failure", "\033[31mfailure\033[0m", 1)
    print(text, flush=True)


class LastingStream:
    """A text stream on a file descriptor.

    What cannot be written is dropped; the first failure calls `on_failure`.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO, on_failure: Any = None) -> None:
        """Take over the descriptor of `stream`. Raises OSError if it has none of its own."""
        # A notebook's stream shows the output of a cell, and its descriptor is that of the terminal
        # in which the server was started.
        if not isinstance(stream, io.TextIOWrapper):
            raise io.UnsupportedOperation("not the stream of a file")
        self._stream = stream
        self._fd = stream.fileno()
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

    def _send(self, text: str) -> None:
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

    def warn(error: OSError) -> None:
        print(
            f"warning  what this command prints is lost ({error.strerror}); it goes on",
            file=sys.stderr,
            flush=True,
        )

    with suppress(OSError, ValueError):
        stdout.flush()
        sys.stdout = LastingStream(stdout, warn)
    with suppress(OSError, ValueError):
        stderr.flush()
        sys.stderr = LastingStream(stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout = stdout
        sys.stderr = stderr
