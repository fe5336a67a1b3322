"""Data parallelism by hand: flat buckets of gradients, summed while backward runs, in three
policies.

    backward ─► the last gradient of a bucket ─► reduce-scatter: each rank gets the sum of its slice of the bucket

    mode          weights   gradients   optimizer    after the reduce-scatter                  after the update
    ddp_by_hand   whole     whole       whole        all-gather the gradients                  nothing
    zero1         whole     whole       own slice    nothing                                   all-gather the weights
    zero2         whole     own slice   own slice    nothing; a bucket's memory is freed       all-gather the weights

A bucket holds parameters one after the other, each aligned; n ranks share it in equal slices:

    bucket   │ w3 ········ │ b3 · │ w2 ·············· │ b2 · │ padding │      n·s elements
    owner    │ rank 0        │ rank 1        │ rank 2        │ rank 3  │      s elements each

All modes send the same bytes, and their weights are equal bit for bit: each element is summed in
the order of the ranks and updated by the same arithmetic, wherever it lies. Source: Li et al. 2020,
PyTorch Distributed; Rajbhandari et al. 2020, ZeRO.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nanoray.errors import ConfigError
from nanoray.parallel.axis import Axis
from nanoray.parallel.compress import Compressor
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.hybrid import Groups
from nanoray.parallel.mode import DataParallel
from nanoray.parallel.norm import norm_of_owned
from nanoray.parallel.pieces import Shard, whole_pieces

BY_HAND = ("ddp_by_hand", "zero1", "zero2")
# Elements: slices begin where vector registers do, so an update has the bits of one over the whole
ALIGN = 16
IN_FLIGHT = 2  # buckets that travel while backward fills the next one


@dataclass
class Bucket:
    """Parameters one after the other in a flat tensor of n·s elements. Rank r owns slice r, (s,)."""

    index: int
    params: list[nn.Parameter]
    starts: list[int]  # where each parameter begins in the flat tensor
    size: int  # n·s
    own: slice
    weights: Tensor | None = None  # (n·s,), where the weights are gathered
    # (n·s,); with zero2 only from the first gradient until the bucket has left
    grads: Tensor | None = None
    # Each parameter's gradient, as a view of `grads`; empty with zero2
    places: list[Tensor] = field(default_factory=list)
    own_grad: Tensor = field(default_factory=lambda: torch.empty(0))  # (s,)
    mirror_grad: Tensor | None = None  # (s,), of the rank whose slice this rank mirrors
    empty: bool = True  # own_grad has no gradient of this step yet
    missing: int = 0  # parameters whose gradient this backward has not computed yet


class Buckets(DataParallel):
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
        groups: Groups | None = None,
    ) -> None:
        """Lay out the buckets; nothing is sent. (all ranks)

        All ranks must hold equal weights before the first step. mirror: with ZeRO, rank r + mirror
        also updates the slices of rank r, from the same gradients; 0: no rank does. only: the names
        of the parameters to take, where another object sums the rest; first: the number of the
        first bucket. groups: those across which ZeRO's slices are summed, of which `axis` is one.
        `compressor` can be set before the first step, with ddp_by_hand.
        """
        super().__init__(model, axis, groups)
        self.compressor: Compressor | None = None  # sends buckets in place of the reduce-scatter
        self.divisor = self._data.size  # of the loss: afterwards every reduction is a sum
        self._mode = mode
        self._mirror = mirror
        self._first = first
        self._inside = False  # a backward is running
        self._sending = False  # and its buckets leave as they fill
        self._is_last = False  # it is the last one of a step, of its chunk
        self._flight: deque[tuple[Bucket, Callable[[Tensor], Tensor]]] = deque()
        self._gathers: list[Callable[[], None]] = []

        # Gradients that this rank has computed: in the present backward, and in the present step.
        self._arrived: set[nn.Parameter] = set()
        self._computed: set[nn.Parameter] = set()
        # What has no gradient in this step, with the place of the gradient of the next ones
        self._left_out: list[tuple[nn.Parameter, Tensor]] = []

        params = []
        for name, p in model.named_parameters():
            if p.requires_grad and (only is None or name in only):
                params.append(p)
        self._device = params[0].device

        # Backward computes the last layers first, so that is the order of the buckets. All gradients
        # of a pipeline stage's chunk are complete at the same time: a chunk has its own buckets.
        self._buckets: list[Bucket] = []
        self._ranges: list[
            tuple[int, int]
        ] = []  # by chunk: its first bucket, and one past its last
        chunks = model.chunk_params() if hasattr(model, "chunk_params") else [params]  # type: ignore[operator]
        taken = set(params)
        for chunk in reversed(chunks):
            begin = len(self._buckets)
            in_order = [p for p in reversed(chunk) if p in taken]
            self._lay_out(in_order, bucket_mb or default_bucket_mb(self._device))
            self._ranges.insert(0, (begin, len(self._buckets)))

        # The bucket that leaves next, and one past the last: all ranks send them in one order.
        self._next = 0
        self._end = len(self._buckets)
        self._place_of: dict[nn.Parameter, tuple[Bucket, int]] = {}
        for bucket in self._buckets:
            for i, p in enumerate(bucket.params):
                self._place_of[p] = (bucket, i)

        names = {p: name for name, p in model.named_parameters()}
        self._name_of = names
        self._names = {bucket.index: [names[p] for p in bucket.params] for bucket in self._buckets}
        if mode != "ddp_by_hand":
            self.shards = self._shards_of(axis.index, model, names)
            if mirror:
                self.mirror_shards = self._shards_of(self.mirrored, model, names)
                received = [bucket.mirror_grad for bucket in self._buckets]
                self.mirrored_gradients = [grad for grad in received if grad is not None]

        self._register_hooks(params)
        self.zero_grad()

    def _register_hooks(self, params: list[nn.Parameter]) -> None:
        """Let gradients move into their buckets, and each forward wait for the weights.

        The hooks hold no reference to this object, so it ends with its group of ranks; the model,
        which outlives the group, loses them then.
        """
        itself = weakref.ref(self)
        hooks = [p.register_post_accumulate_grad_hook(lambda p: _notify(itself, p)) for p in params]
        hooks.append(self.wrapped.register_forward_pre_hook(lambda *_: _settle(itself)))
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def _lay_out(self, params: list[nn.Parameter], bucket_mb: float) -> None:
        """Add the buckets of one chunk, each of about `bucket_mb`.

        A bucket has one dtype. A tied parameter, which another stage has as well, gets its own
        bucket: so both stages cut it in the same way.
        """
        tied = getattr(self.wrapped, "tied", None)
        pending: list[nn.Parameter] = []

        def close() -> None:
            self._buckets.append(self._close(self._first + len(self._buckets), pending[:]))
            pending.clear()

        for p in params:
            if pending and (p.dtype != pending[0].dtype or p is tied or pending[0] is tied):
                close()
            pending.append(p)
            if sum(q.nbytes for q in pending) >= bucket_mb * 2**20:
                close()
        if pending:
            close()

    def _close(self, index: int, params: list[nn.Parameter]) -> Bucket:
        """Make one bucket of `params`."""
        # Each parameter begins at an aligned element, and all slices have the same aligned length.
        starts = []
        filled = 0
        for p in params:
            starts.append(filled)
            filled += _rounded(p.numel(), ALIGN)
        size = _rounded(filled, self._axis.size * ALIGN)
        share = size // self._axis.size
        own = slice(self._axis.index * share, (self._axis.index + 1) * share)
        bucket = Bucket(index, params, starts, size, own)

        # With zero2 only the own slice lasts; the other modes keep all gradients in the bucket.
        like = params[0].detach().view(-1)
        if self._mode == "zero2":
            bucket.own_grad = like.new_zeros(share)
        else:
            bucket.grads = like.new_zeros(size)
            bucket.own_grad = bucket.grads[own]
            for p, start in zip(params, starts, strict=True):
                bucket.places.append(bucket.grads[start : start + p.numel()].view_as(p))

        # With ZeRO the weights move into the flat tensor, to be gathered without a copy.
        if self._mode != "ddp_by_hand":
            bucket.weights = like.new_zeros(size)
            if self._mirror:
                bucket.mirror_grad = like.new_zeros(share)
            for p, start in zip(params, starts, strict=True):
                place = bucket.weights[start : start + p.numel()].view_as(p)
                place.copy_(p.detach())
                p.data = place
        return bucket

    @property
    def bucket_names(self) -> dict[int, list[str]]:
        return self._names

    @property
    def mirrored(self) -> int:
        """The rank whose slices this rank mirrors."""
        return (self._axis.index - self._mirror) % self._axis.size

    def _shards_of(
        self, rank: int, model: nn.Module, names: dict[nn.Parameter, str]
    ) -> list[Shard]:
        """Return the parts of parameters in the slices of `rank`: this one, or the mirrored one.

        They are views of weights and gradients.
        """
        shards = []
        whole = whole_pieces(model)
        distance = rank - self._axis.index
        for bucket in self._buckets:
            grads = bucket.own_grad if distance == 0 else bucket.mirror_grad
            assert bucket.weights is not None
            assert grads is not None
            first = (bucket.own.start + distance * grads.numel()) % bucket.size
            last = first + grads.numel()

            # A slice may begin and end within a parameter, and padding belongs to none.
            for p, start in zip(bucket.params, bucket.starts, strict=True):
                begin = max(start, first)
                end = min(start + p.numel(), last)
                if begin >= end:
                    continue
                cut_from = whole[names[p]]
                piece = cut_from.flat_range(begin - start, end - start)
                param = nn.Parameter(bucket.weights[begin:end])
                param.grad = grads[begin - first : end - first]
                shards.append(Shard(piece, param, decays=p.dim() >= 2, cut_from=cut_from))
        return shards

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Run a chunk's backward inside. (all ranks) With `last`, and in zero2, it sends full
        buckets.

        late: the parameters whose gradients this backward adds to, if an earlier backward has
        computed the others; None: all of the chunk.
        """
        self._inside = True
        self._sending = last or self._mode == "zero2"
        self._is_last = last
        self._arrived.clear()
        self._next, self._end = self._ranges[chunk]
        try:
            if last and late is not None:
                # A bucket without late parameters is full already.
                for bucket in self._buckets[self._next : self._end]:
                    bucket.missing = sum(p in late for p in bucket.params)
                self._send_full()
            yield
            if self._sending:
                self._finish()
        finally:
            self._inside = False
            self._sending = False

    def on_gradient(self, p: nn.Parameter) -> None:
        """Move a gradient that backward has computed into its bucket; send the bucket when full.

        The first micro batch's is copied and not added to zeros, which would read and write the
        bucket once more.
        """
        if not self._inside or p.grad is None:  # a function of a script may return no gradient
            return
        bucket, i = self._place_of[p]
        if p in self._arrived:  # the first part may be on its way
            raise ConfigError(
                f"backward computes the gradient of {self._name_of[p]} in two parts, as "
                "torch.utils.checkpoint with use_reentrant=True does for a layer that is used "
                "twice; set use_reentrant=False"
            )
        self._arrived.add(p)
        self._take(bucket, i)

        if self._sending:
            bucket.missing -= 1
            self._send_full()

    def _take(self, bucket: Bucket, i: int) -> None:
        """Move the gradient of a bucket's parameter into the bucket."""
        p = bucket.params[i]
        assert p.grad is not None
        self._computed.add(p)
        if self._mode != "zero2":
            # From now on autograd accumulates into the bucket by itself.
            if p.grad is not bucket.places[i]:
                p.grad = bucket.places[i].copy_(p.grad)
            return

        # The bucket exists from its first gradient on, and holds one micro batch's.
        if bucket.grads is None:
            bucket.grads = torch.zeros(bucket.size, dtype=p.dtype, device=p.device)
        start = bucket.starts[i]
        bucket.grads[start : start + p.numel()].view_as(p).copy_(p.grad)
        p.grad = None

    def _send_full(self) -> None:
        """Send the buckets that are full, but none before its turn."""
        while self._next < self._end and self._buckets[self._next].missing <= 0:
            self._send(self._buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        """Start a bucket's reduce-scatter, and finish that of an earlier one."""
        self._next += 1

        # A hook of a script may have set a gradient itself. A parameter that took no part in this
        # step gets a gradient of zero: other ranks may have one.
        for i, p in enumerate(bucket.params):
            if p.grad is not None:
                self._take(bucket, i)
            elif bucket.places:
                p.grad = bucket.places[i].zero_()
        if bucket.grads is None:  # zero2, and none of its parameters took part
            bucket.grads = torch.zeros_like(bucket.own_grad).repeat(self._axis.size)

        last = self._next == len(self._buckets)
        if self.compressor:
            self.compressor.send(bucket.grads, bucket.index, last)
            return

        sending = self._axis.start_reduce_scatter(bucket.grads, "gradients", bucket.index, last)
        self._flight.append((bucket, sending))
        if len(self._flight) > IN_FLIGHT:  # bounds the memory of what has arrived
            self._receive()

    def _receive(self) -> None:
        """Wait for the oldest bucket in flight; with ddp_by_hand start to gather it."""
        bucket, arrived = self._flight.popleft()

        # zero2 sums each micro batch over the ranks, and adds the sums up here.
        if bucket.empty or self._mode != "zero2":
            arrived(bucket.own_grad)
        else:
            bucket.own_grad.add_(arrived(torch.empty_like(bucket.own_grad)))
        bucket.empty = False

        # The sum of all micro batches within this group goes to the other groups.
        if self._groups and self._is_last:
            self._groups.start(bucket.own_grad, bucket.index)

        if self._mode == "zero2":
            bucket.grads = None
        elif self._mode == "ddp_by_hand":
            assert bucket.grads is not None
            self._gathers.append(
                self._axis.start_all_gather(bucket.grads, "gradients", bucket.index)
            )

    def _finish(self) -> None:
        """Send buckets that no gradient has completed, wait for all, and prepare the next backward."""
        while self._next < self._end:
            self._send(self._buckets[self._next])
        while self._flight:
            self._receive()
        if self._groups:
            self._groups.finish()
        if self.compressor:
            self.compressor.drain()
        self.settle()
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)

    @property
    def computed(self) -> set[str]:
        return {self._name_of[p] for p in self._computed}

    def leave_out(self, absent: Collection[str]) -> None:
        if self._mode == "ddp_by_hand":
            for p in self._place_of:
                if self._name_of[p] in absent:
                    p.grad = None
            return

        # A shard's gradient is a part of a bucket: `zero_grad` puts it back.
        for shard in [*(self.shards or ()), *(self.mirror_shards or ())]:
            if shard.piece.name in absent and shard.param.grad is not None:
                self._left_out.append((shard.param, shard.param.grad))
                shard.param.grad = None

    def sum_of(self, p: nn.Parameter) -> Tensor:
        """Return this rank's part of the summed gradient of a parameter with its own bucket, live.

        (s,), or (n·s,) with ddp_by_hand.
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

    def mirror_gradients(self) -> bool:
        if self.mirror_shards is None:
            return False
        # All slices travel at once.
        arriving = []
        for own, into in zip(self.gradients, self.mirrored_gradients, strict=True):
            arriving.append(self._axis.start_pass_on(own, self._mirror, "mirror", into))
        for arrived in arriving:
            arrived()
        return True

    @property
    def owned(self) -> list[Tensor]:
        """The gradients that this rank counts in the norm: its slices, in every mode.

        Of several groups that hold the same slices, the first one counts them.
        """
        if self._groups and not self._groups.is_first:
            return []
        return [bucket.own_grad for bucket in self._buckets]

    def norm(self) -> Tensor:
        return norm_of_owned(self.owned, self._data, self._device)

    def spread(self) -> None:
        """Start to gather the weights that the owners have updated. (all ranks)

        The next forward waits for them.
        """
        if self._mode == "ddp_by_hand":
            return
        for bucket in reversed(self._buckets):  # the first layers first
            assert bucket.weights is not None
            self._gathers.append(self._axis.start_all_gather(bucket.weights, "weights"))

    def settle(self) -> None:
        """Wait for the gathers that have been started."""
        while self._gathers:
            self._gathers.pop(0)()

    def zero_grad(self) -> None:
        self._flight.clear()  # a step that broke may have left some
        if self._groups:
            self._groups.clear()
        self._computed.clear()
        while self._left_out:
            param, grad = self._left_out.pop()
            param.grad = grad
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)
            bucket.empty = True
            if self._mode == "zero2":
                bucket.grads = None
                bucket.own_grad.zero_()
            elif self.compressor and bucket.grads is not None:
                bucket.grads.zero_()  # it has also written between the parameters
            for p in bucket.params:
                p.grad = None


def _notify(buckets: weakref.ref[Buckets], p: nn.Parameter) -> None:
    owner = buckets()
    if owner is not None:
        owner.on_gradient(p)


# Of a model that is compiled as a whole, this hook stays outside of the graph
@torch.compiler.disable
def _settle(buckets: weakref.ref[Buckets]) -> None:
    owner = buckets()
    if owner is not None:
        owner.settle()


def _rounded(count: int, unit: int) -> int:
    """Return `count`, rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
