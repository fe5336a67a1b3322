"""The hand-written all-reduces on real gloo ranks: right to the bit, the same bits everywhere, and
inside DDP.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from nanoray.errors import ConfigError
from nanoray.mesh import algorithms
from nanoray.mesh.algorithms import ALGORITHMS, AsyncAllReduce, cost, tree_links
from nanoray.mesh.rendezvous import open_store
from tests.harness.commands import forkserver

NO_NEIGHBOURS = [1, 2, 4]  # a group whose ranks are not 0..n-1


class RankPool:
    """Real ranks that answer the functions of this file, one after the other."""

    def __init__(self, world: int) -> None:
        self.store = open_store("127.0.0.1", world, 60)
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = forkserver.Pipe()
            process = forkserver.Process(
                target=_serve, args=(rank, world, self.store.port, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def ask(self, function: str, **case: Any) -> list[Any]:
        """Call a function of this file on all ranks; return their answers."""
        for pipe in self.pipes:
            pipe.send((function, case))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(150), f"rank {rank} does not answer to {function} {case}"
            answers.append(pipe.recv())
        broken = [answer for answer in answers if isinstance(answer, str)]
        assert not broken, "\n".join(broken)
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def pool_of(world: int) -> Iterator[RankPool]:
    pool = RankPool(world)
    try:
        yield pool
    finally:
        pool.end()


def _serve(rank: int, world: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    own = dist.new_group()
    some = dist.new_group(NO_NEIGHBOURS) if world > max(NO_NEIGHBOURS) else None
    while True:
        try:
            function, case = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(sys.modules[__name__], function)(own, some, **case))
        except Exception:
            pipe.send(f"rank {rank}: {traceback.format_exc()}")


# What a rank does; `own` is a group of all ranks, `some` one of NO_NEIGHBOURS.


def data_of(rank: int, length: int, dtype: torch.dtype, seed: int, exact: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if exact or not dtype.is_floating_point:  # sums of nine of these are exact in bfloat16
        return torch.randint(-9, 10, (length,), generator=generator).to(dtype)
    return torch.randn(length, generator=generator).to(dtype)


def sum_up(
    own: Any, some: Any, length: int, dtype: str, seed: int, piece_bytes: int, sub: bool
) -> dict[str, Any]:
    """Run every algorithm on exact and on random data; return wrong elements and a digest of the
    bits.
    """
    algorithms.PIECE_BYTES = piece_bytes
    members, group = (NO_NEIGHBOURS, some) if sub else (range(dist.get_world_size()), own)
    rank, found = dist.get_rank(), {}
    if rank not in members:
        return {}
    kind = getattr(torch, dtype)
    expected = torch.stack([data_of(r, length, kind, seed, True).double() for r in members]).sum(0)
    for name, reduce in ALGORITHMS.items():
        exact, random = (data_of(rank, length, kind, seed, e) for e in (True, False))
        reduce(exact, group)
        reduce(random, group)
        raw = random.view(torch.uint8).numpy().tobytes()
        found[name] = int((exact.double() != expected).sum()), hashlib.sha256(raw).hexdigest()
    return found


def in_order(own: Any, some: Any) -> list[int]:
    """Start many sums at once; return the order in which they were done."""
    reducer, done = AsyncAllReduce("ring", own, torch.device("cpu")), []
    buffers = [torch.full((1 + 1000 * (i % 3),), float(i)) for i in range(12)]
    futures = [
        reducer.start(buffer).then(lambda f, i=i: done.append(i) or f.value())
        for i, buffer in enumerate(buffers)
    ]
    for i, future in enumerate(futures):
        value = future.wait()
        assert value.data_ptr() == buffers[i].data_ptr()
        assert (value == i * dist.get_world_size()).all()
    reducer.close()
    return done


def beside(own: Any, some: Any) -> bool:
    """Rank 0 begins a sum and goes on; only what it sends after that lets the others take part.
    True: not yet done.
    """
    reducer = AsyncAllReduce("tree", own, torch.device("cpu"))
    buffer, word, early = torch.ones(10), torch.zeros(1), False
    if dist.get_rank() == 0:
        future = reducer.start(buffer)
        early = not future.done()
        for peer in range(1, dist.get_world_size()):
            dist.send(word, peer)
    else:
        dist.recv(word, 0)
        early, future = True, reducer.start(buffer)
    assert (future.wait() == dist.get_world_size()).all()
    reducer.close()
    return early


def fails(own: Any, some: Any) -> tuple[list[str], list[float]]:
    """Give the reducer what it cannot sum, then something it could; return what the futures raise,
    and the latter.
    """
    reducer, said, last = AsyncAllReduce("ring", own, torch.device("cpu")), [], torch.ones(4)
    for buffer in (torch.ones(4, 4).T[:, 1:], last):
        try:
            reducer.start(buffer).wait()
        except RuntimeError as error:
            said.append(str(error))
    reducer.close()
    return said, last.tolist()


def in_ddp(own: Any, some: Any, name: str) -> tuple[bool, str]:
    """Return whether a hook with the reducer leaves DDP's own gradients, and what backward raises
    when it fails.
    """
    reducer, world = AsyncAllReduce(name, own, torch.device("cpu")), dist.get_world_size()

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buffer = bucket.buffer() if state is None else torch.ones(4, 4).T[:, 1:]
        return reducer.start(buffer.div_(world))

    grads = []
    for hooked, state in ((False, None), (True, None), (True, "broken")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        if hooked:
            ddp.register_comm_hook(state, hook)
        torch.manual_seed(1 + dist.get_rank())
        try:
            ddp(torch.randint(-4, 5, (8, 16)).float()).sum().backward()
        except RuntimeError as error:
            reducer.close()
            return all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), str(error)
        grads.append([p.grad for p in model.parameters()])
    raise AssertionError("a failed sum went unnoticed")


# What is asked of them.


@pytest.mark.parametrize(
    "world", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 4, 5, 6, 7, 8, 9))]
)
def test_every_sum_is_exact_and_the_same_everywhere(world: int) -> None:
    with pool_of(world) as pool:

        @settings(
            max_examples=8 if world < 6 else 3,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            length=st.one_of(st.integers(0, 2 * world), st.integers(0, 3000)),
            dtype=st.sampled_from(["float32", "bfloat16", "float16", "int32", "int64"]),
            seed=st.integers(0, 99),
            # Short ones: the pipelines are long
            piece_bytes=st.sampled_from([64, 1000, algorithms.PIECE_BYTES]),
        )
        @example(length=0, dtype="float32", seed=0, piece_bytes=64)
        @example(length=world - 1, dtype="bfloat16", seed=0, piece_bytes=64)
        @example(length=100 * world + 1, dtype="float32", seed=0, piece_bytes=64)
        def check(**case: Any) -> None:
            assert_right(pool.ask("sum_up", **case, sub=False))

        check()
        if world == 3:  # pieces as they are
            assert_right(
                pool.ask(
                    "sum_up",
                    length=10**6 + 1,
                    dtype="int32",
                    seed=0,
                    piece_bytes=1 << 20,
                    sub=False,
                )
            )
        if world == 5:
            answers = pool.ask(
                "sum_up", length=301, dtype="float32", seed=0, piece_bytes=64, sub=True
            )
            assert [rank for rank, answer in enumerate(answers) if answer] == NO_NEIGHBOURS
            assert_right([answer for answer in answers if answer])


def assert_right(answers: list[dict[str, Any]]) -> None:
    for name in ALGORITHMS:
        assert [answer[name][0] for answer in answers] == [0] * len(answers), f"{name} is wrong"
        assert len({answer[name][1] for answer in answers}) == 1, (
            f"{name}: the ranks hold different bits"
        )


def test_the_reducer_works_beside_its_caller() -> None:
    with pool_of(2) as pool:
        assert pool.ask("in_order") == [list(range(12))] * 2
        assert pool.ask("beside") == [True, True]
        for said, last in pool.ask("fails"):
            assert len(said) == 2
            assert all("view" in text for text in said)
            assert last == [1, 1, 1, 1], (
                "after a failure nothing is summed: the ranks are out of step"
            )


def test_ddp_trains_on_the_reducer() -> None:
    # A/2 + b/2 = b/2 + a/2; three ranks would sum in another order than DDP
    with pool_of(2) as pool:
        for name in ("ring", "recursive_doubling"):
            for equal, said in pool.ask("in_ddp", name=name):
                assert equal
                assert "algorithms.py" in said, (
                    "the failure's own place, not that of DDP's complaint"
                )


# An ideal network: how long an algorithm takes where nothing but its own order of messages holds it
# up.


class Message:
    """A send or a receive of one rank; it is done when its data is through."""

    def __init__(self, network: Network, tensor: torch.Tensor) -> None:
        self.network, self.tensor, self.done, self.waited, self.taken = (
            network,
            tensor,
            False,
            False,
            False,
        )

    def wait(self) -> None:
        assert not self.taken, "gloo waits for ever for what was waited for before"
        self.taken = not self.network.in_order
        self.network.wait_for(self)


class Network:
    """Ranks as threads, and a clock that moves only while all of them wait, so that a run is the
    same every time.

    A rank sends one message at a time and receives one, a byte takes a second, alpha is 0, and what
    is sent is under way whether or not the other side has asked for it. In order: a rank's messages
    run one after the other, and none is through before the other side has come to it, as on a
    stream of NCCL.
    """

    def __init__(self, size: int, in_order: bool = False) -> None:
        self.size, self.in_order, self.now, self.awake = size, in_order, 0.0, size
        self.stuck, self.turn = False, threading.Condition()
        self.out: list[deque[tuple[int, Message]]] = [deque() for _ in range(size)]
        self.flying: list[tuple[float, int, int, Message]] = []
        # (from, to) -> receives
        self.wanted: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        # What has come, and is not asked
        self.landed: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)

    def run(self, name: str, length: int) -> tuple[list[torch.Tensor], float]:
        """Return what every rank holds after the sum, and the seconds; rank r begins with r + 1
        everywhere.
        """
        data = [torch.full((length,), float(rank + 1)) for rank in range(self.size)]
        threads = [
            threading.Thread(target=self.rank, args=(name, each, rank))
            for rank, each in enumerate(data)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return data, self.now

    def rank(self, name: str, tensor: torch.Tensor, rank: int) -> None:
        Place.here.group = Place(self, rank)
        try:
            ALGORITHMS[name](tensor, None)
        except TimeoutError:
            assert self.stuck
        finally:
            with self.turn:
                self.awake -= 1
                self.turn.notify_all()

    def wait_for(self, message: Message) -> None:
        with self.turn:
            if message.done:
                return
            message.waited, self.awake = True, self.awake - 1
            while not message.done and not self.stuck:
                if self.awake == 0:
                    self.move()
                else:
                    self.turn.wait()
            if not message.done:
                raise TimeoutError("every rank waits for another")

    def move(self) -> None:
        """Start what can start, and let the clock go to the next arrival."""
        for rank, queue in enumerate(self.out):
            busy = {(0, f[1]) for f in self.flying} | {(1, f[2]) for f in self.flying}
            if not queue or (0, rank) in busy or (1, queue[0][0]) in busy:
                continue
            to, message = queue[0]
            if not self.in_order or len(self.wanted[rank, to]) > len(self.landed[rank, to]):
                queue.popleft()
                self.flying.append((self.now + message.tensor.nbytes, rank, to, message))
        if not self.flying:
            self.stuck = True
            self.turn.notify_all()
            return
        first = min(self.flying, key=lambda f: f[:3])
        self.flying.remove(first)
        self.now, sender, to, message = first
        self.landed[sender, to].append(message.tensor.clone())
        self.finish(message)
        self.match(sender, to)

    def match(self, sender: int, to: int) -> None:
        while self.wanted[sender, to] and self.landed[sender, to]:
            message = self.wanted[sender, to].popleft()
            message.tensor.copy_(self.landed[sender, to].popleft())
            self.finish(message)

    def finish(self, message: Message) -> None:
        message.done = True
        self.awake += message.waited
        self.turn.notify_all()


class Place:
    """A rank's view of the network: what algorithms._Group is on real ranks."""

    here = threading.local()

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.size, self.in_order = (
            network,
            rank,
            network.size,
            network.in_order,
        )

    def start(self, sends: Any, receives: Any) -> list[Message]:
        net, works = self.network, []
        with net.turn:
            for to_send, messages in ((True, sends), (False, receives)):
                for tensor, peer in messages:
                    if not tensor.numel():
                        continue
                    works.append(Message(net, tensor))
                    if to_send:
                        net.out[self.rank].append((peer, works[-1]))
                    else:
                        net.wanted[peer, self.rank].append(works[-1])
                        net.match(peer, self.rank)
        if self.in_order:
            wait_for_all(works)
        return works

    def run(self, sends: Any, receives: Any) -> None:
        wait_for_all(self.start(sends, receives))


