"""Command lines: flags from the configuration's fields, errors as one line, exit codes.

`python -m nanoray.cli` prints docs/flags.md.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from nanoray.config import (
    DEFAULT_PRESET,
    Config,
    field_extra,
    load_config,
    make_config,
    read_yaml,
    refuse_unknown,
)
from nanoray.config.conflicts import TABLE, Row, known_from
from nanoray.config.load import lay_over
from nanoray.errors import ConfigError, NanorayError
from nanoray.output import lasting_output

_GROUPS = {
    "run": "run",
    "data": "data",
    "model": "model",
    "batch": "batch",
    "optim": "optimisation",
    "dist": "devices and process group",
    "log": "logging, evaluation, checkpoints",
    "fault": "faults",
}


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


@dataclass(frozen=True)
class Scale:
    """Where a dry run pretends to be: so many ranks, and what they and their links are like."""

    world_size: int
    topology: str | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Loaded:
    """A configuration, and which of its keys were given as flags."""

    config: Config
    given: frozenset[str]  # keys set by flags
    dry_run: bool = False
    scale: Scale | None = None  # of a dry run that takes none of this machine's devices
    quiet: bool = False  # print warnings, faults and the result only


def parse_args(
    argv: list[str], prog: str, description: str, base: dict[str, Any] | None = None
) -> Loaded:
    """Turn a command line into a Config. Raises ConfigError; `--help` prints and exits 0.

    `base`: values in the place of a preset's and a file's, which are refused.
    """
    parser = _build_parser(prog, description)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        others = ("config", "preset", "dry_run", "quiet", *_AT_SCALE)
        refuse_unknown(unknown[0].split("=")[0], [f"--{k}" for k in (*_flags(), *others)], "flag")
    flags = vars(known)
    file, preset, dry_run = (
        flags.pop("config", None),
        flags.pop("preset", None),
        flags.pop("dry_run", False),
    )
    scale = _scale({key: flags.pop(key) for key in _AT_SCALE if key in flags}, dry_run, flags)
    quiet = flags.pop("quiet", False)
    if quiet and dry_run:
        raise ConfigError(
            "quiet would be ignored: a dry run prints its plan and nothing else; drop --quiet"
        )
    for key, value in (("config", file), ("preset", preset)):
        if base and value:
            raise ConfigError(
                f"{key} = {value} would be ignored: {prog} is configured from flags alone; drop "
                f"--{key}"
            )
    of_run = base or ({} if file or preset else _config_of_run(flags.get("resume", "none")))
    config = (
        make_config(lay_over(of_run, flags, "the flags"))
        if of_run
        else load_config(file, preset, flags)
    )
    for key in flags.keys() & _COUNTS_IF.keys():
        other, value = _COUNTS_IF[key]
        if key == "weight_decay" and config.momentum:
            continue  # sgd with momentum has it
        if getattr(config, other) not in value:
            raise ConfigError(
                f"{key} = {flags[key]} would be ignored: {other} = {getattr(config, other)}; drop "
                f"--{key}"
            )
    return Loaded(config, frozenset(flags), dry_run, scale, quiet)


# Flags of a dry run at a scale that is not this machine's.
_AT_SCALE = {
    "world_size": ("N", "with --dry_run: so many ranks, which need not exist; prints groups, bytes, memory"),
    "topology": ("NAME|FILE", "with --world_size: nodes and links (nanoray/topologies or a YAML file); adds the "
                 "predicted step and the best layouts"),
    "memory_gb": ("X", "with --world_size: memory of a device in GB (default: the topology's)"),
}  # fmt: skip


def _scale(given: dict[str, str], dry_run: bool, flags: dict[str, Any]) -> Scale | None:
    """Read the flags of _AT_SCALE. Raises ConfigError for those that would be ignored."""
    for key, value in given.items():
        needed = "dry_run" if not dry_run else "world_size" if "world_size" not in given else ""
        if needed:
            raise ConfigError(
                f"{key} = {value} would be ignored without --{needed}; add it, or drop --{key}"
            )
    if not given:
        return None
    if "workers" in flags:
        raise ConfigError(
            f"workers = {flags['workers']} and world_size = {given['world_size']} both say how "
            "many ranks; drop one"
        )
    values: dict[str, Any] = dict(given)
    for key, kind, what in (
        ("world_size", int, "a whole number above 0"),
        ("memory_gb", float, "a number above 0"),
    ):
        if key in given:
            try:
                values[key] = kind(given[key])
            except ValueError:
                values[key] = 0
            if not 0 < values[key] < math.inf:
                raise ConfigError(f"{key} = {given[key]} is not {what}")
    return Scale(**values)


# Flags that have an effect only with certain values of another key.
_COUNTS_IF = {
    "min_lr": ("schedule", ("cosine", "wsd")),
    "decay_fraction": ("schedule", ("wsd",)),
    "weight_decay": ("optimizer", ("adamw", "muon")),
    "beta1": ("optimizer", ("adamw", "muon")),
    "beta2": ("optimizer", ("adamw", "muon")),
    "tokens_per_param": ("scaling", ("nanochat",)),
}


# Keys that belong to one command, not to the run: --resume does not take them from config.json.
_NOT_INHERITED = ("resume", "stop_at", "target_loss", "faults", "workers", "out_dir")


def _config_of_run(resume: str) -> dict[str, Any]:
    """Return config.json of the run that `--resume PATH` names by its folder or a checkpoint; {}
    without one.
    """
    if resume in ("none", "auto"):
        return {}
    path = Path(resume).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.json").is_file():
            return {
                k: v
                for k, v in read_yaml(folder / "config.json").items()
                if k not in _NOT_INHERITED
            }
    return {}


def _flags() -> list[str]:
    return [key for key in Config.model_fields if field_extra(key).get("flag", True)]


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are ConfigErrors."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _build_parser(prog: str, description: str) -> argparse.ArgumentParser:
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
    few = "print neither plan nor steps nor sample: where Ray is, warnings, faults, the result and its folder"
    parser.add_argument("--quiet", action="store_true", help=few)
    for key, (metavar, text) in _AT_SCALE.items():
        parser.add_argument(f"--{key}", metavar=metavar, help=text)
    groups = {key: parser.add_argument_group(title) for key, title in _GROUPS.items()}
    for key in _flags():
        field = Config.model_fields[key]
        doc = " ".join((field.description or "").split()).replace("%", "%%")
        boolean = bool in (field.annotation, *get_args(field.annotation))
        groups[field_extra(key)["group"]].add_argument(
            f"--{key}",
            metavar="|".join(("true", "false", *_other_words(field.annotation)))
            if boolean
            else "X",
            nargs="?" if boolean else None,
            const="true" if boolean else None,
            help=f"{doc} [{field.default}]",
        )
    return parser


def _other_words(annotation: Any) -> list[str]:
    """Return what a flag takes beside true and false."""
    kinds = [kind for kind in get_args(annotation) if get_origin(kind) is Literal]
    return [str(word) for kind in kinds for word in get_args(kind)]


def run_command(
    run: Callable[[Loaded, float], int], argv: list[str] | None, prog: str, what: str
) -> int:
    """Parse a command line and run it; print a NanorayError as one line, and return the exit code."""
    started = time.time()
    return exit_code_of(
        lambda: run(parse_args(sys.argv[1:] if argv is None else argv, prog, what), started)
    )


def exit_code_of(run: Callable[[], int | None]) -> int:
    """Run a command whose output may be cut off; print its error as one line, and return the exit
    code.

    An error of nanoray, or of a file. None from `run` is 0.
    """
    with lasting_output():
        try:
            return run() or 0
        except NanorayError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except OSError as error:
            if error.filename is None:
                raise
            print(
                f"error: {error.filename}: {error.strerror}; check the path and its permissions",
                file=sys.stderr,
            )
            return 1


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Raise ConfigError with the remedy when a file cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}); {remedy}") from None


def tool_parser(prog: str, doc: str | None) -> Parser:
    """Return a parser for a command with flags of its own; `doc`, its module's docstring, is the
    help as it stands.
    """
    how = argparse.RawDescriptionHelpFormatter
    return Parser(prog=prog, description=doc, allow_abbrev=False, formatter_class=how)


def require_script(config: Config, main: object) -> None:
    """Raise ConfigError when the model is a script's own and there is no script."""
    if config.model == "own" and main is None:
        raise ConfigError(
            "model = own needs a script that brings the model; see examples/own_model.py"
        )


