"""Output that does not decide whether a command lives: a closed pipe, a full disk or a lost terminal only mute it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream on a file descriptor. What cannot be written is dropped; the first failure calls `on_failure`."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO, on_failure: Any = None) -> None:
        """Take over the descriptor of `stream`. Raises OSError if it has none."""
        self._stream, self._fd = stream, stream.fileno()
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

    def _send(self, text: str) -> None:
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
    """Let sys.stdout and sys.stderr outlive their readers meanwhile. Says so once on stderr when stdout fails."""
    before = sys.stdout, sys.stderr

    def tell(error: OSError) -> None:
        print(f"warning  what this command prints is lost ({error.strerror}); it goes on", file=sys.stderr, flush=True)

    with suppress(OSError, ValueError):
        before[0].flush()
        sys.stdout = LastingStream(before[0], tell)
    with suppress(OSError, ValueError):
        before[1].flush()
        sys.stderr = LastingStream(before[1])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before
