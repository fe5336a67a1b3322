"""A scripted Ray for the driver: actors, pending results, deaths and time. nanoray is real.

`ScriptedRay` has the part of ray's surface that nanoray.launch uses. Its actors answer as workers
do: they train, die, hang or wait at the times that a test says, and write the same progress files
and exit records. `ScriptedTime` moves only when the driver waits, so that a run of minutes takes
milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import json
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
)

from nanoray.checkpoint.run_folder import RunSpec, recovers_in_place
from nanoray.config import load_config
from nanoray.data.dataset import DatasetInfo
from nanoray.faults import exit_record
from nanoray.faults.progress import ProgressFile
from nanoray.launch.placement import Placement
from nanoray.launch.recovery.actors import ActorPool
from nanoray.launch.recovery.driver import Driver
from nanoray.launch.recovery.rank_end import end_process
from nanoray.launch.recovery.worker import ORPHAN_CODE, Heartbeat
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.launch.signals import Stop
from nanoray.parallel.rendezvous import Rendezvous

NOTICE_S = 0.02  # from a death until its peers' collectives fail
ABORT_S = 0.03  # from an order to abort until the rank has left its group
REPORT_S = 0.01  # from a death until Ray reports it
TAKE_SLOT_S = 0.1  # until a spare has a slot: then a process stands beside it, for its exit record
START_S = 2.0  # from the creation of an actor in place of a lost one until it is ready
STEP_S = 1.0
GO_ON_S = 0.005  # until a waiting rank has taken the next attempt; it still answers that it waits
DRIVER_NODE = "d" * 56
HEAD_NODE = "e" * 56  # has CPUs, and no rank
RUN_S = 40.0  # a group that trains so long without a fault has finished


class NodeDied(ActorDiedError):
    """Ray's error for an actor whose node was declared dead, with Ray 2.60's words."""

    def __init__(self) -> None:
        RayActorError.__init__(
            self,
            None,
            "The actor died unexpectedly before finishing this task.\n"
            "The actor died because its node has died. Node Id: 7be334\n"
            "\tthe actor's node was terminated unexpectedly: health check failed due to missing "
            "too many heartbeats",
            False,
            False,
        )


class ScriptedTime:
    """The module `time`, as far as the driver uses it. Waiting runs the events that fall due."""

    def __init__(self) -> None:
        self.now = self.began = time.monotonic()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.advance(self.now + seconds)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def advance(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Run all events until then, or until there is enough."""
        while not enough() and self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        if not enough():
            assert until - self.began < 1e5, "the driver waits for ever"
            self.now = until


def node_id(slot: int | None) -> str:
    """Every slot has a node of its own."""
    return f"{slot or 0:08x}{0:048x}"


@dataclass(eq=False)
class Ref:
    """An answer, once it is there."""

    value: Any = None
    done: bool = False

    def set(self, value: Any) -> None:
        if not self.done:
            self.value, self.done = value, True


