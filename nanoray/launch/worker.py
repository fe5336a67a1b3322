"""The Ray actor of one rank: bind a device, join the others, train, and answer the driver
meanwhile.

Ray places the actor and reports its death. No gradient, weight or batch passes through Ray.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import math
import os
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.util.metrics import Gauge

from nanoray.devices.choose import require_compiler
from nanoray.errors import NanorayError, RankDiffers, RendezvousError
from nanoray.faults import exit_record
from nanoray.faults.cause import is_collective_error
from nanoray.faults.proc import start_time
from nanoray.faults.progress import UNKNOWN, ProgressFile
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.metrics import METRICS
from nanoray.run import RunSpec, recovers_in_place

# Imports take seconds, and a rehearsal that compiles minutes; an actor that takes longer ends
START_S = 600.0
REPLACE_TIMEOUT_S = 600.0  # a survivor that gets no order for this long ends by itself
# The driver calls every second or two; after this long without it, stop with a checkpoint
DRIVER_SILENT_S = 20.0
ORPHAN_S = 60.0  # the same for a rank that waits for orders, while the driver is busier
HEADLESS_S = 5.0  # both, where the cluster's head is gone: the driver was on it, or gives up, too
DIAL_S = 1.0  # a head that lives accepts a connection in milliseconds, also if it is frozen
FROZEN_S = 2.0  # a process that nobody freezes looks at its clock more often than this
HOLD_S = 1.0  # Ray exports a gauge every 10 s, if it was set since the last time
LOOK_S = 0.005  # how often `heartbeat` checks whether the step it waits for has passed
_STDERR = 2

# A function that trains, and the keys that it has set
Script = tuple[Callable[[Any], Any], frozenset[str]] | None


class LostPeer(RuntimeError):
    """A collective lost its peer, and the peer was not replaced."""


class Heartbeat(NamedTuple):
    """Where a rank is: the step being computed, or just completed, and its phase."""

    step: int
    phase: str
    base: int  # the completed step that its attempt started from
    written_at: float  # when it wrote its position, in its own monotonic seconds
    attempt: int  # the attempt it is in, or has left
    waiting: bool  # it has left its process groups and waits for the next attempt


class Head:
    """The cluster's head, as far as this process can see: whether anything still listens at its
    address.
    """

    def __init__(self, api: Any) -> None:
        """Note the head's address. A name is looked up once: on Kubernetes another head may get it."""
        host, _, port = api.get_runtime_context().gcs_address.rpartition(":")
        self._address: Any = None
        with suppress(OSError, ValueError):
            self._address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0][4][:2]
        self._gone, self._asked_at = False, -math.inf

    @property
    def gone(self) -> bool:
        """Whether it refuses connections or cannot be reached; asked once a second. A frozen head
        is not gone.
        """
        if self._address and time.monotonic() - self._asked_at > DIAL_S:
            try:
                socket.create_connection(self._address, timeout=DIAL_S).close()
                self._gone = False
            except OSError:
                self._gone = True
            self._asked_at = time.monotonic()
        return self._gone


class OwnTime:
    """The monotonic clock without the time in which this process was frozen, as in a paused
    container or machine.

    A driver that could not be heard in that time was not silent.
    """

    def __init__(self) -> None:
        self._seen = time.monotonic(), 0.0  # when it last looked, and the seconds frozen until then
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(FROZEN_S / 4)
            now = time.monotonic()
            self._seen = now, self._frozen(now)

    def _frozen(self, now: float) -> float:
        at, frozen = self._seen
        return frozen + max(0.0, now - at - FROZEN_S)

    def now(self) -> float:
        """Return seconds, of which only differences mean something."""
        now = time.monotonic()
        return now - self._frozen(now)


