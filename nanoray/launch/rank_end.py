"""How ranks end: what their `run` returned, how their process died, or why the driver ended them.

    run returned ─► outcome, or the error as data ────────────┐
    process died ─► its exit record ──────────────────────────┼─► Failure ─► FailureCollector
    hung, silent or on a drained node ─► the driver ends it ──┘

A frozen process needs SIGKILL, from a Ray task on its node. `ray.kill` lets the node's raylet ask
the process to end, and kills it after 5 s without an answer. But if the raylet has tried for 20 s
to connect to the process and failed, as with one that is frozen, the request fails at once, and Ray
2.60 takes that for an answer. The process, and with it the slot's share of the node, then stays
until the driver has ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nanoray.base.proc import start_time
from nanoray.checkpoint.run import RunSpec
from nanoray.faults import exit_record
from nanoray.faults.cause import Failure, FailureCollector
from nanoray.faults.hang import Position, Watchdog, behind
from nanoray.faults.progress import LEFT
from nanoray.launch.actors import ANSWER_S, first_line
from nanoray.launch.connection import bounded
from nanoray.launch.fault_log import end_of_log
from nanoray.launch.worker import DRIVER_SILENT_S, ORPHAN_CODE
from nanoray.launch.worker_group import WorkerGroup

# An exit record is written within milliseconds of the death, but a busy machine may take seconds.
EXIT_RECORD_S = 5.0
BY_MONITOR = "ended by Ray's memory monitor"
BY_KERNEL = "killed by the kernel, which was out of memory"
MAX_NAMED = 3  # other ranks in the title of a hang: all of thousands would be quadratic


# Ends that ranks report, or Ray.


def read_result(
    group: WorkerGroup, ref: Any, slot: int
) -> tuple[dict[str, Any] | None, Failure | None]:
    """Return the outcome of a rank whose `run` has ended, or how it failed; the other is None."""
    rank_end = _rank_end(group, slot)
    try:
        result = group.pool.api.get(ref)
    except RayError as error:
        # One deadline for all ranks that died together: thousands may, and where nodes share no
        # folder none of them leaves a record here.
        failure = rank_end.by_death(error, record_by=group.event_at + EXIT_RECORD_S)
        failure.heard_at = group.heard_at.get(slot)
        return None, failure
    if result["ok"]:
        return result, None
    return None, rank_end.by_error(result)


def read_start(group: WorkerGroup, error: RayError) -> Failure | None:
    """Return how the rank died that an error of a start is about; None if it is about none."""
    for slot, facts in group.facts.items():
        if isinstance(error, ActorDiedError) and error.actor_id == facts["actor"]:
            record_by = group.pool.clock.monotonic() + EXIT_RECORD_S
            return _rank_end(group, slot).by_death(error, record_by)
    return None


def how_newcomer_died(group: WorkerGroup, slot: int, error: RayError) -> str:
    """Return how a new actor for a slot died before it was ready."""
    if isinstance(error, OutOfMemoryError):
        return BY_MONITOR
    # Its pid is not known; that of the process before it is.
    record = exit_record.read(group.spec.exit_record(slot))
    if record.get("oom") and record["pid"] != group.facts[slot]["pid"]:
        return BY_KERNEL
    return first_line(error)


# Ends by the driver.


def end_hung(group: WorkerGroup, watchdog: Watchdog, collector: FailureCollector) -> None:
    """End the rank that all others wait for, after saving the stacks of those that still answer."""
    # Progress files are newer than heartbeats, which come every second or two, and never from a
    # frozen rank.
    running = [slot for slot in group.members if slot in group.runs]
    positions = dict.fromkeys(running, Position(0, "init")) | watchdog.positions()
    for slot, (position, _) in group.positions().items():
        if slot in positions and position.step >= positions[slot].step:
            positions[slot] = position

    # A rank that does not answer is frozen: that is certain. If all answer, the rank hangs that is
    # behind the others in its step, or has started fewer collectives. It is none that has left its
    # group: that waits, with the run's state in memory.
    collectives = _save_stacks(group, positions)
    late = mute = [slot for slot in positions if slot not in collectives]
    if not mute:
        in_group = {slot: positions[slot] for slot in collector.silent}
        if not in_group:
            return
        late = behind(in_group, collectives)
        if len(late) == len(in_group):
            late = late[-1:]  # all are equal: one must go, so that the others can leave their group

    places = {
        slot: _format_place(position, collectives.get(slot)) for slot, position in positions.items()
    }
    for slot in late:
        step, phase = positions[slot]
        others = _format_others(slot, places)
        why = "does not answer" if slot in mute else "is behind"
        title = (
            f"{_rank_end(group, slot).name} made no progress for {watchdog.silent_s:.0f} s "
            f"{places[slot]} and {why} ({others}); it was ended"
        )
        failure = Failure(
            slot,
            "hung",
            title,
            step,
            phase,
            detail=f"stacks of all ranks that answered: {group.spec.log(slot).parent}",
            signature=f"hung in {phase}",
        )
        failure.silent_s = watchdog.silent_s
        _end_rank(group, slot, failure, collector)


def end_silent(group: WorkerGroup, slot: int, collector: FailureCollector) -> None:
    """End a rank that did not leave its broken group, or never reached the rendezvous."""
    _end_rank(group, slot, _rank_end(group, slot).by_silence(), collector)


def end_frozen(group: WorkerGroup, slot: int, mute_s: float, collector: FailureCollector) -> None:
    """End a rank that does not answer, and for which the others wait."""
    _end_rank(group, slot, _rank_end(group, slot).by_no_answer(mute_s), collector)


def end_drained(group: WorkerGroup, slot: int, collector: FailureCollector) -> None:
    """End a rank that has left its group because its node will be taken away."""
    _end_rank(group, slot, drain_of(group, slot), collector)


def drain_of(group: WorkerGroup, slot: int) -> Failure:
    """Return why a rank whose node will be taken away is lost to its group."""
    cluster = group.pool.cluster
    assert cluster
    return _rank_end(group, slot).by_drain(cluster.notice(group.facts[slot]["node"]))


def _end_rank(group: WorkerGroup, slot: int, failure: Failure, collector: FailureCollector) -> None:
    failure.facts = group.facts[slot]
    # Its sockets close, so ranks that wait for it fail, too.
    group.pool.kill(group.pool.actors[slot])
    if failure.cause == "hung":
        bounded(lambda: end_for_certain(failure.facts, group.pool.api))
    group.runs.pop(slot, None)
    collector.ended(slot, failure, group.pool.clock.monotonic())


def end_for_certain(facts: dict[str, Any], api: Any = ray) -> None:
    """Send SIGKILL to the process with these facts: node, pid and start. Returns at once."""
    on_its_node = NodeAffinitySchedulingStrategy(facts["node"], soft=False)
    task = api.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)(end_process)
    task.remote(facts["pid"], facts["start"])


def end_process(pid: int, start: str) -> None:
    """End a process of this host, unless its pid belongs to one that started later."""
    if start and start_time(pid) == start:
        os.kill(pid, signal.SIGKILL)


# Words for a hang.


def _save_stacks(group: WorkerGroup, slots: Iterable[int]) -> dict[int, int]:
    """Let ranks write their stacks to their logs.

    Returns, of those that answer in time, how many collectives each has started.
    """
    pending: dict[Any, int] = {}
    for slot in slots:
        ref = group.pool.actors[slot].stacks.remote(str(group.spec.log(slot)))
        pending[ref] = slot
    done, _ = group.pool.api.wait(list(pending), num_returns=len(pending), timeout=ANSWER_S)

    collectives = {}
    for ref in done:
        try:
            collectives[pending[ref]] = group.pool.api.get(ref)
        except RayError:  # it died just now: that is an answer, too
            collectives[pending[ref]] = 0
    return collectives


def _format_place(position: Position, collectives: int | None) -> str:
    """Return a rank's position, and how many collectives it has started, if it answered."""
    place = f"in {position.phase} of step {position.step}"
    return f"{place} after {collectives} collectives" if collectives else place


