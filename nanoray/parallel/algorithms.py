"""Six all-reduce algorithms written by hand over send and receive.

    latency-bound (small)                                   bandwidth-bound (large)
    flat   recursive_doubling   tree     double_tree     halving_doubling   ring

Each takes (tensor, group) and leaves the sum of all ranks' tensors in place, on every rank of the
group. (all ranks) The tensor is contiguous, of the same shape and dtype everywhere, on CPU with
gloo or on CUDA with NCCL. Costs: alpha seconds to start a message, beta seconds per byte, additions
counted into beta, N ranks, S bytes.

**All ranks end with the same bits** for any data; otherwise replicas would drift apart. Either one
rank forms a sum and the others copy it, or (recursive_doubling) partners add the same two numbers,
and a + b = b + a.

The group must carry no other messages at the same time, because messages are matched by their
order. On NCCL its first operation must be a collective, not one of these, because creating a
communicator needs all ranks.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from nanoray.errors import ConfigError

PIECE_BYTES = 2 << 20  # a message of a pipeline: long against alpha, small against a cache
RING_DEPTH = 4  # pieces in flight to a rank while it adds


class _Group(NamedTuple):
    """A process group with this rank's place in it. Peers are group ranks."""

    handle: ProcessGroup
    rank: int
    size: int
    in_order: bool = False  # NCCL: a rank's messages run strictly in sequence, on its stream

    def start(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> list[Work]:
        """Post the messages of one step together and return their works, the sends' first.

        NCCL needs them in one batch: it runs a rank's operations in sequence, so a ring in which
        all ranks send first would deadlock. gloo posts them at once. Empty messages are left out on
        both sides.
        """
        # Both ranks of a message know its length, so both leave an empty one out.
        sends = [message for message in sends if message[0].numel()]
        receives = [message for message in receives if message[0].numel()]
        if any(tensor.is_cuda for tensor, _ in (*sends, *receives)):
            group = self.handle
            posts = [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=peer)
                for tensor, peer in sends
            ]
            posts += [
                dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer)
                for tensor, peer in receives
            ]
            return dist.batch_isend_irecv(posts)
        works = [self.handle.send([tensor], peer, 0) for tensor, peer in sends]
        return works + [self.handle.recv([tensor], peer, 0) for tensor, peer in receives]

    def run(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Do one step and wait for all its messages."""
        _wait(self.start(sends, receives))


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _open(tensor: Tensor, group: ProcessGroup | None) -> tuple[Tensor, _Group]:
    """Return the flattened tensor and the group.

    Raises ConfigError for a CUDA tensor on gloo, which would read its address as a host address.
    """
    handle = group or dist.group.WORLD
    assert handle is not None
    if tensor.is_cuda and dist.get_backend(handle) != "nccl":
        raise ConfigError(
            f"tensor on {tensor.device}, backend {dist.get_backend(handle)}: all-reduce by hand "
            "sends CUDA tensors over nccl only; use the backend's own all-reduce (--allreduce "
            "backend), or ranks on CPU"
        )
    return tensor.view(-1), _Group(handle, handle.rank(), handle.size(), tensor.is_cuda)


def _split(data: Tensor, parts: int) -> list[Tensor]:
    """Cut `data` into `parts` views whose lengths differ by at most one; some may be empty."""
    return list(data.tensor_split(parts))


def _pieces(data: Tensor) -> int:
    """Return the number of pipeline messages for `data`."""
    return max(1, math.ceil(data.nbytes / PIECE_BYTES))


def ring(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Sum around a ring: the fewest bytes per rank, the most steps. (all ranks)

        step 0..N-2    reduce-scatter: chunk c leaves rank c, grows by each rank it passes, is complete at rank c-1
        step N-1..2N-3 all-gather: the complete chunks go around once more and are copied

        N = 3   rank 0          rank 1          rank 2
                a0 b0 c0        a1 b1 c1        a2 b2 c2
        step 0  a0 ──────────►  b1 ──────────►  c2 ──────────► (to rank 0)
                   c20 ──────►     a01 ──────►     b12 ──────► (to rank 0)      step 1
                   B = b120        C = c201        A = a012                     complete; steps 2, 3 copy them around

    Cost 2(N-1) alpha + 2(N-1)/N S beta. Chunks travel in pieces: a rank adds one piece while the
    next ones arrive, then forwards it. Same bits everywhere: only rank c-1 completes chunk c, the
    others copy it. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
    """
    data, me = _open(tensor, group)
    n = me.size
    if n == 1:
        return
    chunks = _split(data, n)
    pieces = _pieces(chunks[0])  # the first chunk is the longest
    parts = [_split(chunk, pieces) for chunk in chunks]

    # Message k carries one piece of one step. `depth` messages are in flight: while piece k - depth
    # is added, the ones after it arrive.
    depth = min(pieces, RING_DEPTH)
    total = 2 * (n - 1) * pieces
    scratch = [torch.empty_like(parts[0][0]) for _ in range(depth)]
    coming: list[tuple[list[Work], Tensor, Tensor]] = []
    for k in range(total + depth):
        # Finish an earlier message: add what has arrived, or keep it where it was received.
        if k >= depth:
            works, arrived, target = coming[k - depth]
            _wait(works)
            if arrived is not target:
                target += arrived

        # Start the next one. In the reduce-scatter a piece arrives in scratch memory; in the
        # all-gather it is complete, and arrives in its place.
        if k < total:
            step, piece = divmod(k, pieces)
            target = parts[(me.rank - step - 1) % n][piece]
            arrived = scratch[k % depth][: target.numel()] if step < n - 1 else target
            # What is sent: this rank's own piece, or the one that message k - pieces has completed.
            ready = parts[(me.rank - step) % n][piece]
            works = me.start([(ready, (me.rank + 1) % n)], [(arrived, (me.rank - 1) % n)])
            coming.append((works, arrived, target))


def tree_links(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Return the parent (None: root) and the children of a rank in the tree over `size` ranks.

    The tree is binary and in order. Its height is floor(log2(size)), and every even rank is a leaf:
    a left half always has 2^h - 1 ranks.
    """

    def root(low: int, high: int) -> int:
        """Return the root of the tree over ranks `low` to `high` - 1."""
        return low + (1 << (high - low).bit_length() - 1) - 1

    # Walk down from the root of all ranks; the halves of a subtree are left and right of its root.
    low = 0
    high = size
    parent = None
    here = root(low, high)
    while here != rank:
        parent = here
        if rank < here:
            high = here
        else:
            low = here + 1
        here = root(low, high)

    children = []
    if low < rank:
        children.append(root(low, rank))
    if rank + 1 < high:
        children.append(root(rank + 1, high))
    return parent, children


def _up_and_down(me: _Group, trees: Sequence[tuple[Tensor, int | None, list[int]]]) -> None:
    """Sum each tensor up its tree and send the sum down, piece by piece.

    A tree is given as (tensor, this rank's parent, its children). Steps in which this rank is a
    leaf come first, because they need no receive. In alternating order, a rank's leaf step in one
    tree would wait for its children in the other, whose leaf steps wait for this rank: both trees
    would then run at the pace of one message passing through all ranks. Sends are waited for only
    at the end, and so are receives at a leaf, so that the next piece can start. Two ranks exchange
    messages of one tree only, first up and then down, so messages match by their order.
    """
    sent: list[Work] = []
    late: list[Work] = []
    count = _pieces(trees[0][0])  # the first is the longest: a shorter one has as many pieces
    steps = [
        (piece, parent, children)
        for together in zip(*(_split(data, count) for data, _, _ in trees), strict=True)
        for piece, (_, parent, children) in zip(together, trees, strict=True)
    ]
    most = max(len(children) for _, _, children in trees)
    scratch = [torch.empty_like(steps[0][0]) for _ in range(most)]
    # On NCCL's stream two ranks that both begin by sending to each other deadlock. There all ranks
    # take pieces and trees in the same order: slower, as said above, but the first unfinished
    # message can always proceed.
    if not me.in_order:
        steps.sort(key=lambda step: bool(step[2]))

    # Up: add the children's pieces, and send the sum to the parent.
    for piece, parent, children in steps:
        arrived = [room[: piece.numel()] for room in scratch[: len(children)]]
        me.run([], list(zip(arrived, children, strict=True)))
        for each in arrived:
            piece += each
        sent += me.start([(piece, parent)] if parent is not None else [], [])

    # Down: receive the whole sum from the parent, and send it to the children.
    for piece, parent, children in steps:
        coming = me.start([], [(piece, parent)] if parent is not None else [])
        if children:
            _wait(coming)
        else:
            late += coming  # to this list only: waiting twice for a work hangs on gloo
        sent += me.start([(piece, child) for child in children], [])
    _wait(sent + late)


def tree(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    r"""Sum up a binary tree and send the sum down: few steps, but a rank's link carries two
    children. (all ranks)

        N = 7          3                 up:   leaves send to 1 and 5, which add and send to 3, which has the sum
                     /   \               down: the same edges back, copied
                    1     5
                   / \   / \
                  0   2 4   6

    Cost 2 floor(log2 N) alpha + 2 c S beta, c = 2 children (1 at N = 2), pipelined: while one piece
    goes up, the next is added below. Same bits everywhere: the root's sum is copied.
    """
    data, me = _open(tensor, group)
    _up_and_down(me, [(data, *tree_links(me.rank, me.size))])


def double_tree(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    r"""Sum each half of the data over its own tree; no rank is an inner node of both. (all ranks)

        N = 6   first half     3           second half     2         the same tree, played by the next rank down:
                             /   \                       /   \       the part of rank r in it is that of r+1
                            1     5                     0     4      inner ranks: odd ones here, even ones there
                           / \   /                     / \   /
                          0   2 4                     5   1 3

    Cost 2 ceil(log2 N) alpha + 2 S beta, at N = 2 only S beta, if all links are always busy: a rank
    that handles two children for one half is a leaf for the other. The paper colours the edges so
    that no two messages need one link at once; here a link takes them in order of arrival, which on
    an ideal network costs 2.1 S beta at N = 4 and 2.7 at 8 (NCCL's order: 6.0 and 8.5). Same bits
    everywhere: each half is summed at one root and copied. Source: Sanders, Speck and Traeff,
    Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
    """
    data, me = _open(tensor, group)
    n = me.size
    first, second = _split(data, 2)
    parent, children = tree_links(me.rank, n)

    # The second tree is the first one, with rank r in the place of r + 1.
    other_parent, other_children = tree_links((me.rank + 1) % n, n)
    if other_parent is not None:
        other_parent = (other_parent - 1) % n
    other_children = [(child - 1) % n for child in other_children]
    _up_and_down(me, [(first, parent, children), (second, other_parent, other_children)])


def flat(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Send all data to rank 0, which adds in rank order and sends the sum back. (all ranks)

        1 ──┐                 ┌──► 1
        2 ──┼──► 0 adds all ──┼──► 2        a tree of height one
        3 ──┘                 └──► 3

    Cost 2(N-1)(alpha + S beta): rank 0's link carries all of it. Same bits everywhere: rank 0's sum
    is copied.
    """
    data, me = _open(tensor, group)
    if me.rank == 0:
        _up_and_down(me, [(data, None, list(range(1, me.size)))])
    else:
        _up_and_down(me, [(data, 0, [])])


def _fold(data: Tensor, me: _Group, within: Callable[[int], None]) -> None:
    """Run `within(p)` on the largest power of two p <= N ranks.

    The others send their data first, and copy the sum.

    N = 6   4 ──► 0     5 ──► 1     p = 4: ranks 0..3 reduce     0 ──► 4     1 ──► 5
    """
    power = 1 << me.size.bit_length() - 1
    if me.rank >= power:
        me.run([(data, me.rank - power)], [])
        me.run([], [(data, me.rank - power)])
        return
    # Of the first ranks, those that have a partner beyond the power of two.
    extra = me.rank + power < me.size
    if extra:
        arrived = torch.empty_like(data)
        me.run([], [(arrived, me.rank + power)])
        data += arrived
    within(power)
    if extra:
        me.run([(data, me.rank + power)], [])


def recursive_doubling(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Swap everything with partners at distance 1, 2, 4, ...: the fewest steps, for small tensors.
    (all ranks)

        rank      0     1     2     3
        data      a     b     c     d
        step 0    ab ◄► ab    cd ◄► cd          partner = rank xor 1
        step 1    abcd  ◄───► abcd ...          partner = rank xor 2

    Cost log2(N) (alpha + S beta), and 2 (alpha + S beta) more where N is no power of two (_fold).
    Same bits everywhere: after each step two partners hold x + y and y + x, which are equal, and so
    do all in their blocks. Source: Thakur, Rabenseifner and Gropp, Optimization of collective
    communication operations in MPICH, 2005.
    """
    data, me = _open(tensor, group)

    def within(power: int) -> None:
        arrived = torch.empty_like(data)
        for bit in range(power.bit_length() - 1):
            partner = me.rank ^ 1 << bit
            me.run([(data, partner)], [(arrived, partner)])
            data.add_(arrived)

    _fold(data, me, within)


def halving_doubling(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Halve the data with each partner until each rank sums its own part, then double back. (all
    ranks)

        N = 4     parts  0 1 2 3                      rank 0        rank 1        rank 2        rank 3
        step 0    partner xor 2: swap half the data   sums 0 1      sums 0 1      sums 2 3      sums 2 3
        step 1    partner xor 1: swap a quarter       sums 0        sums 1        sums 2        sums 3
        step 2    partner xor 1: copy a quarter       has 0 1       has 0 1       has 2 3       has 2 3
        step 3    partner xor 2: copy half            has 0 1 2 3   everywhere

    Cost 2 log2(N) alpha + 2(N-1)/N S beta: a ring's bytes in a tree's steps; 2 (alpha + S beta)
    more where N is no power of two (_fold). Same bits everywhere: a part is complete at one rank
    only, and copied. Source: Rabenseifner, Optimization of collective reduction operations, 2004;
    Thakur et al., 2005.
    """
    data, me = _open(tensor, group)

    def within(power: int) -> None:
        # Part i is the elements from bounds[i] to bounds[i + 1]: lengths differ by one at most.
        bounds = [data.numel() * part // power for part in range(power + 1)]
        arrived = torch.empty_like(data[: -(-data.numel() // 2)])
        low = 0  # the first of the parts that this rank still adds up
        swaps = []
        # power/2 parts first, then power/4, ... and at last one: each swap halves what is left.
        for half in (power >> bit for bit in range(1, power.bit_length())):
            # Of these parts, the rank with a zero bit keeps the first half, its partner the second.
            partner = me.rank ^ half
            ours = low
            theirs = low + half
            if me.rank & half:
                ours, theirs = theirs, ours
            low = ours
            keep = data[bounds[ours] : bounds[ours + half]]
            give = data[bounds[theirs] : bounds[theirs + half]]
            me.run([(give, partner)], [(arrived[: keep.numel()], partner)])
            keep += arrived[: keep.numel()]
            swaps.append((keep, give, partner))

        # Double back: the same swaps in reverse, now of complete parts.
        for have, want, partner in reversed(swaps):
            me.run([(have, partner)], [(want, partner)])

    _fold(data, me, within)


ALGORITHMS: dict[str, Callable[[Tensor, ProcessGroup | None], None]] = {
    "ring": ring,
    "tree": tree,
    "double_tree": double_tree,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "flat": flat,
}


def cost(name: str, ranks: int, size_bytes: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Return the predicted seconds of an algorithm, by the formulas of the docstrings above.

    alpha_s: to start a message; beta_s_per_byte: of a link and the addition. Each rank has one
    full-duplex link. The double tree's log2(N) is rounded up; its bytes are the paper's. Source:
    Thakur, Rabenseifner and Gropp, 2005, section 4; Sanders, Speck and Traeff, 2009, for the trees.
    """
    if ranks == 1:
        return 0.0
    n = ranks
    alpha = alpha_s
    wire = size_bytes * beta_s_per_byte  # seconds of all data on one link
    # Whole numbers of rounds; ranks beyond the power of two pay two more messages (_fold).
    height = n.bit_length() - 1  # floor(log2(n))
    power = 1 << height
    fold = 2 * (alpha + wire) if n > power else 0.0
    return {
        "ring": 2 * (n - 1) * alpha + 2 * (n - 1) / n * wire,
        "tree": 2 * height * alpha + 2 * min(2, n - 1) * wire,
        "double_tree": 2 * math.ceil(math.log2(n)) * alpha + min(2, n - 1) * wire,
        "recursive_doubling": height * (alpha + wire) + fold,
        "halving_doubling": 2 * height * alpha + 2 * (power - 1) / power * wire + fold,
        "flat": 2 * (n - 1) * (alpha + wire),
    }[name]


class AsyncAllReduce:
    """Run all-reduces in sequence, in the background, for a DDP communication hook.

    On CPU one thread runs them in the order of `start`, which must be the same on all ranks; on
    CUDA a side stream does. `group` must be used by nothing else: messages are matched by their
    order.
    """

    def __init__(self, name: str, group: ProcessGroup, device: torch.device) -> None:
        self._sum = ALGORITHMS[name]
        self._group = group
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[Tensor, Future[Any]] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        else:
            self._thread = threading.Thread(
                target=self._serve, name=f"allreduce {name}", daemon=True
            )
            self._thread.start()

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Start to sum `buffer` in place; return a future of it. (all ranks)

        The future raises the error of a failed sum. After a failure every later sum fails with the
        same error, because this rank's messages no longer match the others'. Do not touch the
        buffer before the future is done.
        """
        if self._device.type == "cuda":
            return self._issue(buffer)
        future: Future[Any] = Future()
        # DDP's C++ code sees an exception only from a callback
        derived = future.then(lambda done: done.value())
        self._jobs.put((buffer, future))
        return derived

    def _issue(self, buffer: Tensor) -> Future[Tensor]:
        """Queue the sum on the side stream, behind the work of the current stream.

        The future carries an event.
        """
        future: Future[Tensor] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._sum(buffer, self._group)
            # The allocator must not reuse it while this stream writes it
            buffer.record_stream(self._stream)
            future.set_result(buffer)
        return future

    def _serve(self) -> None:
        """Run the sums in their order, until None comes."""
        while True:
            job = self._jobs.get()
            if job is None:
                return
            buffer, future = job
            try:
                if self._failure is None:
                    self._sum(buffer, self._group)
            except Exception as error:  # raised by the future
                self._failure = error
            if self._failure is None:
                future.set_result(buffer)
            else:
                future.set_exception(self._failure)

    def close(self) -> None:
        """Wait for the pending sums and end the thread."""
        if self._device.type != "cuda":
            self._jobs.put(None)
            self._thread.join()
