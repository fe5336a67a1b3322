"""The batch of one optimizer step: micro batches, accumulation and data ranks."""

from __future__ import annotations

from typing import NamedTuple

from nanoray.config.keys import Keys
from nanoray.errors import ConfigError


class Batch(NamedTuple):
    """The batch of a run: global = micro x accum x dp sequences."""

    micro: int
    accum: int
    dp: int

    @property
    def global_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro * self.accum * self.dp


def resolve_batch(config: Keys, dp: int) -> Batch:
    """Split the global batch over `dp` ranks, or multiply the per-rank batch up to it.

    Raises ConfigError when the sizes contradict each other or do not divide.
    """
    micro = config.micro_batch_size
    accum = config.grad_accum_steps
    total = config.global_batch_size

    # Until the size is measured: as much at a time as a schedule can take
    if config.micro_batch_search:
        accum = _group(config)

    # Without a global size it follows from that of a rank
    if not total:
        return Batch(micro, accum or 1, dp)

    # All three given: they must agree
    if micro and accum and micro * accum * dp != total:
        product = micro * accum * dp
        raise ConfigError(
            f"micro_batch_size*grad_accum_steps*ranks = {micro}*{accum}*{dp} = {product}, but "
            f"global_batch_size = {total}; drop one of the three, or set global_batch_size "
            f"{product}"
        )

    # One of micro and accum given: the other one follows, if it is a whole number
    given = micro or accum or 1
    share = given * dp
    if total % share:
        unit = f"grad_accum_steps*ranks = {accum or 1}*{dp}"
        if micro:
            unit = f"micro_batch_size*ranks = {micro}*{dp}"
        nearest = max(share, round(total / share) * share)
        raise ConfigError(
            f"global_batch_size = {total} is not a multiple of {unit} = {share}; "
            f"try global_batch_size {nearest}, or another number of workers"
        )
    if micro:
        return Batch(micro, total // share, dp)
    return Batch(total // share, accum or 1, dp)


def batch_for(config: Keys, full: int, ranks: int, limit: int = 0) -> Batch | None:
    """Split the global batch of a run of `full` data ranks over `ranks` of them.

    The micro batch does not grow, so that it still fits the memory of a device; accumulation grows
    instead. limit: the most sequences of a micro batch; 0: as many as the configuration says.
    Returns None where the global batch does not divide like that.
    """
    batch = resolve_batch(config, full)
    most = min(batch.micro, limit or batch.micro)
    if ranks == full and most == batch.micro:
        return batch

    share, rest = divmod(batch.global_size, ranks)
    if rest:
        return None

    # The smallest accumulation that is possible gives the largest micro batch, and so the fewest
    # launches of kernels
    for accum in range(batch.accum, share + 1, _group(config)):
        if share % accum == 0 and share // accum <= most:
            return Batch(share // accum, accum, ranks)
    return None


def micro_batches(config: Keys, share: int) -> list[int]:
    """Return the micro batches into which a rank's share of a step divides, the smallest first."""
    group = _group(config)
    return [
        micro for micro in range(1, share + 1) if share % micro == 0 and share // micro % group == 0
    ]


def _group(config: Keys) -> int:
    """Return how many micro batches the schedule of a pipeline takes at a time."""
    return config.pp if config.pp_schedule == "interleaved" else 1
