"""Stand-ins for thousands of ranks, under the driver's own loop: `python -m nanoray.bench control` is built on them.

Campaign._watch ─► Crowd (a Gang) ─► n - 1 seats ─► a few `Ranks` actors, which answer at once and never train
                                  └► the culprit ─► a `Ranks` actor of its own, whose process is really killed
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

from nanoray import sentinel
from nanoray.config import load_config
from nanoray.data import DatasetInfo
from nanoray.failures import Inquest, read_reports
from nanoray.faults import ProgressStamp
from nanoray.gang import Gang
from nanoray.launch import Campaign, Stop
from nanoray.placement import Placement
from nanoray.run import RunSpec
from nanoray.watchdog import Position, Watchdog
from nanoray.worker import Beat

SEATS_PER_ACTOR = 500  # of a stand-in: Ray's asyncio actors answer a few hundred calls a second each


class Ranks:
    """An actor in place of many ranks, or of the one that fails: it has `Worker`'s methods, and does nothing."""

    def __init__(self, death: str = "") -> None:
        self._waiting, self._step = False, 0
        self._asleep: set[asyncio.Future[None]] = set()
        self._runs: set[asyncio.Future[dict[str, Any]]] = set()
        if death:
            sentinel.attend(Path(death))

    async def describe(self) -> dict[str, Any]:
        """Return where this actor is."""
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": node, "ip": ray.util.get_node_ip_address(), "devices": []}

    async def open_store(self, world_size: int, timeout_s: float) -> tuple[str, int]:
        """Nobody is going to meet there."""
        return "127.0.0.1", 1

    async def run(self, spec: dict[str, Any], rendezvous: Any) -> dict[str, Any]:
        """Train, that is: wait for the end."""
        over = asyncio.get_running_loop().create_future()
        self._runs.add(over)
        return await over

    async def beat(self, patience_s: float, waiting: bool, after: int | None) -> Beat:
        """Say where a rank is: at once when `waiting` is no longer true, else after `patience_s`."""
        loop = asyncio.get_running_loop()
        if self._waiting == waiting:
            wake = loop.create_future()
            timer = loop.call_later(patience_s, _end, wake, None)
            self._asleep.add(wake)
            await wake
            self._asleep.discard(wake)
            timer.cancel()
        self._step += 1  # some rank moves all the time
        return Beat(2 + self._step, "forward", 0, time.monotonic(), 0, self._waiting)

    async def lose_peer(self, wait: bool) -> None:
        """Let every rank notice that a peer is gone: report that it waits, or fail."""
        if wait:
            self._waiting = True
            _end_all(self._asleep, None)
            return
        error = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4711"
        lost = {"ok": False, "kind": "peer_lost", "exit_code": 1, "error": "RuntimeError", "message": error}
        _end_all(self._runs, lost | {"traceback": f"Traceback\n{error}\n" * 20, "step": 7, "phase": "backward"})

    async def rest(self) -> None:
        """Forget everything: whatever is pending ends."""
        self._waiting = False
        _end_all(self._asleep, None)
        _end_all(self._runs, {"ok": True})

    async def ready(self) -> dict[str, Any]:
        """There is nothing to import."""
        return await self.describe()

    async def poll(self) -> list[tuple[str, Any]]:
        """There are no notes."""
        return []

    async def stacks(self, log_file: str) -> None:
        """There is nothing to see."""


