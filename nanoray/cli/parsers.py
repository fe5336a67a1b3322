"""Parsers of command lines: one flag for each key of the configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from nanoray.config import DEFAULT_PRESET, Config, field_extra
from nanoray.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]

# Groups of keys, and their titles in docs/flags.md
GROUPS = {
    "run": "run",
    "data": "data",
    "model": "model",
    "batch": "batch",
    "optim": "optimisation",
    "dist": "devices and process group",
    "log": "logging, evaluation, checkpoints",
    "fault": "faults",
}
# The only flags with a short form: where a command writes to
SHORT = {"out_dir": "-o"}

# Flags of a dry run at a scale that is not this machine's: metavar and help
SCALE_FLAGS = {
    "world_size": (
        "N",
        "with --dry_run: N ranks, which need not exist; prints batch, model and memory of a rank",
    ),
    "topology": (
        "NAME|FILE",
        "with --world_size: nodes and links (nanoray/config/topologies or a YAML file); adds the "
        "predicted step and the best layouts",
    ),
    "memory_gb": (
        "X",
        "with --world_size: memory of a device in GB (default: the topology's)",
    ),
}
# Flags of the command itself, which are no keys of the configuration. No metavar: a switch
COMMAND_FLAGS = {
    "config": ("FILE", "YAML (or config.json) with any of the keys below"),
    "preset": ("NAME", f"a file of nanoray/config/presets (default: {DEFAULT_PRESET})"),
    "schema": (
        "",
        "print a JSON schema of YAML files for --config, which editors read, and exit 0",
    ),
    "dry_run": ("", "print what would run and where, start nothing, exit 0"),
    "quiet": (
        "",
        "print neither plan nor steps nor sample: where Ray is, warnings, faults, the result and "
        "its folder",
    ),
    "verbose": ("", "with --dry_run: list who has set each key"),
    **SCALE_FLAGS,
}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are ConfigErrors."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; see {self.prog} --help")


def tool_parser(prog: str, doc: str | None) -> Parser:
    """Return a parser for a command with flags of its own.

    `doc`, its module's docstring, is printed as it stands.
    """
    return Parser(
        prog=prog,
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def name_program(command: str) -> str:
    """Return how to call this program for its help: `nanoray COMMAND`, or `python SCRIPT`."""
    called = Path(sys.argv[0])
    # An example that passes its flags on
    if called.suffix == ".py" and PACKAGE not in called.resolve().parents:
        return f"python {called}"
    return f"nanoray {command}"


def flag_names() -> list[str]:
    """Return the keys of the configuration that are flags."""
    return [key for key in Config.model_fields if field_extra(key).get("flag", True)]


def build_parser(prog: str, only: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Return a parser with the command's own flags, and one for each key of the configuration.

    A flag that is not given is absent from the result, so that a default is not taken for a choice.
    `only`: these flags and no others. --help is help.py's.
    """
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    keys = [*COMMAND_FLAGS, *flag_names()]
    if only is not None:
        keys = [key for key in keys if key in only]

    for key in COMMAND_FLAGS:
        if key in keys:
            _add_command_flag(parser, key)
    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for key in keys:
        if key not in COMMAND_FLAGS:
            _add_flag(groups[field_extra(key)["group"]], key)
    return parser


def _add_command_flag(parser: argparse.ArgumentParser, key: str) -> None:
    """Add a flag of the command itself."""
    metavar, text = COMMAND_FLAGS[key]
    if metavar:
        kind = {"N": int, "X": float}.get(metavar, str)
        parser.add_argument(f"--{key}", metavar=metavar, type=kind, help=text)
    else:
        parser.add_argument(f"--{key}", action="store_true", help=text)


def _add_flag(group: Any, key: str) -> None:
    """Add the flag of a key. A boolean takes a value, but `--bias` alone means `--bias true`."""
    field = Config.model_fields[key]
    # argparse formats help texts with %, so a literal one is doubled
    description = " ".join((field.description or "").split()).replace("%", "%%")
    text = f"{description} [{field.default}]"

    if key == "env":  # a mapping, one variable per flag
        text = text.removesuffix(" [{}]")
        group.add_argument("--env", metavar="KEY[=VALUE]", action="append", help=f"{text} [none]")
        return
    if bool not in (field.annotation, *get_args(field.annotation)):
        names = [f"--{key}"]
        if key in SHORT:
            names.insert(0, SHORT[key])
        group.add_argument(*names, metavar=_metavar(field.annotation), help=text)
        return
    words = "|".join(words_of(field.annotation))
    group.add_argument(f"--{key}", metavar=words, nargs="?", const="true", help=text)


def _metavar(annotation: Any) -> str:
    """Return the word for a flag's value: N for a whole number, X for another, NAME for a text."""
    kinds = {annotation, *get_args(annotation)}
    # Annotated[int, ...] in a union
    kinds |= {get_args(kind)[0] for kind in kinds if get_origin(kind) is Annotated}
    if int in kinds:
        return "N"
    if float in kinds:
        return "X"
    return "NAME"


def words_of(annotation: Any) -> list[str]:
    """Return the words that a type allows; [] for a number, a name or a path."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for kind in get_args(annotation) for word in words_of(kind)]
