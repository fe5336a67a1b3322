"""Rendezvous records, the choice of a backend, and ranks that do not meet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nanoray.errors import ConfigError, RankDiffers, RendezvousError
from nanoray.parallel.mesh import break_meeting, join, refuse_meeting
from nanoray.parallel.rendezvous import (
    RankDevice,
    Rendezvous,
    choose_backend,
    connect_store,
    open_store,
    public_name,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_rendezvous_from_torchruns_environment() -> None:
    r = Rendezvous.from_env(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (r.rank, r.world_size, r.local_rank, r.local_world_size, r.node_rank) == (3, 4, 1, 2, 1)
    assert (r.master_addr, r.master_port, r.agent_store) == ("10.0.0.1", 29500, True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"MASTER_PORT": None},
            "but not MASTER_PORT; set all four (torchrun does), or none for one process",
        ),
        ({"RANK": "4"}, "RANK = 4 is outside 0..WORLD_SIZE-1 = 3; ranks count from 0"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' must be a whole number: invalid literal"),
    ],
)
def test_a_broken_environment_is_named(change: dict[str, str | None], text: str) -> None:
    env = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ConfigError) as error:
        Rendezvous.from_env(env)
    assert text in str(error.value)


CPU = RankDevice("cpu", "node", "")
GPUS = [RankDevice("cuda", "node", "0"), RankDevice("cuda", "node", "1")]
SHARED = [RankDevice("cuda", "node", "0")] * 2
SLICES = [RankDevice("mig", "node", "GPU-1")] * 2


@pytest.mark.parametrize(
    ("ranks", "requested", "nccl", "backend", "reason"),
    [
        ([CPU, CPU], "auto", None, "gloo", "CPU ranks"),
        (GPUS, "auto", (2, 29, 7), "nccl", "one rank per GPU, NCCL 2.29.7"),
        (GPUS, "auto", None, "gloo", "this torch build has no NCCL"),
        (
            SHARED,
            "auto",
            (2, 29, 7),
            "gloo",
            "ranks that share a GPU: NCCL 2.29.7 refuses that (from 2.30.3",
        ),
        (SHARED, "auto", (2, 30, 3), "nccl", "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (
            SLICES,
            "auto",
            (2, 30, 7),
            "gloo",
            "slices of one GPU: NCCL 2.30.7 refuses that (from 2.31.0",
        ),
        (SLICES, "auto", (2, 31, 2), "nccl", "NCCL_MULTI_RANK_GPU_ENABLE=1"),
    ],
)
def test_choice_of_a_backend(
    ranks: Any, requested: str, nccl: Any, backend: str, reason: str
) -> None:
    choice = choose_backend(ranks, requested, nccl)
    assert choice.backend == backend
    assert reason in choice.reason
    shares = backend == "nccl" and len(set(ranks)) < len(ranks)
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in choice.env) == shares
    assert not shares or choice.env["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("ranks", "nccl", "text"),
    [
        (
            [CPU],
            None,
            "backend = nccl, but ranks run on CPU; use backend gloo or auto, or device cuda",
        ),
        (GPUS, None, "this torch build has no NCCL; use backend gloo"),
        (
            SLICES,
            (2, 29, 7),
            "NCCL 2.29.7 refuses slices of one GPU; use backend gloo or auto, or install",
        ),
    ],
)
def test_nccl_that_cannot_work_is_refused(ranks: Any, nccl: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_backend(ranks, "nccl", nccl)
    assert text in str(error.value)


def rendezvous(rank: int, world: int, port: int, secret: str = "s") -> Rendezvous:
    return Rendezvous(
        rank=rank,
        world_size=world,
        master_addr="127.0.0.1",
        master_port=port,
        secret=secret,
        agent_store=True,
    )


def test_absent_ranks_are_named_within_the_timeout() -> None:
    store = open_store("127.0.0.1", 3, 10)
    start = time.monotonic()
    with pytest.raises(
        RendezvousError, match="rank 0 timed out waiting for rank 1, 2 of 3; look at their logs"
    ):
        join(rendezvous(0, 3, store.port), {}, timeout_s=5, init_timeout_s=1, store=store)
    assert time.monotonic() - start < 60, "a guard against a hang"


def test_a_stranger_without_the_secret_does_not_count() -> None:
    store = open_store("127.0.0.1", 2, 10)
    stranger = connect_store(rendezvous(1, 2, store.port, "guess"), 5)
    stranger.set(f"nanoray/{public_name('guess')}/facts/1", "{}")
    with pytest.raises(RendezvousError, match="timed out waiting for rank 1"):
        join(rendezvous(0, 2, store.port), {}, timeout_s=5, init_timeout_s=1, store=store)


@pytest.mark.parametrize(("reference", "unfit"), [(0, 1), (1, 0)])
def test_a_fact_that_differs_is_named_with_both_values(reference: int, unfit: int) -> None:
    """Both ranks know at once; the one that differs knows that it is the one."""
    store, seen = open_store("127.0.0.1", 2, 10), dict[int, RendezvousError]()

    def meet(rank: int) -> None:
        r = replace(rendezvous(rank, 2, store.port), reference=reference)
        with pytest.raises(RendezvousError) as caught:
            join(r, {"torch": "2.12" if rank == unfit else "2.13"}, timeout_s=60, init_timeout_s=60)
        seen[rank] = caught.value

    in_threads(meet, 0, 1)
    assert str(seen[0]) == str(seen[1])
    assert str(seen[0]).startswith(
        f"rank {unfit} has torch = 2.12, rank {reference} has 2.13; start every rank with"
    )
    assert isinstance(seen[unfit], RankDiffers)
    assert not isinstance(seen[reference], RankDiffers)


def test_a_meeting_without_a_lost_rank_is_broken_at_once() -> None:
    """Whoever serves the store knows of the loss from the driver; the others need not wait for
    their time to be up.
    """
    store, seen = open_store("127.0.0.1", 3, 10), list[str]()

    def meet(rank: int) -> None:
        with pytest.raises(RendezvousError) as caught:
            join(rendezvous(rank, 3, store.port), {}, timeout_s=60, init_timeout_s=60)
        seen.append(str(caught.value))

    def tell(_: int) -> None:
        while store.add(f"nanoray/{public_name('s')}/arrived", 0) < 2:
            time.sleep(0.01)
        break_meeting(store, "s", 1)

    start = time.monotonic()
    in_threads(meet, 0, 2, also=tell)
    assert seen == ["rank 1 of 3 was lost before the ranks had met"] * 2
    assert time.monotonic() - start < 50, "not after init_timeout_s"


def test_a_rank_that_cannot_take_part_says_why() -> None:
    """Such as one without the run's folder: its own output is on another host."""
    store, seen = open_store("127.0.0.1", 3, 10), list[str]()

    def meet(rank: int) -> None:
        with pytest.raises(RendezvousError) as caught:
            join(rendezvous(rank, 3, store.port), {}, timeout_s=60, init_timeout_s=60)
        seen.append(str(caught.value))

    def refuse(_: int) -> None:
        refuse_meeting(store, rendezvous(1, 3, store.port), "no run's folder on beta")

    start = time.monotonic()
    in_threads(meet, 0, 2, also=refuse)
    assert seen == ["rank 1 of 3 cannot take part: no run's folder on beta"] * 2
    assert time.monotonic() - start < 50, "not after init_timeout_s"


