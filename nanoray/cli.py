"""Command lines: flags from the configuration's fields, errors as one line, exit codes.

`python -m nanoray.cli` prints docs/flags.md.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from nanoray.config.conflicts import TABLE, Row, Rule, known_from
from nanoray.config.load import lay_over, run_folder_of
from nanoray.config.spellings import refuse_old
from nanoray.errors import ConfigError, NanorayError
from nanoray.output import as_command, lasting_output, say, say_error

# Titles of the groups in --help
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

# Flags of a dry run at a scale that is not this machine's: metavar and help
_SCALE_FLAGS = {
    "world_size": (
        "N",
        "with --dry_run: so many ranks, which need not exist; prints groups, bytes, memory",
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
_COMMAND_FLAGS = ("config", "preset", "dry_run", "quiet", *_SCALE_FLAGS)

# Flags that have an effect only with certain values of another key. Their keys have defaults that
# presets change, so these rules are about what was typed, not about values: they cannot stand in
# the table of conflicts.
_COUNTS_IF = {
    "min_lr": ("schedule", ("cosine", "wsd")),
    "decay_fraction": ("schedule", ("wsd",)),
    "weight_decay": ("optimizer", ("adamw", "muon")),
    "beta1": ("optimizer", ("adamw", "muon")),
    "beta2": ("optimizer", ("adamw", "muon")),
    "tokens_per_param": ("scaling", ("nanochat",)),
}

# Keys that belong to one command, not to the run: --resume does not take them from config.json
_NOT_INHERITED = ("resume", "stop_at", "target_loss", "faults", "workers", "out_dir")

# Why Ctrl-C does not stop a run that a thread has launched, and what does
NO_SIGNALS = (
    "launched outside of the main thread, which alone receives Ctrl-C and SIGTERM: `run.stop()` in a "
    "callback stops this run with a checkpoint"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


@dataclass(frozen=True)
class Scale:
    """The scale of a dry run that takes none of this machine's devices."""

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


# ---- from a command line to a Config -------------------------------------------------------------


def parse_args(
    argv: list[str], prog: str, description: str, base: dict[str, Any] | None = None
) -> Loaded:
    """Turn a command line into a Config. `--help` prints and exits 0.

    `base` has values in the place of a preset's and a file's, which are refused then. Raises
    ConfigError.
    """
    parser = _build_parser(prog, description)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        # `--key=value`, or `--key value`
        key, _, value = unknown[0].removeprefix("--").partition("=")
        if not value and len(unknown) > 1:
            value = unknown[1]
        refuse_old({key: value})
        names = [f"--{key}" for key in (*_flags(), *_COMMAND_FLAGS)]
        refuse_unknown(unknown[0].split("=")[0], names, "flag")

    # What remains in `flags` after this are keys of the configuration
    flags = vars(known)
    file = flags.pop("config", None)
    preset = flags.pop("preset", None)
    dry_run = flags.pop("dry_run", False)
    quiet = flags.pop("quiet", False)
    scale_flags = {key: flags.pop(key) for key in _SCALE_FLAGS if key in flags}
    scale = _parse_scale(scale_flags, dry_run, flags)

    if quiet and dry_run:
        raise ConfigError(
            "quiet would be ignored: a dry run prints its plan and nothing else; drop --quiet"
        )
    if base:
        _refuse_files(file, preset, prog)
        config = make_config(lay_over(base, flags, "the flags"))
    else:
        config = _load(file, preset, flags)
    _refuse_idle_flags(flags, config)
    return Loaded(config, frozenset(flags), dry_run, scale, quiet)


def _load(file: str | None, preset: str | None, flags: dict[str, Any]) -> Config:
    """Return the configuration of file, preset and flags, or of the run that is resumed."""
    if file or preset:
        return load_config(file, preset, flags)
    resumed = _config_of_run(flags.get("resume", "none"))
    if not resumed:
        return load_config(file, preset, flags)
    return make_config(lay_over(resumed, flags, "the flags"))


def _config_of_run(resume: str) -> dict[str, Any]:
    """Return the inherited keys of the run that `--resume PATH` names; {} if it names none.

    PATH is the run's folder, or one of its checkpoints.
    """
    folder = run_folder_of(resume)
    if folder is None:
        return {}
    values = read_yaml(folder / "config.json")
    inherited = {key: value for key, value in values.items() if key not in _NOT_INHERITED}
    return inherited | _found_from_here(inherited, folder)


