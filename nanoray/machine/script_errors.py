"""Errors that a script's code raises, as they are shown: a line, and the script's own frames."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback

import nanoray
from nanoray.errors import NanorayError

# How a frame looks in the text of a traceback, and how many of a script's are shown: the innermost
_FRAME = re.compile(r'  File "(?P<file>.+)", line \d+, in .+\n(    .*\n)*')
_FRAMES = 8


def one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    kind = type(error).__name__
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # __str__ of a script's own class
        return kind
    return f"{kind}: {lines[0][:200]}" if lines else kind


def shown(error: BaseException) -> str:
    """Return an error of a script's code: one line, and the script's own frames below it.

    One of nanoray's says all in its text.
    """
    # torch's text for what was raised in a worker process of a DataLoader has the whole traceback.
    is_from_worker = str(error).startswith("Caught ")
    if isinstance(error, NanorayError) and not is_from_worker:
        return str(error)
    line = one_line(error)
    text = "".join(traceback.format_exception(error))
    if is_from_worker:
        line = text.rstrip().splitlines()[-1]

    libraries = tuple(_folders_of_libraries())
    frames = []
    for found in _FRAME.finditer(text):
        if not found["file"].startswith(libraries):
            frames.append(found[0].rstrip())
    return "\n".join([line, *frames[-_FRAMES:]])


def exit_code_after(error: BaseException) -> int:
    """Return the exit code of a process that an error ends, as Python and nanoray define it."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1  # sys.exit(0) before the end of a run leaves it unfinished, too
    code: int = getattr(error, "exit_code", 1)
    return code


def how_it_ended_itself(error: BaseException) -> str:
    """Return the text and the place of what a script has raised that is no Exception: it must end.

    These are KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError and its own.
    """
    _, _, text = one_line(error).partition(": ")
    words = [text, "raised"] if text else ["raised"]
    what = ", ".join(words)
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) was called"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return what
    return f"{what} in {frames[-1].filename}, line {frames[-1].lineno}"


def _folders_of_libraries() -> list[str]:
    """Return where the frames of a traceback lie that are not the script's."""
    folders = [f"{os.path.dirname(nanoray.__file__)}{os.sep}", contextlib.__file__]
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.append(f"{os.path.dirname(torch.__file__)}{os.sep}")
    return folders
