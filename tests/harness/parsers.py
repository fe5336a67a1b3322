"""The parsers of nanoray's commands: each command is asked for the one that it would use."""

from __future__ import annotations

import importlib
import io
import re
from argparse import ArgumentParser
from contextlib import redirect_stderr
from typing import Any
from unittest import mock

from nanoray.bench.registry import BENCHMARKS
from nanoray.cli.catalog import COMMANDS
from nanoray.cli.parsers import Parser, build_parser
from nanoray.launch.program.flags import build_parser as parser_of_programs

# Commands whose flags are those of a run, and commands that take these besides their own
RUNS = ("train", "launch", "check")
# Words after which a command that has a meaning of its own takes other flags
PARTS = {
    "report": ("compare", "ledger", "timeline"),
    "replay": ("bisect",),
    "check": ("mig plan", "mig show"),
}
TAKE_FLAGS_OF_RUNS = ("inspect", "kube render", "kube submit", "tune")


class _Found(BaseException):
    """A command line would be parsed by this parser."""

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def find_parsers(command: str) -> dict[str, list[ArgumentParser]]:
    """Return the parsers of a command, by subcommand; "" for a command without any."""
    parts = {word: _parsers_of(command, word) for word in PARTS.get(command, ())}
    if command in RUNS:
        return {"": [_parser_of_runs()]} | parts
    if command == "run":  # what follows its flags belongs to the program
        return {"": [parser_of_programs()]}
    if command == "bench":
        entries = BENCHMARKS.values()
        families = (entry.family for entry in entries)
        words = [*dict.fromkeys([*(entry.words for entry in entries), *families, "all"])]
    else:
        words = _subcommands(command)
    return {word: _parsers_of(command, word) for word in words} | parts


def _subcommands(command: str) -> list[str]:
    """Return the subcommands of a command, as its error about an unknown one lists them."""
    error = _try(command, "no-such-command")
    if isinstance(error, ArgumentParser):
        return [""]
    known = re.search(r"unknown command no-such-command; one of (.*)", error)
    assert known, f"{command}: {error}"
    return known[1].split(", ")


def _parsers_of(command: str, word: str) -> list[ArgumentParser]:
    """Return the parser that a command makes, and that of a run where it takes its flags."""
    parser = _try(command, *word.split())
    assert isinstance(parser, ArgumentParser), f"{command} {word} makes no Parser: {parser}"
    if f"{command} {word}".rstrip() in TAKE_FLAGS_OF_RUNS:
        return [parser, _parser_of_runs()]
    return [parser]


def _try(command: str, *words: str) -> ArgumentParser | str:
    """Return the parser that a command line would be parsed with, or else its error."""

    def stop(self: Parser, *args: Any, **kwargs: Any) -> Any:
        raise _Found(self)

    errors = io.StringIO()
    module = importlib.import_module(COMMANDS[command].module)
    with mock.patch.object(Parser, "parse_known_args", stop), redirect_stderr(errors):
        try:
            module.main([*words])
        except _Found as found:
            return found.parser
    return errors.getvalue()


def _parser_of_runs() -> ArgumentParser:
    parser = build_parser("nanoray train")
    parser.add_argument("-h", "--help", nargs="?")
    return parser
