"""Data parallelism by hand: flat buckets of gradients, summed while backward runs, in three
policies.

    backward ─► the last gradient of a bucket ─► reduce-scatter: each rank gets the sum of its slice of the bucket

    mode          weights   gradients   optimizer    after the reduce-scatter                  after the update
    ddp_by_hand   whole     whole       whole        all-gather the gradients                  nothing
    zero1         whole     whole       own slice    nothing                                   all-gather the weights
    zero2         whole     own slice   own slice    nothing; a bucket's memory is freed       all-gather the weights

All modes send the same bytes, and their weights are equal bit for bit: each element is summed in
the order of the ranks and updated by the same arithmetic, wherever it lies. Source: Li et al. 2020,
PyTorch Distributed; Rajbhandari et al. 2020, ZeRO.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nanoray.mesh.axis import Axis
from nanoray.mesh.pieces import Shard, whole_pieces
from nanoray.parallel.compress import Compressor, Sent
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.norm import clip_to, norm_of_owned

BY_HAND = ("ddp_by_hand", "zero1", "zero2")
# Elements: slices begin where vector registers do, so an update has the bits of one over the whole
ALIGN = 16
IN_FLIGHT = 2  # buckets that travel while backward fills the next one


@dataclass
class Bucket:
    """Some parameters, one after the other in one flat tensor of n·s elements. Rank r owns slice r,
    (s,).
    """

    index: int
    params: list[nn.Parameter]
    starts: list[int]  # of each parameter in the flat tensor
    size: int  # n·s
    own: slice
    weights: Tensor | None = None  # (n·s,), where the weights are gathered
    # (n·s,); with zero2 only from the first gradient until the bucket has left
    grads: Tensor | None = None
    # Of the parameters' gradients in it; empty with zero2
    places: list[Tensor] = field(default_factory=list)
    own_grad: Tensor = field(default_factory=lambda: torch.empty(0))  # (s,)
    mirror_grad: Tensor | None = None  # (s,), of the rank whose slice this rank mirrors
    empty: bool = True  # own_grad has no gradient of this step yet
    missing: int = 0  # parameters whose gradient this backward has not computed yet


class Buckets:
    """Keeps a model's gradients, and with ZeRO its weights, in buckets. One object for each group
    of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        mode: str,
        bucket_mb: float,
        mirror: int = 0,
        only: Collection[str] | None = None,
        first: int = 0,
    ) -> None:
        """Lay out the buckets; nothing is sent. (all ranks) All ranks must hold equal weights
        before the first step.

        mirror: with ZeRO, rank r + mirror also updates the slices of rank r, from the same
        gradients; 0: nobody does. only: the names of the parameters to take, where others sum the
        rest; first: the number of the first bucket. `compressor` can be set before the first step,
        with ddp_by_hand.
        """
        self.compressor: Compressor | None = None  # sends buckets in place of the reduce-scatter
        self.wrapped, self._axis, self._mode, self._mirror, self._first = (
            model,
            axis,
            mode,
            mirror,
            first,
        )
        self.divisor = axis.size  # of the loss: afterwards every reduction is a sum
        self._inside = self._sending = False
        self._flight: deque[tuple[Bucket, Callable[[Tensor], Tensor]]] = deque()
        self._gathers: list[Callable[[], None]] = []
        params = [
            p
            for n, p in model.named_parameters()
            if p.requires_grad and (only is None or n in only)
        ]
        self._device = params[0].device
        self._buckets: list[Bucket] = []
        # By chunk: its first bucket, and that after its last
        self._ranges: list[tuple[int, int]] = []
        chunks = model.chunk_params() if hasattr(model, "chunk_params") else [params]  # type: ignore[operator]
        taken = set(params)
        for of_chunk in reversed(chunks):
            begin = len(self._buckets)
            self._lay_out(
                [p for p in reversed(of_chunk) if p in taken],
                bucket_mb or default_bucket_mb(self._device),
            )
            self._ranges.insert(0, (begin, len(self._buckets)))
        # Bucket to leave next: all ranks send them in one order
        self._next, self._end = 0, len(self._buckets)
        self._place_of = {
            p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.params)
        }
        names = {p: name for name, p in model.named_parameters()}
        self.bucket_names = {
            bucket.index: [names[p] for p in bucket.params] for bucket in self._buckets
        }
        self.shards = self._shards_of(axis.index, model, names) if mode != "ddp_by_hand" else None
        self.mirror_shards = (
            self._shards_of(self.mirrored, model, names)
            if self.shards is not None and mirror
            else None
        )
        # The hooks hold no reference to this object, so it ends with the group of ranks that it was
        # made for.
        itself = weakref.ref(self)
        hooks = [p.register_post_accumulate_grad_hook(lambda p: _notify(itself, p)) for p in params]
        hooks.append(model.register_forward_pre_hook(lambda *_: _settle(itself)))
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self.zero_grad()

    def _lay_out(self, params: list[nn.Parameter], bucket_mb: float) -> None:
        """Add the buckets of one chunk. A parameter that another rank has as well gets its own, cut
        alike there.
        """
        buckets, taken = self._buckets, list[nn.Parameter]()
        tied = getattr(self.wrapped, "tied", None)
        for p in params:
            if taken and (p.dtype != taken[0].dtype or p is tied or taken[0] is tied):
                buckets.append(self._close(self._first + len(buckets), taken))
                taken = []
            taken.append(p)
            if sum(q.nbytes for q in taken) >= bucket_mb * 2**20:
                buckets.append(self._close(self._first + len(buckets), taken))
                taken = []
        if taken:
            buckets.append(self._close(self._first + len(buckets), taken))

    def _close(self, index: int, params: list[nn.Parameter]) -> Bucket:
        """Make one bucket. With ZeRO the weights move into its flat tensor, to be gathered without
        a copy.
        """
        starts, at = [], 0
        for p in params:
            starts.append(at)
            at += _rounded(p.numel(), ALIGN)
        size = _rounded(at, self._axis.size * ALIGN)
        share = size // self._axis.size
        bucket = Bucket(
            index,
            params,
            starts,
            size,
            slice(self._axis.index * share, (self._axis.index + 1) * share),
        )
        like = params[0].detach().view(-1)
        if self._mode == "zero2":
            bucket.own_grad = like.new_zeros(share)
        else:
            bucket.grads = like.new_zeros(size)
            bucket.own_grad = bucket.grads[bucket.own]
            bucket.places = [
                bucket.grads[at : at + p.numel()].view_as(p)
                for p, at in zip(params, starts, strict=True)
            ]
        if self._mode != "ddp_by_hand":
            bucket.weights = like.new_zeros(size)
            bucket.mirror_grad = like.new_zeros(share) if self._mirror else None
            for p, start in zip(params, starts, strict=True):
                place = bucket.weights[start : start + p.numel()].view_as(p)
                place.copy_(p.detach())
                p.data = place
        return bucket

    @property
    def mirrored(self) -> int:
        """The rank whose slices this rank mirrors."""
        return (self._axis.index - self._mirror) % self._axis.size

    def _shards_of(
        self, rank: int, model: nn.Module, names: dict[nn.Parameter, str]
    ) -> list[Shard]:
        """Return what a rank's slices hold of each parameter, as views of weights and gradients:
        own or mirrored.
        """
        shards, whole = [], whole_pieces(model)
        for bucket in self._buckets:
            assert bucket.weights is not None
            grads = bucket.own_grad if rank == self._axis.index else bucket.mirror_grad
            assert grads is not None
            first = (bucket.own.start + (rank - self._axis.index) * grads.numel()) % bucket.size
            last = first + grads.numel()
            for p, start in zip(bucket.params, bucket.starts, strict=True):
                begin, end = max(start, first), min(start + p.numel(), last)
                if begin >= end:
                    continue
                piece = whole[names[p]].flat_range(begin - start, end - start)
                param = nn.Parameter(bucket.weights[begin:end])
                param.grad = grads[begin - first : end - first]
                shards.append(Shard(piece, param, p.dim() >= 2, cut_from=whole[names[p]]))
        return shards

    def forward(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for a forward, which needs none."""
        return nullcontext()

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Run a chunk's backward inside. (all ranks) With `last`, and in zero2, it sends each full
        bucket.

        late: the parameters whose gradients this backward adds to, if an earlier one had the rest;
        None: all.
        """
        self._inside, self._sending = True, last or self._mode == "zero2"
        self._next, self._end = self._ranges[chunk]
        try:
            if last and late is not None:
                for bucket in self._buckets[self._next : self._end]:
                    bucket.missing = sum(p in late for p in bucket.params)
                self._send_full()
            yield
            if self._sending:
                self._finish()
        finally:
            self._inside = self._sending = False

    def quiet(self) -> AbstractContextManager[None]:
        """Return a context for a forward and backward of this rank alone."""
        return nullcontext()

    def on_gradient(self, p: nn.Parameter) -> None:
        """Move a gradient that backward has computed into its bucket; send the bucket when it was
        the last one.

        The first micro batch's is copied and not added to zeros, which would read and write the
        bucket once more.
        """
        if not self._inside:
            return
        bucket, i = self._place_of[p]
        assert p.grad is not None
        if self._mode == "zero2":
            if bucket.grads is None:
                bucket.grads = torch.zeros(bucket.size, dtype=p.dtype, device=p.device)
            bucket.grads[bucket.starts[i] : bucket.starts[i] + p.numel()].view_as(p).copy_(p.grad)
            p.grad = None
        elif p.grad is not bucket.places[i]:
            p.grad = bucket.places[i].copy_(p.grad)
        if not self._sending:
            return
        bucket.missing -= 1
        self._send_full()

    def _send_full(self) -> None:
        while self._next < self._end and self._buckets[self._next].missing <= 0:
            self._send(self._buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        """Start a bucket's reduce-scatter, and finish that of an earlier one."""
        self._next += 1
        for p, place in zip(bucket.params, bucket.places, strict=False):
            if p.grad is None:  # it took no part in this step
                p.grad = place.zero_()
        if bucket.grads is None:  # zero2, and no parameter of it took part
            bucket.grads = torch.zeros_like(bucket.own_grad).repeat(self._axis.size)
        last = self._next == len(self._buckets)
        if self.compressor:
            self.compressor.send(
                Sent(bucket.grads, bucket.params, bucket.starts, bucket.index, last)
            )
            return
        sending = self._axis.start_reduce_scatter(bucket.grads, "gradients", bucket.index, last)
        self._flight.append((bucket, sending))
        if len(self._flight) > IN_FLIGHT:
            self._receive()

    def _receive(self) -> None:
        """Wait for the oldest bucket in flight; with ddp_by_hand start to gather it."""
        bucket, arrived = self._flight.popleft()
        if bucket.empty or self._mode != "zero2":
            arrived(bucket.own_grad)
        else:
            bucket.own_grad.add_(arrived(torch.empty_like(bucket.own_grad)))
        bucket.empty = False
        if self._mode == "zero2":
            bucket.grads = None
        elif self._mode == "ddp_by_hand":
            assert bucket.grads is not None
            self._gathers.append(
                self._axis.start_all_gather(bucket.grads, "gradients", bucket.index)
            )

    def _finish(self) -> None:
        """Send what no gradient completed, wait for everything, and get ready for the next
        backward.
        """
        while self._next < self._end:
            self._send(self._buckets[self._next])
        while self._flight:
            self._receive()
        if self.compressor:
            self.compressor.drain()
        self.settle()
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)

    def sum_of(self, p: nn.Parameter) -> Tensor:
        """Return what this rank has of the summed gradient of a parameter that has its own bucket,
        (s,) or (n·s,).
        """
        bucket, _ = self._place_of[p]
        if self._mode != "ddp_by_hand":
            return bucket.own_grad
        assert bucket.grads is not None
        return bucket.grads

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with, as flat tensors."""
        if self._mode == "ddp_by_hand":
            return [bucket.grads for bucket in self._buckets if bucket.grads is not None]
        return [bucket.own_grad for bucket in self._buckets]

    @property
    def _mirror_grads(self) -> list[Tensor]:
        return [bucket.mirror_grad for bucket in self._buckets if bucket.mirror_grad is not None]

    def mirror_gradients(self) -> bool:
        """Send this rank's gradients to the rank that mirrors it, and receive those to mirror. (all
        ranks)

        Returns whether the step can be finished, once this has been done, without the ranks that
        are lost later.
        """
        if self.mirror_shards is None:
            return False
        self._axis.pass_on(self.gradients, self._mirror_grads, self._mirror, "mirror")
        return True

    @property
    def owned(self) -> list[Tensor]:
        """The gradients that this rank counts in the norm: its slices, in every mode."""
        return [bucket.own_grad for bucket in self._buckets]

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, a float32 scalar on the device. (all ranks)"""
        return norm_of_owned(self.owned, self._axis, self._device)

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""
        clip_to(limit, [*self.gradients, *self._mirror_grads], norm)

    def spread(self) -> None:
        """Start to gather the weights that the owners have updated; the next forward waits for
        them. (all ranks)
        """
        if self._mode == "ddp_by_hand":
            return
        for bucket in self._buckets[::-1]:  # the first layers first
            assert bucket.weights is not None
            self._gathers.append(self._axis.start_all_gather(bucket.weights, "weights"))

    def settle(self) -> None:
        """Wait until what `spread` has started has arrived."""
        while self._gathers:
            self._gathers.pop(0)()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._flight.clear()
        for bucket in self._buckets:
            bucket.missing, bucket.empty = len(bucket.params), True
            if self._mode == "zero2":
                bucket.grads = None
                bucket.own_grad.zero_()
            elif self.compressor and bucket.grads is not None:
                bucket.grads.zero_()  # it has also written between the parameters
            for p in bucket.params:
                p.grad = None


def _notify(buckets: weakref.ref[Buckets], p: nn.Parameter) -> None:
    if found := buckets():
        found.on_gradient(p)


# Of a model that is compiled as a whole, this hook stays outside of the graph
@torch.compiler.disable
def _settle(buckets: weakref.ref[Buckets]) -> None:
    if found := buckets():
        found.settle()


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