def _found_from_here(values: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the keys with a path that was relative to the working folder of the run's command."""
    cwd = read_yaml(folder / "run.json").get("cwd") if (folder / "run.json").is_file() else None
    if not isinstance(cwd, str):  # an older version wrote it
        return {}
    paths = {}
    for key in ("dataset", "data_dir"):
        value = str(values.get(key) or "")
        # A word such as `shakespeare` names no file there
        there = Path(cwd, value)
        if value and not Path(value).exists() and there.exists():
            paths[key] = str(there)
    return paths


def _refuse_files(file: str | None, preset: str | None, prog: str) -> None:
    """Raise ConfigError for a file or preset where the command's own script has the values."""
    for key, value in (("config", file), ("preset", preset)):
        if value:
            raise ConfigError(
                f"{key} = {value} would be ignored: {prog} is configured from flags alone; drop "
                f"--{key}"
            )


def _refuse_idle_flags(flags: dict[str, Any], config: Config) -> None:
    """Raise ConfigError for a flag that has no effect with the values of another key."""
    for key, (other, values) in _COUNTS_IF.items():
        if key not in flags or getattr(config, other) in values:
            continue
        # Plain sgd has no weight decay, but sgd with momentum has
        if key == "weight_decay" and config.momentum:
            continue
        raise ConfigError(
            f"{key} = {flags[key]} would be ignored: {other} = {getattr(config, other)}; drop "
            f"--{key}"
        )


def _parse_scale(given: dict[str, str], dry_run: bool, flags: dict[str, Any]) -> Scale | None:
    """Return the values of _SCALE_FLAGS. Raises ConfigError for those that would be ignored."""
    if not given:
        return None

    key, value = next(iter(given.items()))
    if not dry_run:
        raise ConfigError(
            f"{key} = {value} would be ignored without --dry_run; add it, or drop --{key}"
        )
    if "world_size" not in given:
        raise ConfigError(
            f"{key} = {value} would be ignored without --world_size; add it, or drop --{key}"
        )
    if "workers" in flags:
        raise ConfigError(
            f"workers = {flags['workers']} and world_size = {given['world_size']} both say how "
            "many ranks; drop one"
        )

    world_size = _parse_positive("world_size", given["world_size"], int, "a whole number above 0")
    memory_gb = None
    if "memory_gb" in given:
        memory_gb = _parse_positive("memory_gb", given["memory_gb"], float, "a number above 0")
    return Scale(int(world_size), given.get("topology"), memory_gb)


def _parse_positive(key: str, text: str, kind: Callable[[str], float], form: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{key} = {text} is not {form}") from None
    # Also false for nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{key} = {text} is not {form}")
    return value


# ---- parsers -------------------------------------------------------------------------------------


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


def _flags() -> list[str]:
    """Return the keys of the configuration that are flags."""
    return [key for key in Config.model_fields if field_extra(key).get("flag", True)]


def _build_parser(prog: str, description: str) -> argparse.ArgumentParser:
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
    for key, (metavar, text) in _SCALE_FLAGS.items():
        parser.add_argument(f"--{key}", metavar=metavar, help=text)

    groups = {key: parser.add_argument_group(title) for key, title in _GROUPS.items()}
    for key in _flags():
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


# ---- running commands ----------------------------------------------------------------------------


def run_command(
    run: Callable[[Loaded, float], int], argv: list[str] | None, prog: str, what: str
) -> int:
    """Parse a command line and run it; print a NanorayError as one line, and return the exit code."""
    started = time.time()
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(parse_args(words, prog, what), started))


def exit_code_of(run: Callable[[], int | None], in_program: bool = False) -> int:
    """Run a command and return its exit code; None from `run` is 0.

    The error of nanoray, or of a file, is printed as one line. The output may be cut off, by `head`
    for instance, without a traceback. `in_program`: a program has called it, whose logging may
    receive the lines.
    """
    with lasting_output(), nullcontext() if in_program else as_command():
        try:
            return run() or 0
        except NanorayError as error:
            say_error(f"error: {error}")
            return error.exit_code
        except OSError as error:
            # Without a file name it is no error of a path that the user could mend
            if error.filename is None:
                raise
            say_error(
                f"error: {error.filename}: {error.strerror}; check the path and its permissions"
            )
            return 1


def run_subcommand(
    commands: dict[str, Callable[[list[str]], int]], argv: list[str] | None, doc: str
) -> int:
    """Run the command that the first word names, and return its exit code; `doc` is the help."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else ""

    def run() -> int:
        if name in ("-h", "--help"):
            print(doc.strip())
            return 0
        # No command at all is a mistake, but the help is what is needed
        if not name:
            print(doc.strip())
            return 2
        if name not in commands:
            raise ConfigError(f"unknown command {name}; one of {', '.join(commands)}")
        return commands[name](words[1:])

    return exit_code_of(run)


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Raise ConfigError with the remedy when a file cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}); {remedy}") from None


def require_script(config: Config, main: object) -> None:
    """Raise ConfigError when the model is a script's own and there is no script."""
    if config.model == "own" and main is None:
        raise ConfigError(
            "model = own needs a script that brings the model; see examples/own_model.py"
        )


def handle_stop_signals(handler: Callable[[int, Any], None]) -> None:
    """Install `handler` for the stop signals. Only the main thread of a process may do so.

    A signal that is ignored already stays so: nohup starts commands with SIGHUP ignored.
    """
    if not in_main_thread():
        return
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


@contextmanager
def stop_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the stop signals while a run lasts, and restore the program's own handlers then."""
    if not in_main_thread():
        say(f"note   {NO_SIGNALS}")
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    handle_stop_signals(handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            # None: a handler that was not installed from Python, which nothing can restore.
            signal.signal(signum, signal.SIG_DFL if old is None else old)


def in_main_thread() -> bool:
    """Return whether this thread is the one that receives this process's signals."""
    return threading.current_thread() is threading.main_thread()


# ---- docs/flags.md -------------------------------------------------------------------------------


def to_markdown() -> str:
    """Return docs/flags.md: the flags that `nanoray launch --help` prints, and the conflicts."""
    lines = [
        "# Flags",
        "",
        "Generated by `python -m nanoray.cli` from `nanoray/config/`: flags of `nanoray train` "
        "and `launch`.",
        "Those with a default are also YAML keys. A flag overrides `--config FILE`, which "
        "overrides the preset.",
    ]
    for group in _build_parser("nanoray launch", "")._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if not actions:
            continue
        title = "the command" if group.title == "options" else group.title
        lines += ["", f"## {title}", "", "| flag | default | what |", "| --- | --- | --- |"]
        lines += [_flag_row(action) for action in actions]
    lines += _conflict_lines()
    return "\n".join(lines)


def _flag_row(action: argparse.Action) -> str:
    """Return a flag's line of the table; a key's help text ends with its default in brackets."""
    text = (action.help or "").replace("%%", "%")
    default = ""
    if action.dest in Config.model_fields:
        text, _, default = text.rpartition(" [")
        default = default.removesuffix("]")
    shown = f"`{default}`" if default else ""
    return _table_row([f"`--{action.dest}`", shown, text])


def _conflict_lines() -> list[str]:
    """Return the table of conflicts: what is refused, why, what helps, and when it is known."""
    lines = [
        "",
        "## What does not go together",
        "",
        "Each row is refused before training starts: as soon as the keys are read, or when the "
        "number of ranks or the device is known.",
        "",
        "| asked for | not with | why | instead | known from |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in TABLE:
        if isinstance(row, Row):
            lines.append(_row_of_two(row))
    lines += [
        "",
        "Sizes must fit each other; the message names a size that does:",
        "",
    ]
    for row in TABLE:
        if isinstance(row, Rule):
            lines.append(f"- {row.words}")
    return lines


def _row_of_two(row: Row) -> str:
    other = row.other.words
    if row.also is not None:
        other += f", {row.also.words}"

    why = row.why
    if row.ignored:
        why = "it would be ignored"
    if row.ignored and row.why:
        why = f"it would be ignored: {row.other.key} {row.why}"
    return _table_row([row.asked.words, other, why, row.remedy, known_from(row)])


def _table_row(cells: list[str]) -> str:
    """Return one line of a table; a bar inside a cell would end it."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(escaped) + " |"


if __name__ == "__main__":
    print(to_markdown())