def run_subcommand(
    commands: dict[str, Callable[[list[str]], int]], argv: list[str] | None, doc: str
) -> int:
    """Run the command that the first word names; `doc` is the help. Print errors, and return the
    exit code.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]

    def run() -> int:
        if name in ("", "-h", "--help"):
            print(doc.strip())
            return 0 if name else 2
        if name not in commands:
            raise ConfigError(f"unknown command {name}; one of {', '.join(commands)}")
        return commands[name](rest)

    return exit_code_of(run)


def handle_stop_signals(handler: Callable[[int, Any], None]) -> None:
    """Let `handler` receive the stop signals, but for one that is ignored already, as nohup does
    with SIGHUP.
    """
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


def to_markdown() -> str:
    """Return docs/flags.md: what `nanoray launch --help` prints, as tables."""
    parser = _build_parser("nanoray launch", "")
    lines = [
        "# Flags",
        "",
        "Generated by `python -m nanoray.cli` from `nanoray/config/`: flags of `nanoray train` "
        "and `launch`.",
        "Those with a default are also YAML keys. A flag overrides `--config FILE`, which "
        "overrides the preset.",
    ]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        title = "the command" if group.title == "options" else group.title
        lines += (
            ["", f"## {title}", "", "| flag | default | what |", "| --- | --- | --- |"]
            if actions
            else []
        )
        for action in actions:
            text, bracket, default = (action.help or "").replace("%%", "%").rpartition(" [")
            if action.dest not in Config.model_fields or not bracket:
                text, default = (action.help or "").replace("%%", "%"), "]"
            value = f"`{default[:-1]}`" if default[:-1] else ""
            lines.append(f"| `--{action.dest}` | {value} | " + text.replace("|", "\\|") + " |")
    return "\n".join([*lines, *_conflicts_as_markdown()])


def _conflicts_as_markdown() -> list[str]:
    """Return the table of conflicts: what is refused, why, what helps, and when it is known."""
    lines = [
        "",
        "## what does not go together",
        "",
        "Each row is refused before training starts: as soon as the keys are read, or when the "
        "number of ranks or the device is known.",
        "",
        "| asked for | not with | why | instead | known from |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in TABLE:
        if isinstance(row, Row):
            other = row.other.words
            if row.also is not None:
                other = f"{other}, {row.also.words}"
            why = row.why
            if row.ignored:
                why = (
                    f"it would be ignored: {row.other.key} {why}" if why else "it would be ignored"
                )
            cells = [row.asked.words, other, why, row.remedy, known_from(row)]
        else:
            cells = [row.words, "", "", "", known_from(row)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    print(to_markdown())
