"""The options of when a command stops before the end of its schedule. config.py is built on this
file.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from nanoray.seq_options import SeqOptions


class StopOptions(SeqOptions):
    """The keys of an early end, a part of Config. Each attribute's docstring is the help text of
    its flag.
    """

    stop_at: int = Field(0, json_schema_extra={"group": "log"}, ge=0)
    """write a checkpoint and exit 0 after this step (0 = run to max_steps)"""
    target_loss: float = Field(0.0, json_schema_extra={"group": "log"}, ge=0)
    """write a checkpoint and exit 0 after the first evaluation with a validation loss of at most
    this (0 = run to max_steps); max_steps is still where the learning rate's schedule ends"""


def refuse_stop(config: Any, steps: int) -> None:
    """Raise ValueError when a Config of so many steps asks for an end that cannot come."""
    if config.stop_at > steps:
        raise ValueError(
            f"stop_at = {config.stop_at} is beyond max_steps = {config.max_steps}; lower stop_at "
            "or raise max_steps"
        )
    if config.target_loss and not config.eval_every:
        raise ValueError(
            f"target_loss = {config.target_loss} would be ignored: eval_every = 0 evaluates "
            "nothing; raise eval_every, "
            "or drop target_loss"
        )
