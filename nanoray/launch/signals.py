"""Stop requests: SIGINT, SIGTERM and SIGHUP from outside, or for a reason of the driver itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nanoray.cli import stop_signals
from nanoray.machine.output import say

AFTER_THIS_STEP = (
    b"\nstopping after this step; what is done is saved (Ctrl-C once more: stop now)\n"
)


class StopRequested(Exception):
    """A stop was requested while there was nothing to save."""


class Stop:
    """Whether a stop was requested: first after this step, with a second Ctrl-C at once."""

    def __init__(self, answer: bytes = AFTER_THIS_STEP) -> None:
        """answer: what is printed at the first signal."""
        self.answer = answer
        self.signal = 0
        self.reason = ""

    def __call__(self, signum: int, frame: Any) -> None:
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = signum
            with suppress(OSError):  # the terminal may be gone
                os.write(2, self.answer)

    def request(self, reason: str) -> None:
        """Stop as SIGTERM would, and say why."""
        self.signal, self.reason = signal.SIGTERM, reason
        say(f"\nstop     {reason}: stopping after this step; what is done is saved")

    def check(self) -> None:
        """Raise StopRequested if a stop was requested."""
        if self.signal:
            raise StopRequested

    @property
    def requested(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal as in shells."""
        return 128 + self.signal if self.signal else 0


@contextmanager
def catch_signals(answer: bytes = AFTER_THIS_STEP) -> Iterator[Stop]:
    """Turn SIGINT, SIGTERM and SIGHUP into stop requests while a run lasts; `answer`: see Stop.

    A second SIGINT exits with code 130, and StopRequested with the code of the stop.
    """
    stop = Stop(answer)
    with stop_signals(stop):
        try:
            yield stop
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except StopRequested:
            say("stop     before any rank had trained: nothing to save")
            raise SystemExit(stop.exit_code) from None