def wait_for_all(works: list[Message]) -> None:
    for work in works:
        work.wait()


@pytest.fixture
def ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        algorithms, "_open", lambda tensor, group: (tensor.view(-1), Place.here.group)
    )
    monkeypatch.setattr(algorithms, "PIECE_BYTES", 256)


def in_bytes(name: str, size: int, in_order: bool = False, pieces: int = 32) -> float:
    """Return what an algorithm takes on an ideal network as multiples of S beta; check that its
    sums are right.
    """
    length = 64 * pieces
    data, seconds = Network(size, in_order).run(name, length)
    assert all((each == size * (size + 1) / 2).all() for each in data), (
        f"{name} is wrong, or waits for ever"
    )
    return seconds / (4 * length)


@pytest.mark.usefixtures("ideal")
@pytest.mark.parametrize("size", range(1, 10))
def test_on_a_stream_nobody_waits_for_ever(size: int) -> None:
    """In order, and with sends that last until they are received: leaves first would hang here from
    two ranks on.
    """
    for name in ALGORITHMS:
        in_bytes(name, size, in_order=True, pieces=5)


@pytest.mark.parametrize("size", range(1, 40))
def test_trees_are_trees(size: int) -> None:
    links = [tree_links(rank, size) for rank in range(size)]
    assert [parent for parent, _ in links].count(None) == 1
    for rank, (parent, children) in enumerate(links):
        assert len(children) <= 2
        assert parent is None or rank in links[parent][1]
        assert all(links[child][0] == rank for child in children)
        assert rank % 2 or not children, (
            "even ranks are leaves, so that the second tree can use them"
        )
        height = 0
        while parent is not None:
            parent, height = links[parent][0], height + 1
        assert height <= size.bit_length() - 1


