"""Stand-ins for thousands of ranks, watched by the driver's own loop. `python -m
tests.stress control` uses them.

Watcher ─► Crowd (a WorkerGroup) ─► n - 1 slots ─► a few `Ranks` actors, which answer at once and never train
                                  └► the victim ─► a `Ranks` actor of its own, whose process is really killed
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import load_config
from nanoray.data.dataset import DatasetInfo
from nanoray.faults import exit_record
from nanoray.faults.cause import FailureCollector, read_reports
from nanoray.faults.hang import Position, Watchdog
from nanoray.faults.progress import ProgressFile
from nanoray.launch.placement import Placement
from nanoray.launch.recovery.actors import ActorPool
from nanoray.launch.recovery.driver import Driver
from nanoray.launch.recovery.rank_end import end_hung as end_hung_rank
from nanoray.launch.recovery.worker import Heartbeat
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.launch.signals import Stop

SLOTS_PER_ACTOR = 500  # Ray's asyncio actors answer a few hundred calls a second each


class Ranks:
    """An actor in place of many ranks, or of the one that fails: it has the methods of `Worker` and
    does nothing.
    """

    def __init__(self, record: str = "") -> None:
        self._waiting = False
        self._step = 0
        self._asleep: set[asyncio.Future[None]] = set()
        self._runs: set[asyncio.Future[dict[str, Any]]] = set()
        if record:
            exit_record.watch(Path(record))

    async def ready(self) -> dict[str, Any]:
        """Return where this actor is."""
        node = ray.get_runtime_context().get_node_id()
        where = {"node": node, "ip": ray.util.get_node_ip_address(), "devices": []}
        # This process is many ranks, so none is ended by its pid
        return where | {"pid": os.getpid(), "start": ""}

    async def open_store(self, world_size: int, timeout_s: float) -> tuple[str, int]:
        """Return an address that is never used."""
        return "127.0.0.1", 1

    async def break_meeting(self, secret: str, absent: int) -> None:
        """Do nothing: nobody has met."""

    async def abort(self, attempt: int) -> None:
        """Do nothing: there is no group."""

    async def run(self, spec: dict[str, Any], rendezvous: Any) -> dict[str, Any]:
        """Wait for the end."""
        over = asyncio.get_running_loop().create_future()
        self._runs.add(over)
        return await over

    async def heartbeat(self, patience_s: float, waiting: bool, after: int | None) -> Heartbeat:
        """Return a position after `patience_s`, or as soon as `waiting` differs."""
        loop = asyncio.get_running_loop()
        if self._waiting == waiting:
            wake = loop.create_future()
            timer = loop.call_later(patience_s, _end, wake, None)
            self._asleep.add(wake)
            await wake
            self._asleep.discard(wake)
            timer.cancel()
        self._step += 1  # some rank moves all the time
        return Heartbeat(2 + self._step, "forward", 0, time.monotonic(), 0, self._waiting)

    async def lose_peer(self, wait: bool) -> None:
        """Make every rank notice a lost peer: report that it waits, or fail."""
        if wait:
            self._waiting = True
            _end_all(self._asleep, None)
            return
        error = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4711"
        lost = {
            "ok": False,
            "kind": "peer_lost",
            "exit_code": 1,
            "error": "RuntimeError",
            "message": error,
        }
        _end_all(
            self._runs,
            lost | {"traceback": f"Traceback\n{error}\n" * 20, "step": 7, "phase": "backward"},
        )

    async def rest(self) -> None:
        """End all pending calls."""
        self._waiting = False
        _end_all(self._asleep, None)
        _end_all(self._runs, {"ok": True})

    async def poll(self) -> list[tuple[str, Any]]:
        """Return no messages."""
        return []

    async def stacks(self, log_file: str) -> int:
        """Do nothing."""
        return 0


def _end(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _end_all(futures: set[asyncio.Future[Any]], value: Any) -> None:
    while futures:
        _end(futures.pop(), value)


class StandIns(ActorPool):
    """Actors of which each is many ranks."""

    def new_actor(self, slot: int | None, rehearse: bool, **options: Any) -> Any:
        """Create a stand-in for one rank."""
        record = str(self.spec.progress(slot or 0))
        return ray.remote(Ranks).options(num_cpus=0, max_concurrency=10).remote(record)


class Crowd(WorkerGroup):
    """A group of stand-ins. The victim has an actor of its own, which can be killed."""

    def __init__(
        self, spec: RunSpec, place: Placement, actors: list[Any], fact: dict[str, Any], victim: int
    ) -> None:
        pool = StandIns(spec, place)
        super().__init__(pool)
        self.requests = 0
        self.victim = victim
        for slot in range(place.workers):
            pool.actors[slot] = actors[slot % len(actors)]
            pool.facts[slot] = fact
        pool.actors[victim] = pool.new_actor(victim, rehearse=False)
        pool.facts[victim] = ray.get(pool.actors[victim].ready.remote())

    def request_heartbeat(self, slot: int, waiting: bool = False, after: int | None = None) -> None:
        """Count the requests."""
        self.requests += 1
        super().request_heartbeat(slot, waiting, after)


class Stage:
    """One size: its stand-ins, its run folder, and the faults injected there."""

    def __init__(self, n: int, folder: Path) -> None:
        self.n = n
        self.source = random.Random(n)
        self.died = 0.0  # monotonic seconds of the newest death
        self._late: int | None = None  # the rank whose progress file is behind
        self.place = Placement(None, "cpu", {"CPU": 1.0}, tuple(range(n)))  # type: ignore[arg-type]
        self.folder = folder / f"run{n}"
        (self.folder / "logs").mkdir(parents=True)
        (self.folder / "checkpoints").mkdir()
        count = math.ceil(n / SLOTS_PER_ACTOR)
        remote: Any = ray.remote(Ranks)
        many = 4 * math.ceil(n / count) + 100
        self.actors = [
            remote.options(num_cpus=0, max_concurrency=many).remote() for _ in range(count)
        ]
        self.fact = ray.get([actor.ready.remote() for actor in self.actors])[0]

    def crowd(self, recovery: str) -> Crowd:
        """Return a group with a new victim, which is a phase behind according to the progress
        files.
        """
        config = load_config(
            preset="tiny", overrides={"recovery": recovery, "workers": self.n, "hang_timeout": 60.0}
        )
        data = DatasetInfo("words", "", self.folder, "uint16", 65, 1000, 100, "", "", {})
        spec = RunSpec(config, data, self.folder, time.time())
        victim = self.source.randrange(1, self.n)
        for slot in range(self.n) if self._late is None else (self._late,):
            ProgressFile(spec.progress(slot)).set(7, "backward")
        ProgressFile(spec.progress(victim)).set(7, "forward")
        self._late = victim
        return Crowd(spec, self.place, self.actors, self.fact, victim)

    def watch(self, crowd: Crowd, meanwhile: Callable[[], None]) -> tuple[float, float, int]:
        """Start the ranks and let the driver watch them. `meanwhile` runs in a thread and ends with
        `kill`.

        Return the seconds to start, those from the death to the written report, and the rank that
        the report names.
        """
        began = time.monotonic()
        crowd.begin()
        started = time.monotonic() - began
        driver = Driver(crowd.spec, self.place, Stop())
        trouble: list[BaseException] = []

        def ending_in_death() -> None:
            try:
                meanwhile()
            except BaseException as error:  # raised again below, once the loop is over
                trouble.append(error)
                os.kill(crowd.facts[crowd.victim]["pid"], signal.SIGKILL)

        thread = threading.Thread(target=ending_in_death, daemon=True)
        with driver.cluster, contextlib.redirect_stdout(io.StringIO()) as output:
            thread.start()
            driver.at.group = crowd
            ends = driver.watcher.watch(driver.at, driver.console)
            driver.recoverer.decide(driver.at, ends)
            driver.faults.close("none")
        over = time.monotonic()
        thread.join()
        if trouble:
            raise trouble[0]
        named = read_reports(self.folder)[-1]["rank"]
        if f"failure  rank {named} " not in output.getvalue():
            raise RuntimeError(
                f"the report names rank {named}, and the driver said {output.getvalue()[:200]!r}"
            )
        return started, over - self.died, named

    def kill(self, crowd: Crowd, wait: bool) -> None:
        """Kill the victim. Its peers are told just before, so their failures may arrive first."""
        self.died = time.monotonic()
        for actor in self.actors:
            actor.lose_peer.remote(wait)
        os.kill(crowd.facts[crowd.victim]["pid"], signal.SIGKILL)

    def rest(self, crowd: Crowd) -> None:
        """End what is left of a crowd: the victim's actor, or the one that replaced it."""
        ray.kill(crowd.pool.actors[crowd.victim])
        ray.get([actor.rest.remote() for actor in self.actors])

    def end(self) -> None:
        """End the stand-ins."""
        for actor in self.actors:
            ray.kill(actor)
        shutil.rmtree(self.folder)


def end_hung(crowd: Crowd) -> tuple[float, int]:
    """Return how long `rank_end.end_hung` takes to read all progress files, ask for all stacks
    and end one rank.
    """
    crowd.members = sorted(crowd.pool.actors)
    watchdog, collector = (
        Watchdog(crowd.members, 60.0),
        FailureCollector(crowd.members, False, 60.0, 0.0),
    )
    for slot in crowd.members:
        watchdog.update(slot, Position(7, "forward" if slot == crowd.victim else "backward"), 0.0)
    began = time.monotonic()
    end_hung_rank(crowd, watchdog, collector)
    return time.monotonic() - began, collector.cause.rank
