"""What nanoray says to its user, and output that cannot end a command.

A line goes to one place: to the logging of the program that uses nanoray, if that takes it, else to
the console. The loggers are `nanoray`, and `nanoray.steps` for the line of each logged step. Our own
commands print. What a rank does beside that is in its log file (logger `nanoray.rank`).

A closed pipe, a full disk or a lost terminal only mute a command.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

LINES = "nanoray"  # the logger of what is said
STEPS = "nanoray.steps"  # and of the lines of steps, with their metrics as `record.metrics`
# First words of lines about trouble
TROUBLE = ("warning", "failure", "drain", "stop")


def say(text: str, logger: str = LINES, metrics: Mapping[str, Any] | None = None) -> None:
    """Give a line, or several, to the program's logging if it takes them; else print them.

    `metrics` is an attribute of the log record, for handlers that write more than texts.
    """
    words = text.split(maxsplit=1)
    level = logging.INFO
    if words and words[0].rstrip(":") in TROUBLE:
        level = logging.WARNING
    if is_taken(level, logger):
        logging.getLogger(logger).log(level, "%s", text.strip("\n"), extra={"metrics": metrics})
    else:
        print(_marked(text, words), flush=True)


def _marked(text: str, words: list[str]) -> str:
    """Return a text whose first word is red on a terminal, where that is `failure`."""
    if words[:1] != ["failure"] or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return text.replace("failure", "\033[31mfailure\033[0m", 1)


def say_error(text: str) -> None:
    """Give the line of an error to the program's logging if it takes it; else print it on stderr."""
    if is_taken(logging.ERROR, LINES):
        logging.getLogger(LINES).error("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def is_taken(level: int, name: str = LINES) -> bool:
    """Return whether a handler of the program takes the records of a logger at a level.

    With `logging.basicConfig()` alone that is so from WARNING on.
    """
    logger: logging.Logger | None = logging.getLogger(name)
    assert logger is not None
    is_printed = any(isinstance(mark, Printed) for mark in logging.getLogger(LINES).handlers)
    if is_printed or not logger.isEnabledFor(level):
        return False
    while logger is not None:
        for handler in logger.handlers:
            if level >= handler.level and not isinstance(handler, logging.NullHandler):
                return True
        logger = logger.parent if logger.propagate else None
    return False


class Printed(logging.NullHandler):
    """Marks on the logger that its lines are printed: this process is a command of ours."""


@contextmanager
def as_command() -> Iterator[None]:
    """Print all lines meanwhile, also where an imported library has a handler on the root logger."""
    logger = logging.getLogger(LINES)
    mark = Printed()
    logger.addHandler(mark)
    try:
        yield
    finally:
        logger.removeHandler(mark)


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
