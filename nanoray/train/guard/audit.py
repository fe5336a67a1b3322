"""Compute a gradient on a second rank, too, and on a third one where they differ.

A device that computes a wrong but finite number leaves no other trace.

    samples of rank 1 ─┬─ rank 1: forward, backward ─► hash ─┐
                       ├─ rank 0: forward, backward ─► hash ─┴─► equal, or
                       └─ rank N-1: the same, only then ───────► who of the three is alone

The gradients of one micro batch are compared before any sum over micro batches or ranks. Rank r
computes that of its own samples and that of the samples of rank r + 1, from the same weights and
with the same dropout. Seeds depend on the data rank, so equal devices with the same kernels get
equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanoray.data.tokens import MicroBatches
from nanoray.errors import WrongGradient
from nanoray.parallel.flow import MicroBatch
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan
from nanoray.train.guard.replicas import combine, hash_tensors, sum_of_bits

Hashes = dict[str, int]  # by parameter, in the order of backward


class Audit:
    """Audits a micro batch of every K-th step, each in turn. Does nothing with one rank."""

    def __init__(
        self,
        every: int,
        mesh: Mesh,
        par: Plan,
        batches: MicroBatches,
        seed: Callable[[int, int, int], None],
        note: Callable[[str], None],
    ) -> None:
        """`seed` seeds the dropout of (step before, micro batch, data rank)."""
        self._every = every if mesh.world_size > 1 else 0
        # Else a convolution may take another algorithm, with other bits, each time. Attention that
        # has no fixed order is refused: see config/conflicts.py.
        if self._every:
            torch.backends.cudnn.deterministic = True
        self._mesh = mesh
        self._par = par
        self._batches = batches
        self._seed = seed
        self._note = note

        # The present step, its first sample, and its audited micro batch
        self._step = 0
        self._samples = 0
        self._micro = 0
        self._own: dict[str, Tensor] = {}  # sums of bits, on the device
        self._theirs: Hashes = {}  # of the next rank's micro batch
        self._hooks: list[Any] = []

        self._clean = 0  # the newest step in which all gradients were equal
        self._differed = 0  # the newest one in which some differed

    @property
    def due(self) -> bool:
        """Whether the present step is audited."""
        return bool(self._every) and self._step % self._every == 0

    def watch(
        self,
        micro_batches: Iterator[MicroBatch],
        step: int,
        samples: int,
        phase: Callable[[str], None],
    ) -> Iterator[MicroBatch]:
        """Begin the step after `step`, whose first sample is `samples`; return its micro batches.

        If the step is audited, the next rank's micro batch is computed here, before this rank's
        own.
        """
        self._step = step + 1
        self._samples = samples
        if not self.due:
            return micro_batches

        # Each micro batch of a step is audited in turn.
        phase("forward")
        self._micro = self._step // self._every % self._batches.batch.accum
        next_rank = (self._mesh.rank + 1) % self._mesh.world_size
        self._theirs = self._compute(next_rank)
        self._own = {}
        return self._listening(micro_batches)

    def _listening(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro batches of a step; hash the gradients of the audited one."""
        # The backward of a micro batch ends before the next one is taken.
        for micro, batch in enumerate(micro_batches):
            self.forget()
            if micro == self._micro:
                self._listen()
            yield batch

    def _compute(self, rank: int) -> Hashes:
        """Return the hashes of the gradient of a rank's micro batch.

        Gradients that the parameters hold stay as they are.
        """
        self._par.settle()
        x, y = self._batches.get(self._samples, self._micro, rank)
        self._seed(self._step - 1, self._micro, rank)
        names, hashes = hash_tensors(self._par.gradients_of(x, y))
        return dict(zip(names, hashes, strict=True))

    def _listen(self) -> None:
        """Attach hooks that hash the gradients of the next backward."""
        odd: dict[Any, Tensor] = {}  # factors that all hashes share, by device
        for name, p in self._par.trained.items():

            def hook(gradient: Tensor, name: str = name) -> None:
                self._own[name] = sum_of_bits(gradient, odd)

            self._hooks.append(p.register_hook(hook))

    def forget(self) -> None:
        """Remove the hooks: the gradients are hashed, or the step broke and its group is left."""
        while self._hooks:
            self._hooks.pop().remove()

    def refuses(self) -> bool:
        """Return whether gradients differ: then the step is done again, with a warning. (all ranks)"""
        difference = self.differences() if self.due else None
        if difference is None:
            return False
        self._note(f"warning  {difference}")
        return True

    def differences(self) -> str | None:
        """Return which gradients of an audited step differ, and on which rank. (all ranks)

        None where none do. Raises WrongGradient when the same step was done again and they differ
        again. Waits for the device.
        """
        self.forget()
        mesh = self._mesh
        own = dict(zip(self._own, torch.stack([*self._own.values()]).tolist(), strict=True))

        # Compare one number per rank first. Index -1 is the last rank: they stand in a ring.
        digests = mesh.all_gather((_digest(own), _digest(self._theirs)))
        disputed = []
        for rank, (own_digest, _) in enumerate(digests):
            _, digest_of_rank_before = digests[rank - 1]
            if own_digest != digest_of_rank_before:
                disputed.append(rank)
        if not disputed:
            self._clean = self._step
            return None

        # Only now a third rank computes the disputed gradient, too.
        disputed_one = (mesh.rank + 2) % mesh.world_size
        third = None
        if mesh.world_size > 2 and disputed_one in disputed:
            third = self._compute(disputed_one)
        everyone = mesh.all_gather((own, self._theirs, third))
        difference = "; ".join(self._describe(rank, everyone) for rank in disputed)

        if self._differed == self._step:
            newest = "No audit since the ranks met was without a difference"
            if self._clean:
                newest = f"The newest audit without a difference was of step {self._clean}"
            raise WrongGradient(
                f"at step {self._step}, done twice, {difference}. The update was left out. "
                f"{newest}; later weights may have wrong gradients in them. Take the faulty device "
                "out of the cluster and resume from a checkpoint of that time. Devices of "
                "different models, and kernels that add in no fixed order, need audit_every 0"
            )
        self._differed = self._step
        return f"at step {self._step} {difference}. No weight has changed; the step is done again"

    def _describe(self, rank: int, everyone: list[Any]) -> str:
        """Return which ranks computed different gradients of the micro batch of `rank`.

        `everyone` contains, for each rank, the hashes of its own micro batch, of the next rank's,
        and of the disputed one of the rank after that, or None.
        """
        # Those of this micro batch, and the ranks that computed them: the rank itself, the one
        # before it, and the one before that.
        before = (rank - 1) % len(everyone)
        before_that = (rank - 2) % len(everyone)
        own: Hashes = everyone[rank][0]
        second: Hashes = everyone[before][1]
        third: Hashes | None = everyone[before_that][2]

        what = f"of rank {rank}'s micro batch {self._micro}"
        where = f"first, as backward goes, of {_first_difference(own, second)}"
        if third is None:
            return (
                f"ranks {rank} and {before} have different gradients {what}, {where}: no third "
                "rank can decide"
            )
        if third == own:
            return (
                f"rank {before} has another gradient {what} than ranks {rank} and {before_that}, "
                f"{where}"
            )
        if third == second:
            return (
                f"rank {rank} has another gradient {what} than ranks {before} and {before_that}, "
                f"{where}"
            )
        return (
            f"ranks {rank}, {before} and {before_that} have three different gradients {what}, "
            f"{where}"
        )


def _first_difference(own: Hashes, second: Hashes) -> str:
    """Return the first parameter, in the order of backward, whose gradients differ."""
    for name in (*own, *second):
        if own.get(name) != second.get(name):
            return name
    return ""


def _digest(hashes: Hashes) -> int:
    return combine([hashes[name] for name in sorted(hashes)])
