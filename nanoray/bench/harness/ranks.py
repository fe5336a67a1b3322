"""One rank of a benchmark, and the two ways to start ranks and to exchange messages with them.

    processes   children of this process: orders to their stdin, answers from their stdout, as JSON lines
    ray         one actor per slot of a cluster, or of a local Ray

An order is a method of Rank with its arguments. A message of a rank is {"event": ...} while it
runs, and at the end of an order {"done": ...}, {"error": ..., "collective": ...} or {"died": ...}.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import secrets
import select
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanoray import __version__
from nanoray.bench.harness.processes import (
    TAIL_LINES,
    Child,
    ChildFailed,
    answers_only,
    arm_environment,
    scratch_folder,
)
from nanoray.bench.harness.report import Kept, Record
from nanoray.config import make_config
from nanoray.faults.cause import is_collective_error
from nanoray.machine.device import Device
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus, cpu_name
from nanoray.machine.slots import local_slots
from nanoray.parallel.rendezvous import RankDevice, Rendezvous, choose_backend

if TYPE_CHECKING:
    from nanoray.parallel.mesh import Mesh

START_S = 90.0  # for a rank to import torch and meet the others


@dataclass(frozen=True)
class Where:
    """Which ranks to start, and how."""

    workers: int
    launcher: str = "processes"  # or ray
    device: str = "auto"
    backend: str = "auto"
    ray_address: str = "auto"
    timeout_s: float = 600.0  # of a collective, and of the ranks' silence
    shared: bool = False  # more ranks than devices: they take turns on them (processes only)
    threads: int = 0  # of each rank; 0: an equal share of the cores
    # Of their environment, beside those of every arm (processes only)
    variables: Mapping[str, str] = field(default_factory=dict)


class Rank:
    """One rank in any process: reports where it is, joins the others, and runs functions."""

    def __init__(self, slot: Record, emit: Callable[[Record], object]) -> None:
        """`slot`: rank, workers, kind, node, gpu, device, uuid, addr, threads, timeout_s."""
        self.slot = slot
        self._emit = emit if slot["rank"] == 0 else _drop
        self.store: Any = None
        self._mesh: Mesh | None = None
        self._kept: Kept | None = None

    def answer(self, method: str, arguments: Any) -> Record:
        """Call hello, meet, keep or run, and return {"done": ...} or {"error": ...}.

        The parent compares the errors of several ranks, so an exception becomes data.
        """
        try:
            return {"done": getattr(self, method)(*arguments)}
        except Exception as error:
            trace = "\n".join(traceback.format_exc().splitlines()[-TAIL_LINES:])
            text = f"{type(error).__name__}: {error}\n{trace}"
            return {"error": text, "collective": is_collective_error(error)}

    def hello(self) -> Record:
        """Return the slot, the NCCL in force, and on rank 0 the port of the store that it serves."""
        from nanoray.parallel.rendezvous import open_store, runtime_nccl_version

        slot = self.slot
        if slot["workers"] > 1 and slot["rank"] == 0 and self.store is None:
            self.store = open_store(slot["addr"], slot["workers"], START_S)
        answer: Record = {"secret": secrets.token_hex(16)} | slot
        answer["nccl"] = None if slot["kind"] == "cpu" else runtime_nccl_version()
        answer["port"] = self.store.port if self.store else 0
        return answer

    def meet(self, record: Record) -> Record:
        """Join the others; return this rank's facts. (all ranks)"""
        # Imported by ranks: the benchmark's own process needs no torch.
        import torch

        from nanoray.parallel.mesh import join

        r = Rendezvous(**record)
        os.environ.update(r.env)
        torch.set_num_threads(r.threads)
        versions = {"torch": torch.__version__, "nanoray": __version__}
        self._mesh = join(r, versions, self.slot["timeout_s"], START_S, self.store)
        name = cpu_name()
        uuid = ""
        sms = None
        if self._mesh.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._mesh.device)
            name = properties.name
            sms = properties.multi_processor_count
            uuid = self.slot["uuid"] or f"GPU-{properties.uuid}"
        return {
            "rank": r.rank,
            "host": self.slot["node"],
            "pid": os.getpid(),
            "device": r.device,
            "name": name,
            "uuid": uuid,
            "sms": sms,
            "threads": r.threads,
        }

    def keep(self, function: str, order: Record) -> None:
        """Call "module:function", and keep the function that it returns. (all ranks)"""
        self._kept = self._named(function)(self._mesh, order)

    def run(self, function: str, order: Record) -> None:
        """Call "module:function", or without a name the function that is kept. (all ranks)"""
        called = self._named(function) if function else self._kept
        assert called, "nothing was kept"
        called(self._mesh, order, self._emit)

    def _named(self, function: str) -> Callable[..., Any]:
        import torch

        # OpenMP counts per thread, and an actor may run this in another one.
        torch.set_num_threads(self.slot["threads"])
        module, _, name = function.partition(":")
        called: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return called