class Actor:
    """One worker's process, as the driver sees it."""

    def __init__(self, ray: ScriptedRay, slot: int | None, name: str) -> None:
        self.ray, self.slot, self.name = ray, slot, name
        self.pid = next(ray.pids)
        # As Ray's handle: what it calls hex is the key of the actor's record
        self._actor_id = SimpleNamespace(hex=lambda: name)
        # Frozen: SIGSTOP. stuck: its training thread hangs
        self.alive, self.frozen, self.stuck = True, False, False
        self.trains_since: float | None = None
        self.waiting, self.attempt = False, -1
        self.step, self.phase, self.base = 0, "init", 0
        self.file: ProgressFile | None = None
        self.written: tuple[int, str, int] | None = None
        self.refs: list[Ref] = []
        self.runs: list[Ref] = []
        self.sleepers: list[tuple[Ref, bool, int | None]] = []
        # Whether it has held the run's state; its steps when its group broke; which share of the
        # state it holds where tp divides that (-1: it was left out of the group)
        self.trained, self.kept, self.share = False, 0, 0
        self.collectives = 0  # that it has started
        # What Ray says to calls once it is dead
        self.end: Exception = self.died(ActorDiedError())
        self.ready_at = ray.time.now + ray.imports_s
        self.devices: list[str] = []
        self.avoids: list[str] = []  # nodes on which Ray must not place it
        self.home = ""  # a spare's node, also once it has a slot

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Ref:
            ref = Ref()
            self.refs.append(ref)
            if not self.alive:
                ref.set(self.end)
            elif not self.frozen:
                getattr(self.ray, f"on_{method}")(self, ref, *args)
            return ref

        return SimpleNamespace(remote=remote)

    def died(self, error: Exception) -> Exception:
        """Return an error as Ray raises it for this actor."""
        if isinstance(error, ActorDiedError):
            error.actor_id = self.name
        return error

    @property
    def facts(self) -> dict[str, Any]:
        node = self.home or node_id((self.slot or 0) + 256 * len(self.avoids))
        return {
            "pid": self.pid,
            "start": "1",
            "node": node,
            "ip": f"10.0.0.{self.slot}",
            "actor": self.name,
            "devices": self.devices,
        }

    def write_progress(self) -> None:
        """Bring the progress file up to date, as a rank does that trains."""
        if self.trains_since is not None:
            self.step = self.base + 1 + int((self.ray.time.now - self.trains_since) / STEP_S)
        position = (self.step, self.phase, self.base)
        if self.slot is not None and (self.trains_since is not None or position != self.written):
            self.file = self.file or ProgressFile(self.ray.spec.progress(self.slot))
            self.file.base, self.written = self.base, position
            self.file.set(self.step, self.phase)

    def wake(self) -> None:
        """Answer the heartbeats whose condition holds."""
        self.write_progress()
        for ref, waiting, after in list(self.sleepers):
            if self.waiting != waiting or (after is not None and self.step > after):
                self.answer(ref)

    def answer(self, ref: Ref) -> None:
        self.sleepers = [s for s in self.sleepers if s[0] is not ref]
        if self.alive and not self.frozen:
            self.write_progress()
            position = ProgressFile.read_own(self.ray.spec.progress(self.slot or 0))
            ref.set(Heartbeat(*position, attempt=self.attempt, waiting=self.waiting))

    def fail_pending(self, error: Exception) -> None:
        self.alive, self.trains_since = False, None
        for ref in self.refs:
            ref.set(self.died(error))


