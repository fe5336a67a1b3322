"""Parsers of command lines: one flag for each key of the configuration."""

from __future__ import annotations

import argparse
from typing import Any, Literal, get_args, get_origin

from nanoray.config import DEFAULT_PRESET, Config, field_extra
from nanoray.errors import ConfigError

# Titles of the groups in --help
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

# Flags of a dry run at a scale that is not this machine's: metavar and help
SCALE_FLAGS = {
    "world_size": (
        "N",
        "with --dry_run: N ranks, which need not exist; prints groups, bytes, memory",
    ),
    "topology": (
        "NAME|FILE",
        "with --world_size: nodes and links (nanoray/topologies or a YAML file); adds the "
        "predicted step and the best layouts",
    ),
    "memory_gb": (
        "X",
        "with --world_size: memory of a device in GB (default: the topology's)",
    ),
}
# Flags of the command itself, which are no keys of the configuration
COMMAND_FLAGS = ("config", "preset", "dry_run", "quiet", *SCALE_FLAGS)


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


def flag_names() -> list[str]:
    """Return the keys of the configuration that are flags."""
    return [key for key in Config.model_fields if field_extra(key).get("flag", True)]


def build_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the command's own flags, and one for each key of the configuration.

    A flag that is not given is absent from the result, so that a default is not taken for a choice.
    """
    parser = Parser(
        prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML (or config.json) with any of the keys below"
    )
    parser.add_argument(
        "--preset", metavar="NAME", help=f"a file of nanoray/presets (default: {DEFAULT_PRESET})"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print what would run and where, start nothing, exit 0",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="print neither plan nor steps nor sample: where Ray is, warnings, faults, the result "
        "and its folder",
    )
    for key, (metavar, text) in SCALE_FLAGS.items():
        parser.add_argument(f"--{key}", metavar=metavar, help=text)

    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for key in flag_names():
        _add_flag(groups[field_extra(key)["group"]], key)
    return parser


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
        group.add_argument(f"--{key}", metavar="X", help=text)
        return
    words = "|".join(["true", "false", *_literals(field.annotation)])
    group.add_argument(f"--{key}", metavar=words, nargs="?", const="true", help=text)


def _literals(annotation: Any) -> list[str]:
    """Return the words of the Literals in a union: what a flag takes beside true and false."""
    words = []
    for kind in get_args(annotation):
        if get_origin(kind) is Literal:
            words += [str(word) for word in get_args(kind)]
    return words
