"""The watch over the ranks of an attempt: what they report, and the orders they get meanwhile.

    events of the group ─► ended      ─► FailureCollector; a lost rank's slot gets a new actor
                           heartbeat  ─► Watchdog (who hangs), the fault that is now overcome
                           started    ─► a new actor is ready, so the group may grow
    orders to the group ◄─ stop, leave a drained node, abort

It is over when all ranks have finished, have failed, or wait. What follows is the driver's decision.

Most ranks notice a lost peer by a closed connection. A frozen process, a node that is cut off, and
NCCL close none: the others are ordered to abort, until all wait. Without that order they would find
out when the timeout of their collective is over.
"""

from __future__ import annotations

import math
from typing import Any

from ray.exceptions import RayError

from nanoray.faults.cause import FailureCollector
from nanoray.faults.hang import Position, Watchdog
from nanoray.faults.progress import SCRIPT
from nanoray.launch.recovery.actors import POLL_S
from nanoray.launch.recovery.cluster_watch import ClusterWatch
from nanoray.launch.recovery.drain import Drains, Leave
from nanoray.launch.recovery.fault_log import FaultLog
from nanoray.launch.recovery.rank_end import end_hung, end_silent
from nanoray.launch.recovery.recover import Recoverer
from nanoray.launch.recovery.run_state import RunState
from nanoray.launch.recovery.worker import Heartbeat
from nanoray.launch.recovery.worker_group import SETTLE_S, WorkerGroup
from nanoray.launch.signals import Stop
from nanoray.machine.output import say
from nanoray.observe.watch.observers import Console

# While ranks save, one that does not notice a lost peer for this long is ended. After a stop, so is one
# whose script goes on although that of rank 0 has returned.
STOP_PATIENCE_S = 30.0
MUTE_S = 5.0  # a living rank answers a heartbeat within a second or two
# While ranks save, one that does not answer for this long is ended: the others wait for it.
FROZEN_S = 10.0
NOTICE_S = 0.1  # a closed connection is noticed within a few hundredths of a second


