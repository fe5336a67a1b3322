"""From a rendezvous record to process groups: the ranks meet, compare facts, and form their groups.

Rendezvous (own rank, store's address) ───── join() ──► Mesh (groups, device) ── used by the loop
                                              │
                    roll call: every rank writes its facts into the TCPStore; the last one to come compares them
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakSet

import torch
import torch.distributed as dist

# DDP imports this module, whose functions take the default group of that moment as a default
# argument. Imported here, before there is a group, they hold no reference, so that a broken group
# and its sockets can be freed.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore, Work

from nanoray.config.layout import Layout
from nanoray.errors import GroupNotFormed, NanorayError, RankDiffers, RendezvousError
from nanoray.machine.compat import (
    abort_process_groups,
    collectives_of,
    new_groups_meet_in,
    process_groups,
    restart_group_names,
)
from nanoray.machine.fault_points import reached
from nanoray.machine.interfaces import (
    addresses_of_hosts,
    interface_for_gloo,
    own_interfaces,
    publish_route,
    require_interface,
)
from nanoray.machine.tensor_memory import plain_memory
from nanoray.parallel import wire
from nanoray.parallel.backends import NCCL, load_backend, reports_lost_peers, settings_for_aborts
from nanoray.parallel.rendezvous import PATIENCE_S, Order, Rendezvous, T, connect_store, public_name
from nanoray.parallel.wire import SealedStore

READ_S = 5.0  # for the other ranks to read why the roll call has failed
_MEETINGS = WeakSet[SealedStore]()  # of this process, until it leaves its groups


class CollectiveListener(Protocol):
    """An object that is called around each collective of a mesh, such as a recorder."""

    def call(
        self, op: str, what: str, group: str, tensor: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for one collective.

        `what` is its purpose, `group` the process group's name.
        """

    def started(
        self, op: str, what: str, group: str, tensor: Tensor, bucket: int | None, last: bool
    ) -> Callable[[], None]:
        """Note a collective that begins now; return the function to call when it has ended."""

    def beside(
        self, op: str, what: str, group: str, tensor: Tensor
    ) -> tuple[Callable[[], None], AbstractContextManager[None]]:
        """Note a collective that begins now and travels beside compute.

        Returns the function to call when it has ended, and a context in which this rank waits for
        it, once.
        """


