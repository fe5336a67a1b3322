"""The Ray actor: bind one device, join the others, train, and answer health questions meanwhile.

Ray places the actor, keeps what it prints, and reports its death. No gradient, weight or batch passes through Ray.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.util.metrics import Gauge

from nanoray import sentinel
from nanoray.errors import NanorayError, RendezvousError
from nanoray.faults import ProgressStamp
from nanoray.mesh import GO_ON, REGROUP, STOP, Rendezvous
from nanoray.metrics import METRICS
from nanoray.run import RunSpec, recovers_in_place

REPLACE_TIMEOUT_S = 600.0  # a survivor that the driver has forgotten ends by itself
DRIVER_SILENT_S = 20.0  # a driver asks every second or two; after so long without, stop with a checkpoint
LOOK_S = 0.005  # how often a rank looks whether it has passed the step that the driver asks about


class LostPeer(RuntimeError):
    """A collective lost its peer, and nobody took the peer's place."""


class Beat(NamedTuple):
    """Where a rank is: a step (being computed, or just completed) and phase of an attempt that began after `base`."""

    step: int
    phase: str
    base: int
    stamped: float  # the rank's own monotonic seconds
    attempt: int  # which it is in, or waits after
    waiting: bool  # it has left its groups and waits for orders


class Worker:
    """One rank. `run` trains on the main lane; the control lane answers at the same time, and so does `beat` on its.

    Without a seat it is a spare: it imports torch, holds no device, and waits for `take_seat`.
    """

    def __init__(self, run_name: str, rank: int | None, rehearsal: dict[str, Any] | None = None) -> None:
        self._name, self._rank, self._rehearsal = run_name, rank, rehearsal
        self._events: deque[tuple[str, Any]] = deque()
        self._stop, self._pause = threading.Event(), threading.Event()
        self._heard = time.monotonic()  # when the driver last asked where this rank is
        self._store: Any = None
        self._spec: RunSpec | None = None  # of the run that is under way here
        self._waiting = threading.Event()  # this rank has left its groups and waits for orders
        self._orders: queue.Queue[tuple[dict[str, Any], Rendezvous]] = queue.Queue()
        self._devices = bound_devices()
        raise_priority()
        # Importing torch takes seconds: begin now, while the driver still talks to the other actors. Whoever needs it
        # joins this thread first, for two threads that import torch.distributed at once abort the process.
        self._importing = threading.Thread(target=self._prepare, daemon=True)
        self._importing.start()

    def _prepare(self) -> None:
        importlib.import_module("nanoray.train")
        if self._rehearsal:
            from nanoray.recovery import rehearse

            rehearse(RunSpec.from_dict(self._rehearsal))

    def __repr__(self) -> str:
        return f"{self._name} spare" if self._rank is None else f"{self._name} rank {self._rank}"

    @ray.method(concurrency_group="control")
    def take_seat(self, rank: int, devices: list[str]) -> None:
        """Make this spare a rank, on the devices of the one that was lost."""
        self._rank, self._devices = rank, devices
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)  # read when CUDA starts, which it has not here

    @ray.method(concurrency_group="control")
    def describe(self) -> dict[str, Any]:
        """Return where this actor is and what it is bound to."""
        return self._where()

    def _where(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "node": context.get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "actor": context.get_actor_id(),
            "devices": self._devices,
        }

    def ready(self) -> dict[str, Any]:
        """Return what `describe` does once everything is imported and, in a spare, rehearsed."""
        self._importing.join()
        return self._where()

    @ray.method(concurrency_group="control")
    def nccl_version(self) -> tuple[int, int, int] | None:
        """Return the NCCL library in force on this node."""
        self._importing.join()
        from nanoray.mesh import runtime_nccl_version

        return runtime_nccl_version()

    @ray.method(concurrency_group="control")
    def open_store(self, world_size: int, timeout_s: float) -> tuple[str, int]:
        """Serve the store on a port that the kernel picks; return its address. (one rank: rank 0, or a survivor)"""
        self._importing.join()
        from nanoray.mesh import open_store

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, world_size, timeout_s)
        return host, self._store.port

    def run(self, spec: dict[str, Any], rendezvous: Rendezvous) -> dict[str, Any]:
        """Train as one rank. A failure comes back as data, with its kind, so that the driver can name the cause."""
        self._importing.join()
        from nanoray.faults import is_collective_error
        from nanoray.train import log, train

        assert self._rank is not None
        run = self._spec = RunSpec.from_dict(spec)
        self._heard = time.monotonic()
        for old in (run.stamp(self._rank), run.death(self._rank)):  # of who sat here before
            old.unlink(missing_ok=True)
        sentinel.attend(run.death(self._rank))
        try:
            watchers = [_Forwarder(self._events, _RayMetrics(self._name, self._rank))]
            store = self._store if rendezvous.rank == 0 and not rendezvous.agent_store else None
            in_place = recovers_in_place(run.config, rendezvous.backend, rendezvous.seats)
            rejoin = self._rejoin if in_place else None
            outcome = train(run, rendezvous, watchers, self._wish, store, rejoin)
            self._end_if_orphaned()
            return {"ok": True, **outcome}
        except Exception as error:  # every exception becomes data: the driver ranks it against the other ranks'
            log.exception("rank %d failed", self._rank)
            self._end_if_orphaned()
            step, phase = ProgressStamp.read(run.stamp(self._rank)) or (0, "init")
            kind = "refused" if isinstance(error, NanorayError) else "exception"
            if getattr(error, "retry", False):
                kind = "diverged"
            if rendezvous.live and isinstance(error, RendezvousError):
                kind = "peer_lost"  # a newcomer that nobody met: the others are lost, or frozen
            return {
                "ok": False,
                "kind": "peer_lost" if isinstance(error, LostPeer) or is_collective_error(error) else kind,
                "exit_code": getattr(error, "exit_code", 1),
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "step": step,
                "phase": phase,
            }

    def _rejoin(self, lost: str) -> tuple[RunSpec, Rendezvous]:
        """Wait, in the middle of `run`, until the driver has replaced the lost rank. Raises LostPeer otherwise."""
        assert self._spec
        self._waiting.set()
        try:
            patience_s = max(REPLACE_TIMEOUT_S, 2 * self._spec.config.replace_timeout)
            spec, rendezvous = self._orders.get(timeout=patience_s)
            while not self._orders.empty():
                spec, rendezvous = self._orders.get_nowait()  # the newest order counts
        except queue.Empty:
            raise LostPeer(lost) from None
        self._pause.clear()
        self._waiting.clear()
        self._heard = time.monotonic()
        self._spec = RunSpec.from_dict(spec)
        return self._spec, rendezvous

    def _wish(self) -> int:
        """Say what the driver asked for; STOP, with a checkpoint, when no driver has asked anything for too long."""
        if self._stop.is_set() or self._driver_is_silent():
            return STOP
        return REGROUP if self._pause.is_set() else GO_ON

    def _driver_is_silent(self) -> bool:
        return time.monotonic() - self._heard > DRIVER_SILENT_S

    def _end_if_orphaned(self) -> None:
        """End this process when nobody is there to end it: Ray ends the actors of a driver that it knows to be dead."""
        if self._driver_is_silent():
            os._exit(0)

    @ray.method(concurrency_group="beat")
    def beat(self, patience_s: float, waiting: bool, after: int | None) -> Beat:
        """Say where this rank is: at once when `waiting` is no longer true or it has passed step `after`, else late."""
        deadline = time.monotonic() + patience_s
        self._heard = deadline
        while True:
            spec = self._spec  # read before `waiting`, which ends before the next attempt is known
            place = ProgressStamp.read_all(spec.stamp(self._rank or 0)) if spec else None
            attempt = spec.attempt if spec else -1
            beat = Beat(*(place or (0, "init", 0, 0.0)), attempt=attempt, waiting=self._waiting.is_set())
            passed = after is not None and beat.step > after
            left = deadline - time.monotonic()
            if beat.waiting != waiting or passed or left <= 0:
                return beat
            if after is None and not waiting:
                self._waiting.wait(left)
            else:
                time.sleep(LOOK_S)

    @ray.method(concurrency_group="control")
    def stacks(self, log_file: str) -> None:
        """Append the Python stacks of all threads to this rank's log."""
        with open(log_file, "a", encoding="utf-8") as file:
            file.write("the stacks of this rank, asked for because no rank moves:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    @ray.method(concurrency_group="control")
    def go_on(self, spec: dict[str, Any], rendezvous: Rendezvous) -> None:
        """Give a waiting rank the new attempt."""
        self._orders.put((spec, rendezvous))

    @ray.method(concurrency_group="control")
    def poll(self) -> list[tuple[str, Any]]:
        """Return the notes and records since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    @ray.method(concurrency_group="control")
    def pause(self) -> None:
        """Ask all ranks to leave their groups after the same step, and to wait for the next one's."""
        self._pause.set()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ask all ranks to stop after the same step, with a checkpoint."""
        self._stop.set()


def bound_devices() -> list[str]:
    """Return the GPU or MIG ids that Ray gave this process, as strings; with none, hide every GPU from it."""
    ids = [str(i) for i in ray.get_gpu_ids()]
    if not ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an actor without GPUs would otherwise see all of them
    return ids


def raise_priority() -> None:
    """Undo Ray's nice 15, under which any other process on the node comes first. Root may; the driver knows."""
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


class _Forwarder:
    """Queue what rank 0 observes for the driver, which alone prints, and export it as Ray metrics."""

    def __init__(self, events: deque[tuple[str, Any]], metrics: _RayMetrics) -> None:
        self._events, self._metrics = events, metrics

    def on_note(self, text: str) -> None:
        self._events.append(("note", text))

    def on_record(self, record: dict[str, Any]) -> None:
        self._events.append(("record", record))
        self._metrics.set(record)

    def close(self) -> None:
        """Nothing is held back."""


class _RayMetrics:
    """Export the run's metrics as gauges `ray_nanoray_<name>` with tags run and rank."""

    def __init__(self, run_name: str, rank: int) -> None:
        self._tags = {"run": run_name, "rank": str(rank)}
        self._gauges: dict[str, Gauge] = {}

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