@dataclass
class ScriptedRay:
    """The module `ray`, as far as the driver uses it, and the script's handles on what happens."""

    spec: RunSpec
    workers: int
    in_place: bool
    time: ScriptedTime = field(default_factory=ScriptedTime)
    orders: list[str] = field(default_factory=list)  # what the driver did, in order
    # Slot and attempt of each order to abort
    aborts: list[tuple[int | None, int]] = field(default_factory=list)
    actors: dict[int, Actor] = field(default_factory=dict)  # by slot, the newest
    # Slot -> how many of its next actors die at start
    failing_starts: dict[int, int] = field(default_factory=dict)
    # Slot -> how many newcomers cannot work
    refusing_starts: dict[int, int] = field(default_factory=dict)
    created: list[Actor] = field(default_factory=list)
    store_server: Actor | None = None  # whose process serves the newest store
    # Pids that a task on their node was to end
    ended_for_certain: list[int] = field(default_factory=list)
    # The beginning of an order, and what happens once right after the next such order
    armed: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    start_s: float = START_S
    imports_s: float = 0.0  # from the creation of a run's first actors until they can join others
    # Node -> Unix ms of its end; 0 if nobody said
    draining: dict[str, int] = field(default_factory=dict)
    room: int = 0  # how many more ranks other nodes can hold
    # Actors in bundles on such nodes
    unplaced: list[tuple[Actor, Callable[[], None]]] = field(default_factory=list)
    # Actors that were created when the head was gone
    without_head: list[str] = field(default_factory=list)
    # Slot, its steps, those of the checkpoint
    thrown_away: list[tuple[int, int, int]] = field(default_factory=list)

    # Slot -> how many of its next actors get no process
    lost_requests: dict[int, int] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)  # their names
    memory: tuple[int, int] = (300 << 20, 8 << 30)  # bytes of each rank, and free on each node

    def __post_init__(self) -> None:
        self.pids = itertools.count(1000)
        # It is never accepted from: the kernel completes the connections that the driver makes
        self.head = socket.create_server(("127.0.0.1", 0), backlog=4096)
        address = f"127.0.0.1:{self.head.getsockname()[1]}"
        self.members: list[Actor] = []  # of the newest group that has formed
        self.forming: dict[int, Actor] = {}
        self.furthest = 0  # completed steps in memory
        self.saved = 0  # the step of the newest checkpoint: ranks write one when they stop
        self.paused: dict[int, int] = {}  # pid -> the attempt that it should leave
        self.stopped: set[int] = set()
        self.util = SimpleNamespace(
            placement_group_table=lambda group: {
                "bundles_to_node_id": {i: node_id(i) for i in range(self.workers)},
                "state": "CREATED",
            }
        )
        record = lambda name: {"State": "PENDING_CREATION" if name in self.pending else "ALIVE"}  # noqa: E731
        state = SimpleNamespace(get_draining_nodes=lambda: dict(self.draining))
        free = lambda: {"free": {"CPU": float(self.room)}}  # noqa: E731
        gcs = SimpleNamespace(internal_kv_get=lambda *_: b"")
        worker = SimpleNamespace(global_worker=SimpleNamespace(gcs_client=gcs))
        state = SimpleNamespace(state=state, available_resources_per_node=free, actors=record)
        self._private = SimpleNamespace(state=state, worker=worker)
        self.get_runtime_context = lambda: SimpleNamespace(
            gcs_address=address, get_node_id=lambda: DRIVER_NODE
        )

    # ray's surface

    def nodes(self) -> list[dict[str, Any]]:
        """Return the head's node, one of each rank, and one whose room is `room`."""
        resources: dict[str, dict[str, float]] = {HEAD_NODE: {"CPU": 8.0}}
        resources |= {node_id(slot): {"CPU": 1.0} for slot in range(self.workers)}
        resources["free"] = {}
        return [
            {
                "NodeID": node,
                "NodeManagerAddress": "",
                "Resources": amounts,
                "Alive": True,
            }
            for node, amounts in resources.items()
        ]

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda run, slot, *_: self._create(slot, given))

        def decorate(what: Any) -> Any:
            if what is end_process:
                return SimpleNamespace(remote=lambda pid, start: self.ended_for_certain.append(pid))
            return SimpleNamespace(options=options)

        return decorate

    def _create(self, slot: int | None, given: dict[str, Any]) -> Actor:
        actor = Actor(self, slot, given["name"])
        where = given["scheduling_strategy"]
        for label in getattr(where, "hard", []):
            actor.avoids += label.operator.values
        if slot is None:
            actor.home = where.node_id
        self.created.append(actor)
        if self.head.fileno() < 0:
            self.without_head.append(actor.name)  # Ray would wait for ever
        self._note(f"start {'spare' if slot is None else slot}")
        if slot is not None:
            self.actors[slot] = actor
        return actor

    def kill(self, actor: Actor) -> None:
        if actor.alive:
            self._judge(actor)
            self._note(f"kill {'spare' if actor.slot is None else actor.slot}")
            self._die(actor, NOTICE_S, 0.0, ActorDiedError())

    def holds(self, actor: Actor) -> int:
        """The completed steps in an actor's memory; 0 if it never trained or does not answer."""
        if (
            not actor.alive
            or actor.frozen
            or actor.stuck
            or not actor.trained
            or actor.runs[-1].done
        ):
            return 0
        actor.write_progress()
        return actor.step - 1 if actor.trains_since is not None else actor.kept

    def in_memory(self, without: Actor | None = None) -> int:
        """The completed steps of the state of which the ranks hold every share, less one rank."""
        steps = dict.fromkeys(range(self.spec.config.tp), 0)
        for actor in self.created:
            if actor is not without and actor.slot is not None and actor.share in steps:
                steps[actor.share] = max(steps[actor.share], self.holds(actor))
        return min(steps.values())

    def _judge(self, actor: Actor) -> None:
        """Note a state that is thrown away: no checkpoint and no other ranks have as many steps."""
        steps = self.in_memory()
        if actor.slot is not None and steps > max(self.saved, self.in_memory(without=actor)):
            self.thrown_away.append((actor.slot, steps, self.saved))

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        pending = refs if isinstance(refs, list) else [refs]
        self.wait(pending, num_returns=len(pending), timeout=1e9 if timeout is None else timeout)
        for ref in pending:
            if not ref.done:
                raise GetTimeoutError("timed out")
            if isinstance(ref.value, Exception):
                raise ref.value
        return [ref.value for ref in pending] if isinstance(refs, list) else refs.value

    def wait(
        self, refs: list[Ref], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[Ref], list[Ref]]:
        def enough() -> bool:
            return sum(ref.done for ref in refs) >= num_returns

        self.time.advance(self.time.now + timeout, enough)
        ready = [ref for ref in refs if ref.done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def _note(self, order: str) -> None:
        self.orders.append(order)
        for beginning, event in [armed for armed in self.armed if order.startswith(armed[0])]:
            self.armed.remove((beginning, event))
            self.time.after(0.0, event)

    # What actors do when they are called

    def _loses_request(self, actor: Actor) -> bool:
        slot = -1 if actor.slot is None else actor.slot
        if not self.lost_requests.get(slot, 0):
            return False
        self.lost_requests[slot] -= 1
        self.pending.add(actor.name)
        return True

    def _once_placed(self, actor: Actor, answer: Callable[[], None]) -> None:
        """Let an actor start; on a drained node it waits until Ray has moved its bundle."""
        if actor.slot is not None and actor.facts["node"] in self.draining:
            self.unplaced.append((actor, answer))
        else:
            answer()

    def on_describe(self, actor: Actor, ref: Ref) -> None:
        if not self._loses_request(actor):
            self._once_placed(actor, lambda: ref.set(actor.facts))

    def on_memory(self, actor: Actor, ref: Ref) -> None:
        ref.set(self.memory)

    def on_ready(self, actor: Actor, ref: Ref) -> None:
        if not self._loses_request(actor):
            self._once_placed(actor, lambda: self._start(actor, ref))

    def _start(self, actor: Actor, ref: Ref) -> None:
        slot = -1 if actor.slot is None else actor.slot
        if self.failing_starts.get(slot, 0):
            self.failing_starts[slot] -= 1
            self.time.after(self.start_s / 2, lambda: actor.fail_pending(ActorDiedError()))
            return

        # A spare has imported everything long before it takes a slot.
        was_ready = actor.home and actor.slot is not None
        self.time.after(0.0 if was_ready else self.start_s, lambda: ref.set(actor.facts))

    def on_take_slot(
        self, actor: Actor, ref: Ref, slot: int, devices: list[str], record: Path
    ) -> None:
        actor.slot = slot
        self.actors[slot] = actor
        self._note(f"spare takes {slot}")
        assert record == self.spec.progress(slot)

        def has_taken() -> None:
            actor.devices = devices
            ref.set(actor.facts)

        self.time.after(TAKE_SLOT_S, has_taken)

    def on_open_store(self, actor: Actor, ref: Ref, world_size: int, timeout_s: float) -> None:
        self.store_server = actor
        imports_s = max(0.0, actor.ready_at - self.time.now)
        self.time.after(imports_s, lambda: ref.set(("10.0.0.1", 4711)))

    def on_break_meeting(self, actor: Actor, ref: Ref, secret: str, absent: int) -> None:
        """The ranks that wait for a lost one know at once."""
        for waiting in list(self.forming.values()):
            self.time.after(NOTICE_S, partial(self.lose_peer, waiting, waiting.attempt))

    def on_abort(self, actor: Actor, ref: Ref, attempt: int) -> None:
        """Fail a rank of this attempt that waits for a peer, as if its connection closed."""
        self.aborts.append((actor.slot, attempt))
        if actor in self.members and actor not in self.forming.values():
            self.time.after(ABORT_S, partial(self.lose_peer, actor, attempt))

    def on_poll(self, actor: Actor, ref: Ref) -> None:
        ref.set([])

    def on_stacks(self, actor: Actor, ref: Ref, log: str) -> None:
        ref.set(actor.collectives)

    def on_run(self, actor: Actor, ref: Ref, spec: dict[str, Any], r: Rendezvous) -> None:
        actor.runs.append(ref)
        self._note(f"run {r.slot} as {r.rank}/{r.world_size} attempt {spec['attempt']}")
        if r.live and self.refusing_starts.get(r.slot, 0):
            self.refusing_starts[r.slot] -= 1
            self.forming[r.rank] = actor
            actor.step, actor.phase = 0, "init"
            self.time.after(0.01, partial(self._refuse, actor))
        elif actor.ready_at > self.time.now:
            self.time.after(actor.ready_at - self.time.now, lambda: self._join(actor, spec, r))
        else:
            self._join(actor, spec, r)

    def _refuse(self, actor: Actor) -> None:
        """Let a newcomer's `run` say that it cannot work, unless it has ended before."""
        if actor.alive:
            self._fail(actor, "refused", "ConfigError: no shared folder", NOTICE_S)

    def on_go_on(self, actor: Actor, ref: Ref, spec: dict[str, Any], r: Rendezvous) -> None:
        self._note(f"go_on {r.slot} as {r.rank}/{r.world_size} attempt {spec['attempt']}")
        self.time.after(GO_ON_S, lambda: self._join(actor, spec, r))

    def on_heartbeat(
        self, actor: Actor, ref: Ref, patience_s: float, waiting: bool, after: int | None
    ) -> None:
        actor.sleepers.append((ref, waiting, after))
        self.time.after(patience_s, lambda: actor.answer(ref))
        actor.wake()

    def on_stop(self, actor: Actor, ref: Ref) -> None:
        self._note(f"stop {actor.slot}")
        self.stopped.add(actor.pid)
        self._end_step()

    def on_pause(self, actor: Actor, ref: Ref, attempt: int) -> None:
        self._note(f"pause {actor.slot}")
        self.paused[actor.pid] = attempt
        self._end_step()

    # Training

    def _join(self, actor: Actor, spec: dict[str, Any], r: Rendezvous) -> None:
        """Meet the other ranks of an attempt; when all are there, training goes on."""
        assert actor.slot == r.slot
        if not actor.alive or actor.frozen:
            return
        actor.waiting = False
        if actor.attempt < spec["attempt"] and not any(
            a.attempt == spec["attempt"] for a in self.forming.values()
        ):
            self.forming = {}
        actor.attempt, actor.phase = spec["attempt"], "init"
        self.forming[r.rank] = actor
        if not r.live:
            self.furthest = self.saved
        actor.step = actor.base = self.furthest
        server = self.store_server
        if r.world_size > 1 and server and not server.alive:  # its host refuses the connection
            self.time.after(NOTICE_S, lambda: self._give_up_meeting(actor, spec["attempt"]))
            return
        if len(self.forming) < r.world_size:
            # The others may be dead although the driver does not know that yet.
            timeout_s = spec["config"]["init_timeout_s"]
            self.time.after(timeout_s, lambda: self._give_up_meeting(actor, spec["attempt"]))
            return
        self.members = [self.forming[rank] for rank in sorted(self.forming)]
        self.forming = {}
        for other in self.created:
            other.share = -1
        for rank, member in enumerate(self.members):
            member.share = rank % self.spec.config.tp
            member.base, member.phase, member.trains_since = (
                self.furthest,
                "backward",
                self.time.now,
            )
            member.trained, member.kept = True, self.furthest
        attempt = spec["attempt"]
        for step in range(1, 5):  # heartbeats that wait for a step
            self.time.after(
                step * STEP_S, lambda: [m.wake() for m in self.members if m.trains_since]
            )
        self.time.after(RUN_S, lambda: self._finish(attempt, "finished"))
        self._end_step()  # the order may have come before the group had formed

    def _give_up_meeting(self, actor: Actor, attempt: int) -> None:
        if actor.alive and actor.attempt == attempt and actor in self.forming.values():
            self.lose_peer(actor)

    @property
    def healthy(self) -> bool:
        return all(
            m.alive and m.trains_since and not m.frozen and not m.stuck for m in self.members
        )

    def _end_step(self) -> None:
        """After a step of which all ranks know the order, they stop or pause together."""
        members = {m.pid for m in self.members}
        attempt = self.members[0].attempt if self.members else -1
        if members and members <= self.stopped:
            self.time.after(STEP_S, lambda: self._finish(attempt, "stopped"))
        elif members and all(self.paused.get(pid) == attempt for pid in members):
            self.time.after(STEP_S, lambda: self._pause(attempt))

    def _finish(self, attempt: int, reason: str) -> None:
        if self.members and self.members[0].attempt == attempt and self.healthy:
            for m in self.members:
                m.write_progress()
                m.phase, m.trains_since = "done", None
                self.saved = m.step - 1
            for m in self.members:
                m.runs[-1].set(
                    {
                        "ok": True,
                        "exit_reason": reason,
                        "world_size": len(self.members),
                        "step": self.saved,
                    }
                )

    def _pause(self, attempt: int) -> None:
        if self.members and self.members[0].attempt == attempt and self.healthy:
            for m in self.members:
                self.lose_peer(m)

    def lose_peer(self, actor: Actor, attempt: int | None = None, phase: str = "regroup") -> None:
        """Let a rank notice that its group (of that attempt) broke: it waits, or fails."""
        if attempt not in (None, actor.attempt):
            return
        if not actor.alive or actor.frozen or actor.stuck or actor.runs[-1].done or actor.waiting:
            return
        actor.write_progress()
        completed = actor.step if actor.phase == "init" else actor.step - 1
        self.furthest, actor.trains_since = max(self.furthest, completed), None
        actor.kept = completed
        if self.in_place:
            actor.waiting, actor.step, actor.phase = True, completed + 1, phase
            actor.wake()
        else:
            self.fail(
                actor.slot or 0,
                "peer_lost",
                "RuntimeError: Connection closed by peer",
                notice_s=None,
            )

    # The script

    def at(self, seconds: float, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Let something happen that many seconds after the start."""
        self.time.after(seconds, lambda: event(*args, **kwargs))

    def die(
        self,
        slot: int,
        notice_s: float | None = NOTICE_S,
        report_s: float = REPORT_S,
        how: str = "SIGKILL",
    ) -> None:
        """End a rank's process by a signal, by Ray's memory monitor ("memory") or with its node.

        "orphan": by itself, because its driver was silent.
        Of a node Ray first says that it is unreachable ("node"), later that it is dead.
        """
        error = {
            "memory": OutOfMemoryError("Memory on the node was low"),
            "node": ActorUnavailableError("unreachable", None),
            "dead node": NodeDied(),
        }.get(how, ActorDiedError())
        end = {"exit_code": ORPHAN_CODE} if how == "orphan" else {"signal": "SIGKILL"}
        self._die(self.actors[slot], notice_s, report_s, error, end)

    def _die(
        self,
        actor: Actor,
        notice_s: float | None,
        report_s: float,
        error: Exception,
        end: dict[str, Any] | None = None,
    ) -> None:
        if actor.runs:
            actor.write_progress()
        actor.alive, actor.trains_since = False, None
        actor.frozen = actor.stuck = False
        if isinstance(error, OutOfMemoryError):
            actor.end = error
        leaves_record = isinstance(error, ActorDiedError) and not isinstance(error, NodeDied)
        if actor.slot is not None and leaves_record:
            record = {
                "pid": actor.pid,
                "boot": exit_record.boot_id(),
                "monotonic": self.time.now,
            } | (end or {"signal": "SIGKILL"})
            exit_record.write(self.spec.progress(actor.slot), record | {"oom": False})
        self.time.after(report_s, lambda: actor.fail_pending(error))
        self._peers_notice(actor, notice_s)

    def _peers_notice(self, actor: Actor, notice_s: float | None) -> None:
        if actor in self.members:  # without it, no step is completed
            for peer in self.members:
                if peer.alive and peer.trains_since is not None:
                    peer.write_progress()
                    peer.trains_since, peer.kept = None, max(peer.base, peer.step - 1)
        if notice_s is not None and (actor in self.members or actor in self.forming.values()):
            peers = [m for m in {*self.members, *self.forming.values()} if m is not actor]
            for peer in sorted(peers, key=lambda peer: peer.pid):
                self.time.after(notice_s, partial(self.lose_peer, peer, peer.attempt))

    def fail(
        self,
        slot: int,
        kind: str,
        message: str,
        notice_s: float | None = NOTICE_S,
        step: int | None = None,
    ) -> None:
        """Let a rank's `run` return an error."""
        self._fail(self.actors[slot], kind, message, notice_s, step)

    def _fail(
        self,
        actor: Actor,
        kind: str,
        message: str,
        notice_s: float | None,
        step: int | None = None,
    ) -> None:
        actor.write_progress()
        name, _, text = message.partition(": ")
        failed = {
            "ok": False,
            "kind": kind,
            "exit_code": 5,
            "error": name,
            "message": text,
            "traceback": message,
        }
        actor.runs[-1].set(
            failed | {"step": actor.step if step is None else step, "phase": actor.phase}
        )
        actor.trains_since, actor.waiting = None, False
        self._peers_notice(actor, notice_s)

    def hang(self, slot: int, frozen: bool = False) -> None:
        """Stop a rank in `forward` and so the others in `backward`; frozen: no answers."""
        for member in self.members:
            member.write_progress()
            member.trains_since = None
            member.stuck = member.slot == slot
        actor = self.actors[slot]
        actor.phase, actor.frozen = "forward", frozen
        actor.write_progress()

    def freeze(self, slot: int) -> None:
        """Stop the process of a rank that waits: it answers nothing, and does not meet the others."""
        self.actors[slot].frozen = True

    def break_group(self) -> None:
        """Let a collective fail on every rank, although no rank is lost."""
        for member in list(self.members):
            self.lose_peer(member)

    def run_out_of_memory(self, slot: int, noticed_by: Iterable[int]) -> None:
        """Let a rank leave its group because it has no memory, and some ranks notice that."""
        self.lose_peer(self.actors[slot], phase="out_of_memory")
        for other in noticed_by:
            self.time.after(NOTICE_S, partial(self.lose_peer, self.actors[other]))

    def drain(self, driver: Driver, slot: int | None, notice_s: float | None = None) -> None:
        """Announce that a rank's node (None: the driver's) will be taken away."""
        node = DRIVER_NODE if slot is None else self.actors[slot].facts["node"]
        self._announce_drain(driver, node, notice_s)
        # The driver reads the notice by the real clock, which does not move here
        if notice_s is not None:
            for left_s in range(1, int(notice_s)):
                self.time.after(
                    notice_s - left_s, partial(self._announce_drain, driver, node, left_s)
                )
            self.time.after(notice_s, partial(self._take_away, driver, node))

    def _announce_drain(self, driver: Driver, node: str, left_s: float | None) -> None:
        self.draining[node] = 0 if left_s is None else int(1e3 * (time.time() + left_s))
        driver.cluster.check()

    def _take_away(self, driver: Driver, node: str) -> None:
        """End a node and its processes; Ray moves its bundles to the node that replaces it."""
        del self.draining[node]
        driver.cluster.check()
        for actor in [actor for actor in self.created if actor.alive and actor.slot is not None]:
            if actor.facts["node"] == node and not any(
                actor is waiting for waiting, _ in self.unplaced
            ):
                self._die(actor, NOTICE_S, REPORT_S, ActorUnavailableError("unreachable", None))
        unplaced, self.unplaced = self.unplaced, []
        for actor, answer in unplaced:
            if actor.alive:
                self._once_placed(actor, answer)


def make_spec(folder: Path, **config: Any) -> RunSpec:
    """A run of the tiny preset in this folder, on a dataset that does not exist."""
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    values = {"global_batch_size": 12, "micro_batch_size": 1, "spares": 0, "hang_timeout": 60.0}
    data = DatasetInfo("words", "", folder, "uint16", 65, 1000, 100, "", "", {})
    return RunSpec(load_config(preset="tiny", overrides=values | config), data, folder, 0.0)


class Run:
    """A driver on a scripted Ray."""

    def __init__(self, folder: Path, workers: int = 3, **config: Any) -> None:
        self.spec = make_spec(folder, workers=workers, **config)
        self.place = Placement(None, "cpu", {"CPU": 1.0}, tuple(range(workers)))  # type: ignore[arg-type]
        in_place = recovers_in_place(self.spec.config, "gloo", workers)
        self.ray = ScriptedRay(self.spec, workers, in_place)
        self.stop = Stop()
        # For tests without a driver
        self.group = WorkerGroup(
            ActorPool(self.spec, self.place, api=self.ray, clock=self.ray.time)
        )
        self.driver = Driver(self.spec, self.place, self.stop, api=self.ray, clock=self.ray.time)

    def __call__(self) -> dict[str, Any]:
        """Run the driver to its end and return the outcome."""
        try:
            return self.driver.run()
        finally:
            self.ray.head.close()

    def sigterm(self) -> None:
        self.stop(signal.SIGTERM, None)

    @property
    def causes(self) -> list[tuple[int, str]]:
        """(rank, cause) of each fault."""
        return [(failure.rank, failure.cause) for failure in self.driver.faults.causes]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The lines of faults.jsonl."""
        path = self.spec.folder / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def orders(self) -> list[str]:
        """Return the driver's actions from the first group to the end of the last actors."""
        orders = self.ray.orders[2 * self.ray.workers :]
        while orders and orders[-1].startswith("kill"):
            orders = orders[:-1]
        return orders
