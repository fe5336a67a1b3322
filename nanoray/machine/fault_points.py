"""The points at which a run's state passes from one holder to another. A planned fault can fire at
each of them.

The phases of a step (faults/progress.py) are such points, too. Code calls `reached("share")`, which
does nothing unless a callback is set. tests/cluster/test_kill_points.py ends ranks and drivers at
every point.
"""

from __future__ import annotations

from collections.abc import Callable

# In a rank: name -> what happens right after it.
EXCHANGES = {  # each before a collective
    "exchange_vote": "a rank votes for an order, or waits for the outcome",
    "exchange_loss": "the logged loss is averaged",
    "exchange_absent": "of a script's own model: which parameters no rank has a gradient of",
    "exchange_overflow": "with fp16: whether any rank's gradients are not finite",
    "exchange_finite": "before a sharded state is saved: whether all weights are finite",
    "exchange_eval": "the evaluation's sums are added",
    "exchange_objects": "small values: which rank holds the state, what failed, whether a checkpoint is due",
    "exchange_state": "one tensor of the state is sent from the rank that holds it",
    "exchange_barrier": "all ranks wait for each other",
    "exchange_gradients": "a bucket by hand begins to be summed or gathered",
    "exchange_mirror": "gradients are sent to the rank that mirrors their owner",
    "exchange_norm": "the norm of gradients is summed over their owners",
    "exchange_weights": "updated weights begin to be sent by their owners",
    "exchange_activations": "with tp or pp: activations or their gradients are summed, or sent on or back",
    "exchange_keys_values": "with cp: keys and values go to the next rank, or are gathered",
    "exchange_keys_values_grad": "with cp: their gradients go to the next rank, or are summed",
    "exchange_logits": "with tp: the maximum or the sums of a loss over the vocabulary",
    "exchange_tokens": "with ep: tokens, or their counts, go to the ranks of their experts or come back",
    "exchange_statistics": "running statistics of batch normalisation are averaged",
    "exchange_batchnorm": "with sync_batchnorm: a layer's sums are added, forward or backward",
}
MEETING = {
    "leave": "a survivor leaves the group that broke",
    "wait": "it waits for the driver's orders",
    "meet": "a survivor or a new rank goes to the others",
    "roll_call": "it has written its facts, and reads the verdict",
    "agreed": "the roll call is over, and no group is formed",
    "groups": "the group of all ranks is formed, the two others are not",
    "met": "all groups are formed, nothing has been sent",
    "shared": "the state was received, and no engine was built",
    "built": "the engine is built, and no step begun",
    "last": "the last checkpoint is on disk, and the others may still write",
}
SAVING = {
    "save": "a checkpoint begins to be written",
    "written": "its files are on disk under a temporary name",
    "aside": "an older one of this step was moved away, and the new one is not there",
    "renamed": "it has its name, and older ones were not removed",
    "part": "this rank's part of it is on disk, and was not reported to rank 0",
}
STEP = {
    "across_groups": "with replicas: a slice of gradients begins to be summed across the groups",
    "committed": "the norm of gradients is known here, and no weight has changed",
    "caught_up": "a sharded state is recovered: this rank has completed the step that another one had",
}
RANK_POINTS = STEP | EXCHANGES | MEETING | SAVING

# In the driver.
DRIVER_POINTS = {
    "lost": "a lost rank was reported to it",
    "replacing": "it has started a new process for it",
    "store": "one of the survivors serves a new store",
    "attempt": "the new attempt's number is on disk",
    "orders": "all ranks were ordered to meet",
    "restarting": "all ranks were ended, to be started again",
    "finished": "rank 0 has returned its outcome",
}
POINTS = RANK_POINTS | DRIVER_POINTS

_watchers: list[Callable[[str], None]] = []


def reached(point: str) -> None:
    """Call the callback, if one is set: this process is at a point."""
    for watcher in _watchers:
        watcher(point)


def watch(watcher: Callable[[str], None] | None) -> None:
    """Set the single callback for `reached`; None clears it."""
    _watchers[:] = [watcher] if watcher else []
