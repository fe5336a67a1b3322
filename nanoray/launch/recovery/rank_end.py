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
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nanoray.faults import exit_record
from nanoray.faults.cause import BY_KERNEL, Failure, FailureCollector, how_it_ended, title_of
from nanoray.faults.hang import Position, Watchdog, behind
from nanoray.faults.progress import LEFT
from nanoray.launch.connection import bounded
from nanoray.launch.ray_compat import id_of
from nanoray.launch.recovery.actors import ANSWER_S, first_line
from nanoray.launch.recovery.fault_log import end_of_log
from nanoray.launch.recovery.worker import DRIVER_SILENT_S, ORPHAN_CODE
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.machine.proc import start_time

# An exit record is written within milliseconds of the death, but a busy machine may take seconds.
EXIT_RECORD_S = 5.0
BY_MONITOR = "ended by Ray's memory monitor"
BY_SILENCE = (
    f"no call of this driver reached it for {DRIVER_SILENT_S:.0f} s, because the driver was frozen "
    "(Ctrl-Z, a sleeping machine) or cut off"
)
MAX_NAMED = 3  # other ranks in the title of a hang: all of thousands would be quadratic


# Ends that ranks report, or Ray.


def read_result(
    group: WorkerGroup, ref: Any, slot: int
) -> tuple[dict[str, Any] | None, Failure | None]:
    """Return the outcome of a rank whose `run` has ended, or how it failed; the other is None."""
    try:
        result = group.pool.api.get(ref)
    except RayError as error:
        # One deadline for all ranks that died together: thousands may, and where nodes share no
        # folder none of them leaves a record here.
        return None, _death(group, slot, error, record_by=group.event_at + EXIT_RECORD_S)
    if result["ok"]:
        return result, None
    return None, _error(group, slot, result)


def read_start(group: WorkerGroup, error: RayError) -> Failure | None:
    """Return how the rank died that an error of a start is about; None if it is about none."""
    slot = _dead_slot(group, error)
    if slot is None:
        return None
    if slot in group.facts:
        return _death(group, slot, error, group.pool.clock.monotonic() + EXIT_RECORD_S)
    # Its process had not yet said who it is.
    cause, verb, how = _name_death(error, {})
    return Failure(
        slot, cause, f"rank {slot} {verb} while its process started: {how}", detail=str(error)
    )


def _dead_slot(group: WorkerGroup, error: RayError) -> int | None:
    """Return the slot of the actor that an error of a start is about; None if it is about none."""
    if isinstance(error, ActorDiedError):
        for slot, actor in group.pool.actors.items():
            if error.actor_id == id_of(actor):
                return slot
    # It names no actor. But once all have described themselves, a start waits for rank 0 only.
    if isinstance(error, OutOfMemoryError) and not group.pool.starting and not group.runs:
        return 0
    return None


def how_newcomer_died(group: WorkerGroup, slot: int, error: RayError) -> str:
    """Return how a new actor for a slot died before it was ready."""
    if isinstance(error, OutOfMemoryError):
        return BY_MONITOR
    # Its pid is not known; that of the process before it is.
    record = exit_record.read(group.spec.progress(slot))
    if record.get("oom") and record["pid"] != group.facts[slot]["pid"]:
        return BY_KERNEL
    return first_line(error)


def _error(group: WorkerGroup, slot: int, result: dict[str, Any]) -> Failure:
    """Return the failure of a rank whose `run` returned an error."""
    error = f"{result['error']}: {result['message']}"
    refused = result["kind"] == "refused"
    return Failure(
        slot,
        result["kind"],
        _title(group, slot, f"failed in {result['phase']} of step {result['step']}", error),
        result["step"],
        result["phase"],
        detail="" if refused else result["traceback"],
        retry=not refused,
        exit_code=result["exit_code"],
        signature=error,
        facts=group.facts[slot],
    )


