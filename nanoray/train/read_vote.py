"""End a run whose script's data fail: all ranks after the same step, with a checkpoint.

    rank 0   reads ─► forward, backward ─┐
    rank 1   error ─► the newest batch ──┴─► vote ─► no update ─► checkpoint ─► the error, on all ranks

A rank that cannot read takes part in the step with the newest batch that it has, so that no other rank
waits for it. The vote travels beside the last forward and backward of the step. Nanoray's own data have
none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nanoray.config import Batch
from nanoray.data.fallible import FallibleSamples
from nanoray.errors import DataError, DataFailed
from nanoray.machine.script_errors import shown
from nanoray.parallel.flow import MicroBatch
from nanoray.parallel.mesh import Mesh, Vote
from nanoray.parallel.rendezvous import Order


class ReadVote:
    """Lets the ranks agree on whether a script's data could be read."""

    def __init__(self, mesh: Mesh, data: FallibleSamples, batch: Batch) -> None:
        self._mesh = mesh
        self._data = data
        self._batch = batch
        self._vote: Vote | None = None
        self.has_failed = False  # on some rank

    def read_first(self, samples: int, rank: int) -> None:
        """Read the first micro batch of this group. (all ranks)

        Raises DataError on all ranks where a rank cannot read, or its data do not go with those of
        the others.
        """
        error: Exception | None = None
        try:
            self._data.train_batch(samples + rank * self._batch.micro, self._batch.micro)
        except Exception as raised:
            error = raised

        # (all ranks) One rank's error ends all of them.
        own = "" if error is None else shown(error)
        everyone = self._mesh.all_gather((own, self._data.fingerprint if error is None else 0))
        for number, (text, _) in enumerate(everyone):
            if text:
                raise DataError(f"rank {number} cannot read its first batch: {text}") from error
        self._data.compare([fingerprint for _, fingerprint in everyone])
        # From here on an error waits for the other ranks.
        self._data.keeps_errors = True

    @property
    def windows_at_once(self) -> int:
        """The most windows of an evaluation that are read together."""
        return self._data.windows_at_once

    def watch(
        self,
        micro_batches: Iterator[MicroBatch],
        step: int,
        samples: int,
        phase: Callable[[str], None],
    ) -> Iterator[MicroBatch]:
        """Yield a step's micro batches; start the vote with the last one. (all ranks)"""
        end = samples + self._batch.global_size
        for micro, batch in enumerate(micro_batches):
            if micro == self._batch.accum - 1:
                failure = self._data.failure
                failed = failure is not None and failure.sample < end
                self._vote = self._mesh.start_vote(Order.STOP if failed else Order.GO_ON)
            yield batch

    def refuses(self) -> bool:
        """Return whether the step has a batch that a rank could not read. (all ranks)"""
        assert self._vote
        self.has_failed = self._vote.result() is Order.STOP
        return self.has_failed

    def forget(self) -> None:
        """Do nothing: nothing is attached to the model."""

    def fails_in_evaluation(self) -> bool:
        """Return whether a rank could not read a batch of an evaluation. (all ranks)"""
        failure = self._data.failure
        failed = failure is not None and failure.sample < 0
        vote = self._mesh.start_vote(Order.STOP if failed else Order.GO_ON)
        self.has_failed = vote.result() is Order.STOP
        return self.has_failed

    def raise_failure(self, step: int, saved: bool) -> None:
        """Raise the error of the rank that could not read, on all ranks. (all ranks)"""
        failure = self._data.failure
        own = "" if failure is None else shown(failure.error)
        texts = self._mesh.all_gather(own)
        rank = next(number for number, text in enumerate(texts) if text)
        kept = f"the {step} steps before it are saved" if saved else "no step was lost"
        raise DataFailed(
            f"after step {step} rank {rank} could not read the script's data; {kept}: mend the "
            f"data, and resume. {texts[rank]}"
        ) from (failure.error if failure else None)
