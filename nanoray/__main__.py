"""The `nanoray` command: `nanoray launch ...` is the same as `python -m nanoray.launch ...`."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import platform
import sys

from nanoray import __version__
from nanoray.cli import exit_code_of, name_program
from nanoray.cli.catalog import COMMANDS as COMMANDS
from nanoray.cli.catalog import RENAMED
from nanoray.cli.help import PAGES, asked_for, format_help
from nanoray.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    if argv is None:
        argv = sys.argv[1:]
    # `nanoray help COMMAND` is `nanoray COMMAND --help`
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] not in COMMANDS:
        return exit_code_of(lambda: answer(argv))

    # Without torch, whose import takes seconds
    command = argv[0]
    topic = asked_for(argv[1:])
    if command in PAGES and topic is not None:
        return exit_code_of(lambda: print_help(topic, command))

    module = importlib.import_module(COMMANDS[command].module)
    return module.main(argv[1:])


def answer(words: list[str]) -> int:
    """Answer a command line that names no command, and return its exit code.

    Raises ConfigError for a command that does not exist.
    """
    if not words or words[0] in ("-h", "--help"):
        print(format_commands())
        return 0 if words else 2  # no command at all is an error
    if words[0] in ("-V", "--version"):
        print(versions())
        return 0

    if words[0] in RENAMED:
        raise ConfigError(f"`nanoray {words[0]}` is `nanoray {RENAMED[words[0]]}` now")

    hint = f"known: {', '.join(COMMANDS)}"
    similar = difflib.get_close_matches(words[0], COMMANDS, n=1)
    if similar:
        hint = f"did you mean {similar[0]}?"
    raise ConfigError(f"unknown command {words[0]}; {hint}")


def format_commands() -> str:
    """Return the help of `nanoray` itself: its commands by group."""
    lines = ["usage: nanoray COMMAND [flags]"]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", group]
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  {name:<10}  {command.about}")
    lines += ["", "nanoray help COMMAND prints a command's flags, nanoray --version the versions."]
    return "\n".join(lines)


def print_help(topic: str, command: str) -> None:
    """Print the help of a command that trains."""
    print(format_help(topic, name_program(command), PAGES[command]), end="")


def versions() -> str:
    """Return the versions of nanoray and of what decides how it runs."""
    parts = []
    for name in ("torch", "ray"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    parts.append(f"Python {platform.python_version()}")
    return f"nanoray {__version__} ({', '.join(parts)})"


if __name__ == "__main__":
    raise SystemExit(main())