def test_cost_follows_the_papers() -> None:
    a, b, s = 1e-5, 1e-9, 10**6  # 10 us, 1 GB/s: a millisecond for the bytes
    by_hand_us = {  # N = 2, N = 4, N = 6
        "ring": (2 * 10 + 1000, 6 * 10 + 1.5 * 1000, 10 * 10 + 10 / 6 * 1000),
        "tree": (2 * 10 + 2 * 1000, 4 * 10 + 4 * 1000, 4 * 10 + 4 * 1000),
        "double_tree": (2 * 10 + 1000, 4 * 10 + 2 * 1000, 6 * 10 + 2 * 1000),
        "recursive_doubling": (1010, 2 * 1010, 4 * 1010),
        "halving_doubling": (2 * 10 + 1000, 4 * 10 + 1.5 * 1000, 4 * 10 + 1.5 * 1000 + 2 * 1010),
        "flat": (2 * 1010, 6 * 1010, 10 * 1010),
    }
    for name, expected_us in by_hand_us.items():
        assert cost(name, 1, s, a, b) == 0
        for n, us in zip((2, 4, 6), expected_us, strict=True):
            assert cost(name, n, s, a, b) == pytest.approx(us * 1e-6)
    with pytest.raises(
        ConfigError, match="no cost is known for all-reduce rings; known: ring, tree"
    ):
        cost("rings", 4, s, a, b)