class Worker:
    """One rank. `run` trains; other methods answer at the same time, in Ray's concurrency groups.

    With rank None it is a spare: it imports torch, holds no device, and waits for `take_slot`.
    """

    def __init__(
        self,
        run_name: str,
        rank: int | None,
        rehearsal: dict[str, Any] | None = None,
        script: Script = None,
        train: Callable[..., dict[str, Any]] | None = None,
        api: Any = ray,
    ) -> None:
        """`rehearsal`: a RunSpec, as a dict, to rehearse with. Tests replace recipe.train and ray
        (`api`).
        """
        self._name, self._rank, self._rehearsal, self._script = run_name, rank, rehearsal, script
        self._train, self._api = train, api
        self._messages: deque[tuple[str, Any]] = deque()
        self._metrics: _RayMetrics | None = None
        # The attempt in which the driver wants another group
        self._stop, self._pause_in = threading.Event(), -1
        self._own_time = OwnTime()
        # When the driver last called `heartbeat`, or its patience ends
        self._called_at = self._own_time.now()
        self._head = Head(api)
        self._store: Any = None
        self._spec: RunSpec | None = None  # of the present attempt
        self._rendezvous = Rendezvous()
        # This rank has left its groups and waits for the next attempt
        self._waiting = threading.Event()
        self._attempts: queue.Queue[tuple[dict[str, Any], Rendezvous]] = queue.Queue()
        self._devices = bound_devices(api)
        raise_priority()
        # If an import or a device hangs, this says where and ends the process: the driver starts
        # another actor.
        faulthandler.dump_traceback_later(START_S, exit=True, file=_STDERR)
        # Importing torch takes seconds: start now, while the driver creates the other actors.
        # Methods that need torch join this thread first, because two threads that import
        # torch.distributed at once abort the process.
        self._importing = threading.Thread(target=self._prepare, daemon=True)
        self._importing.start()

    def _prepare(self) -> None:
        try:
            # Looking for garbage among modules, which stay, is a sixth of the time that importing
            # takes
            gc.disable()
            importlib.import_module("nanoray.train.runtime")
            gc.freeze()
            gc.enable()
            if self._rehearsal:
                from nanoray.train.elastic import rehearse

                rehearse(RunSpec.from_dict(self._rehearsal))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def __repr__(self) -> str:
        return f"{self._name} spare" if self._rank is None else f"{self._name} rank {self._rank}"

    @ray.method(concurrency_group="control")
    def take_slot(self, rank: int, devices: list[str]) -> None:
        """Make this spare a rank, on the devices of the lost one."""
        self._rank, self._devices = rank, devices
        # CUDA reads this when it starts, later: see add_spares
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    @ray.method(concurrency_group="control")
    def describe(self) -> dict[str, Any]:
        """Return this actor's rank, pid, start in ticks, node, IP address, Ray id and devices."""
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        context = self._api.get_runtime_context()
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "start": start_time(os.getpid()),
            "node": context.get_node_id(),
            "ip": self._api.util.get_node_ip_address(),
            "actor": context.get_actor_id(),
            "devices": self._devices,
        }

    def ready(self) -> dict[str, Any]:
        """Do as `describe` does, once torch is imported and the rehearsal, if any, is done."""
        self._importing.join()
        return self._describe()

    @ray.method(concurrency_group="control")
    def nccl_version(self) -> tuple[int, int, int] | None:
        """Return the version of the NCCL library in force on this node."""
        self._importing.join()
        from nanoray.mesh.rendezvous import runtime_nccl_version

        return runtime_nccl_version()

    @ray.method(concurrency_group="control")
    def open_store(self, world_size: int, timeout_s: float) -> tuple[str, int]:
        """Serve the store on a port that the kernel picks; return its address. (one rank: rank 0,
        or a survivor)
        """
        self._importing.join()
        from nanoray.mesh.rendezvous import open_store

        host = self._api.util.get_node_ip_address()
        self._store = open_store(host, world_size, timeout_s)
        return host, self._store.port

    @ray.method(concurrency_group="control")
    def break_meeting(self, secret: str, absent: int) -> None:
        """Let the ranks that meet in this process's store know that one of them is lost."""
        from nanoray.mesh.mesh import break_meeting

        break_meeting(self._store, secret, absent)

    @ray.method(concurrency_group="control")
    def abort(self, attempt: int) -> None:
        """Abort the process groups of this attempt, if this rank is in them: a peer is lost.

        An order for another attempt does nothing. No newer groups can stand yet: `go_on` waits for
        the same thread.
        """
        if self._spec and self._spec.attempt == attempt and not self._waiting.is_set():
            from nanoray.mesh.mesh import abort_groups

            abort_groups()

    def run(self, spec: dict[str, Any], rendezvous: Rendezvous) -> dict[str, Any]:
        """Train as one rank and return the outcome, or the failure and its kind as data for the
        driver.
        """
        self._importing.join()
        from nanoray.train.recipe import log, train
        from nanoray.train.runtime import Program

        assert self._rank is not None
        run = self._spec = RunSpec.from_dict(spec)
        self._rendezvous = rendezvous
        self._called_at = self._own_time.now()
        # Of an earlier process in this slot
        for old in (run.progress(self._rank), run.exit_record(self._rank)):
            old.unlink(missing_ok=True)
        exit_record.watch(run.exit_record(self._rank))
        try:
            require_compiler(run.config, rendezvous.device)
            self._metrics = _RayMetrics(self._name, self._rank)
            watchers = [_MessageQueue(self._messages, self._metrics)]
            store = self._store if rendezvous.rank == 0 and not rendezvous.agent_store else None
            in_place = recovers_in_place(run.config, rendezvous.backend, rendezvous.slots)
            rejoin = self._rejoin if in_place else None
            trainer = Program(*self._script) if self._script else self._train or train
            outcome = trainer(run, rendezvous, watchers, self._wanted, store, rejoin)
            self._end_if_orphaned()
            return {"ok": True, **outcome}
        except Exception as error:  # the driver compares it with what other ranks report
            log.exception("rank %d failed", self._rank)
            self._end_if_orphaned()
            step, phase = ProgressFile.read(run.progress(self._rank)) or (0, "init")
            return {
                "ok": False,
                "kind": _kind_of(error, rendezvous),
                "exit_code": getattr(error, "exit_code", 1),
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "step": step,
                "phase": phase,
            }

    def _rejoin(self, lost: str) -> tuple[RunSpec, Rendezvous]:
        """Wait, during `run`, for the driver's next attempt; return it. Raises LostPeer if none
        comes.

        If the driver is silent, one of the ranks that wait goes on alone, and only to save.
        """
        assert self._spec
        self._waiting.set()
        until = self._own_time.now() + max(REPLACE_TIMEOUT_S, 2 * self._spec.config.replace_timeout)
        orders = None
        while orders is None:
            with suppress(queue.Empty):
                orders = self._attempts.get(timeout=ORPHAN_S / 60)
                while True:
                    orders = self._attempts.get_nowait()  # only the newest counts
            orphaned = self._silent_s > self._patience_s(ORPHAN_S)
            if orders is None and orphaned and self._is_first_orphan():
                self._stop.set()
                orders = self._spec.to_dict(), _alone(self._rendezvous)
            elif orders is None and (orphaned or self._own_time.now() > until):
                raise LostPeer(lost)
        self._waiting.clear()
        self._called_at = self._own_time.now()
        self._spec, self._rendezvous = RunSpec.from_dict(orders[0]), orders[1]
        return self._spec, self._rendezvous

    def _is_first_orphan(self) -> bool:
        """Whether no other rank that waits has noticed that the driver is gone: only one may save."""
        assert self._spec
        mark = self._spec.folder / "logs" / f"orphan-{self._spec.started!r}-{self._spec.attempt}"
        with suppress(OSError):
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        return False

    def _wanted(self) -> Order:
        """Return what the driver wants after this step. A driver that is silent for too long means
        STOP.
        """
        if self._stop.is_set() or self._silent_s > self._patience_s(DRIVER_SILENT_S):
            return Order.STOP
        return Order.REGROUP if self._spec and self._pause_in == self._spec.attempt else Order.GO_ON

    @property
    def _silent_s(self) -> float:
        """For how long the driver has been due to call."""
        return self._own_time.now() - self._called_at

    def _patience_s(self, usual_s: float) -> float:
        """Return how long the driver may be silent: not long if the cluster's head is gone."""
        return (
            min(usual_s, HEADLESS_S)
            if self._silent_s > HEADLESS_S / 2 and self._head.gone
            else usual_s
        )

    def _end_if_orphaned(self) -> None:
        """End this process if the driver is silent: Ray ends actors only once it knows that their
        driver is dead.

        The rank whose patience ended first stops all of them. The others wait here for the driver's
        next call.
        """
        while self._silent_s > (patience_s := self._patience_s(DRIVER_SILENT_S)) / 2:
            if self._silent_s > patience_s:
                os._exit(0)
            time.sleep(LOOK_S)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, patience_s: float, waiting: bool, after: int | None) -> Heartbeat:
        """Return where this rank is, after `patience_s` or once `waiting` differs or step `after`
        has passed.
        """
        deadline = time.monotonic() + patience_s
        self._called_at = self._own_time.now() + patience_s
        while True:
            # Before `waiting`, which `_rejoin` clears before it sets the next spec
            spec = self._spec
            position = ProgressFile.read_all(spec.progress(self._rank or 0)) if spec else None
            attempt = spec.attempt if spec else -1
            position = position or (0, "init", UNKNOWN, 0.0)
            heartbeat = Heartbeat(*position, attempt=attempt, waiting=self._waiting.is_set())
            passed = after is not None and heartbeat.step > after
            left = deadline - time.monotonic()
            if heartbeat.waiting != waiting or passed or left <= 0:
                return heartbeat
            if after is None and not waiting:
                self._waiting.wait(left)
            else:
                time.sleep(LOOK_S)

    @ray.method(concurrency_group="control")
    def stacks(self, log_file: str) -> int:
        """Append the Python stacks of all threads to this rank's log; return how many collectives
        it has started.
        """
        from nanoray.mesh.mesh import collectives_started

        with open(log_file, "a", encoding="utf-8") as file:
            file.write("stacks of all threads of this rank, because no rank makes progress:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        return collectives_started()

    @ray.method(concurrency_group="control")
    def go_on(self, spec: dict[str, Any], rendezvous: Rendezvous) -> None:
        """Start the next attempt on a waiting rank."""
        self._attempts.put((spec, rendezvous))

    @ray.method(concurrency_group="control")
    def poll(self) -> list[tuple[str, Any]]:
        """Return the notes and records since the last call."""
        if self._metrics:
            self._metrics.hold()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    @ray.method(concurrency_group="control")
    def pause(self, attempt: int) -> None:
        """Ask all ranks to leave the process groups of this attempt after the same step, and wait
        for the next one.
        """
        self._pause_in = attempt

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ask all ranks to stop after the same step, with a checkpoint."""
        self._stop.set()


def bound_devices(api: Any = ray) -> list[str]:
    """Return the GPU or MIG ids that Ray gave this process, as strings; if none, hide every GPU
    from it.
    """
    ids = [str(i) for i in api.get_gpu_ids()]
    if not ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise an actor without GPUs sees all of them
    return ids


def raise_priority() -> None:
    """Undo Ray's nice 15, which puts every other process on the node first. Works for root only;
    see new_actor.
    """
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def _alone(r: Rendezvous) -> Rendezvous:
    """Return the meeting of one rank that holds the run's state, for a rank of a group that broke."""
    alone = replace(
        r,
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        live=True,
        reference=0,
    )
    return replace(alone, master_addr="", master_port=0, agent_store=True)


def _kind_of(error: Exception, rendezvous: Rendezvous) -> str:
    """Return the key of CAUSES for an exception of `run`."""
    if isinstance(error, LostPeer) or is_collective_error(error):
        return "peer_lost"
    if (
        rendezvous.live
        and isinstance(error, RendezvousError)
        and not isinstance(error, RankDiffers)
    ):
        return "peer_lost"  # a new rank that did not meet the others: they are lost or frozen
    if getattr(error, "retry", False):
        return "diverged"
    return "refused" if isinstance(error, NanorayError) else "exception"


class _MessageQueue:
    """Keeps what rank 0 reports until the driver polls it, and exports it as Ray metrics."""

    def __init__(self, messages: deque[tuple[str, Any]], metrics: _RayMetrics) -> None:
        self._messages, self._metrics = messages, metrics

    def on_note(self, text: str) -> None:
        self._messages.append(("note", text))

    def on_record(self, record: dict[str, Any]) -> None:
        self._messages.append(("record", record))
        self._metrics.set(record)

    def close(self) -> None:
        """Nothing to close."""


class _RayMetrics:
    """Exports the run's metrics as gauges `ray_nanoray_<name>` with tags run and rank."""

    def __init__(self, run_name: str, rank: int) -> None:
        self._tags = {"run": run_name, "rank": str(rank)}
        self._gauges: dict[str, Gauge] = {}
        self._newest: dict[str, float] = {}
        self._set_at = 0.0

    def set(self, record: dict[str, Any]) -> None:
        for name in METRICS.keys() & record.keys():
            if name not in self._gauges:
                metric = METRICS[name]
                self._gauges[name] = Gauge(
                    "nanoray_" + name.replace("/", "_"),
                    description=f"{metric.meaning} [{metric.unit}]",
                    tag_keys=("run", "rank"),
                )
            self._gauges[name].set(record[name], tags=self._tags)
            self._newest[name] = record[name]

    def hold(self) -> None:
        """Set all gauges again, at most once in HOLD_S: Ray forgets one that was not set in two
        report intervals.
        """
        if time.monotonic() - self._set_at > HOLD_S:
            self._set_at = time.monotonic()
            for name, value in [*self._newest.items()]:
                self._gauges[name].set(value, tags=self._tags)