def in_threads(
    meet: Callable[[int], None], *ranks: int, also: Callable[[int], None] | None = None
) -> None:
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    threads += [threading.Thread(target=also, args=(0,))] if also else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)


def test_a_listener_that_never_answers_does_not_hang_us() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(
            RendezvousError, match=r"rank 1 cannot reach the store at 127\.0\.0\.1:"
        ):
            connect_store(rendezvous(1, 2, silent.getsockname()[1]), 1)
        assert time.monotonic() - start < 60, "a guard against a hang"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "no-such-host.invalid"),
        ({"RANK": "0"}, "Address already in use"),
        ({}, "127.0.0.1"),
    ],
)
def test_the_variables_of_an_address_that_fails_are_named(
    change: dict[str, str], text: str
) -> None:
    """In one line, with torch's own reason; the port belongs to a program that says nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        rank = Rendezvous.from_env(env | {"MASTER_PORT": str(port)} | change)
        with pytest.raises(RendezvousError) as error:
            connect_store(rank, 1)
    said = str(error.value)
    assert said.startswith(
        f"rank {rank.rank} cannot reach the store at {rank.master_addr}:{port}; "
    )
    assert "MASTER_ADDR and MASTER_PORT must name rank 0's host, and a port open to all" in said
    assert text in said
    assert "\n" not in said
