"""What nanoray assumes about NCCL where a rank is lost, each with its source and a check.

A check runs in a process of each of two ranks, over NCCL on GPUs (tests/gpu) and over the stand-in
on CPUs (tests/ranks/test_nccl_stand_in.py). So the stand-in has what is assumed, and an hour on two
GPUs shows whether NCCL has it.

Sources: files of pytorch/pytorch under torch/csrc/distributed/c10d as of torch 2.13; the NCCL user
guide (docs.nvidia.com/deeplearning/nccl/user-guide); issues.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nanoray.faults.cause import is_collective_error
from nanoray.machine.environment import environment
from nanoray.parallel.backends import load_backend, settings_for_aborts
from nanoray.parallel.mesh import Mesh, abandon_groups, abort_groups, collectives_started, join
from nanoray.parallel.rendezvous import Rendezvous, open_store

LOST = 1  # the rank that ends, of two
SOON_S = 15.0  # what must come at once comes within this, also on a busy machine
HOLDS_S = 1.0  # what must not come does not within this
TIMEOUT_S = 5  # of groups in which a timeout is awaited


@dataclass(frozen=True)
class Ranks:
    """What two ranks have: a process each."""

    context: BaseContext  # of multiprocessing
    backend: str
    kind: str  # cpu | cuda
    env: Mapping[str, str]  # of a backend whose ranks share a device


@dataclass
class Place:
    """One of the ranks of a check."""

    rank: int
    backend: str
    device: torch.device
    port: int

    def join(self, secret: str, world: int = 2, timeout_s: float = 60) -> Mesh:
        """Form the groups as a run with --abort_nccl does. (all ranks)"""
        rendezvous = Rendezvous(
            rank=self.rank,
            world_size=world,
            master_addr="127.0.0.1",
            master_port=self.port,
            device=str(self.device),
            backend=self.backend,
            secret=secret,
            agent_store=True,
            abortable=True,
        )
        return join(rendezvous, {}, timeout_s, 60)

    def form(self, secret: str, timeout_s: float = 60) -> None:
        """Form the default group alone, and let it communicate once. (all ranks)"""
        self.begin(secret, timeout_s)
        assert self.sum().tolist() == [3.0]

    def begin(self, secret: str, timeout_s: float = 60) -> None:
        """Form the default group alone; nothing is sent."""
        store = dist.TCPStore("127.0.0.1", self.port, 2, timeout=timedelta(seconds=60))
        dist.init_process_group(
            load_backend(self.backend, self.device.type),
            store=dist.PrefixStore(secret, store),
            rank=self.rank,
            world_size=2,
            timeout=timedelta(seconds=timeout_s),
            device_id=self.device if self.device.type == "cuda" else None,
        )

    def sum(self, group: Any = None) -> Tensor:
        """Add up the ranks' numbers from 1 on, and wait for the device. (all ranks)"""
        value = torch.full((1,), self.rank + 1.0, device=self.device)
        dist.all_reduce(value, group=group)
        self.synchronize()
        return value

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def end_lost(self) -> None:
        """End the rank that is to be lost, by SIGKILL."""
        if self.rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)  # it is gone


class Started:
    """A function that runs in a thread: what it returned or raised, once it has ended."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.outcome: list[Any] = []
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome.append(self._function())
        except Exception as error:
            self.outcome.append(error)

    def ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return bool(self.outcome)


def aborted_in_a_thread() -> None:
    """Abort all groups as the driver's order does, on another thread."""
    order = threading.Thread(target=abort_groups)
    order.start()
    order.join(SOON_S)
    assert not order.is_alive(), "the abort hangs"


# ---- checks: each runs on both ranks, and rank LOST ends in most ---------------------------------


def waits_on(place: Place) -> None:
    place.form("a1")
    place.end_lost()
    waiting = Started(place.sum)
    assert not waiting.ended(HOLDS_S), waiting.outcome
    aborted_in_a_thread()


def ends_without_an_error(place: Place) -> None:
    place.form("a2")
    place.end_lost()
    waiting = Started(place.sum)
    assert not waiting.ended(HOLDS_S), waiting.outcome
    aborted_in_a_thread()
    assert waiting.ended(SOON_S), "the abort does not end it"
    assert isinstance(waiting.outcome[0], Tensor), waiting.outcome
    assert waiting.outcome[0].tolist() != [3.0], "nobody has sent the 2"


