"""The bytes of the collectives that the forecast counts."""

from __future__ import annotations

from nanoray.cli.forecast.parallelisms.record import Talk


def sent(talk: Talk, ranks: int) -> float:
    """Return the bytes that a rank of the axis sends in a step: it keeps its own part."""
    share = (ranks - 1) / ranks
    if talk.op == "all_reduce":
        share *= 2  # a reduce-scatter and an all-gather
    elif talk.op == "send":
        share = 1.0
    return talk.times * talk.nbytes * share
