"""`fit` of a plain script, without nanoray.launch: `python script.py`, or under torchrun.

The script calls `fit` in the middle, and goes on after it. So a run that fails raises, signals are
handled only while it trains, and process groups are left at its end.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nanoray.base.output import lasting_output
from nanoray.cli import Loaded
from nanoray.errors import NanorayError
from nanoray.mesh.mesh import abandon_groups
from nanoray.own.program import Program
from nanoray.own.run import Run
from nanoray.own.settings import refuse_while_spawned, with_steps
from nanoray.train.__main__ import train_here


def fit_here(loaded: Loaded, steps: int | None, fit: Callable[[Run], None]) -> dict[str, Any]:
    """Train in this process, as the only rank or as one of a launcher's; return the outcome.

    `fit` trains a model as the rank that it is given. After Ctrl-C, with a checkpoint, it raises
    KeyboardInterrupt, and after another stop signal SystemExit, as Python would without nanoray.
    """
    refuse_while_spawned()
    loaded = with_steps(loaded, steps)
    try:
        # A terminal that is closed must not end the run before it has saved.
        with lasting_output():
            ended = train_here(loaded, time.time(), Program(fit, loaded.given))
    finally:
        # The next fit forms its own groups, and the end of Python must not wait for their threads.
        abandon_groups()
    if ended is None:  # a dry run, which ends the script
        raise SystemExit(0)
    if ended.code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if ended.code:
        raise SystemExit(ended.code)
    return ended.outcome


def end_in_one_line() -> None:
    """Let an error of nanoray that a script does not catch end it in one line, with its exit code.

    Nothing changes where another program has its own way to show errors, as notebooks have.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_in_one_line


def _print_in_one_line(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not isinstance(error, NanorayError):
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)