def aborts_from_another_thread(place: Place) -> None:
    mesh = place.join("a3")
    mesh.all_reduce(torch.ones(1, device=place.device))
    place.end_lost()
    waiting = Started(lambda: mesh.all_reduce(torch.ones(1, device=place.device)))
    assert not waiting.ended(HOLDS_S), waiting.outcome
    aborted_in_a_thread()
    aborted_in_a_thread()  # twice is as once
    assert waiting.ended(SOON_S)
    # nanoray's own check of the order, because the collective reports nothing.
    assert "the driver has ordered to abort the group" in str(waiting.outcome[0])


def stays_poisoned(place: Place) -> None:
    place.form("a4")
    place.end_lost()
    aborted_in_a_thread()
    for _ in range(2):
        again = Started(place.sum)
        assert again.ended(SOON_S)
        error = again.outcome[0]
        assert isinstance(error, dist.DistBackendError), error
        assert "was aborted" in str(error)
        assert is_collective_error(error)


def raises_no_noted_error(place: Place) -> None:
    """The watchdog notes a timeout. The process lives, and waits on; only an abort ends that."""
    place.form("a5", timeout_s=TIMEOUT_S)
    place.end_lost()
    first = dist.all_reduce(torch.ones(1, device=place.device), async_op=True)
    assert first is not None
    time.sleep(TIMEOUT_S + 3)
    late = Started(lambda: (first.wait(), place.sum()))
    assert not late.ended(HOLDS_S), late.outcome
    aborted_in_a_thread()
    assert late.ended(SOON_S)


def aborts_several_at_once(place: Place) -> None:
    place.form("a6")
    groups = [dist.new_group(timeout=timedelta(seconds=60)) for _ in range(2)]
    for group in groups:
        place.sum(group)
    place.end_lost()
    waiting = [Started(lambda group=group: place.sum(group)) for group in groups]
    assert not any(each.ended(HOLDS_S / 2) for each in waiting)
    aborted_in_a_thread()
    assert all(each.ended(SOON_S) for each in waiting)


def initialises_without_a_rank(place: Place) -> None:
    """Rank LOST never comes. The other one gets an error in time, and not before it communicates."""
    if place.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    forming = Started(lambda: place.begin("a7"))
    assert forming.ended(SOON_S), "init_process_group waits for the absent rank"
    assert forming.outcome == [None], forming.outcome
    first = Started(place.sum)
    assert first.ended(TIMEOUT_S + SOON_S), "the first collective waits for ever"
    assert is_collective_error(first.outcome[0]), first.outcome


def ends_the_process_by_default(place: Place) -> None:
    """Without settings_for_aborts. The other rank is alive, and does not take part."""
    place.form("a8", timeout_s=TIMEOUT_S)
    if place.rank == LOST:
        time.sleep(4 * SOON_S)
        return
    place.sum()
    time.sleep(4 * SOON_S)
    raise AssertionError("it outlived the timeout of its collective")


def forms_again(place: Place) -> None:
    """An abort on both ranks, then another name in the same processes; three times."""
    for round_number in range(3):
        mesh = place.join(f"a9 {round_number}")
        value = torch.full((1,), place.rank + 1.0, device=place.device)
        assert mesh.all_reduce(value).tolist() == [3.0]
        dist.barrier(group=mesh.patient_group)
        abort_groups()
        mesh.leave()
    # Fewer ranks than before, and more again.
    if place.rank != LOST:
        alone = place.join("a9 alone", world=1)
        alone.leave()
    mesh = place.join("a9 grown")
    value = torch.full((1,), place.rank + 1.0, device=place.device)
    assert mesh.all_reduce(value).tolist() == [3.0]
    dist.barrier(group=mesh.patient_group)


def is_destroyed_soon(place: Place) -> None:
    """The watchdog has noted an error, and an aborted group is released."""
    place.form("a10", timeout_s=TIMEOUT_S)
    place.end_lost()
    waiting = Started(place.sum)
    time.sleep(TIMEOUT_S + 3)
    aborted_in_a_thread()
    assert waiting.ended(SOON_S)
    began = time.monotonic()
    leaving = Started(abandon_groups)
    assert leaving.ended(SOON_S), "a thread of the group is waited for"
    assert time.monotonic() - began < SOON_S


def counts_collectives(place: Place) -> None:
    place.form("a11")
    before = collectives_started()
    for _ in range(3):
        place.sum()
    assert collectives_started() == before + 3


