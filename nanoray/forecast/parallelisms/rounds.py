"""Replicas that rarely communicate: the differences of their weights, once in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from nanoray.config import Config
from nanoray.config.mesh import SHARDS_STATE
from nanoray.config.optim import FRAGMENT_DELAY
from nanoray.forecast.job import Job
from nanoray.forecast.memory import exchanged, exchanged_bytes
from nanoray.forecast.parallelisms.data import buckets_of, bytes_of
from nanoray.forecast.parallelisms.record import Parallelism, Sender, Talk, Tried
from nanoray.mesh.layout import Layout


def talks(sender: Sender) -> list[Talk]:
    """Return how replicas that rarely communicate average by how much their weights have moved.

    Each rank averages what it updates of its replica. Every fragment has its own step of a round,
    and is sent in buckets of its own.
    """
    job = sender.job
    config = job.config
    layout = sender.layout
    if layout.replicas == 1 or not config.sync_every:
        return []
    own = float(bytes_of(sender).dense)
    if job.mode(layout) in SHARDS_STATE:
        own /= layout.shard_size
    fragment = own / config.sync_fragments
    buckets = config.sync_fragments * buckets_of(job, fragment)
    # One fragment has no step beside which it could travel.
    when = "once" if config.sync_fragments == 1 else "travels"
    each = own / buckets * exchanged_bytes(config) / 4
    moved = Talk("replica", "all_to_all", "moves of weights", buckets, each, when)
    moved = moved._replace(every=config.sync_every)
    return [moved, moved._replace(op="all_gather", what="their means")]


def _words(config: Config, layout: Layout) -> dict[str, str]:
    if not config.sync_every:
        return {}
    return {"replica": f"how far their weights have moved, once in {config.sync_every} steps"}


def _tries(tried: Tried, layout: Layout) -> Iterable[Layout]:
    """Yield replicas of one data rank each, and groups that shard their state."""
    if not tried.job.config.sync_every or layout.replicas > 1:
        yield layout
    elif layout.dp > 1:
        yield replace(layout, replicas=layout.dp)


def _delay_s(
    job: Job, talks: Sequence[Talk], seconds: Callable[[Talk], float], step_s: float
) -> float:
    """Return the seconds of a step, on average, in which training waits for a fragment of a round.

    A fragment travels while two steps are computed; what takes longer delays the second one.
    """
    travelling_s = sum(talk.times * seconds(talk) for talk in talks if talk.when == "travels")
    fragments = job.config.sync_fragments
    waited_s = max(0.0, travelling_s / fragments - FRAGMENT_DELAY * step_s)
    return fragments * waited_s / max(1, job.config.sync_every)


ROUNDS = Parallelism(
    key="sync_every",
    in_pass=False,
    talks=talks,
    words=_words,
    tries=_tries,
    delay_s=_delay_s,
    between=exchanged,
)