@dataclass
class Mesh:
    """The ranks of a run as this rank sees them.

    With one rank there is no process group and collectives do nothing.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    backend_reason: str
    # Two groups more, gloo on CPU: one for votes, apart from gradients; one with a long timeout, for
    # waits while rank 0 works on files.
    control_group: ProcessGroup | None = None
    patient_group: ProcessGroup | None = None
    store: Any = field(default=None, repr=False)
    listener: CollectiveListener | None = field(default=None, repr=False)
    # Torch calls its methods, but does not keep the object alive
    sealed: Any = field(default=None, repr=False)
    slot: int = -1  # slot, slots and abortable are as in Rendezvous
    slots: int = 0
    abortable: bool = False
    # The address of each rank's host, on the network over which the ranks met; () for one rank
    hosts: tuple[str, ...] = ()
    # How the run divides these ranks; if none is given, all of them are data replicas
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.slot < 0:
            self.slot = self.rank
        if not self.slots:
            self.slots = self.world_size
        if self.layout == Layout():
            self.layout = Layout(dp=self.world_size)
        assert self.layout.world_size == self.world_size, f"{self.layout} is not of these ranks"

    def all_reduce_mean(self, tensor: Tensor, what: str = "value") -> Tensor:
        """Average `tensor` over all ranks, in place; `what` names it for the listener. (all ranks)"""
        tensor = self.all_reduce(tensor, what)
        tensor /= self.world_size
        return tensor

    def all_reduce(self, tensor: Tensor, what: str = "value", op: str = "sum") -> Tensor:
        """Sum (or max) `tensor` over all ranks, in place. (all ranks)"""
        if self.world_size > 1:
            with self._noted("all_reduce", what, "default", tensor):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
            self.require_unbroken()
        return tensor

    def max_of(self, flags: Tensor) -> Tensor:
        """Combine bytes, on the CPU, by their maximum over the ranks, in place. (all ranks)

        From host to host, so no device is waited for.
        """
        if self.world_size > 1:
            with self._noted("all_reduce", "absent", "control", flags):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.control_group)
        return flags

    def start_vote(self, wanted: Order) -> Vote:
        """Start a vote for the highest order that any rank wants. (all ranks)

        It runs beside compute.
        """
        ballot = torch.tensor([wanted], dtype=torch.uint8)
        if self.world_size == 1:
            return Vote(ballot, None, self)

        reached("exchange_vote")
        work = dist.all_reduce(
            ballot, op=dist.ReduceOp.MAX, group=self.control_group, async_op=True
        )
        return Vote(ballot, work, self)

    def gather(self, value: T) -> list[T] | None:
        """Collect one value per rank on rank 0; the others get None. (all ranks)

        `value`: see wire.encode.
        """
        if self.world_size == 1:
            return [value]
        parts: list[Tensor] | None = None
        with self._noted("gather", "objects", "patient"):
            own, sizes = self._sized(value)
            if self.rank == 0:
                parts = [torch.empty_like(own) for _ in sizes]
            dist.gather(own, parts, dst=0, group=self.patient_group)
        return None if parts is None else _decoded(parts, sizes)

    def all_gather(self, value: T) -> list[T]:
        """Collect one value per rank on every rank. (all ranks) `value`: see wire.encode."""
        if self.world_size == 1:
            return [value]
        with self._noted("all_gather", "objects", "patient"):
            own, sizes = self._sized(value)
            parts = [torch.empty_like(own) for _ in sizes]
            dist.all_gather(parts, own, group=self.patient_group)
        return _decoded(parts, sizes)

    def _sized(self, value: Any) -> tuple[Tensor, list[int]]:
        """Return a value as bytes, and the sizes of all ranks' values. (all ranks)

        The bytes are padded to the largest size: gloo gathers tensors of one shape.
        """
        data = wire.encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.patient_group)
        all_sizes = [int(size) for size in sizes]
        own = torch.zeros(max(all_sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return own, all_sizes

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src` on every rank. (all ranks) `value`: see wire.encode."""
        if self.world_size == 1:
            return value
        data = wire.encode(value) if self.rank == src else b""
        with self._noted("broadcast", "objects", "patient"):
            # The other ranks need the size first, to make room.
            size = torch.tensor([len(data)])
            dist.broadcast(size, src=src, group=self.patient_group)
            buffer = bytearray(data or bytes(int(size)))
            content = torch.frombuffer(buffer, dtype=torch.uint8)
            dist.broadcast(content, src=src, group=self.patient_group)
        if self.rank == src:
            return value
        return cast(T, wire.decode(content.numpy().tobytes()))

    def broadcast_tensor(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor`, on this rank's device, with that of rank `src`. (all ranks)"""
        if self.world_size == 1:
            return
        # As bytes, because backends lack some dtypes, such as int16.
        memory = plain_memory(tensor)
        with self._noted("broadcast", "state", "default", tensor):
            dist.broadcast(memory.view(torch.uint8), src=src)
        if memory.data_ptr() != tensor.data_ptr():
            tensor.copy_(memory.view(tensor.shape))
        self.require_unbroken()

    def require_unbroken(self) -> None:
        """Raise RuntimeError if this rank's groups were aborted: its last results may be wrong.

        An aborted collective of NCCL ends like any other. So where the driver may order an abort,
        this waits for the device.
        """
        is_late = self.device.type == "cuda" and not reports_lost_peers(self.backend)
        if self.abortable and is_late:
            torch.cuda.current_stream(self.device).synchronize()
        if self.sealed is not None and self.sealed.aborted:
            raise RuntimeError(
                f"{self.backend}: a peer is lost, and the driver has ordered to abort the group"
            )

    def leave(self) -> None:
        """Abandon every process group and its pending work; the other ranks see connections close."""
        # References keep the sockets open, and DTensor's caches have some.
        self.control_group = None
        self.patient_group = None
        if self.sealed is not None:
            self.sealed.abort()
        abandon_groups()

    def barrier(self) -> None:
        """Wait until every rank is here. (all ranks)"""
        if self.world_size > 1:
            with self._noted("barrier", "barrier", "patient"):
                dist.barrier(group=self.patient_group)

    def _noted(
        self, op: str, what: str, group: str, tensor: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for a collective, which the listener notes if there is one."""
        reached(f"exchange_{what}")
        if self.listener is None:
            return nullcontext()
        return self.listener.call(op, what, group, tensor)


def _decoded(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
    """Return the values in padded bytes."""
    values = []
    for part, size in zip(parts, sizes, strict=True):
        values.append(wire.decode(part[:size].numpy().tobytes()))
    return values


def abandon_groups() -> None:
    """Abort and destroy all process groups of this process, also those of a failed `join`."""
    _MEETINGS.clear()
    # First all communicators at once: torch aborts one after the other.
    for end in (_abort_together, abort_process_groups, dist.destroy_process_group):
        with suppress(Exception):  # a broken group may raise; close what can be closed
            end()
    restart_group_names()  # which must be equal on all ranks of the next meeting


def abort_groups() -> None:
    """Make every wait for a peer in this process's groups fail. (any thread, any number of times)

    gloo has no abort (torch 2.13: `ProcessGroup.abort` does nothing there), so its connections are
    shut down.
    """
    # First mark the meetings as aborted: the results of an aborted communicator of NCCL must not be
    # used, and `require_unbroken` reads this mark.
    for meeting in list(_MEETINGS):
        meeting.abort()
    _abort_together()


def _abort_together() -> None:
    """Abort all groups of this process at the same time.

    The abort of a communicator of NCCL may wait for all kernels of the device, also for those of
    another group that waits for a lost peer (pytorch/pytorch#119797). So none waits for its turn.
    """
    threads = []
    for group in process_groups():
        threads.append(threading.Thread(target=_abort, args=(group,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # it is being closed
        group.abort()


def collectives_started() -> int:
    """Return how many collectives this process has started in its present groups. (any thread)"""
    return sum(collectives_of(group) for group in process_groups())


class Vote(NamedTuple):
    """A vote of all ranks in progress."""

    ballot: Tensor
    work: Work | None
    mesh: Mesh

    def result(self) -> Order:
        """Wait for the outcome. (all ranks)"""
        if self.work is not None:
            with self.mesh._noted("all_reduce", "vote", "control", self.ballot):
                self.work.wait()
        return Order(int(self.ballot.item()))


def join(
    rendezvous: Rendezvous,
    facts: Mapping[str, str],
    timeout_s: float,
    init_timeout_s: float,
    store: TCPStore | None = None,
    layout: Layout | None = None,
) -> Mesh:
    """Meet the other ranks, check that all have the same `facts`, and form the groups. (all ranks)

    `store` is the server that rank 0 opened with `open_store`, if any. `layout` is how the run
    divides the ranks; if none is given, all are data replicas. Raises RendezvousError with
    the absent ranks, or with the fact that differs and both values; ConfigError for an interface
    that this host does not have.
    """
    r = rendezvous
    layout = layout or Layout(dp=r.world_size)
    device = torch.device(r.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if r.world_size == 1:
        reason = "one rank: no process group"
        return Mesh(0, 1, 0, device, "none", reason, slot=r.slot, slots=r.slots, layout=layout)

    # What fails in the same way each time is refused before anyone waits for this rank.
    require_interface(os.environ)
    name = load_backend(r.backend, device.type)

    # Meet in the store, under a name and with a seal that only ranks of this run can make.
    deadline = time.monotonic() + init_timeout_s
    if store is None:
        store = connect_store(r, init_timeout_s)
    plain = dist.PrefixStore(f"nanoray/{r.public}", store)
    sealed = SealedStore(plain, r.secret)
    _MEETINGS.add(sealed)

    if r.abortable and not reports_lost_peers(r.backend):
        for variable, value in settings_for_aborts(timeout_s).items():
            os.environ.setdefault(variable, value)
    publish_route(sealed, r.rank, r.master_addr or store.host, r.master_port or store.port)
    _roll_call(sealed, r, facts, deadline)
    reached("agreed")

    try:
        hosts = addresses_of_hosts(sealed, r.world_size)
        why_backend = r.backend_reason
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = interface_for_gloo(hosts, r.rank)
            if interface:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
                why_backend += f", over {interface}: this host's own name is a loopback address"
        control_group, patient_group = _form_groups(r, name, sealed, plain, timeout_s, device)
    except NanorayError:
        raise
    except Exception as error:  # torch raises several types here, with texts of C++
        reason = " ".join(str(error).split())[:300]
        raise GroupNotFormed(
            f"rank {r.rank} of {r.world_size} met the others, but could not connect to them over "
            f"{r.backend} ({reason}); look at their logs; if they offer addresses that cannot be "
            "reached from here, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each host to one "
            f"of its interfaces (here: {', '.join(own_interfaces())})"
        ) from error
    return Mesh(
        rank=r.rank,
        world_size=r.world_size,
        local_rank=r.local_rank,
        device=device,
        backend=r.backend,
        backend_reason=why_backend,
        control_group=control_group,
        patient_group=patient_group,
        store=store,
        sealed=sealed,
        slot=r.slot,
        slots=r.slots,
        abortable=r.abortable,
        hosts=tuple(hosts),
        layout=layout,
    )


def _form_groups(
    r: Rendezvous,
    name: str,
    sealed: SealedStore,
    plain: dist.PrefixStore,
    timeout_s: float,
    device: torch.device,
) -> tuple[ProcessGroup, ProcessGroup]:
    """Form the default group; return the control group and the patient group. (all ranks)"""
    # The group of all ranks, for gradients. gloo's addresses are sealed. NCCL gets the plain store,
    # because its threads call it even at exit.
    timeout = timedelta(seconds=timeout_s)
    meeting = dist.PrefixStore("default", sealed)
    dist.init_process_group(
        name,
        store=meeting if reports_lost_peers(r.backend) else dist.PrefixStore("default", plain),
        rank=r.rank,
        world_size=r.world_size,
        timeout=timeout,
        device_id=device if r.backend == NCCL else None,
    )
    reached("groups")

    # Votes and small values travel over gloo. Its addresses are sealed, so that an order to abort
    # finds the connections.
    patience = timedelta(seconds=max(timeout_s, PATIENCE_S))
    with new_groups_meet_in(meeting):
        control_group = dist.new_group(backend="gloo", timeout=timeout)
        patient_group = dist.new_group(backend="gloo", timeout=patience)
    return control_group, patient_group


def _roll_call(store: Any, r: Rendezvous, facts: Mapping[str, str], deadline: float) -> None:
    """Wait until every rank has come and has the facts of the reference. (all ranks)"""
    keys = [f"facts/{rank}" for rank in range(r.world_size)]
    own = {**facts, "WORLD_SIZE": str(r.world_size), "backend": r.backend}
    store.set(keys[r.rank], json.dumps(own))
    reached("roll_call")

    # The last rank to come compares, and writes the verdict for all.
    if store.add("arrived", 1) == r.world_size:
        all_facts = [json.loads(value) for value in store.multi_get(keys)]
        store.set("verdict", json.dumps(_difference(all_facts, r.reference)))
    try:
        store.wait(["verdict"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except Exception:  # torch raises several types here
        if store.aborted:  # it was not the time that was up
            raise
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RendezvousError(
            f"rank {r.rank} timed out waiting for rank {', '.join(absent)} of {r.world_size}; "
            "look at their logs, or raise init_timeout_s if they are only slow"
        ) from None
    # An empty verdict: no fact differs, and no rank is absent.
    verdict = json.loads(store.get("verdict"))
    if verdict:
        _let_others_read(store, r)
    if "absent" in verdict:
        raise RendezvousError(
            f"rank {verdict['absent']} of {r.world_size} was lost before the ranks had met"
        )
    if "refused" in verdict:
        error = RendezvousError(
            f"rank {verdict['refused']} of {r.world_size} cannot take part: {verdict['why']}"
        )
        error.refuses = True
        raise error
    if verdict:
        kind = RankDiffers if verdict["rank"] == r.rank else RendezvousError
        raise kind(
            f"rank {verdict['rank']} has {verdict['key']} = {verdict['its']}, rank {r.reference} "
            f"has {verdict['reference']}; start every rank with the same code, configuration and "
            "versions"
        )


def _let_others_read(store: Any, r: Rendezvous) -> None:
    """Wait, on the rank that serves the store, until the others have read the verdict.

    That rank is about to end, and the store ends with it. It waits READ_S at most.
    """
    store.add("read", 1)
    if r.rank != 0 or r.agent_store:
        return
    deadline = time.monotonic() + READ_S
    while store.add("read", 0) < r.world_size and time.monotonic() < deadline:
        time.sleep(0.01)


def _difference(facts: Sequence[Mapping[str, str]], reference: int) -> dict[str, Any]:
    """Return the first rank and fact that differ from the reference's, with both values.

    Empty if none does.
    """
    for rank, own in enumerate(facts):
        for key, value in facts[reference].items():
            if own.get(key) != value:
                return {"rank": rank, "key": key, "its": own.get(key), "reference": value}
    return {}


def break_meeting(store: Any, secret: str, absent: int) -> None:
    """End the roll call of the ranks that meet in `store`: rank `absent` will not come."""
    plain = dist.PrefixStore(f"nanoray/{public_name(secret)}", store)
    SealedStore(plain, secret).set("verdict", json.dumps({"absent": absent}))


def refuse_meeting(store: Any, r: Rendezvous, why: str) -> None:
    """End the roll call of the other ranks: this one cannot take part in the run, and says why.

    Otherwise they would wait for it until their time is up, and could only name its rank.
    """
    plain = dist.PrefixStore(f"nanoray/{r.public}", store)
    sealed = SealedStore(plain, r.secret)
    sealed.set("verdict", json.dumps({"refused": r.rank, "why": why}))
    _let_others_read(sealed, r)
