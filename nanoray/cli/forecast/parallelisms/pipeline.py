"""Pipeline parallelism: the residual stream crosses the boundaries of stages."""

from __future__ import annotations

from nanoray.cli.forecast.parallelisms.record import Parallelism, Sender, Talk, every_size


def talks(sender: Sender) -> list[Talk]:
    """Return what crosses the boundaries of a stage, in float32."""
    job = sender.job
    layout = sender.layout
    if layout.pp == 1:
        return []
    shape = job.shape
    # Every chunk of a stage has its own boundary, which each micro batch crosses.
    sends = sender.accum * job.config.chunks
    stream = 4.0 * sender.tokens * shape.n_embd
    if job.cuts_sequence(layout):
        stream /= layout.tp  # each tensor rank sends its own positions
    sent = [
        Talk("pp", "send", "residual stream", sends, stream, "forward"),
        Talk("pp", "send", "its gradient", sends, stream, "backward"),
    ]
    # The first and the last stage hold the tied embedding, so they add up its gradients.
    if sender.is_first or sender.is_last:
        tied = 4 * shape.padded_vocab * shape.n_embd / layout.tp
        sent.append(Talk("pp", "send", "gradient of the embedding", 1, tied, "after"))
    return sent


PIPELINE = Parallelism(
    key="pp",
    in_pass=True,
    talks=talks,
    tries=every_size("pp"),
)
