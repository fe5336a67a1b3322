"""Tensor parallelism: sums of activations over the ranks that share layers."""

from __future__ import annotations

from nanoray.cli.forecast.parallelisms.record import (
    Parallelism,
    Sender,
    Talk,
    every_size,
)
from nanoray.models.weights import layers_of


def talks(sender: Sender) -> list[Talk]:
    """Return what a stage's rank sends to those that share its layers."""
    job = sender.job
    layout = sender.layout
    if layout.tp == 1:
        return []
    tokens = sender.tokens
    shape = job.shape
    has_shared = shape.shared_experts > 0

    blocks = sender.blocks
    sums = blocks * (3 if has_shared else 2)  # of a forward
    again = 0  # of the forward that backward repeats: the last sum of a block is not needed again
    if sender.repeats:
        again = blocks * (2 if has_shared else 1)

    if job.cuts_sequence(layout):
        sent = _sequence(sender, sums, again)
    else:
        first = sender.accum if sender.is_first else 0
        last = sender.accum if sender.is_last else 0
        stream = tokens * shape.n_embd
        width = (2 if job.half else 4) * stream
        sent = [
            Talk("tp", "all_reduce", "activations", sums, width, "forward"),
            Talk("tp", "all_reduce", "activations, again", again, width, "backward"),
            Talk("tp", "all_reduce", "their gradients", sums + last, 4 * stream, "backward"),
            Talk("tp", "all_reduce", "embedding", first, 4 * stream, "forward"),
        ]

    if shape.experts:
        gates = 4 * tokens * shape.experts_per_token
        sent.append(Talk("tp", "all_reduce", "gradients of gates", blocks, gates, "backward"))
        if job.cuts_sequence(layout):
            # Each rank routes its own positions, and all of them need every rating.
            rated = 4 * tokens * shape.experts
            repeated = blocks if sender.repeats else 0
            sent += [
                Talk("tp", "all_gather", "ratings of experts", blocks, rated, "forward"),
                Talk("tp", "all_gather", "ratings of experts, again", repeated, rated, "backward"),
            ]

    # The loss over a vocabulary that is cut takes two sums per micro batch, of 4 and 8 bytes a token.
    if sender.is_last:
        sent.append(Talk("tp", "all_reduce", "loss", 2 * sender.accum, 6 * tokens, "forward"))
    return [talk for talk in sent if talk.times]


def _sequence(sender: Sender, sums: int, again: int) -> list[Talk]:
    """Return the talks of tensor ranks that also divide the positions of the residual stream.

    An all-gather and a reduce-scatter stand for each sum. `sums`: of a forward; `again`: of what
    backward repeats of it.
    """
    job = sender.job
    shape = job.shape
    first = sender.accum if sender.is_first else 0
    last = sender.accum if sender.is_last else 0
    stream = 4 * sender.tokens * shape.n_embd  # float32
    width = (2 if job.half else 4) * sender.tokens * shape.n_embd
    gathered_again = sums if sender.repeats else 0
    partial = 4 * _partial_rows(sender) * shape.n_embd
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
        Talk("tp", "all_reduce", "gradients of norms and positions", 1, partial, "after"),
    ]


def _partial_rows(sender: Sender) -> int:
    """Return the parameters, in rows of n_embd, whose gradients each tensor rank has a part of."""
    shape = sender.job.shape

    # Of a block: two norms, the bias of proj and, without routed experts only, that of down.
    rows = 2
    if shape.bias:
        rows += 3
        if not shape.experts or shape.shared_experts:
            rows += 1
    rows += shape.experts  # the router
    rows *= layers_of(shape.n_layer, sender.layout.pp, sender.stage)

    if sender.is_first:
        rows += shape.block_size  # positions
    if sender.is_last:
        rows += 1 + shape.bias  # the last norm
    return rows


TENSOR = Parallelism(
    key="tp",
    in_pass=True,
    talks=talks,
    tries=every_size("tp"),
)
