"""Signals that stop a run, handled while it lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanoray.machine.output import say

# Why Ctrl-C does not stop a run that a thread has launched, and what does
NO_SIGNALS = (
    "launched outside of the main thread, which alone receives Ctrl-C and SIGTERM: `run.stop()` in a "
    "callback stops this run with a checkpoint"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


@contextmanager
def stop_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the stop signals while a run lasts, and restore the program's own handlers then.

    A signal that is ignored already stays so: nohup starts commands with SIGHUP ignored.
    """
    # Python gives a process's signals to its main thread
    if threading.current_thread() is not threading.main_thread():
        say(f"note   {NO_SIGNALS}")
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    for signum, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            # None: a handler that was not installed from Python, which nothing can restore.
            signal.signal(signum, signal.SIG_DFL if old is None else old)
