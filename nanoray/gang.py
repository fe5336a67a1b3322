"""The actors of a run on Ray: one per seat, each a rank of the group that trains at present.

A seat is the place of a rank: its bundle, its device, its log. Who sits there changes when a rank is lost. As long as
every seat is taken, rank and seat are the same number; with `--recovery shrink` the group may be smaller for a while,
and its ranks are the taken seats in order.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nanoray import sentinel
from nanoray.callbacks import Console
from nanoray.config import Config, batch_for
from nanoray.failures import Failure, Inquest
from nanoray.faults import ProgressStamp
from nanoray.mesh import BackendChoice, RankDevice, Rendezvous, choose_backend, network_env
from nanoray.placement import START_TIMEOUT_S, Placement, strategy
from nanoray.run import RunSpec, recovers_in_place
from nanoray.watchdog import Position, Watchdog, behind
from nanoray.worker import Worker

POLL_S, BEAT_S = 0.25, 1.0  # the driver looks this often; a rank with no news answers this late
AUTO_SPARE_S = 30.0  # a spare imports for two or three seconds; short runs do without
BEATS_PER_S = 500  # of all ranks together: hearing one and asking again costs the driver about half a millisecond
REST_S = 1e-5  # per pending answer, before the rest of them are gathered: a look costs Ray a tenth of that for each
SEATS = 3  # times that a new actor may be lost before it has answered
ANSWER_S = 2.0  # a process that is alive answers on its control lane in milliseconds
DRAIN_S = 1.5  # after the first failure, wait this long for the others: a survivor's error often arrives first
RECORD_S = 0.2  # a death record is written within milliseconds of the death
LOG_LINES, LOG_BYTES = 8, 1 << 14


@dataclass
class Gang:
    """Who sits where, and what the driver waits for from each of them."""

    spec: RunSpec
    place: Placement
    members: list[int] = field(default_factory=list)  # the seats of the present group, in rank order
    actors: dict[int, Any] = field(default_factory=dict)  # by seat
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)  # by seat: pid, node, devices
    runs: dict[int, Any] = field(default_factory=dict)  # by seat: who has begun to train and has not ended
    beats: dict[int, Any] = field(default_factory=dict)  # by seat: the question where it is, not answered yet
    coming: dict[int, Any] = field(default_factory=dict)  # by seat: new actors that have not answered yet
    spares: list[tuple[Any, Any]] = field(default_factory=list)  # actors without a seat, and where they are
    promoted: set[int] = field(default_factory=set)  # seats that a spare took since the last fault
    begun: float = 0.0  # monotonic seconds at which the ranks began to train
    created: int = 0  # actors so far: their names differ
    choice: BackendChoice | None = None
    said: Any = None  # the question what rank 0 has to say, not answered yet
    heard: float = 0.0  # monotonic seconds of the newest news: whoever they tell of had died by then

    # Seats.

    def create(self) -> None:
        """Create the actors, named by run and rank, and learn where each one is. Raises RayError, GetTimeoutError."""
        for seat in range(self.place.workers):
            self.spec.stamp(seat).unlink(missing_ok=True)  # where the last attempt was says nothing of this one
            self.seat(seat)
        self.facts = dict(zip(self.coming, ray.get([*self.coming.values()], timeout=self._start_s), strict=True))
        self.coming.clear()
        self.add_spares()

    def seat(self, seat: int) -> None:
        """Give a seat to a spare, or to a new actor, in place of the one that was there."""
        self.promoted.discard(seat)
        if seat in self.actors:
            ray.kill(self.actors[seat])
        # Where the others wait, every second counts; where they train meanwhile, the newcomer may as well rehearse.
        later = bool(self.facts)
        rehearse = later and self.spec.config.recovery == "shrink"
        self.actors[seat] = self._spare_for(seat) or self._actor(
            seat,
            rehearse,
            num_cpus=self.place.bundle["CPU"],
            num_gpus=self.place.bundle.get("GPU", 0),
            scheduling_strategy=strategy(self.place.group, self.place.order[seat]),
        )
        # One that dies while it imports costs another try, and not a meeting in which all wait for it.
        self.coming[seat] = self.actors[seat].ready.remote() if later else self.actors[seat].describe.remote()

    def add_spares(self) -> None:
        """Start the spares that are missing: processes that have rehearsed the first step and hold no device."""
        wanted = self.spec.config.spares
        if wanted == "auto":
            wanted = int(self.in_place and time.monotonic() - self.begun > AUTO_SPARE_S)
        while len(self.spares) < wanted:
            node = self.facts[len(self.spares) % self.place.workers]["node"]
            near = NodeAffinitySchedulingStrategy(node, soft=self.place.kind == "cpu")
            spare = self._actor(None, True, num_cpus=0, num_gpus=0, scheduling_strategy=near)
            self.spares.append((spare, spare.ready.remote()))

    def _actor(self, seat: int | None, rehearse: bool, **options: Any) -> Any:
        # A runtime_env costs half a second: Ray cannot use the workers that it keeps ready. Root does without, for it
        # may raise its priority itself (raise_priority); what the network needs travels in the Rendezvous.
        runtime_env = None if os.geteuid() == 0 else {"env_vars": {"RAY_worker_niceness": "0"}}
        remote: Any = ray.remote(concurrency_groups={"control": 1, "beat": 1})(Worker)  # type: ignore[call-overload]
        again = max(0, self.created - self.place.workers + 1)
        suffix = (f".{self.spec.attempt}" if self.spec.attempt or again else "") + (f"-{again}" if again else "")
        self.created += 1
        return remote.options(
            name=f"{self.spec.folder.name}-{'spare' if seat is None else f'rank{seat}'}{suffix}",
            runtime_env=runtime_env,
            max_restarts=0,  # Ray would re-execute silently; the driver decides
            max_task_retries=0,
            **options,
        ).remote(self.spec.folder.name, seat, self.spec.to_dict() if rehearse else None)

    def _spare_for(self, seat: int) -> Any:
        """Return a spare that can sit here, told which seat and devices are its own; None when there is none."""
        for spare, described in self.spares:
            with suppress(RayError):
                ready, _ = ray.wait([described], timeout=0)
                lost = self.facts.get(seat)
                if not ready or lost is None:
                    continue
                if self.place.kind != "cpu" and ray.get(described)["node"] != lost["node"]:
                    continue  # its node has not this seat's device
                self.spares.remove((spare, described))
                spare.take_seat.remote(seat, lost["devices"])
                self.promoted.add(seat)
                return spare
        return None

    def arrived(self, seats: Sequence[int], timeout_s: float) -> None:
        """Wait for the new actors of these seats, and note where they and others are.

        One that is lost meanwhile is created again, a few times.
        """
        deadline = time.monotonic() + timeout_s
        tries = dict.fromkeys(self.coming, SEATS)
        while any(seat in self.coming for seat in seats) and all(tries.values()):
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([*self.coming.values()], num_returns=1, timeout=left)
            for seat in [seat for seat, ref in self.coming.items() if ref in ready]:
                if not self._note(seat):
                    # A process is known to be dead before its node is: the new actor was sent to that node, too.
                    tries[seat] -= 1
                    self.seat(seat)
            if not left:
                return

    def _note(self, seat: int) -> bool:
        """Take down where a new actor is; False when it is lost."""
        try:
            self.facts[seat] = ray.get(self.coming.pop(seat))
        except RayError:
            return False
        return True

    @property
    def taken(self) -> list[int]:
        """The seats whose actor is there, with or without the run's state."""
        return sorted(seat for seat in self.actors if seat not in self.coming)

    def fitting(self, seats: Sequence[int]) -> list[int]:
        """Return as many of these seats as the global batch can be split over; those that hold the state first."""
        best = sorted(seats, key=lambda seat: (seat not in self.runs, seat))
        while best and batch_for(self.spec.config, self.place.workers, len(best)) is None:
            best.pop()
        return sorted(best)

    # Groups.

    @property
    def in_place(self) -> bool:
        """Whether a lost rank alone can be replaced."""
        return recovers_in_place(self.spec.config, self.backend, self.place.workers)

    def begin(self) -> None:
        """Tell every rank where to meet the others, and start to train."""
        self.members, self.begun = sorted(self.actors), time.monotonic()
        ranks = self._rendezvous()
        host, port = "", 0
        if len(ranks) > 1:
            store = self.actors[0].open_store.remote(len(ranks), self.spec.config.init_timeout_s)
            host, port = ray.get(store, timeout=START_TIMEOUT_S)
        order = self.spec.to_dict()
        for r in ranks:
            r = replace(r, master_addr=host, master_port=port)
            self.runs[r.seat] = self.actors[r.seat].run.remote(order, r)

    def regroup(self, spec: RunSpec, seats: list[int]) -> None:
        """Let these seats form a group: who has the run's state goes on with it, new actors take it over from them.

        Raises RayError or GetTimeoutError when that fails.
        """
        self.spec, self.members, self.said = spec, seats, None
        ranks, address, port = self._rendezvous(), "", 0
        if len(seats) > 1:
            host = next(seat for seat in seats if seat in self.runs)
            store = self.actors[host].open_store.remote(len(seats), spec.config.init_timeout_s)
            address, port = ray.get(store, timeout=START_TIMEOUT_S)
        for r in ranks:
            r = replace(r, master_addr=address, master_port=port, agent_store=True, live=True)
            if r.seat in self.runs:
                self.actors[r.seat].go_on.remote(spec.to_dict(), r)
            else:
                self.runs[r.seat] = self.actors[r.seat].run.remote(spec.to_dict(), r)

    @property
    def backend(self) -> str:
        """The process groups' backend; empty before it is chosen."""
        return self.choice.backend if self.choice else ""

    def _choose_backend(self, facts: list[dict[str, Any]]) -> BackendChoice:
        kind, version = self.place.kind, None
        if kind != "cpu":
            version = ray.get(self.actors[self.members[0]].nccl_version.remote(), timeout=START_TIMEOUT_S)
        # Ray's ids of slices are UUIDs of slices: the same node with slices is taken for the same card.
        cards = [RankDevice(kind, f["node"], "" if kind == "mig" else ",".join(f["devices"])) for f in facts]
        return choose_backend(cards, self.spec.config.backend, version)

    def _rendezvous(self) -> list[Rendezvous]:
        kind, facts = self.place.kind, [self.facts[seat] for seat in self.members]
        choice = self.choice = self.choice or self._choose_backend(facts)  # a run keeps its backend
        nodes = {node: i for i, node in enumerate(dict.fromkeys(f["node"] for f in facts))}
        secret = secrets.token_hex(16)
        on_node: dict[str, int] = {}
        ranks = []
        for rank, fact in enumerate(facts):
            local_rank = on_node[fact["node"]] = on_node.get(fact["node"], -1) + 1
            ranks.append(
                Rendezvous(
                    rank=rank,
                    world_size=len(facts),
                    seat=self.members[rank],
                    seats=self.place.workers,
                    local_rank=local_rank,
                    node_rank=nodes[fact["node"]],
                    device="cpu" if kind == "cpu" else "cuda:0",
                    backend=choice.backend,
                    backend_reason=choice.reason,
                    env=tuple((network_env() | choice.env).items()),
                    threads=self.place.threads,
                    secret=secret,
                )
            )
        return [replace(r, local_world_size=on_node[f["node"]] + 1) for r, f in zip(ranks, facts, strict=True)]

    # What the ranks say.

    def hear(self, timeout_s: float) -> Iterable[tuple[str, int, Any]]:
        """Yield what has come in, waiting for the first of it: ("ended", seat, ref), ("beat", seat, Beat), ("here",
        seat, whether the new actor answered). Each costs the same however many ranks there are."""
        asked: dict[Any, tuple[str, int]] = {ref: ("ended", seat) for seat, ref in self.runs.items()}
        asked |= {ref: ("beat", seat) for seat, ref in self.beats.items()}
        asked |= {ref: ("here", seat) for seat, ref in self.coming.items()}
        ready, waiting = ray.wait(list(asked), num_returns=1, timeout=timeout_s)
        if ready and waiting:
            time.sleep(REST_S * len(asked))  # thousands of answers one by one would be quadratic: 40 µs for 2 ranks
            ready += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        self.heard = time.monotonic()
        for ref in ready:
            kind, seat = asked[ref]
            if kind == "ended":
                yield kind, seat, self.runs.pop(seat)
            elif kind == "here":
                yield kind, seat, self._note(seat)
            else:
                del self.beats[seat]
                with suppress(RayError):  # its run says why
                    yield kind, seat, ray.get(ref)

    def ask(self, seat: int, waiting: bool = False, after: int | None = None) -> None:
        """Ask a rank to say where it is: at once when `waiting` changes or it has passed step `after`."""
        self.beats[seat] = self.actors[seat].beat.remote(self.beat_s, waiting, after)

    @property
    def beat_s(self) -> float:
        """How late a rank with no news answers: later where there are many, but in time for the watchdog."""
        period_s, patience_s = len(self.members) / BEATS_PER_S, self.spec.config.hang_timeout
        return max(BEAT_S, min(period_s, patience_s / 4) if patience_s else period_s)

    def drain(self, console: Console, wait_s: float = 0.0) -> None:
        """Print what rank 0 has said, as far as it has answered; with `wait_s` all that it has said until now."""
        for _ in range(2 if wait_s else 1):
            self.said = self.said or self.actors[self.members[0]].poll.remote()
            ready, _ = ray.wait([self.said], timeout=wait_s)
            if not ready:
                return
            said, self.said = self.said, None
            with suppress(RayError):  # a dead rank 0 is reported by its run
                for kind, value in ray.get(said):
                    console.on_note(value) if kind == "note" else console.on_record(value)

    def tell_all(self, order: str) -> None:
        """Call a method without arguments (stop, pause) of every rank."""
        for seat in self.members:
            getattr(self.actors[seat], order).remote()

    def positions(self) -> dict[int, tuple[Position, float]]:
        """Return where every member's stamp says it is, or was when it died, and when by its own clock."""
        found = {seat: ProgressStamp.read_all(self.spec.stamp(seat)) for seat in self.members}
        return {seat: (Position(*place[:2]), place[3]) for seat, place in found.items() if place}

    def end_hung(self, watchdog: Watchdog, inquest: Inquest) -> None:
        """Name the rank that all others wait for, keep the stacks of those that still answer, and end it."""
        # Stamps tell more than answers, which come every second or two, and not at all from who is frozen.
        here = [seat for seat in self.members if seat in self.runs]
        places = dict.fromkeys(here, Position(0, "init")) | watchdog.places()
        for seat, (place, _) in self.positions().items():
            if seat in places and place.step >= places[seat].step:
                places[seat] = place
        answers = {seat: self.actors[seat].stacks.remote(str(self.spec.log(seat))) for seat in places}
        answered, _ = ray.wait([*answers.values()], num_returns=len(answers), timeout=ANSWER_S)
        on_time = set(answered)
        mute = [seat for seat, ref in answers.items() if ref not in on_time]
        late = mute or behind(places)
        where = [(r, f"rank {r} in {p.phase} of step {p.step}") for r, p in list(places.items())[:4]]
        for seat in late if mute or len(late) < len(places) else late[-1:]:
            step, phase = places[seat]
            others = [text for r, text in where if r != seat]  # some are enough: all would be quadratic
            why = "does not answer" if seat in mute else "is behind"
            seen = f"{', '.join(others[:3])}{' ...' if len(places) > 4 else ''}"
            title = (
                f"{self._who(seat)} made no progress for {watchdog.silent_s:.0f} s in {phase} of step {step} and "
                f"{why} ({seen}); it was ended"
            )
            detail = f"stacks of all ranks that answered: {self.spec.log(seat).parent}"
            signature, fact = f"hung in {phase}", self.facts[seat]
            failure = Failure(seat, "hung", title, step, phase, detail, signature=signature, fact=fact)
            failure.silent_s = watchdog.silent_s
            ray.kill(self.actors[seat])  # its sockets close, and whoever waits for it learns so
            self.runs.pop(seat, None)
            inquest.ended(seat, failure, time.monotonic())

    def end_silent(self, seat: int, inquest: Inquest) -> None:
        """End a rank that did not notice that the group broke, or never came to meet the others."""
        step, phase = ProgressStamp.read(self.spec.stamp(seat)) or (0, "init")
        title = f"{self._who(seat)} did not leave the group that broke, in {phase} of step {step}; it was ended"
        failure = Failure(seat, "hung", title, step, phase, self._log_tail(seat), fact=self.facts[seat])
        ray.kill(self.actors[seat])
        self.runs.pop(seat, None)
        inquest.ended(seat, failure, time.monotonic())

    def result(self, ref: Any, seat: int) -> tuple[dict[str, Any] | None, Failure | None]:
        """Return what a rank came to: its outcome, or how it failed."""
        try:
            result = ray.get(ref)
        except RayError as error:
            return None, self._died(error, seat)
        if result["ok"]:
            return result, None
        lines = f"{result['error']}: {result['message']}"
        return None, Failure(
            seat,
            result["kind"],
            f"{self._who(seat)} failed in {result['phase']} of step {result['step']}: {lines}",
            result["step"],
            result["phase"],
            "" if result["kind"] == "refused" else result["traceback"],
            retry=result["kind"] != "refused",
            exit_code=result["exit_code"],
            signature=lines,
            fact=self.facts[seat],
        )

    def _died(self, error: RayError, seat: int) -> Failure:
        """Say how a rank ended that left no answer."""
        step, phase = ProgressStamp.read(self.spec.stamp(seat)) or (0, "init")
        failure = Failure(seat, "killed", "", step, phase, self._log_tail(seat), fact=self.facts[seat])
        what, how = "died", "killed, or crashed without a Python exception"
        if isinstance(error, OutOfMemoryError):
            failure.cause, how = "out_of_memory", "ended by Ray's memory monitor"
            failure.detail = str(error)
        elif isinstance(error, ActorDiedError):
            failure.death = self._death_record(seat)
            if failure.death.get("oom"):
                failure.cause, how = "out_of_memory", "killed by the kernel, which was out of memory"
            elif name := failure.death.get("signal"):
                how = f"killed by {name}"
            elif "exit_code" in failure.death:
                how = f"exited with code {failure.death['exit_code']} and without a Python exception"
        elif isinstance(error, RayActorError):
            failure.cause, what, how = "node_lost", "is out of reach", "its node is lost or busy"
        else:
            failure.cause, what, how = "exception", "failed", str(error)
        failure.title = f"{self._who(seat)} {what} in {phase} of step {step}: {how}"
        failure.signature = how if failure.cause != "node_lost" else ""
        return failure

    def _death_record(self, seat: int) -> dict[str, Any]:
        """Return the death record of a seat's actor, once it is there."""
        deadline = self.heard + RECORD_S  # of all that died together: thousands do, and may leave no record here
        while True:
            death = sentinel.read(self.spec.death(seat))
            if death.get("pid") == self.facts[seat]["pid"]:
                return death
            if time.monotonic() > deadline:
                return {}
            time.sleep(0.005)

    def _who(self, seat: int) -> str:
        fact = self.facts[seat]
        return f"rank {seat} (pid {fact['pid']}, node {fact['ip']})"

    def _log_tail(self, seat: int) -> str:
        with suppress(OSError):
            with self.spec.log(seat).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
            return "\n".join(["its log ends:", *lines[-LOG_LINES:]])
        return ""

    def end(self) -> None:
        """End every actor. What they came to is on disk and in the driver already."""
        for actor in [*self.actors.values(), *(spare for spare, _ in self.spares)]:
            ray.kill(actor)

    @property
    def _start_s(self) -> float:
        return start_timeout_s(self.spec.config)


def start_timeout_s(config: Config) -> float:
    """A bundle whose node is lost waits for another node: as long as the first placement may, if that is longer."""
    return max(START_TIMEOUT_S, config.placement_timeout_s)
