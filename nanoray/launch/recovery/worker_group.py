"""The group of ranks that trains at present: its members, their rendezvous, their events.

Members are slots in rank order. While every slot is taken, rank and slot are the same number. With
`--recovery shrink` the group may be smaller for a while: its ranks are then its members' slots in
order, whatever part of a model that tp or pp cut they had before.

    begin ─► a meeting ─► run on every member ─► events ─► a rank is lost
                 ▲                                             │
                 └── regroup: survivors go on, new actors run ─┘
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from nanoray.checkpoint.run_folder import RunSpec, can_regroup, recovers_in_place
from nanoray.faults.hang import Position
from nanoray.faults.progress import SCRIPT, ProgressFile
from nanoray.launch.recovery.actors import ActorPool
from nanoray.launch.recovery.meeting import Meeting
from nanoray.launch.recovery.shares import Shares
from nanoray.launch.recovery.situation import NextGroup, Why
from nanoray.launch.recovery.worker import Heartbeat
from nanoray.observe.watch.observers import Console
from nanoray.parallel.rendezvous import Rendezvous

HEARTBEAT_S = 1.0  # a rank whose position is unchanged answers after this long
HEARTBEATS_PER_S = 500  # of all ranks together: each costs the driver about half a millisecond
AUTO_SPARE_S = 30.0  # start spares after this long: each imports for 2 to 3 s, short runs need none
# Sleep per pending answer before taking the rest: a ray.wait costs a tenth of that for each.
GATHER_S = 1e-5
# After the first failure, wait this long for others: a survivor's error often arrives first.
SETTLE_S = 1.5


class WorkerGroup:
    """The members of the present group, and the calls to them that have not returned yet."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool
        self.members: list[int] = []  # slots, in rank order

        # Pending calls, by slot. A slot in `runs` trains, or waits with the run's state in memory.
        self.runs: dict[int, Any] = {}
        self.heartbeats: dict[int, Any] = {}
        self._poll: Any = None  # of rank 0

        self.meeting = Meeting(pool)

        # Who holds which share of the run's state.
        self._shares = Shares()
        # While some save, and others were left out of their group: the members and shares of the
        # group before. No step has been done since, so a rank that was left out still has its share.
        self._before_saving: tuple[list[int], Shares] | None = None
        self.newcomers: set[int] = set()  # received the state in this attempt, no step yet
        self.live = False  # some members held the run's state before this attempt

        # Orders to all members that were sent already.
        self.stopping = False
        self.pausing = False

        self._began_at = 0.0  # monotonic seconds at which the ranks began to train
        # Monotonic seconds of the newest events: processes they report dead had died by then.
        self.event_at = 0.0

    # What the pool of actors has.

    @property
    def spec(self) -> RunSpec:
        """Return the spec of the present attempt."""
        return self.pool.spec

    @property
    def facts(self) -> dict[int, dict[str, Any]]:
        """Return pid, start, node, ip and devices of each slot's process."""
        return self.pool.facts

    @property
    def drained(self) -> list[int]:
        """Return the members whose node will be taken away."""
        nodes = self.pool.drained_nodes
        if not nodes:  # almost always, and this runs several times a second
            return []
        return [slot for slot in self.members if self.facts[slot]["node"] in nodes]

    def add_spares(self) -> None:
        """Start the spares that are missing. `auto`: one, unless the run may be short."""
        count = self.spec.config.spares
        if count == "auto":
            trains_for_s = self.pool.clock.monotonic() - self._began_at
            count = int(self.in_place and trains_for_s > AUTO_SPARE_S)
        self.pool.add_spares(count)

    # Form a group.

    @property
    def in_place(self) -> bool:
        """Return whether a lost rank can be replaced while the others keep their state."""
        return recovers_in_place(self.spec.config, self.meeting.backend, self.pool.place.workers)

    @property
    def in_script(self) -> bool:
        """Whether a rank is in a script's function, with no state that the others could keep."""
        phases = {position.phase for position, _ in self.positions().values()}
        return SCRIPT in phases and not self.live

    def create(self) -> None:
        """Create one actor per slot, and spares. Raises RayError, GetTimeoutError."""
        self.pool.create()
        self.add_spares()

    def begin(self) -> None:
        """Let every rank meet the others and train. Raises RayError, GetTimeoutError."""
        self.members = sorted(self.pool.actors)
        self._began_at = self.pool.clock.monotonic()
        ranks = self._rendezvous()
        address, port = self.meeting.open_first(len(ranks))

        spec = self.spec.to_dict()  # once: there may be thousands of ranks
        for rank in ranks:
            self._run(spec, replace(rank, master_addr=address, master_port=port))

    def _run(self, spec: dict[str, Any], meeting: Rendezvous) -> None:
        """Start a rank in the new process of a slot."""
        self.runs[meeting.slot] = self.pool.actors[meeting.slot].run.remote(spec, meeting)

    def open_store(self, slots: Sequence[int]) -> tuple[str, int]:
        """Open a store for a group of these slots in a process that has the run's state.

        Returns its address. Raises RayError if no such process answers: they are dead or frozen.
        """
        holders = [slot for slot in slots if slot in self.runs]
        return self.meeting.open(len(slots), holders)

    def plan(self, why: Why) -> NextGroup:
        """Return the next group: who is in it, who leaves and who joins; no members if none can go on."""
        slots = self.savers() if why is Why.SAVING else self.divisible(self.pool.ready)
        return self.of(why, slots)

    def of(self, why: Why, slots: Sequence[int]) -> NextGroup:
        """Return the next group of these slots."""
        return NextGroup(
            why,
            members=tuple(slots),
            leaves=tuple(slot for slot in self.runs if slot not in slots),
            joins=tuple(slot for slot in slots if slot not in self.runs),
        )

    def why_left(self) -> Why | None:
        """Return why all members have left their group although none was lost; None if it broke."""
        if self.is_short_of_memory:
            return Why.MEMORY
        return Why.ORDERED if self.pausing or self.can_grow else None

    def regroup(self, spec: RunSpec, planned: NextGroup, store: tuple[str, int]) -> None:
        """Form a group: holders of the run's state go on, new actors receive it.

        A group that saves ends then. Otherwise a rank that leaves ends, and a new actor waits in
        its slot. Raises RayError.
        """
        slots = list(planned.members)
        saves = planned.why is Why.SAVING
        # A pending poll may have rank 0's messages already; it is lost with a rank 0 that is.
        if slots[0] != self.members[0]:
            self._poll = None

        # If several groups in a row only save, the first of them left the trained one.
        before = self._before_saving or (self.members, self._shares)
        leaves_out = any(slot in self.runs for slot in set(before[0]) - set(slots))
        self._before_saving = before if saves and leaves_out else None

        self.pool.spec = spec
        self.members = slots
        self.live = True
        self.stopping = False
        self.pausing = False
        self.newcomers = set(planned.joins)
        if saves:
            self.stop()  # before they meet, so that they do not begin a step

        address, port = store
        given = spec.to_dict()
        ranks = self._rendezvous()
        reference = next(rank.rank for rank in ranks if rank.slot in self.runs)
        for rank in ranks:
            meeting = replace(
                rank,
                master_addr=address,
                master_port=port,
                agent_store=True,
                live=True,
                reference=reference,
            )
            if rank.slot in self.runs:
                self.pool.actors[rank.slot].go_on.remote(given, meeting)
            else:
                self._run(given, meeting)

        if not saves:
            for slot in planned.leaves:
                del self.runs[slot]
                self.pool.fill(slot)

    def break_meeting(self, slot: int) -> None:
        """Let members that still wait for a lost one in the store's meeting fail at once."""
        if slot in self.members:
            self.meeting.break_for(self.members.index(slot), list(self.runs))

    def _rendezvous(self) -> list[Rendezvous]:
        """Return each member's rank and peers; the store's address is not known yet."""
        place = self.pool.place
        ranks = self.meeting.rendezvous(self.members)

        # Which rank mirrors which share follows from the ranks' places on their nodes.
        local_ranks = [rank.local_rank for rank in ranks]
        self._shares = Shares.of(
            self.spec.config, self.meeting.backend, self.members, local_ranks, place.workers
        )
        return [
            replace(
                rank,
                slot=slot,
                slots=place.workers,
                device="cpu" if place.kind == "cpu" else "cuda:0",
                threads=self.pool.threads,
                env=tuple(item for item in rank.env if item[0] not in self.pool.variables),
                abortable=can_regroup(
                    self.spec.config, self.meeting.backend, self.pool.place.workers
                ),
            )
            for rank, slot in zip(ranks, self.members, strict=True)
        ]

    # Shares of the run's state.

    def divisible(self, slots: Sequence[int]) -> list[int]:
        """Return the largest part of these slots that can train.

        That is whole replicas with all shares of the state among them.
        """
        if len(slots) == self.pool.place.workers:
            return sorted(slots)
        return self._whole_replicas(self._shares, slots)

    def savers(self) -> list[int]:
        """Return the largest part of the ranks that are left that can save."""
        members, shares = self._holders()
        left = [slot for slot in members if slot in self.runs]
        return self._whole_replicas(shares, left, saves=True)

    def _holders(self, leaving: Collection[int] = ()) -> tuple[list[int], Shares]:
        """Return the slots that have all of the state among them, and their shares of it.

        These are the members. If a share was lost, or would be without `leaving`, while some save,
        those that were left out count, too.
        """
        if self._before_saving and self._shares.lost(self._gone(self.members, leaving)):
            return self._before_saving
        return self.members, self._shares

    def _gone(self, members: Collection[int], leaving: Collection[int]) -> set[int]:
        """Return those of `members` that are lost, and those that are `leaving`."""
        return {slot for slot in members if slot not in self.runs}.union(leaving)

    def _whole_replicas(
        self, shares: Shares, slots: Sequence[int], saves: bool = False
    ) -> list[int]:
        # Of two holders of a share, the one that has completed more steps goes on.
        steps = dict.fromkeys(self.runs, 0)
        for slot, (position, _) in self.positions().items():
            if slot in steps:
                steps[slot] = position.step
        workers = self.pool.place.workers
        return shares.whole_replicas(self.spec.config, workers, slots, steps, saves)

    @property
    def can_grow(self) -> bool:
        """Return whether more ranks could train, with all actors that are ready, than do now."""
        return len(self.divisible(self.pool.ready)) > len(self.members)

    def lost_share(self, leaving: Collection[int] = ()) -> str | None:
        """Return which shares of the state are lost, or would be without `leaving`; else None."""
        if not self.spec.config.sharded:  # every rank has all of it, and at least one is left
            return None
        members, shares = self._holders(leaving)
        return shares.lost(self._gone(members, leaving))

    # Events.

    def events(self, timeout_s: float) -> Iterable[tuple[str, int, Any]]:
        """Yield what has happened, waiting for the first event.

        ("ended", slot, ref), ("heartbeat", slot, Heartbeat) or ("started", slot, the error of a new
        actor that died, else None). An event's cost does not depend on the number of ranks.
        """
        pending: dict[Any, tuple[str, int]] = {}
        for slot, ref in self.runs.items():
            pending[ref] = ("ended", slot)
        for slot, ref in self.heartbeats.items():
            pending[ref] = ("heartbeat", slot)
        for slot, ref in self.pool.starting.items():
            pending[ref] = ("started", slot)

        api = self.pool.api
        done, waiting = api.wait(list(pending), num_returns=1, timeout=timeout_s)
        if done and waiting:
            # Collect the answers of one moment: thousands of them one by one would be quadratic.
            self.pool.clock.sleep(GATHER_S * len(pending))
            more, _ = api.wait(waiting, num_returns=len(waiting), timeout=0)
            done = done + more
        self.event_at = self.pool.clock.monotonic()

        for ref in done:
            kind, slot = pending[ref]
            if kind == "ended":
                yield kind, slot, self.runs.pop(slot)
            elif kind == "started":
                yield kind, slot, self.pool.take_facts(slot)
            else:
                del self.heartbeats[slot]
                with suppress(RayError):  # the end of its `run` gives the reason
                    heartbeat: Heartbeat = api.get(ref)
                    yield kind, slot, heartbeat

    def request_heartbeat(self, slot: int, waiting: bool = False, after: int | None = None) -> None:
        """Request a rank's position.

        It answers at once if it waits for an attempt, or not, other than `waiting`, or has passed
        step `after`; else after heartbeat_s.
        """
        actor = self.pool.actors[slot]
        self.heartbeats[slot] = actor.heartbeat.remote(self.heartbeat_s, waiting, after)

    @property
    def heartbeat_s(self) -> float:
        """Return how late a rank may answer: later with more ranks, but within hang_timeout."""
        period_s = len(self.members) / HEARTBEATS_PER_S
        hang_timeout_s = self.spec.config.hang_timeout
        if hang_timeout_s:
            period_s = min(period_s, hang_timeout_s / 4)
        return max(HEARTBEAT_S, period_s)

    def print_messages(self, console: Console, wait_s: float = 0.0) -> None:
        """Print rank 0's messages of a poll that has returned; with `wait_s`, all.

        Messages are notes, records, and what a script prints.
        """
        # A pending poll may have been answered before the last record: poll once more to the end.
        polls = 2 if wait_s else 1
        for _ in range(polls):
            if self._poll is None:
                self._poll = self.pool.actors[self.members[0]].poll.remote()
            done, _ = self.pool.api.wait([self._poll], timeout=wait_s)
            if not done:
                return
            answer = self._poll
            self._poll = None
            with suppress(RayError):  # a dead rank 0 is reported by its run
                for kind, value in self.pool.api.get(answer):
                    if kind == "note":
                        console.on_note(value)
                    elif kind == "length":
                        console.on_length(value)
                    elif kind == "record":
                        console.on_record(value)
                    else:
                        console.on_output(kind, value)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a member has left its group because it ran out of memory."""
        return any(place.phase == "out_of_memory" for place, _ in self.positions().values())

    def positions(self) -> dict[int, tuple[Position, float]]:
        """Return each member's position, and when it wrote that by its own clock.

        A member of which nothing is known yet is not contained.
        """
        positions = {}
        for slot in self.members:
            position = self.position(slot)
            if position:
                positions[slot] = position
        return positions

    def position(self, slot: int) -> tuple[Position, float] | None:
        """Return a rank's position from its progress file, which survives it; None without one."""
        record = ProgressFile.read_all(self.spec.progress(slot))
        if record is None:
            return None
        step, phase, _, written_at = record
        return Position(step, phase), written_at

    # Orders to all members.

    def stop(self) -> None:
        """Order every rank, once, to stop after the same step, with a checkpoint."""
        if not self.stopping:
            self.stopping = True
            self._call_all("stop")

    def pause(self) -> None:
        """Order every rank to leave the group after the same step, and wait."""
        self.pausing = True
        self._call_all("pause", self.spec.attempt)

    def _call_all(self, method: str, *args: Any) -> None:
        for slot in self.members:
            if slot in self.pool.actors:  # else it is lost
                getattr(self.pool.actors[slot], method).remote(*args)

    def end(self) -> None:
        """End every actor."""
        self.pool.end()