def _drop(event: Record) -> None:
    pass


def main() -> None:
    """Be one rank of a pool of processes: carry out the orders on stdin until it ends."""
    say = answers_only()
    rank = Rank(json.loads(sys.argv[1]), lambda event: say({"event": event}))
    for line in sys.stdin:
        say(rank.answer(*json.loads(line)))
    os._exit(0)  # nothing has to be kept, and gloo's teardown can hang


# The driver's side of the two launchers.


class RankChannel:
    """How a pool talks to the ranks that a launcher starts."""

    ranks: range

    def start(self) -> None:
        """Start the ranks."""
        raise NotImplementedError

    def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Order a rank to call a method."""
        raise NotImplementedError

    def receive(self, timeout_s: float) -> list[tuple[int, Record]]:
        """Return the messages that have come, each with its rank."""
        raise NotImplementedError

    def tail(self, rank: int) -> str:
        """Return the last lines of a rank's log, where it has one."""
        return ""

    def end(self) -> None:
        """End the ranks."""


class _Processes(RankChannel):
    """Ranks as children of this process.

    Orders go to their stdin, answers come from their stdout, one JSON line each.
    """

    def __init__(self, where: Where) -> None:
        asked = None if where.shared else where.workers
        slots = local_slots(where.device, asked, discover_gpus(), available_cpus())
        if slots.kind == "cpu":
            # Refuses more ranks than the CPUs can run
            local_slots("cpu", where.workers, [], available_cpus())
            choose_backend([RankDevice("cpu", "", "")], where.backend, None)
        self.ranks = range(where.workers)
        threads = where.threads or max(1, int(available_cpus()) // where.workers)
        devices: list[Device | None] = list(slots.devices) or [None]
        self._slots: list[Record] = []
        for rank in self.ranks:
            device = devices[rank % len(devices)]
            slot = {
                "rank": rank,
                "workers": where.workers,
                "kind": slots.kind,
                "node": platform.node(),
                "gpu": "",
                "uuid": "",
                "device": "cpu",
                "addr": "127.0.0.1",
                "threads": threads,
                "timeout_s": where.timeout_s,
            }
            if device:
                # The rank sees only its own device, which is therefore the first
                slot |= {"gpu": device.parent_uuid, "uuid": device.uuid, "device": "cuda:0"}
            self._slots.append(slot)
        self._variables = dict(where.variables)
        self._children: list[Child] = []
        self._open: dict[Any, int] = {}  # stdout of each rank that still lives
        self._stack = ExitStack()

    def start(self) -> None:
        folder = self._stack.enter_context(scratch_folder())
        for slot in self._slots:
            env = arm_environment() | self._variables | {"CUDA_VISIBLE_DEVICES": slot["uuid"]}
            command = [sys.executable, "-m", "nanoray.bench.harness.ranks", json.dumps(slot)]
            child = Child(command, env, folder / f"rank{slot['rank']}.log", pipes=True)
            self._children.append(child)
            self._open[child.process.stdout] = slot["rank"]

    def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> None:
        with suppress(ChildFailed):  # the end of its stdout is reported, with the reason
            self._children[rank].ask(json.dumps([method, arguments]))

    def receive(self, timeout_s: float) -> list[tuple[int, Record]]:
        messages: list[tuple[int, Record]] = []
        for stdout in select.select(list(self._open), [], [], timeout_s)[0]:
            rank = self._open[stdout]
            try:
                messages += [(rank, message) for message in self._children[rank].read()]
            except ChildFailed as ending:
                del self._open[stdout]
                messages.append((rank, {"died": str(ending)}))
        return messages

    def tail(self, rank: int) -> str:
        return self._children[rank].tail()

    def end(self) -> None:
        for child in self._children:
            child.end()
        self._stack.close()


class _Actors(RankChannel):
    """Ranks as Ray actors: one per slot of a cluster, or of a local Ray that leaves nothing behind."""

    def __init__(self, where: Where) -> None:
        from nanoray.launch.caller import ray_address

        values = {"workers": where.workers, "device": where.device, "backend": where.backend}
        # A configuration must have a batch size, although no batch is read.
        self._config = make_config(
            {"ray_address": where.ray_address, "micro_batch_size": 1, **values}
        )
        self._address = ray_address(self._config)
        self._slots = None
        if self._address == "local":
            self._slots = local_slots(
                where.device, where.workers, discover_gpus(), available_cpus()
            )
        self.ranks = range(where.workers)
        self._timeout_s = where.timeout_s
        self._threads = where.threads
        self._stack = ExitStack()
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}

    def start(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        from nanoray.launch.connection import connected
        from nanoray.launch.placement import Placement, strategy

        # Ray prints, and stdout belongs to the report
        self._stack.enter_context(redirect_stdout(sys.stderr))
        self._stack.enter_context(connected(self._address, self._slots))
        place = Placement.make(self._config)
        self._stack.callback(remove_placement_group, place.group)
        actor: Any = ray.remote(concurrency_groups={"control": 1})(_Actor)  # type: ignore[call-overload]

        slot = {
            "workers": place.workers,
            "kind": place.kind,
            "threads": self._threads or place.threads,
            "timeout_s": self._timeout_s,
        }
        for rank, index in enumerate(place.order):
            options = actor.options(
                num_cpus=place.bundle["CPU"],
                num_gpus=place.bundle.get("GPU", 0),
                scheduling_strategy=strategy(place.group, index),
                max_restarts=0,
                max_task_retries=0,
            )
            self._actors.append(options.remote(slot | {"rank": rank}))

    def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> None:
        self._pending[self._actors[rank].answer.remote(method, arguments)] = rank

    def receive(self, timeout_s: float) -> list[tuple[int, Record]]:
        import ray
        from ray.exceptions import RayActorError, RayError

        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        messages: list[tuple[int, Record]] = []
        with suppress(RayError):  # a dead rank 0 is reported below
            poll = self._actors[0].poll.options(concurrency_group="control").remote()
            messages += [(0, {"event": event}) for event in ray.get(poll, timeout=START_S)]
        for ref in ready:
            rank = self._pending.pop(ref)
            try:
                messages.append((rank, ray.get(ref)))
            except RayActorError as error:
                reason = " ".join(str(error).split())[:600]
                messages.append((rank, {"died": f"its actor is gone: {reason}"}))
            except RayError as error:
                messages.append((rank, {"error": str(error), "collective": False}))
        return messages

    def end(self) -> None:
        import ray

        try:
            for actor in self._actors:
                ray.kill(actor)
        finally:
            self._stack.close()


class _Actor(Rank):
    """A rank in a Ray actor. `answer` runs on the main lane, `poll` beside it on the control lane."""

    def __init__(self, slot: Record) -> None:
        import ray

        from nanoray.launch.devices import bound_devices

        devices = ",".join(bound_devices())
        slice_or_uuid = devices if devices.startswith(("MIG-", "GPU-")) else ""
        slot |= {
            "device": "cuda:0" if devices else "cpu",
            "addr": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            # Ray identifies slices by their UUIDs and not by their card: the slices of a node count
            # as slices of one card
            "gpu": "" if slot["kind"] == "mig" else devices,
            "uuid": slice_or_uuid,
        }
        self._queue: deque[Record] = deque()
        super().__init__(slot, self._queue.append)

    def poll(self) -> list[Record]:
        """Return what this rank emitted since the last call."""
        return [self._queue.popleft() for _ in range(len(self._queue))]


def open_link(where: Where) -> RankChannel:
    """Check what can be checked, start nothing yet. Raises PlacementError or ConfigError."""
    return _Actors(where) if where.launcher == "ray" else _Processes(where)


if __name__ == "__main__":
    main()
