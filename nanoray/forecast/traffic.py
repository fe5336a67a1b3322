"""What a rank of a GPT sends in a step, by formulas: the kind, number and size of its collectives."""

from __future__ import annotations

import math
from typing import NamedTuple

from nanoray.config.mesh import SHARDS_STATE
from nanoray.forecast.job import Experts, Job
from nanoray.forecast.memory import exchanged_bytes
from nanoray.forecast.weights import layers_of, tensors_of
from nanoray.mesh.layout import Layout


class Talk(NamedTuple):
    """Collectives of one kind, of a rank in a step."""

    # tp | cp | dp | dp_cp (dp with cp) | shard, replica (dp in groups) | edp (gradients of experts) |
    # ep | pp
    axis: str
    op: str  # all_reduce | reduce_scatter | all_gather | all_to_all | send
    what: str
    times: float
    nbytes: float  # the tensor of one of them
    # forward | backward: compute waits for it. ring_forward | ring_again | ring_backward: the same,
    # but the attention of the block that is there hides it; again is in backward. prefetched: a pass
    # hides it. beside: backward hides it. after: it follows the update. once: nothing hides it.
    # travels: it has the next steps for it.
    when: str
    every: int = 1  # steps from one time to the next

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank of the axis sends in a step, the mean over all steps."""
        # Each rank keeps its own part of the tensor and sends the others.
        share = (ranks - 1) / ranks
        if self.op == "all_reduce":
            share *= 2  # a reduce-scatter and an all-gather
        elif self.op == "send":
            share = 1.0
        return self.times * self.nbytes * share / self.every


def talks_of(job: Job, layout: Layout, micro: int, stage: int) -> list[Talk]:
    """Return all that a rank of a stage sends in a step, except sums of single numbers."""
    accum = job.sequences // (layout.dp * micro)
    tokens = micro * job.shape.block_size // layout.cp  # of a micro batch, on a rank
    talks = []
    if layout.cp > 1:
        talks += _context_talks(job, layout, stage, accum, tokens)
    if layout.tp > 1:
        talks += _tensor_talks(job, layout, stage, accum, tokens)
    if layout.ep > 1 and job.experts:
        talks += _expert_talks(job, job.experts, layout, stage, accum, tokens)
    if layout.pp > 1:
        talks += _pipeline_talks(job, layout, stage, accum, tokens)

    # Experts that ep divides are reduced over fewer ranks than the rest: their bytes count apart.
    dense = 0
    routed = 0
    in_layers = 0  # of the dense ones
    for tensor in tensors_of(job, layout, stage):
        if tensor.expert and layout.ep > 1:
            routed += 4 * tensor.numel
        else:
            dense += 4 * tensor.numel
            if tensor.layer is not None:
                in_layers += 4 * tensor.numel
    mode = job.mode(layout)
    axis = layout.gradient_axes[0]
    if mode == "fsdp":
        talks += _fsdp_talks(job, axis, dense, in_layers, accum)
    else:
        talks += _gradient_talks(job, mode, axis, layout.shard_size, dense, accum)
    if layout.replicas > 1 and job.config.sync_every:
        talks += _round_talks(job, mode, layout, dense)
    elif layout.replicas > 1:
        talks += _replica_talks(job, mode, layout, dense)
    if routed:
        replicas = layout.dp // layout.ep
        talks += _gradient_talks(job, mode, "edp", replicas, routed, accum)
    return talks


def _context_talks(job: Job, layout: Layout, stage: int, accum: int, tokens: int) -> list[Talk]:
    """Return what the ranks that share sequences exchange for attention.

    `tokens`: of a micro batch, on a rank. A block is the keys and values of these tokens.
    """
    blocks = accum * layers_of(job.shape.n_layer, layout.pp, stage)
    numbers = 2 * tokens * job.shape.n_embd / layout.tp  # of keys and values
    block = (2 if job.half else 4) * numbers
    if job.config.cp_attention == "all_gather":
        return _gathered_talks(job, blocks, layout.cp * block)
    gradients = 4 * numbers  # sums in float32

    # A block passes all other ranks. Its gradients also return to the rank that it is from.
    passes = blocks * (layout.cp - 1)
    again = passes if job.config.activation_checkpointing != "none" else 0
    talks = [
        Talk("cp", "send", "keys and values", passes, block, "ring_forward"),
        Talk("cp", "send", "keys and values, again", again, block, "ring_again"),
        Talk("cp", "send", "keys and values, backward", passes, block, "ring_backward"),
        Talk("cp", "send", "their gradients", passes, gradients, "ring_backward"),
        Talk("cp", "send", "their gradients, home", blocks, gradients, "backward"),
    ]
    return [talk for talk in talks if talk.times]


def _gathered_talks(job: Job, blocks: int, whole: float) -> list[Talk]:
    """Return the same where all keys and values, `whole` bytes, are gathered before attention.

    They are kept for backward. Activation checkpointing gathers them again.
    """
    again = blocks if job.config.activation_checkpointing != "none" else 0
    talks = [
        Talk("cp", "all_gather", "keys and values", blocks, whole, "forward"),
        Talk("cp", "all_gather", "keys and values, again", again, whole, "backward"),
        Talk("cp", "reduce_scatter", "their gradients", blocks, whole, "backward"),
    ]
    return [talk for talk in talks if talk.times]


def _expert_talks(
    job: Job, experts: Experts, layout: Layout, stage: int, accum: int, tokens: int
) -> list[Talk]:
    """Return how tokens travel to their experts and back, with their gradients."""
    layers = layers_of(job.shape.n_layer, layout.pp, stage)
    size = 2 if job.half else 4
    # A token travels once to each of its experts.
    routed = size * tokens * job.shape.n_embd * experts.per_token
    forward = accum * layers * 2  # there and back
    # Backward computes a block again where its activations were not kept.
    backward = forward if job.config.activation_checkpointing == "none" else 2 * forward
    return [
        Talk("ep", "all_to_all", "tokens to experts and back", forward, routed, "forward"),
        Talk("ep", "all_to_all", "their gradients", backward, routed, "backward"),
    ]


def _pipeline_talks(job: Job, layout: Layout, stage: int, accum: int, tokens: int) -> list[Talk]:
    """Return what crosses the boundaries of a stage, in float32."""
    shape = job.shape
    # Every chunk of a stage has its own boundary, which each micro batch crosses.
    sends = accum * job.chunks
    stream = 4.0 * tokens * shape.n_embd
    if job.cuts_sequence(layout):
        stream /= layout.tp  # each tensor rank sends its own positions
    talks = [
        Talk("pp", "send", "residual stream", sends, stream, "forward"),
        Talk("pp", "send", "its gradient", sends, stream, "backward"),
    ]
    # The first and the last stage hold the tied embedding, so they add up its gradients.
    if stage in (0, layout.pp - 1):
        tied = 4 * shape.padded_vocab * shape.n_embd / layout.tp
        talks.append(Talk("pp", "send", "gradient of the embedding", 1, tied, "once"))
    return talks


def _tensor_talks(job: Job, layout: Layout, stage: int, accum: int, tokens: int) -> list[Talk]:
    """Return what a stage's rank sends to those that share its layers.

    `tokens`: of a micro batch.
    """
    experts = job.experts
    layers = layers_of(job.shape.n_layer, layout.pp, stage)
    checkpointing = job.config.activation_checkpointing != "none"
    has_shared = bool(experts and experts.shared)

    blocks = accum * layers
    sums = blocks * (3 if has_shared else 2)  # of a forward
    again = 0  # of the forward that backward repeats: the last sum of a block is not needed again
    if checkpointing:
        again = blocks * (2 if has_shared else 1)

    if job.cuts_sequence(layout):
        talks = _sequence_talks(job, layout, stage, accum, tokens, sums, again)
    else:
        first = accum if stage == 0 else 0
        last = accum if stage == layout.pp - 1 else 0
        stream = tokens * job.shape.n_embd
        width = (2 if job.half else 4) * stream
        talks = [
            Talk("tp", "all_reduce", "activations", sums, width, "forward"),
            Talk("tp", "all_reduce", "activations, again", again, width, "backward"),
            Talk("tp", "all_reduce", "their gradients", sums + last, 4 * stream, "backward"),
            Talk("tp", "all_reduce", "embedding", first, 4 * stream, "forward"),
        ]

    if experts:
        gates = 4 * tokens * experts.per_token
        talks.append(Talk("tp", "all_reduce", "gradients of gates", blocks, gates, "backward"))
        if job.cuts_sequence(layout):
            # Each rank routes its own positions, and all of them need every rating.
            rated = 4 * tokens * experts.count
            repeated = blocks if checkpointing else 0
            talks += [
                Talk("tp", "all_gather", "ratings of experts", blocks, rated, "forward"),
                Talk("tp", "all_gather", "ratings of experts, again", repeated, rated, "backward"),
            ]

    # The loss over a vocabulary that is cut takes two sums per micro batch, of 4 and 8 bytes a token.
    if stage == layout.pp - 1:
        talks.append(Talk("tp", "all_reduce", "loss", 2 * accum, 6 * tokens, "forward"))
    return [talk for talk in talks if talk.times]


def _sequence_talks(
    job: Job, layout: Layout, stage: int, accum: int, tokens: int, sums: int, again: int
) -> list[Talk]:
    """Return the talks of tensor ranks that also divide the positions of the residual stream.

    An all-gather and a reduce-scatter stand for each sum. `sums`: of a forward; `again`: of what
    backward repeats of it.
    """
    shape = job.shape
    first = accum if stage == 0 else 0
    last = accum if stage == layout.pp - 1 else 0
    stream = 4 * tokens * shape.n_embd  # float32
    width = (2 if job.half else 4) * tokens * shape.n_embd
    gathered_again = sums if job.config.activation_checkpointing != "none" else 0
    partial = 4 * _partial_rows(job, layout, stage) * shape.n_embd
    return [
        Talk("tp", "all_gather", "activations into layers", sums + last, stream, "forward"),
        Talk("tp", "reduce_scatter", "activations out of them", sums, width, "forward"),
        Talk(
            "tp", "all_gather", "activations into layers, again", gathered_again, stream, "backward"
        ),
        Talk("tp", "reduce_scatter", "activations out of them, again", again, width, "backward"),
        Talk("tp", "reduce_scatter", "gradients out of layers", sums + last, stream, "backward"),
        Talk("tp", "all_gather", "gradients into them", sums, width, "backward"),
        Talk("tp", "reduce_scatter", "embedding", first, stream, "forward"),
        Talk("tp", "all_gather", "its gradient", first, stream, "backward"),
        Talk("tp", "all_reduce", "gradients of norms and positions", 1, partial, "once"),
    ]


def _partial_rows(job: Job, layout: Layout, stage: int) -> int:
    """Return the parameters, in rows of n_embd, whose gradients each tensor rank has a part of."""
    shape = job.shape
    experts = job.experts
    layers = layers_of(shape.n_layer, layout.pp, stage)

    # Of a block: two norms, the bias of proj and, without routed experts only, that of down.
    rows = 2
    if shape.bias:
        rows += 3
        if experts is None or experts.shared:
            rows += 1
    if experts:
        rows += experts.count  # the router
    rows *= layers

    if stage == 0:
        rows += shape.block_size  # positions
    if stage == layout.pp - 1:
        rows += 1 + shape.bias  # the last norm
    return rows


def _gradient_talks(
    job: Job, mode: str, axis: str, ranks: int, nbytes: int, accum: int
) -> list[Talk]:
    """Return what a data-parallel mode sends for `nbytes` of parameters in float32."""
    if ranks == 1:
        return []
    buckets = _buckets(job, nbytes)
    each = nbytes / buckets
    if mode == "ddp":
        return [Talk(axis, "all_reduce", "gradients", buckets, each, "beside")]

    # zero2 keeps only its share of the gradients, so every micro batch sends its own.
    times = buckets * accum if mode == "zero2" else buckets
    scatter = Talk(axis, "reduce_scatter", "gradients", times, each, "beside")
    if mode == "ddp_by_hand":
        return [scatter, Talk(axis, "all_gather", "gradients", buckets, each, "beside")]
    return [scatter, Talk(axis, "all_gather", "weights", buckets, each, "after")]


def _buckets(job: Job, nbytes: float) -> int:
    """Return the number of gradient buckets for `nbytes` of parameters."""
    return math.ceil(nbytes / (job.bucket_mb * 2**20))


def _replica_talks(job: Job, mode: str, layout: Layout, nbytes: int) -> list[Talk]:
    """Return how groups that each hold the whole state add up their sums of gradients.

    A rank adds its slice up with the ranks that have the same slice in other groups: an all-reduce,
    as a reduce-scatter and an all-gather. It happens once per step, also with accumulation.
    """
    pieces = job.shape.n_layer + 1 if mode == "fsdp" else _buckets(job, nbytes)
    own_slice = nbytes / pieces / layout.shard_size
    scatter = Talk("replica", "reduce_scatter", "slices of gradients", pieces, own_slice, "beside")
    return [scatter, scatter._replace(op="all_gather")]


def _round_talks(job: Job, mode: str, layout: Layout, nbytes: int) -> list[Talk]:
    """Return how replicas that rarely communicate average by how much their weights have moved.

    Each rank averages what it updates of its replica. Every fragment has its own step of a round,
    and is sent in buckets of its own.
    """
    config = job.config
    own = float(nbytes)
    if mode in SHARDS_STATE:
        own /= layout.shard_size
    fragment = own / config.sync_fragments
    buckets = config.sync_fragments * _buckets(job, fragment)
    # One fragment has no step beside which it could travel.
    when = "once" if config.sync_fragments == 1 else "travels"
    each = own / buckets * exchanged_bytes(config) / 4
    moved = Talk("replica", "all_to_all", "moves of weights", buckets, each, when)
    moved = moved._replace(every=config.sync_every)
    return [moved, moved._replace(op="all_gather", what="their means")]


def _fsdp_talks(job: Job, axis: str, nbytes: int, in_layers: int, accum: int) -> list[Talk]:
    """Return the gathers and scatters of fsdp, whose units are the layers and the rest.

    `in_layers`: the bytes of the layers.
    """
    units = job.shape.n_layer + 1
    unit = nbytes / units
    shrinks = 2 if job.config.fsdp_gather == "bf16" else 1
    gather = Talk(axis, "all_gather", "weights", accum * units, unit / shrinks, "prefetched")
    scatter = Talk(axis, "reduce_scatter", "gradients", units, unit, "beside")
    if job.config.fsdp_reshard != "full":
        return [gather, scatter]

    # Backward gathers again what forward has freed: the layers. The rest is kept until its end.
    times = accum * job.shape.n_layer
    layer = in_layers / job.shape.n_layer
    again = Talk(axis, "all_gather", "weights, again", times, layer / shrinks, "prefetched")
    return [gather, again, scatter]
