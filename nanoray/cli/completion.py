"""`nanoray completion bash|zsh|fish`: print a script that completes commands, flags and values.

    bash   nanoray completion bash > ~/.local/share/bash-completion/completions/nanoray
    zsh    nanoray completion zsh > "${fpath[1]}/_nanoray"
    fish   nanoray completion fish > ~/.config/fish/completions/nanoray.fish

The script is made from the parsers of all commands, so completing starts no Python. Print it again
after an update.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import shtab

from nanoray.cli.catalog import COMMANDS
from nanoray.cli.commands import exit_code_of
from nanoray.cli.parsers import (
    DESCRIBE,
    GROUPS,
    PACKAGE,
    Parser,
    ParserFound,
    SubcommandsFound,
    build_parser,
    name_program,
    tool_parser,
    words_of,
)
from nanoray.config import Config, preset_names
from nanoray.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
TOPOLOGIES = PACKAGE / "topologies"

# Commands whose flags are those of a run, and commands that take these besides their own
RUNS = ("train", "launch", "check")
TAKE_FLAGS_OF_RUNS = ("inspect", "kube render", "kube submit", "tune")

# Flags whose value is a file or a folder
FILES = ("config", "from_nanogpt", "dataset", "init_from")
FOLDERS = ("out_dir", "data_dir", "resume")
WIDEST = 70  # characters of a description


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray completion SHELL` and return the exit code."""

    def run() -> None:
        args = make_parser().parse_args(argv)
        if args.shell not in SHELLS:
            raise ConfigError(f"shell = {args.shell} is none of {', '.join(SHELLS)}")
        print(script(args.shell))

    return exit_code_of(run)


def make_parser() -> Parser:
    """Return the parser of `nanoray completion`."""
    parser = tool_parser(name_program("completion"), __doc__)
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))
    return parser


def script(shell: str) -> str:
    """Return the script for a shell. It imports every command, which takes seconds."""
    return shtab.complete(whole_parser(), shell)


def whole_parser() -> Parser:
    """Return one parser of `nanoray` with all commands and their subcommands."""
    whole = Parser(prog="nanoray", description="Train nanoGPT on many accelerators.")
    whole.add_argument("-V", "--version", action="store_true", help="print the versions")
    commands = whole.add_subparsers(dest="command")
    for name, (_, description) in COMMANDS.items():
        found = find_parsers(name)
        if "" in found:
            _add(commands, name, description, found[""])
            continue
        # No command line of its own: the words after it are commands, too
        group = commands.add_parser(name, help=description, description=description)
        inner = group.add_subparsers(dest="subcommand")
        for word, parents in found.items():
            _add(inner, word, _first_line(parents[0].description), parents)
    return whole


def find_parsers(command: str) -> dict[str, list[argparse.ArgumentParser]]:
    """Return the parsers of a command, by subcommand; "" for a command without any."""
    if command in RUNS:
        return {"": [_parser_of_runs()]}
    try:
        return {"": _parsers_of(command, [])}
    except SubcommandsFound as found:
        return {word: _parsers_of(command, [word]) for word in found.names}


def _parsers_of(command: str, words: list[str]) -> list[argparse.ArgumentParser]:
    """Return the parser that a command makes for these words, and that of a run where it counts."""
    module = importlib.import_module(COMMANDS[command][0])
    try:
        module.main([*words, DESCRIBE])
    except ParserFound as found:
        parsers = [found.parser]
    else:
        raise AssertionError(f"{command} {words} makes no Parser of nanoray.cli")

    for action in parsers[0]._actions:
        _complete_tools(action)
    if " ".join([command, *words]) in TAKE_FLAGS_OF_RUNS:
        parsers.append(_parser_of_runs())
    return parsers


def _add(
    commands: Any, name: str, description: str, parents: list[argparse.ArgumentParser]
) -> None:
    """Add a command with the flags of its parsers, of which the first one's count."""
    parser = commands.add_parser(
        name,
        help=description,
        description=description,
        parents=[*reversed(parents)],
        add_help=False,
        conflict_handler="resolve",
    )
    for action in parser._actions:
        action.help = _first_line(action.help)


def _parser_of_runs() -> argparse.ArgumentParser:
    """Return the parser of a run's flags, with the values of each."""
    parser = build_parser("nanoray train", "")
    for action in parser._actions:
        if action.dest in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        else:
            action.choices = values_of(action.dest) or None
    parser.add_argument("-h", "--help", nargs="?", choices=("all", "command", *GROUPS))
    return parser


def values_of(key: str) -> list[str]:
    """Return the words that a key can have; [] for a number, a name or a path."""
    if key == "preset":
        return preset_names()
    if key == "topology":
        return sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))
    if key not in Config.model_fields:
        return []
    return words_of(Config.model_fields[key].annotation)


def _complete_tools(action: argparse.Action) -> None:
    """Let a path of a tool be completed. Positional words of tools are mostly folders of runs."""
    if action.dest == "shell":
        action.choices = SHELLS
    elif not action.option_strings or action.metavar == "DIR" or action.type is Path:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif action.dest == "preset":
        action.choices = values_of("preset")


def _first_line(text: str | None) -> str:
    """Return the start of a help text, up to its first clause, on one line."""
    line = " ".join((text or "").split()).replace("%%", "%")
    for mark in ("; ", ". ", " (", " | "):
        line = line.partition(mark)[0]
    if len(line) > WIDEST:
        line = line[: WIDEST - 3] + "..."
    # argparse formats help texts with %
    return line.replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
