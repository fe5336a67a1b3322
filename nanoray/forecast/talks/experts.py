"""Expert parallelism: tokens travel to their experts and back."""

from __future__ import annotations

from nanoray.forecast.talks.talk import Sender, Talk


def talks(sender: Sender) -> list[Talk]:
    """Return how tokens travel to their experts and back, with their gradients."""
    job = sender.job
    experts = job.experts
    if sender.layout.ep == 1 or experts is None:
        return []
    size = 2 if job.half else 4
    # A token travels once to each of its experts.
    routed = size * sender.tokens * job.shape.n_embd * experts.per_token
    forward = sender.blocks * 2  # there and back
    # Backward computes a block again where its activations were not kept.
    backward = 2 * forward if sender.repeats else forward
    return [
        Talk("ep", "all_to_all", "tokens to experts and back", forward, routed, "forward"),
        Talk("ep", "all_to_all", "their gradients", backward, routed, "backward"),
    ]
