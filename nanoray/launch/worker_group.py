"""The actors of a run on Ray: one per slot, each a rank of the process group that trains at
present.

A slot is the place of a rank: its resources, its device, its log. When a rank is lost, another
actor takes its slot. While every slot is taken, rank and slot are the same number. With `--recovery
shrink` the group may be smaller for a while: its ranks are then its members' slots in order,
whatever part of a model that tp or pp cut they had before.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
)

from nanoray.config import Config
from nanoray.faults.cause import Failure, FailureCollector
from nanoray.faults.hang import Position, Watchdog, behind
from nanoray.faults.progress import ProgressFile
from nanoray.launch.cluster_watch import ClusterWatch
from nanoray.launch.placement import START_TIMEOUT_S, Placement, bounded, strategy
from nanoray.launch.rank_end import RankEnd
from nanoray.launch.shares import Shares
from nanoray.launch.sigkill import end_for_certain
from nanoray.launch.worker import Script, Worker
from nanoray.mesh.rendezvous import (
    BackendChoice,
    RankDevice,
    Rendezvous,
    choose_backend,
    rendezvous_of,
)
from nanoray.run import RunSpec, recovers_in_place
from nanoray.train.watch.observers import Console

# The driver looks this often; a rank whose position is unchanged answers this late
POLL_S, HEARTBEAT_S = 0.25, 1.0
# Start spares after this long: each imports for 2 to 3 s, and short runs do without
AUTO_SPARE_S = 30.0
HEARTBEATS_PER_S = 500  # of all ranks together: each costs the driver about half a millisecond
# Sleep per pending answer before taking the rest: one ray.wait costs a tenth of that for each
GATHER_S = 1e-5
START_TRIES = 3  # how often a new actor may die before it is ready
ANSWER_S = 2.0  # a process that is not frozen answers on its control lane in milliseconds
# After the first failure, listen this long for others: a survivor's error often arrives first
SETTLE_S = 1.5
STORE_TIMEOUT_S = 5.0  # a rank that waits opens a store in milliseconds
# An exit record is written within milliseconds of the death, and a busy machine may take seconds
EXIT_RECORD_S = 5.0


@dataclass
class WorkerGroup:
    """The actors, by slot, and what the driver expects from each of them."""

    spec: RunSpec
    place: Placement
    # Called while the ranks start; what it raises interrupts that
    check: Callable[[], None] = lambda: None
    # Which nodes are drained; whether there is a head to create or end an actor
    cluster: ClusterWatch | None = None
    script: Script = None  # what each rank runs in the place of the recipe
    # The slots of the present group, in rank order
    members: list[int] = field(default_factory=list)
    actors: dict[int, Any] = field(default_factory=dict)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)  # pid, start, node, ip, devices
    runs: dict[int, Any] = field(default_factory=dict)  # pending `run` of ranks that train or wait
    heartbeats: dict[int, Any] = field(default_factory=dict)  # pending `heartbeat` of each rank
    starting: dict[int, Any] = field(default_factory=dict)  # pending `ready` of new actors
    # Lost ranks' actors that could not be ended at once
    former: list[Any] = field(default_factory=list)
    # Actors without a slot, and their pending `ready`
    spares: list[tuple[Any, Any]] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)  # slots that a spare took since the last fault
    # Slots that received the state in this attempt, no step yet
    newcomers: set[int] = field(default_factory=set)
    # Slot -> nodes on which a newcomer could not work
    unfit: dict[int, set[str]] = field(default_factory=dict)
    live: bool = False  # some members held the run's state before this attempt
    stopping: bool = False  # the members were told to stop
    pausing: bool = False  # the members were told to leave the group and wait
    began_at: float = 0.0  # monotonic seconds at which the ranks began to train
    created: int = 0  # actors so far, to give each its own name
    choice: BackendChoice | None = None
    host: int | None = None  # the slot whose process serves the store
    shares: Shares = field(default_factory=Shares)  # of the state, and the members that hold them
    secret: str = field(default="", repr=False)  # of the present meeting
    poll: Any = None  # pending `poll` of rank 0
    # Monotonic seconds of the newest events: processes they report dead had died by then
    event_at: float = 0.0
    api: Any = ray
    clock: Any = time

    # Slots.

    def create(self) -> None:
        """Create one actor per slot, named by run and rank. Raises RayError, GetTimeoutError."""
        for slot in range(self.place.workers):
            # An older attempt's position means nothing now
            self.spec.progress(slot).unlink(missing_ok=True)
            self.fill(slot)
        if len(self.starting) < self.place.workers:
            raise RayError("the cluster's head does not answer")
        wait_s = start_timeout_s(self.spec.config) + (
            self.cluster.vacated_in_s if self.cluster else 0.0
        )
        facts = self._get([*self.starting.values()], wait_s)
        self.facts = dict(zip(self.starting, facts, strict=True))
        self.starting.clear()
        self.add_spares()

    def _get(self, refs: list[Any], timeout_s: float) -> list[Any]:
        """Return all values, looking at `check` meanwhile. Raises RayError, GetTimeoutError."""
        deadline, pending = self.clock.monotonic() + timeout_s, refs
        while pending:
            self.check()
            left = max(0.0, deadline - self.clock.monotonic())
            done, pending = self.api.wait(
                pending, num_returns=len(pending), timeout=min(POLL_S, left)
            )
            self.api.get(done)
            if pending and not left:
                raise GetTimeoutError(f"no answer within {timeout_s:g} s")
        return list(self.api.get(refs))

    def head_answers(self) -> bool:
        """Whether the head answers: without one, creating or ending an actor takes for ever."""
        return self.cluster is None or self.cluster.head_answers()

    def vacate(self, slot: int, head: bool | None = None) -> None:
        """Leave a slot empty. Without a head its actor, if it lives, ends with the run.

        head: whether it answers, if it was asked just now.
        """
        self.starting.pop(slot, None)
        self.promoted.discard(slot)
        if (actor := self.actors.pop(slot, None)) is None:
            return
        if self.head_answers() if head is None else head:
            self.kill(actor)
        else:
            self.former.append(actor)

    def fill(self, slot: int, head: bool | None = None) -> None:
        """End the actor in a slot, if any, and put a spare or a new actor in its place; none
        without a head.

        head: whether it answers, if it was asked just now.
        """
        head = self.head_answers() if head is None else head
        self.vacate(slot, head)
        if not head:
            return
        replaces = bool(self.facts)
        # With shrink the others train meanwhile, so a new actor has the time to rehearse; otherwise
        # they wait for it.
        rehearse = replaces and self.spec.config.recovery == "shrink"
        self.actors[slot] = self._take_spare(slot) or self.new_actor(
            slot,
            rehearse,
            num_cpus=self.place.bundle["CPU"],
            num_gpus=self.place.bundle.get("GPU", 0),
            scheduling_strategy=self._strategy(slot),
        )
        # `ready` comes after the imports: an actor that dies in them costs another try, and no
        # rendezvous.
        actor = self.actors[slot]
        self.starting[slot] = actor.ready.remote() if replaces else actor.describe.remote()

    def _strategy(self, slot: int) -> Any:
        """Where an actor goes: to the slot's bundle, or to another node if that one is unfit or
        drained.
        """
        bundle = self.place.order[slot]
        avoid = self.unfit.get(slot, set()) | (
            self.cluster.avoided(bundle) if self.cluster else set()
        )
        if avoid:
            return NodeLabelSchedulingStrategy(hard={"ray.io/node-id": NotIn(*sorted(avoid))})
        return strategy(self.place.group, bundle)

    def add_spares(self) -> None:
        """Start the spares that are missing: processes that hold no device, and on CPUs have
        rehearsed a step.
        """
        # Not on GPUs: a backward pass would settle for the process that it has no GPU.
        wanted = self.spec.config.spares
        if wanted == "auto":
            wanted = int(self.in_place and self.clock.monotonic() - self.began_at > AUTO_SPARE_S)
        while len(self.spares) < wanted and self.head_answers():
            node = self.facts[len(self.spares) % self.place.workers]["node"]
            near = NodeAffinitySchedulingStrategy(node, soft=self.place.kind == "cpu")
            spare = self.new_actor(
                None, self.place.kind == "cpu", num_cpus=0, num_gpus=0, scheduling_strategy=near
            )
            self.spares.append((spare, spare.ready.remote()))

    def new_actor(self, slot: int | None, rehearse: bool, **options: Any) -> Any:
        """Create a Worker on Ray for a slot, or a spare (`slot` None)."""
        # A runtime_env costs half a second, because Ray cannot use its prestarted workers. Root
        # does without: it may raise its priority itself (raise_priority), and the network's
        # variables travel in the Rendezvous.
        runtime_env = None if os.geteuid() == 0 else {"env_vars": {"RAY_worker_niceness": "0"}}
        remote: Any = self.api.remote(concurrency_groups={"control": 1, "heartbeat": 1})(Worker)
        again = max(0, self.created - self.place.workers + 1)
        suffix = (f".{self.spec.attempt}" if self.spec.attempt or again else "") + (
            f"-{again}" if again else ""
        )
        self.created += 1
        return remote.options(
            name=f"{self.spec.folder.name}-{'spare' if slot is None else f'rank{slot}'}{suffix}",
            runtime_env=runtime_env,
            max_restarts=0,  # Ray would re-execute silently; the driver decides
            max_task_retries=0,
            **options,
        ).remote(
            self.spec.folder.name, slot, self.spec.to_dict() if rehearse else None, self.script
        )

    def _take_spare(self, slot: int) -> Any:
        """Assign a ready spare to a slot and return it; None if there is none that fits."""
        for spare, ready in [*self.spares]:
            try:
                done, _ = self.api.wait([ready], timeout=0)
                lost = self.facts.get(slot)
                if not done or lost is None:
                    continue
                node = self.api.get(ready)["node"]
                if node in self.drained_nodes or (
                    self.place.kind != "cpu" and node != lost["node"]
                ):
                    continue  # it will be gone soon; the slot's device is on another node
                self.spares.remove((spare, ready))
                spare.take_slot.remote(slot, lost["devices"])
                self.promoted.add(slot)
                return spare
            except RayError:  # it died in its imports: `add_spares` starts another one
                self.spares = [other for other in self.spares if other[0] is not spare]
        return None

    def _take_facts(self, slot: int) -> bool:
        """Store what a new actor says of itself; return False if it died."""
        try:
            self.facts[slot] = self.api.get(self.starting.pop(slot))
        except RayError:
            return False
        return True

    @property
    def drained_nodes(self) -> Collection[str]:
        return self.cluster.draining if self.cluster else ()

    @property
    def drained(self) -> list[int]:
        """The members whose node will be taken away."""
        nodes = self.drained_nodes  # almost always none: this is asked in every look at the ranks
        return [slot for slot in self.members if self.facts[slot]["node"] in nodes] if nodes else []

    @property
    def ready(self) -> list[int]:
        """The slots whose actor has started, with or without the run's state in memory."""
        return sorted(slot for slot in self.actors if slot not in self.starting)

    def divisible(self, slots: Sequence[int], saves: bool = False) -> list[int]:
        """Return the largest part of these slots that can train, or save: whole replicas, with all
        shares.
        """
        if len(slots) == self.place.workers:
            return sorted(slots)
        done = dict.fromkeys(self.runs, 0) | {
            slot: at.step for slot, (at, _) in self.positions().items()
        }
        done = {slot: done[slot] for slot in self.runs}
        return self.shares.whole_replicas(self.spec.config, self.place.workers, slots, done, saves)

    # Groups.

    @property
    def in_place(self) -> bool:
        """Whether a lost rank can be replaced while the others keep their state."""
        return recovers_in_place(self.spec.config, self.backend, self.place.workers)

    def begin(self) -> None:
        """Tell every rank where to meet the others, and start training."""
        self.members, self.began_at = sorted(self.actors), self.clock.monotonic()
        ranks = self._rendezvous()
        host, port = "", 0
        if len(ranks) > 1:
            store = self.actors[0].open_store.remote(len(ranks), self.spec.config.init_timeout_s)
            ((host, port),) = self._get([store], START_TIMEOUT_S)
            self.host = 0
        spec = self.spec.to_dict()
        for r in ranks:
            r = replace(r, master_addr=host, master_port=port)
            self.runs[r.slot] = self.actors[r.slot].run.remote(spec, r)

    def open_store(self, slots: Sequence[int]) -> tuple[str, int]:
        """Let one of these slots that holds the state serve the next store; return its address.

        Raises RayError if none answers: they are dead or frozen.
        """
        if len(slots) == 1:
            return "", 0
        holders = [slot for slot in slots if slot in self.runs]
        for slot in holders:
            store = self.actors[slot].open_store.remote(len(slots), self.spec.config.init_timeout_s)
            with suppress(RayError):
                address, port = self.api.get(store, timeout=STORE_TIMEOUT_S)
                self.host = slot
                return address, port
        raise RayError(
            f"none of the ranks {', '.join(map(str, holders))}, which hold the state, answers"
        )

    def regroup(
        self, spec: RunSpec, slots: list[int], store: tuple[str, int], stop: bool = False
    ) -> None:
        """Form a group of these slots: ranks that hold the run's state go on, new actors receive it
        from them.

        With `stop` they save and end. Else a rank that is left out ends, and a new actor waits in
        its slot. Raises RayError.
        """
        # It may have rank 0's lines already
        self.poll = self.poll if slots[0] == self.members[0] else None
        self.spec, self.members = spec, slots
        self.live, self.stopping, self.pausing = True, False, False
        self.newcomers = {slot for slot in slots if slot not in self.runs}
        if stop:
            self.stop()  # before they meet, so that they do not begin a step
        address, port = store
        ranks = self._rendezvous()
        holder = next(r.rank for r in ranks if r.slot in self.runs)
        for r in ranks:
            r = replace(
                r,
                master_addr=address,
                master_port=port,
                agent_store=True,
                live=True,
                reference=holder,
            )
            if r.slot in self.runs:
                self.actors[r.slot].go_on.remote(spec.to_dict(), r)
            else:
                self.runs[r.slot] = self.actors[r.slot].run.remote(spec.to_dict(), r)
        for slot in [] if stop else self.runs.keys() - {*slots}:
            del self.runs[slot]
            self.fill(slot)

    def break_meeting(self, slot: int) -> None:
        """Tell the members, if they still wait for a lost one to join them, that it will not come."""
        if slot in self.members and self.host is not None and self.host in self.runs:
            self.actors[self.host].break_meeting.remote(self.secret, self.members.index(slot))
            self.host = None

    @property
    def backend(self) -> str:
        """The process groups' backend; empty before it is chosen."""
        return self.choice.backend if self.choice else ""

    def _choose_backend(self, facts: list[dict[str, Any]]) -> BackendChoice:
        kind, version = self.place.kind, None
        if kind != "cpu":
            (version,) = self._get(
                [self.actors[self.members[0]].nccl_version.remote()], START_TIMEOUT_S
            )
        # Ray does not say which card a slice belongs to, so all slices of a node count as slices of
        # one card.
        cards = [
            RankDevice(kind, f["node"], "" if kind == "mig" else ",".join(f["devices"]))
            for f in facts
        ]
        return choose_backend(cards, self.spec.config.backend, version)

    def _rendezvous(self) -> list[Rendezvous]:
        """Return who each rank of the present group is; the store's address is not known yet."""
        place, facts = self.place, [self.facts[slot] for slot in self.members]
        choice = self.choice = self.choice or self._choose_backend(facts)  # a run keeps its backend
        device = "cpu" if place.kind == "cpu" else "cuda:0"
        self.secret = secrets.token_hex(16)
        ranks = rendezvous_of([fact["node"] for fact in facts], choice, self.secret)
        self.shares = Shares.of(
            self.spec.config, choice.backend, self.members, [r.local_rank for r in ranks]
        )
        return [
            replace(
                r,
                slot=slot,
                slots=place.workers,
                device=device,
                threads=place.threads,
                abortable=self.in_place,
            )
            for r, slot in zip(ranks, self.members, strict=True)
        ]

    def lost_share(self, leaving: Collection[int] = ()) -> str:
        """Say which share of the state is lost with all its copies, or would be without `leaving`;
        else empty.
        """
        gone = {*leaving, *(slot for slot in self.members if slot not in self.runs)}
        # Whole on each rank: nobody is left
        return self.shares.lost(gone) if self.spec.config.sharded else ""

    def hopeless(self, failure: Failure) -> bool:
        """Whether newcomers could not work on so many nodes that another one will not do either."""
        return not failure.retry and len(self.unfit.get(failure.rank, ())) >= START_TRIES

    # Events.

    def events(self, timeout_s: float) -> Iterable[tuple[str, int, Any]]:
        """Yield what has happened, waiting for the first event. An event's cost does not depend on
        the number of ranks.

        ("ended", slot, ref), ("heartbeat", slot, Heartbeat) or ("started", slot, whether the new
        actor is ready).
        """
        pending: dict[Any, tuple[str, int]] = {
            ref: ("ended", slot) for slot, ref in self.runs.items()
        }
        pending |= {ref: ("heartbeat", slot) for slot, ref in self.heartbeats.items()}
        pending |= {ref: ("started", slot) for slot, ref in self.starting.items()}
        done, waiting = self.api.wait(list(pending), num_returns=1, timeout=timeout_s)
        if done and waiting:
            # Thousands of answers one by one would be quadratic
            self.clock.sleep(GATHER_S * len(pending))
            done += self.api.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        self.event_at = self.clock.monotonic()
        for ref in done:
            kind, slot = pending[ref]
            if kind == "ended":
                yield kind, slot, self.runs.pop(slot)
            elif kind == "started":
                yield kind, slot, self._take_facts(slot)
            else:
                del self.heartbeats[slot]
                with suppress(RayError):  # the end of its `run` says why
                    yield kind, slot, self.api.get(ref)

    def request_heartbeat(self, slot: int, waiting: bool = False, after: int | None = None) -> None:
        """Ask where a rank is. It answers at once if it is not (or no longer) `waiting` or has
        passed step `after`.
        """
        self.heartbeats[slot] = self.actors[slot].heartbeat.remote(self.heartbeat_s, waiting, after)

    @property
    def heartbeat_s(self) -> float:
        """How late a rank may answer: later the more ranks there are, but in time for the watchdog."""
        period_s, timeout_s = len(self.members) / HEARTBEATS_PER_S, self.spec.config.hang_timeout
        return max(HEARTBEAT_S, min(period_s, timeout_s / 4) if timeout_s else period_s)

    def print_messages(self, console: Console, wait_s: float = 0.0) -> None:
        """Print rank 0's notes and records of a poll that has returned; with `wait_s`, all of them
        until now.
        """
        for _ in range(2 if wait_s else 1):
            self.poll = self.poll or self.actors[self.members[0]].poll.remote()
            done, _ = self.api.wait([self.poll], timeout=wait_s)
            if not done:
                return
            poll, self.poll = self.poll, None
            with suppress(RayError):  # a dead rank 0 is reported by its run
                for kind, value in self.api.get(poll):
                    console.on_note(value) if kind == "note" else console.on_record(value)

    def stop(self) -> None:
        """Tell every rank, once, to stop after the same step, with a checkpoint."""
        if not self.stopping:
            self.stopping = True
            self._call_all("stop")

    def pause(self) -> None:
        """Tell every rank to leave the group after the same step, and wait."""
        self.pausing = True
        self._call_all("pause", self.spec.attempt)

    def _call_all(self, method: str, *args: Any) -> None:
        for slot in self.members:
            if slot in self.actors:  # else it is lost
                getattr(self.actors[slot], method).remote(*args)

    def positions(self) -> dict[int, tuple[Position, float]]:
        """Return each member's last position from its progress file, and when it was written by the
        rank's clock.
        """
        found = {slot: ProgressFile.read_all(self.spec.progress(slot)) for slot in self.members}
        return {
            slot: (Position(*values[:2]), values[3]) for slot, values in found.items() if values
        }

    # Failures.

    def end_hung(self, watchdog: Watchdog, collector: FailureCollector) -> None:
        """Name the rank that all others wait for, save the stacks of those that still answer, and
        end it.
        """
        # Progress files are newer than heartbeats, which come every second or two, or never from a
        # frozen rank.
        running = [slot for slot in self.members if slot in self.runs]
        places = dict.fromkeys(running, Position(0, "init")) | watchdog.positions()
        for slot, (position, _) in self.positions().items():
            if slot in places and position.step >= places[slot].step:
                places[slot] = position
        started = self._save_stacks(places)
        mute = [slot for slot in places if slot not in started]
        late = mute or behind(places, started)
        where = {
            slot: f"rank {slot} {_at(places[slot], started.get(slot))}" for slot in list(places)[:4]
        }
        for slot in late if mute or len(late) < len(places) else late[-1:]:
            step, phase = places[slot]
            # A few: all of them would be quadratic
            others = [text for r, text in where.items() if r != slot]
            why = "does not answer" if slot in mute else "is behind"
            seen = f"{', '.join(others[:3])}{' ...' if len(places) > 4 else ''}"
            title = (
                f"{self._rank(slot).name} made no progress for {watchdog.silent_s:.0f} s "
                f"{_at(places[slot], started.get(slot))} and {why} ({seen}); it was ended"
            )
            detail = f"stacks of all ranks that answered: {self.spec.log(slot).parent}"
            failure = Failure(
                slot, "hung", title, step, phase, detail, signature=f"hung in {phase}"
            )
            failure.silent_s = watchdog.silent_s
            self._end_rank(slot, failure, collector)

    def _save_stacks(self, slots: Iterable[int]) -> dict[int, int]:
        """Let ranks write their stacks. Return how many collectives those have started that answer
        in time.
        """
        asked = {self.actors[slot].stacks.remote(str(self.spec.log(slot))): slot for slot in slots}
        done, _ = self.api.wait([*asked], num_returns=len(asked), timeout=ANSWER_S)
        started = {asked[ref]: 0 for ref in done}
        for ref in done:
            with suppress(RayError):  # it died just now
                started[asked[ref]] = self.api.get(ref)
        return started

    def end_silent(self, slot: int, collector: FailureCollector) -> None:
        """End a rank that did not notice that its group broke, or that never reached the
        rendezvous.
        """
        self._end_rank(slot, self._rank(slot).by_silence(), collector)

    def end_drained(self, slot: int, collector: FailureCollector) -> None:
        """End a rank that has left its group because its node will be taken away."""
        self._end_rank(slot, self.drain_of(slot), collector)

    def drain_of(self, slot: int) -> Failure:
        """Return why a rank whose node will be taken away is lost to its group."""
        assert self.cluster
        return self._rank(slot).by_drain(self.cluster.notice(self.facts[slot]["node"]))

    def _end_rank(self, slot: int, failure: Failure, collector: FailureCollector) -> None:
        failure.facts = self.facts[slot]
        self.kill(self.actors[slot])  # its sockets close, so ranks that wait for it fail, too
        if failure.cause == "hung":
            bounded(lambda: end_for_certain(failure.facts, self.api))
        self.runs.pop(slot, None)
        collector.ended(slot, failure, self.clock.monotonic())

    def result(self, ref: Any, slot: int) -> tuple[dict[str, Any] | None, Failure | None]:
        """Return a rank's outcome, or how it failed."""
        try:
            result = self.api.get(ref)
        except RayError as error:
            # One deadline for all ranks that died together: thousands may, and leave no record on
            # this host.
            return None, self._rank(slot).by_death(error, self.event_at + EXIT_RECORD_S)
        return (result, None) if result["ok"] else (None, self._rank(slot).by_error(result))

    def _rank(self, slot: int) -> RankEnd:
        return RankEnd(slot, self.facts[slot], self.spec, self.clock)

    def kill(self, actor: Any) -> None:
        """End an actor. Without a head that takes for ever, so it is left to a thread then."""
        bounded(lambda: self.api.kill(actor))

    def end(self) -> None:
        """End every actor. Their outcomes are on disk or in the driver already."""

        def kill_all() -> None:
            for actor in [
                *self.actors.values(),
                *self.former,
                *(spare for spare, _ in self.spares),
            ]:
                self.api.kill(actor)

        bounded(kill_all)


def start_timeout_s(config: Config) -> float:
    """Return how long actors may take to start. If a node is lost, a slot waits for another one: as
    at placement.
    """
    return max(START_TIMEOUT_S, config.placement_timeout_s)


def _at(position: Position, collectives: int | None) -> str:
    """Write where a rank is, and after how many collectives, if it said so."""
    return f"in {position.phase} of step {position.step}" + (
        f" after {collectives} collectives" if collectives else ""
    )