def _death(group: WorkerGroup, slot: int, error: RayError, record_by: float) -> Failure:
    """Return the failure of a rank that did not return from `run`.

    record_by: monotonic seconds until which its exit record is awaited.
    """
    step, phase = _position(group, slot)
    record: dict[str, Any] = {}
    if isinstance(error, ActorDiedError):
        # A record of a process on a node that is gone will not come any more.
        is_late = bool(_node_end(str(error)))
        record = _exit_record(group, slot, group.pool.clock.monotonic() if is_late else record_by)
    cause, what, how = _name_death(error, record)
    failure = Failure(
        slot,
        cause,
        _title(group, slot, f"{what} in {phase} of step {step}", how),
        step,
        phase,
        detail=str(error) if how == BY_MONITOR else end_of_log(group.spec.log(slot)),
        facts=group.facts[slot],
        exit_record=record,
    )
    # A lost node, and a rank that waited for another attempt, say nothing about the program: if
    # they repeat, that is no deterministic failure.
    if cause != "node_lost" and phase not in LEFT:
        failure.signature = how
    return failure


def _name_death(error: RayError, record: dict[str, Any]) -> tuple[str, str, str]:
    """Return cause, verb and reason of a death, from Ray's error and the exit record; {}: none."""
    if isinstance(error, OutOfMemoryError):
        return "out_of_memory", "died", BY_MONITOR
    if not isinstance(error, RayActorError):
        return "exception", "failed", str(error)
    if not isinstance(error, ActorDiedError):
        return "node_lost", "is out of reach", "its node is lost or busy"

    # Ray says no more than that the process is dead. The record says how it ended.
    if record.get("exit_code") == ORPHAN_CODE:
        return "driver_silent", "ended", BY_SILENCE
    node_end = _node_end(str(error))
    if node_end and not record.keys() & {"signal", "exit_code"}:
        return "node_lost", "is lost", f"Ray has lost its node: {node_end}"
    cause, verb, how = how_it_ended(record)
    if "exit_code" in record:
        how += " and without a Python exception"
    return cause, verb, how


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


def _exit_record(group: WorkerGroup, slot: int, record_by: float) -> dict[str, Any]:
    """Return how the process ended, waiting for its record; empty if none is written."""
    clock = group.pool.clock
    while True:
        record = exit_record.read(group.spec.progress(slot))
        # A record with another pid is of an earlier process in this slot.
        if record.get("pid") == group.facts[slot]["pid"]:
            return record
        if clock.monotonic() > record_by:
            return {}
        clock.sleep(0.005)


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
        what = (
            f"made no progress for {watchdog.silent_s:.0f} s {places[slot]} and {why} ({others}); it "
            "was ended"
        )
        title = _title(group, slot, what)
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


def end_silent(group: WorkerGroup, slot: int, what: str, collector: FailureCollector) -> None:
    """End a rank that does not answer, or did not leave its broken group; `what` says which."""
    step, phase = _position(group, slot)
    title = _title(group, slot, f"{what}, in {phase} of step {step}; it was ended")
    failure = Failure(slot, "hung", title, step, phase, end_of_log(group.spec.log(slot)))
    _end_rank(group, slot, failure, collector)


def end_drained(group: WorkerGroup, slot: int, collector: FailureCollector) -> None:
    """End a rank that has left its group because its node will be taken away."""
    _end_rank(group, slot, drain_of(group, slot), collector)


def drain_of(group: WorkerGroup, slot: int) -> Failure:
    """Return why a rank whose node will be taken away is lost to its group."""
    cluster = group.pool.cluster
    assert cluster
    facts = group.facts[slot]
    step, phase = _position(group, slot)
    why = f"its node is being drained{cluster.notice(facts['node'])}"
    title = _title(group, slot, f"left after step {max(0, step - 1)}", why)
    return Failure(slot, "drained", title, step, phase, facts=facts)


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


def _title(group: WorkerGroup, slot: int, what: str, how: str = "") -> str:
    return title_of(slot, group.facts[slot], what, how)


def _position(group: WorkerGroup, slot: int) -> Position:
    """Return the newest position of a rank that is known."""
    known = group.position(slot)
    return Position(0, "init") if known is None else known[0]