class Watcher:
    """Watches the ranks until there is something to decide. Each `watch` begins anew."""

    def __init__(
        self,
        stop: Stop,
        cluster: ClusterWatch,
        faults: FaultLog,
        recoverer: Recoverer,
        clock: Any,
    ) -> None:
        self._stop = stop
        self._cluster = cluster
        self._faults = faults
        self._recoverer = recoverer
        self._drains = Drains(cluster)
        self._clock = clock

        # Of the present watch, by member: for how many of the seconds in which this driver ran it
        # has not answered since its last heartbeat.
        self._mute_s: dict[int, float] = {}
        self._abort_at = 0.0  # monotonic seconds: no order to abort before then

    def watch(self, at: RunState, console: Console) -> FailureCollector:
        """Print what the ranks report until they have finished, have failed, or all wait."""
        group = at.ranks
        config = at.spec.config
        # A survivor may be computing, and notices a lost peer in its next collective only.
        patience_s = max(config.timeout_s, config.init_timeout_s) + SETTLE_S
        collector = FailureCollector(
            group.members, group.in_place, patience_s, SETTLE_S, group.live
        )
        watchdog = Watchdog(group.members, config.hang_timeout, self._clock.monotonic)
        members = set(group.members)
        self._mute_s = dict.fromkeys(members, 0.0)
        self._abort_at = 0.0
        # Each rank has one heartbeat pending all the time; its answer requests the next one.
        for slot in group.members:
            group.request_heartbeat(slot, after=self._faults.target)

        looked_at = self._clock.monotonic()
        while not collector.complete(self._clock.monotonic()):
            now = self._clock.monotonic()
            if at.too_late(now):
                break
            # While the driver itself was frozen, no rank was asked.
            for slot in members:
                self._mute_s[slot] += min(now - looked_at, 2 * POLL_S)
            looked_at = now
            group.pool.request_again()
            self._send_orders(at, collector)
            for kind, slot, value in group.events(POLL_S):
                if kind == "ended":
                    watchdog.ended(slot)
                    # What a script printed before an error comes before the error.
                    if slot == group.members[0]:
                        group.print_messages(console, wait_s=1.0)
                    self._recoverer.note_end(at, collector, slot, value)
                elif kind == "heartbeat" and slot in group.runs:
                    if slot in members:
                        self._on_heartbeat(at, collector, watchdog, slot, value)
                    else:
                        # Left out of a group that saves: it waits, and learns that its driver lives
                        group.request_heartbeat(slot, value.waiting)
                elif kind == "started":
                    self._on_start(at, collector, slot, value)
            # After a failure rank 0 may be lost, and all ranks stand still.
            if not collector.failures:
                group.print_messages(console)
                self._check_for_hang(at, collector, watchdog)

        if at.outcome and config.model == "own" and collector.silent:
            ranks = ", ".join(str(slot) for slot in collector.silent)
            say(
                f"warning  rank {ranks} had not returned from the script's function as rank 0 had, and "
                "was ended; --hang_timeout 0 waits without a limit"
            )
        # All that rank 0 reported until its end, or until it left its group: before the cause of a
        # fault is printed. Of a rank 0 that is lost, what had arrived was printed with its end.
        if not collector.failures:
            group.print_messages(console, wait_s=5.0)
        elif group.members[0] in group.runs:
            group.print_messages(console, wait_s=1.0)
        return collector

    def end_drained(self, at: RunState, collector: FailureCollector) -> None:
        """End ranks that left drained nodes after a watch, if the others go on without them."""
        if at.outcome or self._recoverer.ending(at):
            return
        if self._drains.end(at.ranks, collector):
            self._recoverer.start_replacements(at, collector, collector.failures)

    # Orders.

    def _send_orders(self, at: RunState, collector: FailureCollector) -> None:
        """Order the ranks to stop, to leave drained nodes, or to leave a group that broke."""
        group = at.ranks
        # A stop is requested from outside, or because of trouble with the cluster.
        if not self._recoverer.ending(at):
            trouble = self._cluster.trouble()
            if trouble:
                self._stop.request(trouble)
        over = self._recoverer.ending(at) or at.outcome is not None
        if not (over or group.pausing or collector.failures):
            self._leave_drained_nodes(at)
        if self._recoverer.ending(at):
            group.stop()
            if at.outcome:
                collector.rank_0_finished(self._clock.monotonic(), STOP_PATIENCE_S)
            if group.live:
                self._end_frozen_ranks(group, collector)
            if collector.failures:
                collector.hurry(STOP_PATIENCE_S, self._clock.monotonic())
        if at.headless or self._cluster.head_lost:
            self._give_up_mute_ranks(group, collector)
        self._abort_broken_group(group, collector)

    def _leave_drained_nodes(self, at: RunState) -> None:
        """Order all ranks to leave their group, or to save, if ranks should leave drained nodes."""
        group = at.ranks
        self._drains.announce(group)
        leave = self._drains.decide(group)
        if leave is Leave.IN_PLACE:
            group.pause()
        elif leave is Leave.SAVE:
            self._faults.add(self._drains.failures(group), group)
            self._faults.set_recovery("restart")
            self._recoverer.begin_saving(at, None, within_s=math.inf)

    def _abort_broken_group(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Order members to abort their process groups, if one is lost or has run out of memory.

        That concerns members that have neither failed nor left the group.
        """
        broke_at = 0.0
        if collector.failures and collector.in_place:
            broke_at = collector.first_failure_at
        elif not collector.failures and collector.first_left_at and group.is_short_of_memory:
            broke_at = collector.first_left_at
        now = self._clock.monotonic()
        if broke_at and now >= max(self._abort_at, broke_at + NOTICE_S):
            self._abort_at = now + group.heartbeat_s
            for slot in collector.silent:
                group.pool.actors[slot].abort.remote(group.spec.attempt)

    def _give_up_mute_ranks(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Wait no longer for ranks that do not answer, where Ray reports no death without a head.

        A rank that answers is alive and will notice the fault; one that does not is dead.
        """
        patience_s = max(MUTE_S, 3 * group.heartbeat_s)
        if all(self._mute_s[slot] > patience_s for slot in collector.silent):
            collector.hurry(0.0, self._clock.monotonic())

    def _end_frozen_ranks(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """End ranks that do not answer, if others that answer have all of the run's state.

        The others, which only save, would wait for a frozen one until their meeting times out. Then
        it may be too late to save.
        """
        patience_s = max(FROZEN_S, 3 * group.heartbeat_s)
        frozen = [slot for slot in collector.silent if self._mute_s[slot] > patience_s]
        # A rank that was left out of the group waits in `runs`, too, and is no member.
        living = [slot for slot in group.members if slot in group.runs]
        others_answer = any(self._mute_s[slot] <= patience_s for slot in living)
        if frozen and others_answer and not group.lost_share(frozen):
            for slot in frozen:
                what = f"did not answer for {self._mute_s[slot]:.0f} s while the others saved"
                end_silent(group, slot, what, collector)

    # Events.

    def _on_heartbeat(
        self,
        at: RunState,
        collector: FailureCollector,
        watchdog: Watchdog,
        slot: int,
        heartbeat: Heartbeat,
    ) -> None:
        """Note a rank's position, and request the next one."""
        group = at.ranks
        now = self._clock.monotonic()
        self._mute_s[slot] = 0.0
        waiting = heartbeat.waiting and heartbeat.attempt == at.spec.attempt
        collector.set_waiting(slot, waiting, now)
        watchdog.update(slot, Position(heartbeat.step, heartbeat.phase), heartbeat.written_at)

        # A base of -1 belongs to a group that has not been built yet.
        completed_a_step = -1 < heartbeat.base < heartbeat.step - 1
        if completed_a_step:
            group.newcomers.discard(slot)

        # A fault is overcome once a rank has completed a step that was not completed before it.
        # Spares start only in undisturbed training, which they would slow down otherwise.
        fault = self._faults.present
        if fault:
            overcome = fault.update(heartbeat.step, heartbeat.base, heartbeat.waiting)
            if overcome and not at.saving:
                self._faults.close_as_recovered()
        elif heartbeat.step > 1 and heartbeat.phase != SCRIPT and not collector.failures:
            group.add_spares()
        group.request_heartbeat(slot, heartbeat.waiting, self._faults.target)

    def _on_start(
        self, at: RunState, collector: FailureCollector, slot: int, error: RayError | None
    ) -> None:
        """Note that a new actor is ready, or died before; a ready one may let the group grow."""
        self._recoverer.note_start(at.ranks, slot, error)
        undisturbed = not collector.failures and not self._recoverer.ending(at)
        undisturbed = undisturbed and at.outcome is None
        if error is None and undisturbed and at.ranks.can_grow:
            at.ranks.pause()

    def _check_for_hang(
        self, at: RunState, collector: FailureCollector, watchdog: Watchdog
    ) -> None:
        """End the rank that all others wait for, once none has made progress for too long."""
        if watchdog.quiet:
            # Progress files are newer than heartbeats.
            for slot, (position, written_at) in at.ranks.positions().items():
                watchdog.update_from_file(slot, position, written_at)
        if watchdog.hangs():
            end_hung(at.ranks, watchdog, collector)
            self._recoverer.start_replacements(at, collector, collector.failures)
