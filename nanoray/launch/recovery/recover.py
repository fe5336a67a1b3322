"""What is done about lost ranks, while the others keep the run's state in memory.

    a rank is lost ─► a new actor starts in its slot ─► the others wait ─► the cause is named
                                                                               │
       train on  ◄─ form a group with the new actors ◄─ await replacements ◄───┤
       restart   ◄─ form a group that only saves     ◄─────────────────────────┘
       or end

Which of these comes next is decided by the driver (situation.py). Here each is done, and what
happened is noted in the RunState.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from nanoray.checkpoint.run_folder import write_attempt
from nanoray.faults.cause import Failure, FailureCollector, reason_to_give_up
from nanoray.faults.hang import PATIENT
from nanoray.launch.recovery.actors import POLL_S, START_TRIES
from nanoray.launch.recovery.cluster_watch import ANOTHER_HEAD, ClusterWatch
from nanoray.launch.recovery.fault_log import FaultLog
from nanoray.launch.recovery.rank_end import end_silent, how_newcomer_died, read_result
from nanoray.launch.recovery.run_state import Forming, RunState, Saving
from nanoray.launch.recovery.shares import no_replica, smaller
from nanoray.launch.recovery.situation import NextGroup, Why
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.launch.signals import Stop
from nanoray.machine.fault_points import reached
from nanoray.machine.output import say

# From a failure that ends an attempt until the survivors must have saved (KubeRay grants 100 s).
SAVE_S = 90.0


@dataclass
class Recoverer:
    """Replaces lost ranks, names causes, and forms groups after faults."""

    stop: Stop
    cluster: ClusterWatch
    faults: FaultLog
    clock: Any

    _is_first_attempt: bool = True

    def ending(self, at: RunState) -> bool:
        """Return whether the ranks only save what they hold: no step follows."""
        return self.stop.requested or at.saving is not None

    def begin_attempt(self, at: RunState) -> None:
        """Count attempts; from now on no rank of an older one may commit a checkpoint."""
        if not self._is_first_attempt:
            at.spec = at.spec.next_attempt()
        try:
            write_attempt(at.spec)
        except OSError as error:
            if self._is_first_attempt:
                raise
            say(f"warning  attempt {at.spec.attempt} is not noted: {error}")
        self._is_first_attempt = False

    # Single ranks: they end, and new ones start.

    def note_end(self, at: RunState, collector: FailureCollector, slot: int, ref: Any) -> None:
        """Note that a rank finished or failed; start a new actor for one that failed."""
        group = at.ranks
        outcome, failure = read_result(group, ref, slot)
        if slot not in group.members:  # its actor is left over from before the group shrank
            group.pool.fill(slot)
            return
        if failure and self._is_after_training(at, failure):
            say_after_training(failure, at.spec.log(failure.rank))
            collector.ended(slot, None, self.clock.monotonic())
            return
        collector.ended(slot, failure, self.clock.monotonic())
        if failure and failure.cause == "driver_silent":
            return  # all ranks end for this reason: none of them is replaced
        if failure:
            # Peers that still wait for it in a rendezvous would wait until the timeout.
            reached("lost")
            group.break_meeting(slot)
            if slot in group.newcomers and not failure.retry:
                # It never trained: this node does not suit, another one may.
                group.pool.unfit.setdefault(slot, set()).add(failure.facts["node"])
            self.start_replacements(at, collector, [failure])
            reached("replacing")
        elif slot == group.members[0]:
            at.outcome = outcome
            collector.rank_0_finished(self.clock.monotonic(), self._patience_s(at))

    def _is_after_training(self, at: RunState, failure: Failure) -> bool:
        """Return whether a script has raised after its `fit`, on another rank than 0."""
        if failure.cause not in ("exception", "refused") or failure.rank == at.ranks.members[0]:
            return False
        if at.outcome:
            return "own_loop" not in at.outcome
        # Before the last barrier a rank that is lost would be missed.
        places = [position for position, _ in at.ranks.positions().values()]
        return failure.phase == "done" and all(place.phase == "done" for place in places)

    def _patience_s(self, at: RunState) -> float:
        """Return how long ranks of a script may go on once rank 0 has returned from it.

        Each may write results of its own, as under torchrun.
        """
        config = at.spec.config
        # Ranks of an engine have all saved when rank 0 returns; those of a loop of its own may not.
        has_saved = at.saving and at.outcome and "own_loop" not in at.outcome
        if config.model != "own" or has_saved:
            return 0.0
        return PATIENT * config.hang_timeout or math.inf

    def start_replacements(
        self, at: RunState, collector: FailureCollector, failures: list[Failure]
    ) -> None:
        """Start new actors for lost ranks at once, while the others still find out.

        While ranks save, none is replaced.
        """
        if not collector.in_place or at.outcome:
            return
        # One request to the head serves all: thousands of ranks may have failed at once.
        at.headless = not self.cluster.head_answers()
        pool = at.ranks.pool
        for failure in failures:
            refused = not failure.retry and pool.refused_everywhere(failure.rank)
            if self.ending(at) or refused:
                pool.vacate(failure.rank, not at.headless)
            else:
                pool.failed_starts[failure.rank] = 0
                pool.fill(failure.rank, not at.headless)

    def note_start(self, group: WorkerGroup, slot: int, error: RayError | None) -> None:
        """Note that a new actor is ready, or create one again that died before, a few times."""
        pool = group.pool
        if error is None:
            pool.failed_starts[slot] = 0
            return
        # Ray notices that a process is dead before it notices that its node is, and so uses that
        # node again.
        pool.failed_starts[slot] += 1
        if pool.failed_starts[slot] < START_TRIES:
            pool.fill(slot)
        else:
            pool.vacate(slot)
            say(
                f"replace  {START_TRIES} new actors for rank {slot} died while starting, and no "
                f"more are started: {how_newcomer_died(group, slot, error)}"
            )

    # The cause of a fault.

    def name_cause(self, at: RunState, collector: FailureCollector, group_broke: bool) -> None:
        """Announce the cause of a fault, and prepare to form another group after it.

        group_broke: it broke and all ranks left it, although none was lost.
        """
        group = at.ranks
        if group_broke:
            self._add_broken_group(group, collector)
        self._end_silent_ranks(at, collector)
        reason = self.decide(at, collector)
        lost = [slot for slot in group.members if slot not in group.runs]
        if reason is None and not self.ending(at) and len(lost) < len(group.members):
            say("  now      the other ranks keep the state and wait for a new process")
        at.forming = Forming(
            reason,
            lost,
            size_before=len(group.members),
            began_at=self.clock.monotonic(),
        )

    def _add_broken_group(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Add a failure for a group that broke although no rank was lost."""
        slot = group.members[0]
        step, phase = 0, "init"
        positions = group.positions()
        if slot in positions:
            step, phase = positions[slot][0]
        size = len(group.members)
        failure = Failure(
            slot,
            "peer_lost",
            f"the group of {size} rank(s) broke in {phase} of step {step}, though no rank was lost",
            step,
            phase,
            signature="group broke",
            facts=group.facts[slot],
        )
        failure.at = self.clock.monotonic()
        collector.failures.append(failure)
        collector.no_rank_lost = True
        collector.first_failure_at = failure.at

    def _end_silent_ranks(self, at: RunState, collector: FailureCollector) -> None:
        """End ranks that did not notice that their group broke, so that the others can go on."""
        silent = collector.silent
        if not collector.in_place or not silent:
            return
        known = len(collector.failures)
        for slot in silent:
            end_silent(at.ranks, slot, "did not leave the group that broke", collector)
        self.start_replacements(at, collector, collector.failures[known:])

    def decide(self, at: RunState, collector: FailureCollector) -> str | None:
        """Announce which failure is the cause.

        Returns why the run must not continue; None if it may.
        """
        group = at.ranks
        cause = self.faults.add(collector, group)
        if not self.cluster.head_answers(self.cluster.head_timeout_s):
            if self.cluster.replaced:
                return f"{ANOTHER_HEAD}; start the run again with --resume auto"
            return "the cluster's head is gone; start it again, and this run with --resume auto"
        if not cause.retry and cause.rank in group.newcomers:
            # It never trained: another node may do, or the group shrinks.
            shrinks = at.spec.config.recovery == "shrink"
            if shrinks or not group.pool.refused_everywhere(cause.rank):
                return None
            return "its replacement could not work on three nodes"
        return reason_to_give_up(cause, self.faults.causes, self.faults.max_failures)

    # Form another group.

    def await_replacements(self, at: RunState) -> None:
        """Wait until the lost ranks have new actors, time is up, or a stop is requested."""
        group = at.ranks
        forming = at.forming
        assert forming
        forming.awaited = True
        timeout_s = at.spec.config.replace_timeout
        if at.spec.config.recovery != "shrink":
            # Until then a new actor may have to wait in its bundle on a drained node.
            timeout_s += self.cluster.vacated_in_s
        deadline = self.clock.monotonic() + timeout_s

        # The head may not have answered when a rank was lost: its slot is still empty then.
        for slot in forming.lost:
            pool = group.pool
            given_up = pool.refused_everywhere(slot) or pool.failed_starts[slot] >= START_TRIES
            if slot not in pool.actors and not given_up:
                pool.fill(slot)

        while any(slot in group.pool.starting for slot in forming.lost):
            group.pool.request_again()
            now = self.clock.monotonic()
            if self.stop.requested or now >= deadline:
                break
            trouble = self.cluster.trouble()
            if trouble:
                self.stop.request(trouble)
            remaining_s = max(0.0, deadline - self.clock.monotonic())
            for kind, slot, value in group.events(min(POLL_S, remaining_s)):
                if kind == "started":
                    self.note_start(group, slot, value)
                elif kind == "heartbeat" and slot in group.runs:
                    # The next request shows a waiting rank that its driver lives.
                    group.request_heartbeat(slot, value.waiting)
                elif kind == "ended" and self._is_another_loss(at, forming, slot, value):
                    if forming.later_reason:
                        return
                    deadline = self.clock.monotonic() + timeout_s

    def _is_another_loss(self, at: RunState, forming: Forming, slot: int, ref: Any) -> bool:
        """Return whether a rank that waited has failed; announce that as a fault of its own."""
        # The others wait already, so there are no consequences to collect.
        collector = FailureCollector(at.ranks.runs, True, 0.0, 0.0, live=True)
        self.note_end(at, collector, slot, ref)
        if not collector.failures:
            return False
        forming.lost.append(slot)
        forming.later_reason = self.decide(at, collector)
        return True

    def begin_saving(self, at: RunState, reason: str | None, within_s: float = SAVE_S) -> None:
        """Give the ranks that are left some time to save, unless a stop was requested anyway."""
        if self.stop.requested:
            return
        saving = at.saving or Saving(reason)
        until = min(saving.until, self.clock.monotonic() + within_s)
        at.saving = replace(saving, until=until)

    def form_group(self, at: RunState, why: Why) -> bool:
        """Form a group of ranks that hold the run's state, and of new actors unless it only saves.

        Returns False if that failed: after a fault, `forming` contains what is left to try.
        """
        group = at.ranks
        size_before = len(group.members)
        left = [slot for slot in group.members if slot in group.runs]
        planned = group.plan(why)
        obstacle = self._meet(at, planned) if planned.members else no_replica(at.spec.config, left)
        if not why.follows_fault:
            if obstacle:
                say(f"grow     failed: {obstacle}")
            elif len(planned.members) > size_before:
                size = len(planned.members)
                say(f"grow     {size_before} -> {size} ranks; no step is repeated\n")
            return not obstacle

        forming = at.forming
        assert forming
        if not planned.members:
            forming.no_replica = obstacle
            return False
        if obstacle:
            # More ranks may be lost: await their replacements, and try again.
            say(f"replace  {self.faults.budget} failed: {obstacle}")
            forming.tries_left -= 1
            forming.awaited = False
            return False
        self._announce_group(at, forming, planned)
        group.pool.promoted.clear()
        return True

    def _meet(self, at: RunState, planned: NextGroup) -> str:
        """Let the members of a group meet as a new attempt; return why that failed, if it did."""
        try:
            store = at.ranks.open_store(planned.members)
        except RayError as error:
            return " ".join(str(error).split())[:200]
        reached("store")
        # From here on no rank of the older attempt may commit a checkpoint.
        self.begin_attempt(at)
        reached("attempt")
        at.ranks.regroup(at.spec, planned, store)
        reached("orders")
        return ""

    def _announce_group(self, at: RunState, forming: Forming, planned: NextGroup) -> None:
        """Print which ranks joined and which are missing, and note the kind of recovery."""
        group = at.ranks
        promoted = group.pool.promoted
        joined = [slot for slot in forming.lost if slot in planned.joins]
        size = len(group.members)
        kind = "in_place"
        if joined:
            if set(joined) <= promoted:
                kind = "spare"
            names = []
            for slot in joined:
                note = ", a spare" if slot in promoted else ""
                names.append(f"rank {slot} (pid {group.facts[slot]['pid']}{note})")
            seconds = self.clock.monotonic() - forming.began_at
            say(
                f"replace  {self.faults.budget} {', '.join(names)} joins in {seconds:.1f} s; "
                "no step is repeated\n"
            )
        if planned.why is Why.SAVING:
            kind = "none"
            say(
                f"save     {size} rank(s) are left and hold the run's state; they save it, and "
                "end\n"
            )
        elif size < group.pool.place.workers:
            kind = "shrink"
            shrunk = smaller(
                at.spec.config,
                forming.size_before,
                group.members,
                planned.leaves,
                group.pool.place.workers,
            )
            say(f"shrink   {self.faults.budget} {shrunk}\n")
        self.faults.set_recovery(kind, len(joined))


def say_after_training(failure: Failure, log: Path) -> None:
    """Print what a script did on a rank after its training: that changes no outcome."""
    say(
        f"\nwarning  {failure.title}. The training had ended, and its outcome stands; the traceback is "
        f"in {log}"
    )
