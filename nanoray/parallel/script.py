"""What a step calls of a user's script besides the model: its loss, and what follows an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoray.parallel.hooks import StepHook

Wait = Callable[[], None]


@dataclass(frozen=True)
class Script:
    """Code of a script that the Plan calls, or whose side effects it undoes."""

    code: Sequence[Any] = ()
    """what a forward calls besides the model, such as a loss"""

    after_update: Callable[[Wait], None] | None = None
    """called after each update with a function that waits until the weights are complete"""


class AfterUpdate(StepHook):
    """Calls a script after an update, when this rank has all weights."""

    def __init__(self, call: Callable[[Wait], None], wait: Wait) -> None:
        self._call = call
        self._wait = wait

    def sent(self) -> None:
        self._call(self._wait)
