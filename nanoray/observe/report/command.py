"""The command that started a run, as it was typed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nanoray.config.settings import public_words

# The file of a command -> the words that run it.
_COMMANDS = {
    "nanoray/train/__main__.py": ["nanoray", "train"],
    "nanoray/launch/__main__.py": ["python", "-m", "nanoray.launch"],
    "nanoray/__main__.py": ["nanoray"],
}


def typed_command(record: dict[str, Any]) -> str:
    """Return the program of a run with its flags, without its launcher; "" if none was recorded.

    `record` is the run's run.json, or program.json.
    """
    argv = [str(word) for word in record.get("command", [])]
    if not argv:
        return ""
    # A console script runs by itself, each other file in an interpreter.
    words = [argv[0]]
    if Path(argv[0]).suffix == ".py":
        words = ["python", argv[0]]
    for ending, command in _COMMANDS.items():
        if argv[0].endswith(ending):
            words = command
    return shlex.join([*words, *public_words(argv[1:])])
