"""Replicas that rarely communicate: the differences of their weights, once in a round."""

from __future__ import annotations

from nanoray.config.mesh import SHARDS_STATE
from nanoray.forecast.memory import exchanged_bytes
from nanoray.forecast.talks.gradients import buckets_of, bytes_of
from nanoray.forecast.talks.talk import Sender, Talk


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