def _end(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _end_all(futures: set[asyncio.Future[Any]], value: Any) -> None:
    while futures:
        _end(futures.pop(), value)


class Crowd(Gang):
    """A gang whose seats are taken by stand-ins; the culprit's is an actor of its own, which can be killed."""

    def __init__(self, spec: RunSpec, place: Placement, actors: list[Any], fact: dict[str, Any], culprit: int) -> None:
        super().__init__(spec, place)
        self.asked, self.culprit = 0, culprit
        self.actors = {seat: actors[seat % len(actors)] for seat in range(place.workers) if seat != culprit}
        self.facts = dict.fromkeys(range(place.workers), fact)
        self.actors[culprit] = self._actor(culprit, False)
        self.facts[culprit] = ray.get(self.actors[culprit].describe.remote())

    def _actor(self, seat: int | None, rehearse: bool, **options: Any) -> Any:
        death = str(self.spec.death(seat or 0))
        return ray.remote(Ranks).options(num_cpus=0, max_concurrency=10).remote(death)

    def ask(self, seat: int, waiting: bool = False, after: int | None = None) -> None:
        """Count and ask."""
        self.asked += 1
        super().ask(seat, waiting, after)


class Stage:
    """One size: its stand-ins, its run folder, and what is done to them."""

    def __init__(self, n: int, folder: Path) -> None:
        self.n, self.source = n, random.Random(n)
        self.died = 0.0  # monotonic seconds of the newest death
        self._late: int | None = None  # whose stamp is behind
        self.place = Placement(None, "cpu", {"CPU": 1.0}, tuple(range(n)))  # type: ignore[arg-type]
        self.folder = folder / f"run{n}"
        (self.folder / "logs").mkdir(parents=True)
        (self.folder / "checkpoints").mkdir()
        count = math.ceil(n / SEATS_PER_ACTOR)
        remote: Any = ray.remote(Ranks)
        many = 4 * math.ceil(n / count) + 100
        self.actors = [remote.options(num_cpus=0, max_concurrency=many).remote() for _ in range(count)]
        self.fact = ray.get([actor.describe.remote() for actor in self.actors])[0]

    def crowd(self, recovery: str) -> Crowd:
        """Seat everybody, with a new culprit; the stamps say that it is a phase behind."""
        config = load_config(preset="tiny", overrides={"recovery": recovery, "workers": self.n, "hang_timeout": 60.0})
        data = DatasetInfo("words", "", self.folder, "uint16", 65, 1000, 100, "", "", {})
        spec = RunSpec(config, data, self.folder, time.time())
        culprit = self.source.randrange(1, self.n)
        for seat in range(self.n) if self._late is None else (self._late,):
            ProgressStamp(spec.stamp(seat)).set(7, "backward")
        ProgressStamp(spec.stamp(culprit)).set(7, "forward")
        self._late = culprit
        spec.death(culprit).unlink(missing_ok=True)
        return Crowd(spec, self.place, self.actors, self.fact, culprit)

    def watch(self, crowd: Crowd, meanwhile: Callable[[], None]) -> tuple[float, float, int]:
        """Start the ranks and run the driver's loop; `meanwhile`, in a thread, ends with `kill`.

        Return the seconds to start, those from the death to the written report, and the rank that the report names.
        """
        began = time.monotonic()
        crowd.begin()
        started = time.monotonic() - began
        campaign = Campaign(crowd.spec, self.place, Stop())
        campaign.gang = crowd
        trouble: list[BaseException] = []

        def ending_in_death() -> None:
            try:
                meanwhile()
            except BaseException as error:  # raised again below, once the loop is over
                trouble.append(error)
                os.kill(crowd.facts[crowd.culprit]["pid"], signal.SIGKILL)

        thread = threading.Thread(target=ending_in_death, daemon=True)
        with campaign.cluster, contextlib.redirect_stdout(io.StringIO()) as told:
            thread.start()
            inquest = campaign._watch(crowd)
            campaign._judge(inquest)
            assert campaign.recovering
            campaign.recovering.report.write(self.folder)
        over = time.monotonic()
        thread.join()
        if trouble:
            raise trouble[0]
        named = read_reports(self.folder)[-1]["rank"]
        if f"failure  rank {named} " not in told.getvalue():
            raise RuntimeError(f"the report names rank {named}, and the driver said {told.getvalue()[:200]!r}")
        return started, over - self.died, named

    def kill(self, crowd: Crowd, wait: bool) -> None:
        """Let the culprit die, after its peers were told so: their news may come first."""
        self.died = time.monotonic()
        for actor in self.actors:
            actor.lose_peer.remote(wait)
        os.kill(crowd.facts[crowd.culprit]["pid"], signal.SIGKILL)

    def rest(self, crowd: Crowd) -> None:
        """End what is left of a crowd: its culprit, or the one in its place."""
        ray.kill(crowd.actors[crowd.culprit])
        ray.get([actor.rest.remote() for actor in self.actors])

    def end(self) -> None:
        """End the stand-ins."""
        for actor in self.actors:
            ray.kill(actor)
        shutil.rmtree(self.folder)


def end_hung(crowd: Crowd) -> tuple[float, int]:
    """Return how long `Gang.end_hung` takes to read all stamps, ask for all stacks, and end one rank; and which."""
    crowd.members = sorted(crowd.actors)
    watchdog, inquest = Watchdog(crowd.members, 60.0), Inquest(crowd.members, False, 60.0, 0.0)
    for seat in crowd.members:
        watchdog.see(seat, Position(7, "forward" if seat == crowd.culprit else "backward"), 0.0)
    began = time.monotonic()
    crowd.end_hung(watchdog, inquest)
    return time.monotonic() - began, inquest.cause.rank
