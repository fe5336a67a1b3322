"""Run a command: parse its flags, print an error as one line, return its exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nanoray.cli.flags import Loaded, parse_args
from nanoray.config import Config
from nanoray.errors import ConfigError, NanorayError
from nanoray.machine.output import lasting_output


def run_command(
    run: Callable[[Loaded, float], int],
    argv: list[str] | None,
    prog: str,
    about: str,
    elsewhere: bool = False,
) -> int:
    """Parse a command line and run it; print a NanorayError as one line, and return the exit code.

    elsewhere: another machine will load the configuration, and have the files that it names.
    """
    started = time.time()
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(parse_args(words, prog, about, None, elsewhere), started))


def exit_code_of(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; None from `run` is 0.

    The error of nanoray, or of a file, is printed as one line. The output may be cut off, by `head`
    for instance, without a traceback.
    """
    with lasting_output():
        try:
            return run() or 0
        except NanorayError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        except OSError as error:
            if error.filename is None:
                raise
            what = f"{error.filename}: {error.strerror}"
            print(f"error: {what}; check the path and its disk", file=sys.stderr, flush=True)
            return 1


def run_subcommand(
    commands: Mapping[str, Callable[[list[str]], int]],
    argv: list[str] | None,
    doc: str | None,
    otherwise: Callable[[list[str]], int] | None = None,
) -> int:
    """Run the command that the first word names, and return its exit code.

    `doc`, the module's docstring, is the help. `otherwise` takes all command lines that begin with
    no such word.
    """
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else ""
    if otherwise is not None and name not in commands:
        return otherwise(words)
    text = (doc or "").strip()

    def run() -> int:
        if name in ("-h", "--help"):
            print(text)
            return 0
        # No command at all is a mistake, but the help is what is needed
        if not name:
            print(text)
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
