"""The collectives along one axis of the mesh. Parallel code holds an Axis and knows no process
group.

A sum is taken in the order of the ranks: every rank sends each slice to the rank that owns it, and
the owner adds.

    rank 0   a0 a1 a2 ─┐ exchange   a0 b0 c0 ─► a0 + b0 + c0
    rank 1   b0 b1 b2 ─┼──────────► a1 b1 c1 ─► a1 + b1 + c1
    rank 2   c0 c1 c2 ─┘            a2 b2 c2 ─► a2 + b2 + c2

So the bits of an element depend neither on its place in the buffer nor on the size of the buffer.
Those of gloo's and NCCL's own reduce-scatter do, from three ranks on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.points import reached


@dataclass
class Axis:
    """One axis as this rank sees it. With one rank its collectives do nothing."""

    name: str
    ranks: tuple[int, ...]  # of the whole run, in the order of this axis
    index: int  # this rank's place among them
    group: ProcessGroup | None  # None: all ranks of the run
    mesh: Mesh

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Add `tensor` up over the axis, in place. (all ranks of the axis)"""
        return self._all_reduce(tensor, what, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor, what: str) -> Tensor:
        """Take the largest of each element of `tensor` over the axis, in place. (all ranks of the
        axis)
        """
        return self._all_reduce(tensor, what, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, what: str, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            reached(f"exchange_{what}")
            with self.noted("all_reduce", what, tensor):
                dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], what: str
    ) -> Tensor:
        """Send the first send[0] rows to the axis's first rank, and so on; return the rows
        received, by rank.

        (all ranks of the axis) receive[i]: how many rows rank i sends to this one, which may be
        none.
        """
        if self.size == 1:
            return rows
        reached(f"exchange_{what}")
        sent = rows.cpu() if self.through_host(rows) else rows.contiguous()
        got = sent.new_empty(sum(receive), *sent.shape[1:])
        with self.noted("all_to_all", what, sent):
            dist.all_to_all_single(got, sent, [*receive], [*send], group=self.group)
        return got.to(rows.device)

    def start_reduce_scatter(
        self, flat: Tensor, what: str, bucket: int | None = None, last: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Start to sum `flat`, (n·s,), over the axis. (all ranks of the axis)

        Returns a function that waits, writes this rank's slice of the sum into a tensor (s,), which
        may be a part of `flat`, and returns that tensor. Until then `flat` must not change.
        `bucket` numbers it for the listener, which hears nothing without; `last` marks the last one
        of a backward pass.
        """
        if self.size == 1:
            return lambda out: out.copy_(flat)
        arrived = self.start_exchange(flat, what, bucket, last, "reduce_scatter")

        def finish(out: Tensor) -> Tensor:
            total, *others = arrived().view(self.size, -1)
            for other in others:  # `sum(0)` adds in an order of its own, which depends on the place
                total = torch.add(total, other, out=out)
            return total

        return finish

    def start_exchange(
        self,
        flat: Tensor,
        what: str,
        bucket: int | None = None,
        last: bool = False,
        op: str = "all_to_all",
    ) -> Callable[[], Tensor]:
        """Start to send slice i of `flat`, (n·s,), to rank i of the axis, which has several. (all
        ranks of the axis)

        Returns a function that waits and returns the slices that this rank got, (n·s,), in the
        order of the ranks. Until then `flat` must not change. `bucket` and `last` are those of
        `start_reduce_scatter`; `op` is what the listener hears.
        """
        reached(f"exchange_{what}")
        noted = self._started(op, what, flat, bucket, last) if bucket is not None else None
        sent = flat.cpu() if self.through_host(flat) else flat
        got = torch.empty_like(sent)
        work = dist.all_to_all_single(got, sent, group=self.group, async_op=True)
        if noted:
            work.get_future().then(lambda future: noted())

        def finish() -> Tensor:
            work.wait()
            return got.to(flat.device)

        return finish

    def start_sum(
        self, flat: Tensor, what: str, bucket: int, last: bool = False
    ) -> Callable[[], None]:
        """Start to add `flat` up over the axis, in place, with the backend's all-reduce. (all ranks
        of the axis)

        Returns a function that waits for it. `bucket` and `last` are those of
        `start_reduce_scatter`.
        """
        reached(f"exchange_{what}")
        noted = self._started("all_reduce", what, flat, bucket, last)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        if noted:
            work.get_future().then(lambda future: noted())
        return lambda: work.wait() and None

    def start_all_gather(
        self, flat: Tensor, what: str, bucket: int | None = None
    ) -> Callable[[], None]:
        """Start to fill `flat`, (n·s,), with the slice that each rank of the axis holds in it. (all
        ranks of the axis)

        Returns a function that waits for it. Without a `bucket` the listener hears of the wait
        only.
        """
        if self.size == 1:
            return lambda: None
        reached(f"exchange_{what}")
        noted = (
            self._started("all_gather", what, flat, bucket, False) if bucket is not None else None
        )
        own, whole = flat.view(self.size, -1)[self.index], flat
        if self.through_host(flat):
            own, whole = own.cpu(), torch.empty_like(flat, device="cpu")
        work = dist.all_gather_single(whole, own, group=self.group, async_op=True)
        if noted:
            work.get_future().then(lambda future: noted())

        def finish() -> None:
            with self.noted("all_gather", what, flat) if bucket is None else nullcontext():
                work.wait()
                if whole is not flat:
                    flat.copy_(whole)

        return finish

    def pass_on(
        self, tensors: Sequence[Tensor], into: Sequence[Tensor], distance: int, what: str
    ) -> None:
        """Send `tensors` to the rank `distance` further along; fill `into` with those of the rank
        as far behind.

        (all ranks of the axis) Each is flat, and as long on both ranks. Returns when all has been
        received.
        """
        to, source = ((self.index + step) % self.size for step in (distance, -distance))
        reached(f"exchange_{what}")
        works = []
        # Gloo sends single messages of CPU tensors only
        for tensor, out in zip(tensors, into, strict=True):
            there = [len(tensor) * (rank == to) for rank in range(self.size)]
            here = [len(out) * (rank == source) for rank in range(self.size)]
            sent, got = (
                (tensor.cpu(), torch.empty_like(out, device="cpu"))
                if self.through_host(out)
                else (tensor, out)
            )
            works.append(
                (
                    dist.all_to_all_single(got, sent, here, there, group=self.group, async_op=True),
                    got,
                    out,
                )
            )
        for work, got, out in works:
            with self.noted("send_recv", what, out):
                work.wait()
                if got is not out:
                    out.copy_(got)

    def start_messages(
        self, sent: Sequence[tuple[Tensor, int]], got: Sequence[tuple[Tensor, int]], what: str
    ) -> tuple[Callable[[], None], list[Callable[[], Tensor]]]:
        """Start to send each tensor to a rank of this axis, and to fill others with what a rank
        sends, in one batch.

        (both ranks of a message) Each tensor comes with its peer's index. Messages between two
        ranks match in the order of the calls. Returns a function that waits until all is sent,
        before which nothing sent may change, and one per tensor to fill, which waits for it and
        returns it.
        """
        reached(f"exchange_{what}")
        out = [
            (tensor.cpu() if self.through_host(tensor) else tensor, peer) for tensor, peer in sent
        ]
        into = [
            (torch.empty_like(t, device="cpu") if self.through_host(t) else t, peer)
            for t, peer in got
        ]
        ops = [
            dist.P2POp(dist.isend, tensor, self.ranks[peer], group=self.group)
            for tensor, peer in out
        ]
        ops += [
            dist.P2POp(dist.irecv, tensor, self.ranks[peer], group=self.group)
            for tensor, peer in into
        ]
        works = dist.batch_isend_irecv(ops)
        # NCCL has one for the whole batch
        works = works if len(works) == len(ops) else works * len(ops)

        def all_sent() -> None:
            for work in works[: len(out)]:
                work.wait()

        def arrived(i: int) -> Tensor:
            works[len(out) + i].wait()
            return got[i][0] if into[i][0] is got[i][0] else got[i][0].copy_(into[i][0])

        return all_sent, [partial(arrived, i) for i in range(len(got))]

    def leave(self) -> None:
        """Close the connections of a group of this axis' own. Each gloo group has a thread that
        wakes every 10 ms.
        """
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def through_host(self, tensor: Tensor) -> bool:
        """Whether a collective has to copy to the CPU and back: gloo reads a GPU's addresses as the
        host's (SIGSEGV).

        It copies by itself in all-reduce and broadcast only.
        """
        return tensor.is_cuda and dist.get_backend(self.group) == "gloo"

    def _started(
        self, op: str, what: str, flat: Tensor, bucket: int | None, last: bool
    ) -> Callable[[], None] | None:
        listener = self.mesh.listener
        return listener.started(op, what, self.name, flat, bucket, last) if listener else None

    def noted(self, op: str, what: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Return a context that tells the listener of a collective in which this rank waits."""
        return (
            self.mesh.listener.call(op, what, self.name, tensor)
            if self.mesh.listener
            else nullcontext()
        )


def data_axis(mesh: Mesh) -> Axis:
    """Return the axis of all ranks: each of them has its own share of the batch."""
    return Axis("dp", tuple(range(mesh.world_size)), mesh.rank, None, mesh)


def axes_of(layout: Layout, mesh: Mesh, timeout_s: float) -> dict[str, Axis]:
    """Form a process group for each group of every axis; return this rank's axes by name. (all
    ranks)

    A group of all ranks, or of one, is not formed. A collective that waits for `timeout_s` fails.
    """
    layout.require(mesh.world_size)
    axes = {}
    for name in ("dp", "tp", "pp", "ep", *(["edp"] if layout.ep > 1 else [])):
        for ranks in layout.groups(name):  # every rank forms every group, in one order
            whole = len(ranks) in (1, mesh.world_size)
            group = (
                None if whole else dist.new_group([*ranks], timeout=timedelta(seconds=timeout_s))
            )
            if mesh.rank in ranks:
                axes[name] = Axis(name, ranks, ranks.index(mesh.rank), group, mesh)
    return axes