def closes_votes(place: Place) -> None:
    """A rank that is frozen has its connections open; the order ends a vote, too."""
    mesh = place.join("a12")
    mesh.all_reduce(torch.ones(1, device=place.device))
    if place.rank == LOST:
        time.sleep(4 * SOON_S)
        return
    vote = Started(lambda: mesh.max_of(torch.zeros(1, dtype=torch.uint8)))
    assert not vote.ended(HOLDS_S)
    aborted_in_a_thread()
    assert vote.ended(SOON_S), "the vote waits on"
    assert is_collective_error(vote.outcome[0]), vote.outcome


def adds_in_the_same_order(place: Place) -> None:
    """DDP's steps in a group, and again in one that is formed after an abort."""
    bits = []
    for turn in range(2):
        place.form(f"a13 {turn}")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        wrapped = DistributedDataParallel(model.to(place.device), bucket_cap_mb=0.02)
        for step in range(4):
            torch.manual_seed(100 * step + place.rank)
            wrapped(torch.randn(16, 64).to(place.device)).square().mean().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        bits.append(torch.cat(gradients).cpu())
        del wrapped, model
        dist.barrier()
        place.synchronize()
        abort_groups()
        abandon_groups()
    assert torch.equal(*bits)


def keeps_what_it_sends(place: Place) -> None:
    """Rank 0 sends, and the other one is lost: what is sent may be the only copy of a state."""
    place.form("a14")
    place.end_lost()
    kept = torch.arange(1 << 20, dtype=torch.float32, device=place.device)
    sent = kept.clone()

    def send() -> None:
        for _ in range(20):  # the first ones may fit into buffers
            dist.broadcast(sent, src=0)
        place.synchronize()

    sending = Started(send)
    sending.ended(HOLDS_S)
    aborted_in_a_thread()
    assert sending.ended(SOON_S)
    assert torch.equal(sent, kept)


# ---- the list ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumption:
    """One row: what is assumed, who says so, and how to see it."""

    id: str
    statement: str
    source: str
    check: Callable[[Place], None]
    others: tuple[int, ...] = (0,)  # ranks that must end well
    codes: tuple[int, ...] = (-signal.SIGKILL,)  # exit codes of the ranks that need not
    env: Mapping[str, str] | None = None  # in place of settings_for_aborts


