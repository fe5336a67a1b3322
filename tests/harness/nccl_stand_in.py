"""A communicator on CPU tensors that fails as NCCL does: `--backend tests.harness.nccl_stand_in:stand_in`.

gloo computes, so a healthy run has gloo's bits. What a caller sees of a failure is NCCL's:

    collective ─► queue ─► one thread, in order ─► gloo ─► done
                               │
                          a peer is lost ─► the kernel spins ─► abort ─► done, with wrong results and no error

Each trait is an assumption about NCCL, listed with its source in nccl_assumptions.py; a number in
brackets names it. One is not on the list, because two ranks of one machine cannot show it: an error
that the network reports is raised by the next collective. A CPU has no streams, so `wait()` blocks
the host, where NCCL's lets the current stream wait and blocks the host at the next synchronisation.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from nanoray.parallel.wire import SealedStore

NAME = "stand_in"
BACKEND = f"{__name__}:{NAME}"  # the value of --backend
# Set to 1: the network reports a lost peer to the communicator, as between machines
REMOTE_ERROR = "NCCL_STAND_IN_REMOTE_ERROR"
# What an aborted collective leaves behind in floats: finite, so that only a comparison finds it
WRONG = 0.8125
LOOK_S = 0.02  # between two looks of a thread that polls
TEAR_DOWN = (1, 3)  # values of TORCH_NCCL_ASYNC_ERROR_HANDLING with which the process ends

log = logging.getLogger("nanoray.stand_in")
_COMMUNICATORS = WeakSet["StandIn"]()  # of this process


class StandInWork(dist.Work):
    """One collective, or a batch of messages."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._done = threading.Event()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the collective, which may be an abort. (A1, A2)

        An error that the watchdog has noted is not raised. (A5)
        """
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def finish(self) -> None:
        self._done.set()
        self._future.set_result(self._outputs)

    def spoil(self) -> None:
        """Leave what an aborted kernel leaves: neither the sum nor the input. (A2)"""
        for tensor in self._outputs:
            if tensor.is_floating_point():
                tensor.fill_(WRONG)
            else:
                tensor.fill_(1)


@dataclass
class Call:
    """A collective in the queue."""

    start: Callable[[], dist.Work]  # hands it to gloo
    work: StandInWork
    began_at: float = field(default_factory=time.monotonic)


class StandIn(dist.ProcessGroup):
    """A process group in Python, as torch's documentation describes them, over one of gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._group_name = ""
        # NCCL reads these when a group is made, too.
        self._error_handling = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        self._non_blocking = os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == "1"
        init_timeout_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
        self._init_timeout_s = init_timeout_s
        dump_ms = float(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"))
        self._dump_s = 4 * dump_ms / 1000
        self._has_remote_errors = os.environ.get(REMOTE_ERROR) == "1"

        self._timeout_s = timeout.total_seconds()
        self._addresses = SealedStore(dist.PrefixStore("stand_in", store), "stand_in")
        self._gloo: dist.ProcessGroup | None = None
        self._initialised = threading.Event()
        self._comm = threading.RLock()  # as NCCLComm's: held by who waits for its initialisation
        self._aborted = threading.Event()
        self._noted = ""  # by the watchdog
        self._reported = ""  # by the network
        self._started = 0
        self._newest: StandInWork | None = None

        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._running: Call | None = None
        _COMMUNICATORS.add(self)
        for target in (self._run_calls, self._watch):
            threading.Thread(target=target, daemon=True, name=f"{NAME}_{target.__name__}").start()

        # A blocking initialisation returns when all ranks have come, however long that takes. (A7)
        if not self._non_blocking:
            self._initialised.wait()

    # Collectives. torch calls them by these names, from Python and from C++.

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> StandInWork:
        """Queue a collective, and return at once. (A1)"""
        self._require_communicator()
        outputs = _tensors(args[0]) if args else []
        if name == "broadcast" and args[1].rootRank == self.rank():
            outputs = []  # the sender's tensor is only read (A14)
        work = StandInWork(outputs)
        call = Call(lambda: getattr(self._gloo, name)(*args, **options), work)
        self._started += 1
        if name in ("send", "recv"):
            # Two ranks that send to each other do not wait for each other's turn.
            threading.Thread(target=self._run, args=(call,), daemon=True).start()
        else:
            self._calls.put(call)
        self._newest = call.work
        return call.work

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch. Calls run in order anyway, so it consists of the calls until its end."""

    def _end_coalescing(self, device: torch.device) -> StandInWork | None:
        """Return one work for the whole batch."""
        return self._newest

    # Failures.

    def _require_communicator(self) -> None:
        """Raise DistBackendError after an abort (A4); first wait for a slow initialisation (A7).

        Raise it as well for an error of the network: NCCL takes no further collective then.
        """
        if self._reported and not self._aborted.is_set():
            self.abort()
            raise dist.DistBackendError(self._reported)
        with self._comm:
            if not self._initialised.wait(self._init_timeout_s):
                raise dist.DistBackendError(
                    f"NCCL timeout in communicator initialization on rank {self.rank()}"
                )
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")

    def abort(self) -> None:
        """End what waits in this communicator, which is of no use afterwards. (any thread) (A3)"""
        # Who waits for the initialisation holds this lock. (A7)
        with self._comm:
            self._aborted.set()

        # The abort frees memory of the device, which waits for all kernels of the device. (A6)
        deadline = time.monotonic() + self._timeout_s
        while any(each.spins for each in _COMMUNICATORS):
            if time.monotonic() > deadline:
                raise dist.DistBackendError("ProcessGroup abort timed out")
            time.sleep(LOOK_S)
        self._calls.put(None)

    def shutdown(self) -> None:
        """Wait for all collectives, then close the connections. A healthy group's way to end."""
        self._calls.put(None)
        while self._running is not None or not self._calls.empty():
            if self._aborted.wait(LOOK_S):
                return
        self._aborted.set()

    @property
    def spins(self) -> bool:
        """Whether a kernel of this communicator runs that nothing has ended."""
        return self._running is not None and not self._aborted.is_set()

    # Threads.

    def _run_calls(self) -> None:
        """Be the stream: one collective after the other, in the order of the calls."""
        self._initialise()
        while self._initialised.is_set():
            call = self._calls.get()
            if call is None:
                break
            self._running = call
            self._run(call)
            self._running = None

        # What was queued behind an aborted kernel does not run either.
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call.work.spoil()
                    call.work.finish()

    def _initialise(self) -> None:
        """Connect to all ranks. Where one does not come, this never ends. (A7)"""
        store = dist.PrefixStore("arrivals", self._store)
        names = [str(rank) for rank in range(self.size())]
        with suppress(RuntimeError):  # a store that is gone tells nothing
            store.set(str(self.rank()), "here")
            while not self._aborted.is_set() and not store.check(names):
                time.sleep(LOOK_S)
            if not self._aborted.is_set():
                forever = timedelta(days=1)
                gloo = dist.ProcessGroup(self._addresses, self.rank(), self.size())
                kind = dist.ProcessGroup.BackendType.GLOO
                gloo._set_default_backend(kind)
                inner = dist.ProcessGroupGloo(self._addresses, self.rank(), self.size(), forever)
                gloo._register_backend(torch.device("cpu"), kind, inner)
                self._gloo = gloo
                self._initialised.set()

    def _run(self, call: Call) -> None:
        """Let gloo do a collective, and mark it as done, also after an abort."""
        call.began_at = time.monotonic()
        try:
            call.start().wait()
        except RuntimeError as error:
            # gloo reports a lost peer. NCCL inside of a node does not: its kernel waits on. (A1)
            log.info("rank %d spins: %s", self.rank(), error)
            if self._has_remote_errors:
                self._reported = (
                    "NCCL communicator encountered error set by ncclCommGetAsyncError "
                    f"(remote process exited) on rank {self.rank()}"
                )
            self._aborted.wait()
        if self._aborted.is_set():
            call.work.spoil()
        call.work.finish()

    def _watch(self) -> None:
        """Be the watchdog: a collective that waits for too long is an error. (A5, A8)"""
        while not self._aborted.wait(LOOK_S):
            call = self._running
            if call is not None and time.monotonic() - call.began_at > self._timeout_s:
                self._noted = self._noted or (
                    f"Watchdog caught collective operation timeout on rank {self.rank()} "
                    f"after {self._timeout_s:g} s (NCCL)"
                )
            error = self._reported or self._noted
            if error and self._error_handling in TEAR_DOWN:
                # Time to write the flight recorder; an abort in the meantime comes too late.
                time.sleep(self._dump_s)
                os.write(2, f"{error}; taking the entire process down\n".encode())
                os.kill(os.getpid(), signal.SIGABRT)

        # gloo has no abort: what it waits for ends when its connections do.
        self._addresses.abort()

    # What torch asks of a group.

    def _get_backend(self, device: torch.device) -> StandIn:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_splitting(self) -> bool:
        return False

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def _has_hooks(self) -> bool:
        return False


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors that a collective writes to: its first argument, however nested."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _collective(name: str) -> Callable[..., StandInWork]:
    def method(self: StandIn, *args: Any, **options: Any) -> StandInWork:
        return self._call(name, args, options)

    method.__name__ = name
    return method


# One method for each collective that a group of gloo has.
COLLECTIVES = (
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(StandIn, _name, _collective(_name))

if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, StandIn, devices=["cpu"])
