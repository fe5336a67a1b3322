"""The command that started a run, as it was typed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

# The file of a command -> the words that run it.
_COMMANDS = {
    "nanoray/train/__main__.py": ["nanoray", "train"],
    "nanoray/launch/__main__.py": ["python", "-m", "nanoray.launch"],
    "nanoray/__main__.py": ["nanoray"],
}


def typed_command(spec: dict[str, Any]) -> str:
    """Return the program of a run with its flags, without its launcher; "" if none was recorded.

    `spec` is the run's run.json.
    """
    argv = [str(word) for word in spec.get("command", [])]
    if not argv:
        return ""
    # A console script runs by itself, each other file in an interpreter.
    words = [argv[0]]
    if Path(argv[0]).suffix == ".py":
        words = ["python", argv[0]]
    for ending, command in _COMMANDS.items():
        if argv[0].endswith(ending):
            words = command
    return shlex.join([*words, *_without_values(argv[1:])])


def _without_values(words: list[str]) -> list[str]:
    """Return the words of a command, of variables their names alone: `--env TOKEN`.

    A report is shown to others, and the values may be keys and passwords. So given, a variable is
    taken from the environment of the command.
    """
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--env":
            word = word.partition("=")[0]
        elif word.startswith("--env="):
            word = "=".join(word.split("=")[:2])
        shown.append(word)
    return shown
