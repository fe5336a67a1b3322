"""The hand-written all-reduces on real gloo ranks: right to the bit, the same bits everywhere, and
inside DDP.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
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

from nanoray.parallel import algorithms
from nanoray.parallel.algorithms import ALGORITHMS, AsyncAllReduce
from nanoray.parallel.rendezvous import open_store
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