def _format_others(slot: int, places: dict[int, str]) -> str:
    """Return where a few ranks other than this one are."""
    first = list(places)[: MAX_NAMED + 1]
    others = [f"rank {other} {places[other]}" for other in first if other != slot]
    more = " ..." if len(places) > MAX_NAMED + 1 else ""
    return ", ".join(others[:MAX_NAMED]) + more


# Describe an end.


@dataclass(frozen=True)
class RankEnd:
    """The process in a slot whose end is described."""

    slot: int
    facts: dict[str, Any]  # pid, node, ip, devices
    spec: RunSpec
    position: Position  # the newest that is known
    clock: Any = time

    @property
    def name(self) -> str:
        return f"rank {self.slot} (pid {self.facts['pid']}, node {self.facts['ip']})"

    def by_error(self, result: dict[str, Any]) -> Failure:
        """Return the failure of a rank whose `run` returned an error."""
        error = f"{result['error']}: {result['message']}"
        refused = result["kind"] == "refused"
        return Failure(
            self.slot,
            result["kind"],
            f"{self.name} failed in {result['phase']} of step {result['step']}: {error}",
            result["step"],
            result["phase"],
            detail="" if refused else result["traceback"],
            retry=not refused,
            exit_code=result["exit_code"],
            signature=error,
            facts=self.facts,
        )

    def by_death(self, error: RayError, record_by: float) -> Failure:
        """Return the failure of a rank that did not return from `run`.

        record_by: monotonic seconds until which its exit record is awaited.
        """
        step, phase = self.position
        log = end_of_log(self.spec.log(self.slot))
        failure = Failure(self.slot, "killed", "", step, phase, log, facts=self.facts)

        what = "died"
        how = "killed, or crashed without a Python exception"
        if isinstance(error, OutOfMemoryError):
            failure.cause = "out_of_memory"
            how = BY_MONITOR
            failure.detail = str(error)
        elif isinstance(error, ActorDiedError):
            # A record of a process on a node that is gone will not come any more.
            node_end = _node_end(str(error))
            record = self._exit_record(self.clock.monotonic() if node_end else record_by)
            failure.exit_record = record
            if record.get("oom"):
                failure.cause = "out_of_memory"
                how = BY_KERNEL
            elif record.get("exit_code") == ORPHAN_CODE:
                failure.cause = "driver_silent"
                what = "ended"
                how = (
                    f"no call of this driver reached it for {DRIVER_SILENT_S:.0f} s, because the "
                    "driver was frozen (Ctrl-Z, a sleeping machine) or cut off"
                )
            elif record.get("signal"):
                how = f"killed by {record['signal']}"
            elif "exit_code" in record:
                how = f"exited with code {record['exit_code']} and without a Python exception"
            elif node_end:
                failure.cause = "node_lost"
                what = "is lost"
                how = f"Ray has lost its node: {node_end}"
        elif isinstance(error, RayActorError):
            failure.cause = "node_lost"
            what = "is out of reach"
            how = "its node is lost or busy"
        else:
            failure.cause = "exception"
            what = "failed"
            how = str(error)
        failure.title = f"{self.name} {what} in {phase} of step {step}: {how}"

        # A lost node, and a rank that waited for another attempt, say nothing about the program: if
        # they repeat, that is no deterministic failure.
        if failure.cause != "node_lost" and phase not in LEFT:
            failure.signature = how
        return failure

    def by_silence(self) -> Failure:
        """Return the failure of a rank that did not leave its broken group, or never reached it."""
        step, phase = self.position
        title = (
            f"{self.name} did not leave the group that broke, in {phase} of step {step}; "
            "it was ended"
        )
        return Failure(self.slot, "hung", title, step, phase, end_of_log(self.spec.log(self.slot)))

    def by_no_answer(self, mute_s: float) -> Failure:
        """Return the failure of a rank that the others wait for, and that does not answer."""
        step, phase = self.position
        title = (
            f"{self.name} did not answer for {mute_s:.0f} s in {phase} of step {step}, and the "
            "others waited for it to save; it was ended"
        )
        return Failure(self.slot, "hung", title, step, phase, end_of_log(self.spec.log(self.slot)))

    def by_drain(self, notice: str) -> Failure:
        """Return the failure of a rank that left its group because its node will be taken away."""
        step, phase = self.position
        completed = max(0, step - 1)
        title = f"{self.name} left after step {completed}: its node is being drained{notice}"
        return Failure(self.slot, "drained", title, step, phase, facts=self.facts)

    def _exit_record(self, record_by: float) -> dict[str, Any]:
        """Return how the process ended, waiting for its record; empty if none is written."""
        while True:
            record = exit_record.read(self.spec.exit_record(self.slot))
            # A record with another pid is of an earlier process in this slot.
            if record.get("pid") == self.facts["pid"]:
                return record
            if self.clock.monotonic() > record_by:
                return {}
            self.clock.sleep(0.005)


def _node_end(error: str) -> str:
    """Return how Ray says that an actor's node ended; "" if it says nothing of a node.

    Ray 2.50 to 2.60 have no other sign of it than this text.
    """
    if "its node has died" not in error:
        return ""
    reasons = [line for line in error.splitlines() if "the actor's node was" in line]
    if not reasons:
        return "no reason given"
    return " ".join(reasons[0].partition("the actor's node was ")[2].split())


def _rank_end(group: WorkerGroup, slot: int) -> RankEnd:
    known = group.position(slot)
    position = Position(0, "init") if known is None else known[0]
    return RankEnd(slot, group.facts[slot], group.spec, position, group.pool.clock)
