"""The Ray actor: bind one device, join the others, train, and answer health questions meanwhile.

Ray places the actor, keeps what it prints, and reports its death. No gradient, weight or batch passes through Ray.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import threading
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

import ray
from ray.util.metrics import Gauge

from nanoray.errors import NanorayError
from nanoray.mesh import Rendezvous
from nanoray.metrics import METRICS
from nanoray.run import RunSpec, recovers_in_place

REPLACE_TIMEOUT_S = 600.0  # a survivor that the driver has forgotten ends by itself


class LostPeer(RuntimeError):
    """A collective lost its peer, and nobody took the peer's place."""


class Worker:
    """One rank. `run` trains on the main lane; `poll` and `stop` answer on the control lane at the same time."""

    def __init__(self, run_name: str, rank: int) -> None:
        self._name, self._rank = run_name, rank
        self._events: deque[tuple[str, Any]] = deque()
        self._stop = threading.Event()
        self._store: Any = None
        self._waiting = ""  # the error after which this rank waits for the lost one's replacement
        self._orders: queue.Queue[tuple[dict[str, Any], Rendezvous]] = queue.Queue()
        self._devices = bound_devices()
        raise_priority()
        # Importing torch takes seconds: begin now, while the driver still talks to the other actors. Whoever needs it
        # joins this thread first, for two threads that import torch.distributed at once abort the process.
        self._importing = threading.Thread(target=importlib.import_module, args=("nanoray.train",), daemon=True)
        self._importing.start()

    def __repr__(self) -> str:
        return f"{self._name} rank {self._rank}"

    @ray.method(concurrency_group="control")
    def describe(self) -> dict[str, Any]:
        """Return where this actor is and what it is bound to."""
        context = ray.get_runtime_context()
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "node": context.get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "actor": context.get_actor_id(),
            "devices": self._devices,
        }

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
        from nanoray.faults import ProgressStamp, is_collective_error
        from nanoray.train import log, train

        run = RunSpec.from_dict(spec)
        try:
            watchers = [_Forwarder(self._events, _RayMetrics(self._name, self._rank))] if self._rank == 0 else []
            store = self._store if rendezvous.rank == 0 and not rendezvous.agent_store else None
            in_place = recovers_in_place(run.config, rendezvous.backend, rendezvous.world_size)
            rejoin = self._rejoin if in_place else None
            outcome = train(run, rendezvous, watchers, self._stop.is_set, store, rejoin)
            return {"ok": True, **outcome}
        except Exception as error:  # every exception becomes data: the driver ranks it against the other ranks'
            log.exception("rank %d failed", self._rank)
            step, phase = ProgressStamp.read(run.stamp(self._rank)) or (0, "init")
            kind = "refused" if isinstance(error, NanorayError) else "user"
            return {
                "ok": False,
                "kind": "collective" if isinstance(error, LostPeer) or is_collective_error(error) else kind,
                "exit_code": getattr(error, "exit_code", 1),
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "step": step,
                "phase": phase,
            }

    def _rejoin(self, lost: str) -> tuple[RunSpec, Rendezvous]:
        """Wait, in the middle of `run`, until the driver has replaced the lost rank. Raises LostPeer otherwise."""
        self._waiting = lost
        try:
            spec, rendezvous = self._orders.get(timeout=REPLACE_TIMEOUT_S)
        except queue.Empty:
            raise LostPeer(lost) from None
        self._waiting = ""
        return RunSpec.from_dict(spec), rendezvous

    @ray.method(concurrency_group="control")
    def waiting(self) -> str:
        """Return the error after which this rank waits for a replacement, empty while it trains."""
        return self._waiting

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
