"""The collectives along one axis of the mesh. Parallel code uses an Axis, never a process group.

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

from nanoray.machine.compat import all_gather_single
from nanoray.machine.fault_points import reached
from nanoray.parallel.mesh import Mesh


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
        """Take the maximum of `tensor` over the axis, in place. (all ranks of the axis)"""
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
        """Send send[i] rows to rank i of the axis, in their order; return the rows received.

        (all ranks of the axis) They come by rank, receive[i] from rank i. Any number may be 0.
        """
        if self.size == 1:
            return rows
        reached(f"exchange_{what}")
        # A message is read from memory as it lies there, so rows must follow each other.
        sent = rows.cpu() if self.through_host(rows) else rows.contiguous()
        # The caller has exchanged the counts: the numbers of rows are known on both sides.
        received = sent.new_empty(sum(receive), *sent.shape[1:])
        with self.noted("all_to_all", what, sent):
            dist.all_to_all_single(received, sent, list(receive), list(send), group=self.group)
        return received.to(rows.device)

    def start_reduce_scatter(
        self, flat: Tensor, what: str, bucket: int | None = None, last: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Start to sum `flat`, (n·s,), over the axis. (all ranks of the axis)

        Returns a function that waits, writes this rank's slice of the sum into a tensor (s,), which
        may be a part of `flat`, and returns that tensor. Until then `flat` must not change.
        `bucket` numbers it for the listener; without, it is not reported. `last` marks the last one
        of a backward pass.
        """
        if self.size == 1:
            return lambda out: out.copy_(flat)
        # Each rank gets the n slices that are its own, one of each rank, and adds them itself.
        arrived = self.start_exchange(flat, what, bucket, last, "reduce_scatter")

        def finish(out: Tensor) -> Tensor:
            # In the order of the ranks. `sum(0)` would add in an order that depends on the place.
            slices = arrived().view(self.size, -1)  # (n, s)
            total = slices[0]
            for other in slices[1:]:
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
        """Start to send slice i of `flat`, (n·s,), to rank i of the axis. (all ranks of the axis)

        For axes of several ranks. Returns a function that waits and returns the slices received,
        (n·s,), in the order of the ranks. Until then `flat` must not change. `bucket` and `last`
        are those of `start_reduce_scatter`; `op` is reported to the listener.
        """
        reached(f"exchange_{what}")
        report_end = self._started(op, what, flat, bucket, last)
        sent = flat.cpu() if self.through_host(flat) else flat
        # Not in place: slices of `flat` may still be on their way when others arrive.
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        _call_at_end(work, report_end)

        def finish() -> Tensor:
            work.wait()
            return received.to(flat.device)

        return finish

    def start_all_gather(
        self, flat: Tensor, what: str, bucket: int | None = None
    ) -> Callable[[], None]:
        """Start to fill `flat`, (n·s,), with each rank's slice of it. (all ranks of the axis)

        Returns a function that waits for it. Without a `bucket` only the wait is reported to the
        listener.
        """
        if self.size == 1:
            return lambda: None
        reached(f"exchange_{what}")
        report_end = self._started("all_gather", what, flat, bucket, last=False)
        # This rank's slice is a view into the whole, so it needs no copy.
        own = flat.view(self.size, -1)[self.index]
        whole = flat
        if self.through_host(flat):
            # The other slices arrive on the host, and are copied to the device at the end.
            own = own.cpu()
            whole = torch.empty_like(flat, device="cpu")
        work = all_gather_single(whole, own, group=self.group, async_op=True)
        _call_at_end(work, report_end)

        def finish() -> None:
            # With a bucket the listener has the start and the end of the collective itself.
            context = self.noted("all_gather", what, flat) if bucket is None else nullcontext()
            with context:
                work.wait()
                if whole is not flat:
                    flat.copy_(whole)

        return finish

    def start_pass_on(
        self, tensor: Tensor, distance: int, what: str, into: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Start to send `tensor` to the rank `distance` further along the axis. (all ranks of the
        axis)

        Returns a function that waits, and returns the tensor of the rank `distance` behind: `into`,
        or a new one of the same shape. Until then `tensor` must not change. Both are contiguous.
        """
        # The axis is a ring here: the last rank sends to the first one.
        target = (self.index + distance) % self.size
        source = (self.index - distance) % self.size
        reached(f"exchange_{what}")
        report_end: Callable[[], None] | None = None
        wait: AbstractContextManager[None] = nullcontext()
        if self.mesh.listener is not None:
            report_end, wait = self.mesh.listener.beside("send_recv", what, self.name, tensor)

        out = torch.empty_like(tensor) if into is None else into
        sent = tensor.view(-1)
        received = out.view(-1)
        # An all-to-all with one message for each rank, because gloo sends single messages of CPU
        # tensors only: how many elements go to each rank of the axis, and come from it.
        send = [0] * self.size
        receive = [0] * self.size
        send[target] = len(sent)
        receive[source] = len(received)
        if self.through_host(out):
            sent = sent.cpu()
            received = torch.empty_like(received, device="cpu")
        work = dist.all_to_all_single(
            received, sent, receive, send, group=self.group, async_op=True
        )
        _call_at_end(work, report_end)

        def finish() -> Tensor:
            with wait:
                work.wait()
                if received.device != out.device:
                    out.view(-1).copy_(received)
            return out

        return finish

    def start_messages(
        self, sent: Sequence[tuple[Tensor, int]], got: Sequence[tuple[Tensor, int]], what: str
    ) -> tuple[Callable[[], None], list[Callable[[], Tensor]]]:
        """Start to send each tensor of `sent`, and to fill each tensor of `got`, in one batch.

        (both ranks of a message) Each tensor comes with its peer's index on this axis. Messages
        between two ranks match in the order of the calls. Returns a function that waits until all
        is sent, before which nothing sent may change; and one per tensor of `got`, which waits for
        the tensor and returns it.
        """
        reached(f"exchange_{what}")
        ops = []
        for tensor, peer in sent:
            out = tensor.cpu() if self.through_host(tensor) else tensor
            # torch wants the peer's rank in the whole run, also for a group of few.
            ops.append(dist.P2POp(dist.isend, out, self.ranks[peer], group=self.group))
        received = []
        for tensor, peer in got:
            into = tensor
            if self.through_host(tensor):
                into = torch.empty_like(tensor, device="cpu")
            received.append(into)
            ops.append(dist.P2POp(dist.irecv, into, self.ranks[peer], group=self.group))

        # gloo returns a work for each message, NCCL one for the whole batch.
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):
            works = works * len(ops)
        send_works = works[: len(sent)]
        receive_works = works[len(sent) :]

        def all_sent() -> None:
            for work in send_works:
                work.wait()

        def arrived(i: int) -> Tensor:
            receive_works[i].wait()
            tensor, _ = got[i]
            if received[i] is not tensor:
                tensor.copy_(received[i])
            return tensor

        return all_sent, [partial(arrived, i) for i in range(len(got))]

    def leave(self) -> None:
        """Close the connections of this axis, if it has a group of its own.

        Each gloo group has a thread that wakes every 10 ms.
        """
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def through_host(self, tensor: Tensor) -> bool:
        """Whether a collective has to copy to the CPU and back.

        gloo reads a GPU's addresses as the host's (SIGSEGV). It copies by itself in all-reduce and
        broadcast only.
        """
        return tensor.is_cuda and dist.get_backend(self.group) == "gloo"

    def _started(
        self, op: str, what: str, flat: Tensor, bucket: int | None, last: bool
    ) -> Callable[[], None] | None:
        """Report to the listener that a bucket's collective begins; return what reports its end."""
        # Most steps are not traced, and have no listener.
        listener = self.mesh.listener
        if listener is None or bucket is None:
            return None
        return listener.started(op, what, self.name, flat, bucket, last)

    def noted(self, op: str, what: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Return a context that reports to the listener a collective in which this rank waits."""
        if self.mesh.listener is None:
            return nullcontext()
        return self.mesh.listener.call(op, what, self.name, tensor)


def _call_at_end(work: dist.Work, report_end: Callable[[], None] | None) -> None:
    """Let `report_end` run when a collective ends: on a thread of the backend, without a wait."""
    if report_end is not None:
        work.get_future().then(lambda future: report_end())


def data_axis(mesh: Mesh) -> Axis:
    """Return the axis of all ranks: each of them has its own share of the batch."""
    return Axis("dp", tuple(range(mesh.world_size)), mesh.rank, None, mesh)


def axes_of(mesh: Mesh, timeout_s: float) -> dict[str, Axis]:
    """Form a process group for each group of every axis; return this rank's axes by name. (all
    ranks)

    A group of all ranks, or of one, is not formed. A collective that waits for `timeout_s` fails.
    """
    layout = mesh.layout
    timeout = timedelta(seconds=timeout_s)

    # torch wants every rank to form every group, also those of other ranks, in one order.
    axes = {}
    for name in layout.axes:
        for ranks in layout.groups(name):
            group = None
            if len(ranks) not in (1, mesh.world_size):
                group = dist.new_group(list(ranks), timeout=timeout)
            if mesh.rank in ranks:
                axes[name] = Axis(name, ranks, ranks.index(mesh.rank), group, mesh)

    # What a run does not divide is an axis that it has already.
    axes.setdefault("dp_cp", axes["dp"])
    axes.setdefault("shard", axes["dp_cp"])
    axes.setdefault("replica", Axis("replica", (mesh.rank,), 0, None, mesh))
    return axes