BOTH: dict[str, Any] = {"others": (0, 1), "codes": ()}
ASSUMPTIONS = (
    Assumption(
        "A1",
        "A collective waits on when a peer on the same node is lost or frozen: the host sees no "
        "error. On a GPU wait() returns at once, and the host waits where it next synchronises",
        "ProcessGroupNCCL.cpp, WorkNCCL::wait and synchronizeStream",
        waits_on,
    ),
    Assumption(
        "A2",
        "An aborted collective ends like any other: the wait returns, with a wrong result and "
        "without an error",
        "NCCL user guide, API, ncclCommAbort; ProcessGroupNCCL.cpp, WorkNCCL::wait",
        ends_without_an_error,
    ),
    Assumption(
        "A3",
        "abort() works from another thread while the host waits, with the lock of Python free, and "
        "may be repeated",
        "ProcessGroupNCCL.cpp, ProcessGroupNCCL::abort (a thread of its own does it)",
        aborts_from_another_thread,
    ),
    Assumption(
        "A4",
        "An aborted communicator stays so: each later call raises DistBackendError",
        "NCCLUtils.cpp, NCCLComm::getNcclComm",
        stays_poisoned,
    ),
    Assumption(
        "A5",
        "With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 the watchdog ends no process, and the error that it "
        "has noted is not raised: the host waits on, until the group is aborted",
        "ProcessGroupNCCL.cpp, Watchdog::runLoop, which notes it in a copy of the work; "
        "SHOULD_TEAR_DOWN in ProcessGroupNCCL.hpp",
        raises_no_noted_error,
    ),
    Assumption(
        "A6",
        "Several communicators that wait for a lost peer can be aborted at the same time; one after "
        "the other may deadlock",
        "pytorch/pytorch#119797, NVIDIA/nccl#1013",
        aborts_several_at_once,
    ),
    Assumption(
        "A7",
        "With TORCH_NCCL_USE_COMM_NONBLOCKING=1 a group forms without a rank that does not come, "
        "and the first collective fails after TORCH_NCCL_NONBLOCKING_TIMEOUT",
        "ProcessGroupNCCL.cpp, useNonblocking; NCCLUtils.cpp, NCCLComm::getNcclComm and waitReady; "
        "against it: pytorch/pytorch#153960, a hang of NCCL 2.26 in this mode",
        initialises_without_a_rank,
        env=settings_for_aborts(TIMEOUT_S),
    ),
    Assumption(
        "A8",
        "By default a collective that takes longer than the group's timeout ends the process by "
        "SIGABRT",
        "ProcessGroupNCCL.cpp, WorkNCCL::checkTimeout and handleException; docs.pytorch.org, "
        "ProcessGroupNCCL Environment Variables",
        ends_the_process_by_default,
        others=(),
        codes=(-signal.SIGABRT, 0),
        env={"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
    ),
    Assumption(
        "A9",
        "After an abort the same processes form groups under another name, in any number, and their "
        "sums are right",
        "NCCL user guide, Creating a Communicator, fault tolerance; torchft, process_group.py",
        forms_again,
        **BOTH,
    ),
    Assumption(
        "A10",
        "An aborted group is released within seconds although its watchdog has noted an error, with "
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=50 and TORCH_NCCL_DUMP_ON_TIMEOUT=0",
        "ProcessGroupNCCL.cpp, Watchdog::runLoop (four times the first), HeartbeatMonitor::runLoop "
        "(eight minutes with the second), ~ProcessGroupNCCL, which waits for both",
        is_destroyed_soon,
    ),
    Assumption(
        "A11",
        "A group counts the collectives that were started: a rank that hangs has the lowest number",
        "ProcessGroupNCCL.cpp, getSequenceNumberForGroup",
        counts_collectives,
        **BOTH,
    ),
    Assumption(
        "A12",
        "Groups of gloo beside one of NCCL meet in a store of their own, through which an order "
        "finds and closes their connections",
        "torch/distributed/distributed_c10d.py, _new_group_with_tag",
        closes_votes,
        codes=(0, -signal.SIGKILL),
    ),
    Assumption(
        "A13",
        "Two communicators of the same ranks add in the same order: a run that was recovered has "
        "the bits of one without a fault",
        "No document promises it. NCCL chooses by topology and size (user guide, NCCL_ALGO), which "
        "are the same; two ranks show little, so this check should run on as many GPUs as there are",
        adds_in_the_same_order,
        **BOTH,
    ),
    Assumption(
        "A14",
        "An aborted broadcast has not changed the tensor of the rank that sends: it may hold the "
        "only copy of the state",
        "NCCL user guide, API, ncclBroadcast (sendbuff is const; in place, the root has nothing to "
        "write)",
        keeps_what_it_sends,
    ),
)
BY_ID = {each.id: each for each in ASSUMPTIONS}


def observe(assumption: Assumption, ranks: Ranks) -> None:
    """Run a check on two ranks. Raises AssertionError with what a rank saw."""
    store = open_store("127.0.0.1", 2, 60)
    lines = []
    processes = []
    for rank in range(2):
        here, there = ranks.context.Pipe(duplex=False)
        order = assumption.id, rank, ranks.backend, ranks.kind, store.port, dict(ranks.env), there
        process = ranks.context.Process(target=_be_rank, args=order, daemon=True)  # type: ignore[attr-defined]
        process.start()
        there.close()
        lines.append(here)
        processes.append(process)

    # The ranks that must end well first: the others may wait for as long as they live.
    found = {}
    deadline = time.monotonic() + 120
    needed = assumption.others or (0,)
    for rank in needed:
        try:
            arrived = lines[rank].poll(max(0.1, deadline - time.monotonic()))
            found[rank] = lines[rank].recv() if arrived else "no answer"
        except EOFError:
            processes[rank].join(5)
            found[rank] = processes[rank].exitcode
    for process in processes:
        process.join(0.5)
        process.kill()
        process.join()

    for rank in range(2):
        if rank in assumption.others:
            assert found[rank] == "", f"{assumption.id}, rank {rank}: {found[rank]}"
        else:
            code = processes[rank].exitcode
            allowed = (*assumption.codes, -signal.SIGKILL) if rank != 0 else assumption.codes
            assert code in allowed, f"{assumption.id}, rank {rank} ended with {code}"


def _be_rank(
    name: str, rank: int, backend: str, kind: str, port: int, env: dict[str, str], line: Connection
) -> None:
    assumption = BY_ID[name]
    settings = settings_for_aborts(60) if assumption.env is None else dict(assumption.env)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    said = ""
    with environment(settings | env):
        try:
            assumption.check(Place(rank, backend, device, port))
        except BaseException:
            said = traceback.format_exc()
    line.send(said)
    os._exit(0)  # whatever still waits
