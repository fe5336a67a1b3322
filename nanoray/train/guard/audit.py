"""Let another rank compute a gradient, too, and a third decide where they differ: a finite error
has no other trace.

    samples of rank 1 ─┬─ rank 1: forward, backward ─► hash ─┐
                       ├─ rank 0: forward, backward ─► hash ─┴─► equal, or
                       └─ rank N-1: the same, only then ───────► who of the three is alone

What is compared is a micro batch's gradient as backward hands it over, before any sum over micro
batches or ranks: that of each rank with what the rank before it makes of the same weights, samples
and dropout. Seeds depend on the data rank, so equal devices with the same kernels get equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoray.data.tokens import MicroBatches
from nanoray.errors import WrongGradient
from nanoray.mesh.mesh import Mesh
from nanoray.parallel.plan import Plan
from nanoray.train.guard.replicas import combine, hash_tensors, sum_of_bits

Hashes = dict[str, int]  # by parameter, in the order in which backward came to them


class Audit:
    """Audits a micro batch of every K-th step, each in turn. Does nothing with one rank."""

    def __init__(
        self,
        every: int,
        mesh: Mesh,
        par: Plan,
        batches: MicroBatches,
        seed: Callable[[int, int, int | None], None],
    ) -> None:
        """`seed` seeds the dropout of (step before, micro batch, data rank); None: of this rank."""
        self._every = every if mesh.world_size > 1 else 0
        # A convolution's gradient has the same bits each time; for attention see config/conflicts.py
        if self._every:
            torch.backends.cudnn.deterministic = True
        self._mesh, self._par, self._batches, self._seed = mesh, par, batches, seed
        # The step in hand, its first sample, and its audited micro batch
        self._step = self._samples = self._micro = 0
        self._own: dict[str, Tensor] = {}  # sums of bits, on the device
        self._theirs: Hashes = {}  # of the next rank's micro batch
        self._hooks: list[Any] = []
        # The newest step in which all gradients were equal, or some differed
        self._clean = self._differed = 0

    @property
    def due(self) -> bool:
        """Whether the step in hand is audited."""
        return bool(self._every) and self._step % self._every == 0

    def begin(self, step: int, samples: int, phase: Callable[[str], None]) -> Callable[[int], None]:
        """Begin the step after `step`, whose first sample is `samples`; return what seeds its micro
        batches.

        If it is audited, the next rank's micro batch is computed here, before this rank's own.
        """

        def own(micro: int) -> None:
            self._seed(step, micro, None)

        self._step, self._samples = step + 1, samples
        if not self.due:
            return own
        phase("forward")
        self._micro = self._step // self._every % self._batches.batch.accum
        self._theirs, self._own = self._compute((self._mesh.rank + 1) % self._mesh.world_size), {}

        def seed(micro: int) -> None:
            self.forget()
            if micro == self._micro:
                self._listen()
            own(micro)

        return seed

    def _compute(self, rank: int) -> Hashes:
        """Return the hashes of the gradient of a rank's micro batch; those in the parameters stay
        as they are.
        """
        self._par.settle()
        x, y = self._batches.get(self._samples, self._micro, rank)
        self._seed(self._step - 1, self._micro, rank)
        return dict(zip(*hash_tensors(self._par.gradients_of(x, y)), strict=True))

    def _listen(self) -> None:
        """Hash what the next backward hands to the parameters."""
        odd: dict[Any, Tensor] = {}
        for name, p in self._par.trained.items():

            def hook(gradient: Tensor, name: str = name) -> None:
                self._own[name] = sum_of_bits(gradient, odd)

            self._hooks.append(p.register_hook(hook))

    def forget(self) -> None:
        """Hear of no more gradients: they are hashed, or a step broke and its group is left."""
        while self._hooks:
            self._hooks.pop().remove()

    def differences(self) -> str:
        """Return which gradients differ, and whose is wrong; empty: none, or the step is not
        audited. (all ranks)

        Raises WrongGradient when the same step was done again and they differ again. Waits for the
        device.
        """
        if not self.due:
            return ""
        self.forget()
        mesh, own = (
            self._mesh,
            dict(zip(self._own, torch.stack([*self._own.values()]).tolist(), strict=True)),
        )
        digests = mesh.all_gather((_digest(own), _digest(self._theirs)))
        disputed = [
            rank for rank in range(len(digests)) if digests[rank][0] != digests[rank - 1][1]
        ]
        if not disputed:
            self._clean = self._step
            return ""
        third = (mesh.rank + 2) % mesh.world_size
        decides = mesh.world_size > 2 and third in disputed
        told = mesh.all_gather((own, self._theirs, self._compute(third) if decides else None))
        found = "; ".join(self._describe(rank, told) for rank in disputed)
        if self._differed == self._step:
            newest = f"The newest audit without a difference was of step {self._clean}" if self._clean else (
                "No audit since the ranks met was without a difference"
            )  # fmt: skip
            raise WrongGradient(
                f"at step {self._step}, done twice, {found}. The update was left out. {newest}; "
                "later weights may have "
                "wrong gradients in them. Take the faulty device out of the cluster and resume "
                "from a checkpoint of "
                "that time. Devices of different models, and kernels that add in no fixed order, "
                "need audit_every 0"
            )
        self._differed = self._step
        return f"at step {self._step} {found}. No weight has changed; the step is done again"

    def _describe(self, of: int, told: list[Any]) -> str:
        """Say who computed another gradient of rank `of`'s micro batch: itself, the rank before it,
        or the third.
        """
        own, theirs, third = (told[of - i][i] for i in range(3))
        by = [(of - i) % len(told) for i in range(3)]
        what = f"of rank {of}'s micro batch {self._micro}"
        first = next((name for name in (*own, *theirs) if own.get(name) != theirs.get(name)), "")
        where = f"first, as backward goes, of {first}"
        if third in (own, theirs):
            wrong, right = (by[1], by[0]) if third == own else by[:2]
            return (
                f"rank {wrong} has another gradient {what} than ranks {right} and {by[2]}, {where}"
            )
        who = f"ranks {by[0]} and {by[1]} have different gradients" if third is None else (
            f"ranks {by[0]}, {by[1]} and {by[2]} have three different gradients"
        )  # fmt: skip
        return f"{who} {what}, {where}" + (": no third rank can decide" if third is None else "")


def _digest(hashes: Hashes) -> int:
    return combine([hashes[name] for name in sorted(hashes)])
