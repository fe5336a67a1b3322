"""Context parallelism: keys and values pass between the ranks that share sequences."""

from __future__ import annotations

from nanoray.forecast.talks.talk import Sender, Talk


def talks(sender: Sender) -> list[Talk]:
    """Return what the ranks that share sequences exchange for attention.

    A block is the keys and values of a micro batch's tokens on a rank.
    """
    job = sender.job
    layout = sender.layout
    if layout.cp == 1:
        return []
    blocks = sender.blocks
    numbers = 2 * sender.tokens * job.shape.n_embd / layout.tp  # of keys and values
    block = (2 if job.half else 4) * numbers
    if job.config.cp_attention == "all_gather":
        return _gathered(sender, layout.cp * block)
    gradients = 4 * numbers  # sums in float32

    # A block passes all other ranks. Its gradients also return to the rank that it is from.
    passes = blocks * (layout.cp - 1)
    again = passes if sender.repeats else 0
    ring = [
        Talk("cp", "send", "keys and values", passes, block, "ring_forward"),
        Talk("cp", "send", "keys and values, again", again, block, "ring_again"),
        Talk("cp", "send", "keys and values, backward", passes, block, "ring_backward"),
        Talk("cp", "send", "their gradients", passes, gradients, "ring_backward"),
        Talk("cp", "send", "their gradients, home", blocks, gradients, "backward"),
    ]
    return [talk for talk in ring if talk.times]


def _gathered(sender: Sender, whole: float) -> list[Talk]:
    """Return the same where all keys and values, `whole` bytes, are gathered before attention.

    They are kept for backward. Activation checkpointing gathers them again.
    """
    blocks = sender.blocks
    again = blocks if sender.repeats else 0
    gathered = [
        Talk("cp", "all_gather", "keys and values", blocks, whole, "forward"),
        Talk("cp", "all_gather", "keys and values, again", again, whole, "backward"),
        Talk("cp", "reduce_scatter", "their gradients", blocks, whole, "backward"),
    ]
    return [talk for talk in gathered if talk.times]
