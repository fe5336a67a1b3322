"""Data parallelism: gradients, and weights that other ranks have updated; also in groups that each
hold the whole state (hybrid sharding)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.parallelisms.record import Parallelism, Sender, Talk, Tried, divisors
from nanoray.config.layout import Layout
from nanoray.config.mesh import SHARDS_STATE
from nanoray.models.weights import weights_of


class Bytes(NamedTuple):
    """The bytes of a rank's parameters in float32."""

    dense: int  # those that all data ranks sum
    in_layers: int  # of these, in the layers
    routed: int  # experts that ep divides: they are summed over fewer ranks


def bytes_of(sender: Sender) -> Bytes:
    """Return the bytes of the parameters that a rank sends gradients of."""
    dense = 0
    in_layers = 0
    routed = 0
    for tensor in weights_of(sender.job.shape, sender.layout, sender.stage):
        nbytes = 4 * tensor.numel
        if tensor.expert and sender.layout.ep > 1:
            routed += nbytes
            continue
        dense += nbytes
        if tensor.layer is not None:
            in_layers += nbytes
    return Bytes(dense, in_layers, routed)


def buckets_of(job: Job, nbytes: float) -> int:
    """Return the number of gradient buckets for `nbytes` of parameters."""
    return math.ceil(nbytes / (job.bucket_mb * 2**20))


def talks(sender: Sender) -> list[Talk]:
    """Return what a data-parallel mode sends for all parameters of a rank."""
    job = sender.job
    layout = sender.layout
    mode = job.mode(layout)
    axis = layout.gradient_axes[0]
    dense, in_layers, routed = bytes_of(sender)
    if mode == "fsdp":
        sent = _fsdp(sender, axis, dense, in_layers)
    else:
        sent = _buckets(sender, mode, axis, layout.shard_size, dense)
    if layout.replicas > 1:
        sent += _slices(sender, mode, dense)
    if routed:
        sent += _buckets(sender, mode, "edp", layout.dp // layout.ep, routed)
    return sent


def _buckets(sender: Sender, mode: str, axis: str, ranks: int, nbytes: int) -> list[Talk]:
    """Return what a mode with buckets sends for `nbytes` of parameters."""
    if ranks == 1:
        return []
    buckets = buckets_of(sender.job, nbytes)
    each = nbytes / buckets
    if mode == "ddp":
        return [Talk(axis, "all_reduce", "gradients", buckets, each, "beside")]

    # zero2 keeps only its share of the gradients, so every micro batch sends its own.
    times = buckets * sender.accum if mode == "zero2" else buckets
    scatter = Talk(axis, "reduce_scatter", "gradients", times, each, "beside")
    if mode == "ddp_by_hand":
        return [scatter, Talk(axis, "all_gather", "gradients", buckets, each, "beside")]
    return [scatter, Talk(axis, "all_gather", "weights", buckets, each, "after")]


def _fsdp(sender: Sender, axis: str, nbytes: int, in_layers: int) -> list[Talk]:
    """Return the gathers and scatters of fsdp, whose units are the layers and the rest.

    `in_layers`: the bytes of the layers.
    """
    job = sender.job
    units = job.shape.n_layer + 1
    unit = nbytes / units
    shrinks = 2 if job.config.fsdp_gather == "bf16" else 1
    times = sender.accum * units
    gather = Talk(axis, "all_gather", "weights", times, unit / shrinks, "prefetched")
    scatter = Talk(axis, "reduce_scatter", "gradients", units, unit, "beside")
    if job.config.fsdp_reshard != "full":
        return [gather, scatter]

    # Backward gathers again what forward has freed: the layers. The rest is kept until its end.
    times = sender.accum * job.shape.n_layer
    layer = in_layers / job.shape.n_layer
    again = Talk(axis, "all_gather", "weights, again", times, layer / shrinks, "prefetched")
    return [gather, again, scatter]


def _slices(sender: Sender, mode: str, nbytes: int) -> list[Talk]:
    """Return how groups that each hold the whole state add up their sums of gradients.

    A rank adds its slice up with the ranks that have the same slice in other groups: an all-reduce,
    as a reduce-scatter and an all-gather. It happens once per step, also with accumulation.
    """
    job = sender.job
    pieces = job.shape.n_layer + 1 if mode == "fsdp" else buckets_of(job, nbytes)
    own_slice = nbytes / pieces / sender.layout.shard_size
    scatter = Talk("replica", "reduce_scatter", "slices of gradients", pieces, own_slice, "beside")
    return [scatter, scatter._replace(op="all_gather")]


def _tries(tried: Tried, layout: Layout) -> Iterable[Layout]:
    """Yield all data ranks as one group and, on nodes, groups that fill whole nodes."""
    yield layout
    per_node = tried.ranks_per_node
    if per_node is None or tried.job.mode(layout) not in SHARDS_STATE or layout.ep > 1:
        return
    for replicas in divisors(layout.dp):
        # One group is the layout itself, and a group of one rank shards nothing.
        if replicas in (1, layout.dp):
            continue
        grouped = replace(layout, replicas=replicas)
        # The ranks of a group are next to each other.
        if grouped.shard_size * grouped.tp % per_node == 0:
            yield grouped


DATA = Parallelism(
    key="replicas",
    in_pass=False,
    talks=talks,
    tries=_tries,
)
