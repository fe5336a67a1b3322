"""The option of statistics by layer, and what it does not go with. config.py is built on this file."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from nanoray.stop_options import StopOptions

WHOLE = ("ddp", "ddp_by_hand")  # values of dp_mode with which rank 0 has all weights and all gradients


class StatisticsOptions(StopOptions):
    """The key of statistics, a part of Config. Its docstring is the help text of its flag."""

    statistics_every: int = Field(0, json_schema_extra={"group": "log"}, ge=0)
    """steps between statistics of each layer in statistics.jsonl: weights, gradients, updates, activations, attention,
    dead units (0 = never); rank 0 measures them, and no bit of the training changes"""


def refuse_statistics(config: Any) -> None:
    """Raise ValueError when a Config wants statistics of weights or gradients that rank 0 does not have."""
    for key, whole in (("dp_mode", WHOLE), ("tp", (1,)), ("pp", (1,)), ("ep", (1,))):
        if config.statistics_every and (value := getattr(config, key)) not in whole:
            raise ValueError(
                f"statistics_every = {config.statistics_every} with {key} = {value}: rank 0 has only a part of the "
                f"weights or gradients; use {key} {' or '.join(map(str, whole))}, or drop statistics_every"
            )
