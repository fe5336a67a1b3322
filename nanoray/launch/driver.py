"""The driver of a run on Ray: start the ranks, watch them, decide what a failure means, recover.
Only it prints.

connect ─► place (placement group) ─► Driver: attempts of a WorkerGroup ─► watch ──► outcome
                                        ▲                              │
                                        └─ replace, shrink or restart ─┴─ a rank fails: which one, and why?
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from nanoray.errors import ConfigError, PlacementError
from nanoray.faults.cause import (
    Failure,
    FailureCollector,
    back_off_s,
    reason_to_give_up,
    without_progress,
)
from nanoray.faults.hang import Position, Watchdog
from nanoray.launch.actors import POLL_S, START_TRIES, ActorPool, start_timeout_s
from nanoray.launch.cluster_watch import ANOTHER_HEAD, ClusterWatch
from nanoray.launch.drain import AbortOrders, Drains, Leave
from nanoray.launch.fault_log import FaultLog
from nanoray.launch.placement import Placement
from nanoray.launch.rank_end import end_hung, end_silent, read_result
from nanoray.launch.shares import no_replica, smaller
from nanoray.launch.signals import Stop, StopRequested
from nanoray.launch.worker import Heartbeat, Script
from nanoray.launch.worker_group import SETTLE_S, WorkerGroup
from nanoray.points import reached
from nanoray.run import RunSpec, write_attempt
from nanoray.train.watch.observers import Console

# From a failure that ends an attempt: the ranks that are left must have saved (KubeRay grants 100
# s)
SAVE_S = 90.0
# While ranks save, one that does not notice a lost peer for so long is ended
STOP_PATIENCE_S = 30.0
MUTE_S = 5.0  # a rank that lives answers a heartbeat within a second or two


@dataclass(frozen=True)
class Saving:
    """The ranks that are left only save what they hold. `reason`: why the run ends then; empty: all
    start again.
    """

    reason: str
    until: float = math.inf  # monotonic seconds; set once a rank has failed


class Driver:
    """Runs attempt after attempt of a training run, until it ends or there is no reason to try
    again.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: Placement,
        stop: Stop,
        api: Any = ray,
        clock: Any = time,
        script: Script = None,
    ) -> None:
        """`api` and `clock` are the modules ray and time, or a test's stand-ins for what they
        offer.
        """
        self.spec, self.place, self.stop, self._script = spec, place, stop, script
        self._api, self._clock = api, clock
        self.console = Console(spec.config.max_steps)
        self.cluster = ClusterWatch(place, api, head_timeout_s=spec.config.head_timeout_s)
        self.drains, self.aborts = Drains(self.cluster), AbortOrders(clock)
        self.faults = FaultLog(spec.folder, clock)
        self.group: WorkerGroup | None = None
        # Rank 0's, which it returns after the last checkpoint
        self.outcome: dict[str, Any] | None = None
        self._saving: Saving | None = None
        self._first_attempt = True
        self._headless = False  # the head did not answer when a rank was lost
        self._heard: dict[int, float] = {}  # slot -> monotonic seconds of its last heartbeat
        # Slot -> new actors in a row that died before they were ready
        self._failed_starts: dict[int, int] = {}

    def run(self) -> dict[str, Any]:
        """Return rank 0's outcome, or why there is none (`ok` False)."""
        try:
            with self.cluster:
                while True:
                    # Start the ranks, unless they wait in memory, and watch them until there is
                    # something to decide.
                    collector = self._start_and_watch()
                    if collector is None:
                        return self._stopped_without_ranks()
                    # Failures after the last checkpoint change nothing
                    if self.outcome is not None:
                        saving = self._saving if self.outcome["exit_reason"] == "stopped" else None
                        if saving and saving.reason:
                            return self._gave_up(saving.reason)
                        if not saving or self.stop.requested:
                            return self._finished(self.outcome)
                        self._restart()
                        continue
                    # All left their groups although no rank failed: nodes are drained, to grow, or
                    # the group broke.
                    assert self.group
                    if not self._ending and self.drains.end(self.group, collector):
                        self._start_replacements(self.group, collector, collector.failures)
                    if not collector.failures:
                        if collector.all_waiting and (self.group.pausing or self._can_grow()):
                            self._grow()
                            continue
                        if not collector.silent:  # else they are the cause
                            self._name_broken_group(self.group, collector)

                    # Name the cause. Ranks that wait hold the run's state, so nothing ends before
                    # they have formed another group: to train with replacements, or alone and only
                    # to save.
                    self._end_silent(self.group, collector)
                    reason = self.decide(self.group, collector)
                    if collector.all_waiting and self._form_group(self.group, reason):
                        continue
                    reason = (self._saving and self._saving.reason) or reason
                    if reason or self.stop.requested:
                        return self._gave_up(
                            reason or "a stop was requested, and no rank could save"
                        )
                    self._restart()
        finally:
            if self.faults.recovery:
                self.faults.close("none")
            if self.group:
                self.group.end()

    # Start.

    def _start_and_watch(self) -> FailureCollector | None:
        """Start all ranks if there are none, and watch them; return None if a stop is requested
        before they train.
        """
        self.outcome = None
        try:
            if self.group is None:
                self.stop.check()
                self._begin_attempt()
                pool = ActorPool(
                    self.spec,
                    self.place,
                    self.stop.check,
                    self.cluster,
                    self._script,
                    api=self._api,
                    clock=self._clock,
                )
                self.group = WorkerGroup(pool)
                self.group.create()
                self.group.begin()
                self._refuse_useless_spares(self.group)
            return self.watch(self.group)
        except StopRequested:
            return None
        except RayError as error:
            what = f"an actor failed while starting: {error}"
            if isinstance(error, GetTimeoutError):
                what = f"the actors did not start within {start_timeout_s(self.spec.config):g} s; look at `ray logs`, "
                what += "and whether every node has this nanoray and torch"
                if not self.faults.causes:  # it never worked: another try would not, either
                    raise PlacementError(what) from None
            collector = FailureCollector([0], False, 0.0, 0.0)
            collector.ended(0, Failure(0, "killed", what), self._clock.monotonic())
            return collector

    def _begin_attempt(self) -> None:
        """Count attempts; from now on no rank of an older one may commit a checkpoint."""
        if not self._first_attempt:
            self.spec = self.spec.next_attempt()
        try:
            write_attempt(self.spec)
        except OSError as error:
            if self._first_attempt:
                raise
            print(f"warning  attempt {self.spec.attempt} is not noted: {error}", flush=True)
        self._first_attempt = False

    def _refuse_useless_spares(self, group: WorkerGroup) -> None:
        config = self.spec.config
        if config.spares not in ("auto", 0) and not group.in_place:
            raise ConfigError(
                f"spares = {config.spares} would be ignored: with backend {group.backend}, "
                f"{self.place.workers} "
                f"rank(s), allreduce {config.allreduce}, dp_mode {config.dp_mode}, tp {config.tp}, "
                f"pp {config.pp} "
                f"and ep {config.ep} a fault restarts all ranks; drop spares"
            )

    # Watch.

    def watch(self, group: WorkerGroup) -> FailureCollector:
        """Handle and print what the ranks report until they have finished, have failed, or all
        wait.
        """
        config = self.spec.config
        # A survivor may be computing
        patience_s = max(config.timeout_s, config.init_timeout_s) + SETTLE_S
        collector = FailureCollector(
            group.members, group.in_place, patience_s, SETTLE_S, group.live
        )
        watchdog = Watchdog(group.members, config.hang_timeout, self._clock.monotonic)
        members = set(group.members)
        self._heard = dict.fromkeys(members, self._clock.monotonic())
        for slot in group.members:
            group.request_heartbeat(slot, after=self.faults.target)
        while not collector.complete(self._clock.monotonic()) and not self._too_late:
            self._obey_stop(group, collector)
            self.aborts.send_due(group, collector)
            for kind, slot, value in group.events(POLL_S):
                if kind == "ended":
                    watchdog.ended(slot)
                    self._on_end(group, collector, slot, value)
                elif kind == "heartbeat" and slot in group.runs and slot in members:
                    self._on_heartbeat(group, collector, watchdog, slot, value)
                elif kind == "started":
                    self._on_start(group, collector, slot, value)
            if not collector.failures:
                group.print_messages(self.console)
                self._check_for_hang(group, collector, watchdog)
        if not collector.failures:
            group.print_messages(self.console, wait_s=5.0)
        return collector

    def _obey_stop(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Tell the ranks of a stop: requested from outside, or because of trouble with the cluster."""
        if not self._ending and (trouble := self.cluster.trouble()):
            self.stop.request(trouble)
        if not (self._ending or group.pausing or collector.failures):
            self._leave_drained_nodes(group)
        if self._ending:
            group.stop()
            if collector.failures:
                collector.hurry(STOP_PATIENCE_S, self._clock.monotonic())
        # Without a head no death is reported. A rank that answers is alive and will notice, one
        # that does not is dead.
        if self._headless or self.cluster.head_lost:
            now, patience_s = self._clock.monotonic(), max(MUTE_S, 3 * group.heartbeat_s)
            if all(now - self._heard.get(slot, now) > patience_s for slot in collector.silent):
                collector.hurry(0.0, now)

    @property
    def _ending(self) -> bool:
        """Whether the ranks only save what they hold: no step follows."""
        return self.stop.requested or self._saving is not None

    @property
    def _too_late(self) -> bool:
        """Whether the time in which the ranks that are left may save is over."""
        return self._saving is not None and self._clock.monotonic() > self._saving.until

    def _on_end(self, group: WorkerGroup, collector: FailureCollector, slot: int, ref: Any) -> None:
        """Note that a rank finished or failed."""
        result, failure = read_result(group, ref, slot)
        if slot not in group.members:  # its actor is left over from before the group shrank
            group.pool.fill(slot)
            return
        collector.ended(slot, failure, self._clock.monotonic())
        if failure:
            reached("lost")
            group.break_meeting(slot)
            if slot in group.newcomers and not failure.retry:
                group.pool.unfit.setdefault(slot, set()).add(failure.facts["node"])
            self._start_replacements(group, collector, [failure])
            reached("replacing")
        elif slot == group.members[0]:
            self.outcome = result
            collector.rank_0_finished(self._clock.monotonic())

    def _on_heartbeat(
        self,
        group: WorkerGroup,
        collector: FailureCollector,
        watchdog: Watchdog,
        slot: int,
        heartbeat: Heartbeat,
    ) -> None:
        """Note where a rank is, and ask again."""
        self._heard[slot] = self._clock.monotonic()
        waiting = heartbeat.waiting and heartbeat.attempt == self.spec.attempt
        collector.set_waiting(slot, waiting, self._clock.monotonic())
        watchdog.update(slot, Position(heartbeat.step, heartbeat.phase), heartbeat.written_at)
        if -1 < heartbeat.base < heartbeat.step - 1:  # of a group that has been built
            group.newcomers.discard(slot)
        recovery = self.faults.recovery
        if (
            recovery
            and recovery.update(heartbeat.step, heartbeat.base, heartbeat.waiting)
            and not self._saving
        ):
            self.faults.close_as_recovered()
        elif not recovery and heartbeat.step > 1 and not collector.failures:
            group.add_spares()
        group.request_heartbeat(slot, heartbeat.waiting, self.faults.target)

    def _on_start(
        self, group: WorkerGroup, collector: FailureCollector, slot: int, ready: bool
    ) -> None:
        """Note that a new actor is ready, or died before that. A ready one lets a group that shrank
        grow again.
        """
        self._note_start(group, slot, ready)
        if ready and not collector.failures and not self._ending and self._can_grow():
            group.pause()

    def _note_start(self, group: WorkerGroup, slot: int, ready: bool) -> None:
        """Create a new actor again that died before it was ready, a few times."""
        if ready:
            self._failed_starts.pop(slot, None)
            return
        # Ray learns that a process is dead before it learns that its node is: it uses that node
        # again.
        self._failed_starts[slot] = tries = self._failed_starts.get(slot, 0) + 1
        if tries < START_TRIES:
            group.pool.fill(slot)
        else:
            group.pool.vacate(slot)
            self._failed_starts.pop(slot)
            print(
                f"replace  {tries} new actors for rank {slot} died while starting; going on "
                "without it",
                flush=True,
            )

    def _check_for_hang(
        self, group: WorkerGroup, collector: FailureCollector, watchdog: Watchdog
    ) -> None:
        if watchdog.quiet:
            for slot, (position, written_at) in group.positions().items():
                watchdog.update_from_file(slot, position, written_at)
        if watchdog.hangs():
            end_hung(group, watchdog, collector)
            self._start_replacements(group, collector, collector.failures)

    def _start_replacements(
        self, group: WorkerGroup, collector: FailureCollector, failures: list[Failure]
    ) -> None:
        """Start new actors for lost ranks while the others still find out. While ranks save no rank
        is replaced.
        """
        if not collector.in_place:
            return
        self._headless = not self.cluster.head_answers()
        for failure in failures:
            if self._ending or (not failure.retry and group.pool.refused_everywhere(failure.rank)):
                group.pool.vacate(failure.rank, not self._headless)
            else:
                group.pool.fill(failure.rank, not self._headless)

    def _leave_drained_nodes(self, group: WorkerGroup) -> None:
        """Tell all ranks to leave their group after this step, or to save, if ranks on drained
        nodes should leave.
        """
        self.drains.announce(group)
        leave = self.drains.decide(group)
        if leave is Leave.IN_PLACE:
            group.pause()
        elif leave is Leave.SAVE:
            positions = [position for position, _ in group.positions().values()]
            self.faults.add(
                self.drains.failures(group), positions, self.spec.attempt, len(group.members)
            )
            self.faults.set_recovery("restart")
            self._saving = Saving("")

    # Decide.

    def _name_broken_group(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Add a failure for a group that broke although no rank was lost, and all left it."""
        slot = group.members[0]
        step, phase = group.positions().get(slot, (Position(0, "init"), 0.0))[0]
        title = f"the group of {len(group.members)} rank(s) broke in {phase} of step {step}, though no rank was lost"
        failure = Failure(
            slot, "peer_lost", title, step, phase, signature="group broke", facts=group.facts[slot]
        )
        failure.at = self._clock.monotonic()
        collector.failures.append(failure)
        collector.no_rank_lost, collector.first_failure_at = True, failure.at

    def _end_silent(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """End the ranks that did not notice that their group broke, so that those which did can go
        on without them.
        """
        if collector.in_place and (silent := collector.silent):
            known = len(collector.failures)
            for slot in silent:
                end_silent(group, slot, collector)
            self._start_replacements(group, collector, collector.failures[known:])

    def decide(self, group: WorkerGroup, collector: FailureCollector) -> str:
        """Announce which failure is the cause; return why the run must not continue, empty if it
        may.
        """
        positions = [position for position, _ in group.positions().values()]
        cause = self.faults.add(collector, positions, self.spec.attempt, len(group.members))
        if not self.cluster.head_answers(self.cluster.head_timeout_s):
            gone = "the cluster's head is gone; start it again, and this run with --resume auto"
            return (
                f"{ANOTHER_HEAD}; start the run again with --resume auto"
                if self.cluster.replaced
                else gone
            )
        # It never trained: another node may do
        if not cause.retry and cause.rank in group.newcomers:
            shrinks = self.spec.config.recovery == "shrink"
            return (
                ""
                if shrinks or not group.pool.refused_everywhere(cause.rank)
                else "its replacement could not work on three nodes"
            )
        return reason_to_give_up(cause, self.faults.causes, self.spec.config.max_failures)

    @property
    def _budget(self) -> str:
        return f"{without_progress(self.faults.causes)}/{self.spec.config.max_failures}"

    # Recover.

    def _form_group(self, group: WorkerGroup, reason: str) -> bool:
        """Form a group of the ranks that hold the run's state: with new ones to train, or alone,
        and then to save.

        `reason`: why training must not go on. Returns False if no group can be formed in time.
        """
        began, config = self._clock.monotonic(), self.spec.config
        lost, before = (
            [slot for slot in group.members if slot not in group.runs],
            len(group.members),
        )
        for _ in range(START_TRIES):
            if not reason and not self._ending and not group.lost_share():
                reason = self._wait_for_replacements(group, lost)
            if text := group.lost_share():
                self.faults.explain(text)
                return False
            left = [slot for slot in group.members if slot in group.runs]
            if not left or self._too_late:
                return False
            slots = group.divisible(group.pool.ready)
            too_few = not slots or (len(slots) < self.place.workers and config.recovery != "shrink")
            if too_few and not reason and not self._ending:
                print(
                    f"replace  {self._budget} no new actor within {config.replace_timeout:g} s",
                    flush=True,
                )
                if any(slot in group.pool.unfit for slot in lost):
                    reason = "its replacement cannot work where it was started, and no other node has room"
            saves = self._ending or bool(reason) or too_few
            if saves:
                slots = group.divisible(left, saves=True)
                if not self.stop.requested:
                    until = min(
                        self._saving.until if self._saving else math.inf,
                        self._clock.monotonic() + SAVE_S,
                    )
                    self._saving = replace(self._saving or Saving(reason), until=until)
            if not slots:
                self.faults.explain(no_replica(config, left))
                return False
            try:
                store = group.open_store(slots)
            except RayError as error:
                print(f"replace  {self._budget} failed: {_one_line(error)}", flush=True)
                continue
            reached("store")
            self._begin_attempt()
            reached("attempt")
            group.regroup(self.spec, slots, store, stop=saves)
            reached("orders")
            joined, left_out = (
                [slot for slot in lost if slot in slots],
                [slot for slot in left if slot not in slots],
            )
            self._announce_group(joined, left_out, before, self._clock.monotonic() - began, saves)
            group.pool.promoted.clear()
            return True
        return False

    def _wait_for_replacements(self, group: WorkerGroup, lost: list[int]) -> str:
        """Wait until the lost ranks have new actors, time is up, or a stop is requested. `lost`
        grows if more are lost.

        Returns why the run must not continue after one of those; empty if it may.
        """
        timeout_s = self.spec.config.replace_timeout
        if self.spec.config.recovery != "shrink":
            # Until then a new actor may have to wait in its bundle
            timeout_s += self.cluster.vacated_in_s
        deadline = self._clock.monotonic() + timeout_s
        for slot in lost:
            if slot not in group.pool.actors and len(group.pool.unfit.get(slot, ())) < START_TRIES:
                group.pool.fill(slot)  # the head did not answer when it was lost
        while any(slot in group.pool.starting for slot in lost):
            if self.stop.requested or self._clock.monotonic() >= deadline:
                break
            if trouble := self.cluster.trouble():
                self.stop.request(trouble)
            for kind, slot, value in group.events(
                min(POLL_S, max(0.0, deadline - self._clock.monotonic()))
            ):
                if kind == "started":
                    self._note_start(group, slot, value)
                elif kind == "heartbeat" and slot in group.runs:
                    # So that it knows that the driver lives
                    group.request_heartbeat(slot, value.waiting)
                elif kind == "ended":
                    collector = FailureCollector(group.runs, True, 0.0, 0.0, live=True)
                    self._on_end(group, collector, slot, value)
                    if collector.failures:
                        lost.append(slot)
                        if reason := self.decide(group, collector):
                            return reason
                        deadline = self._clock.monotonic() + timeout_s
        return ""

    def _announce_group(
        self, joined: list[int], left_out: list[int], before: int, seconds: float, saves: bool
    ) -> None:
        """Print and note which ranks joined and which are missing. `before`: the size of the group
        that broke.
        """
        assert self.group
        group, kind, size = self.group, "in_place", len(self.group.members)
        if joined:
            kind = "spare" if set(joined) <= group.pool.promoted else "in_place"
            note = {slot: ", a spare" if slot in group.pool.promoted else "" for slot in joined}
            pids = ", ".join(
                f"rank {slot} (pid {group.facts[slot]['pid']}{note[slot]})" for slot in joined
            )
            print(
                f"replace  {self._budget} {pids} joins in {seconds:.1f} s; no step is repeated\n",
                flush=True,
            )
        if saves:
            kind = "none"
            print(
                f"save     {size} rank(s) are left and hold the run's state; they save it, and "
                "end\n",
                flush=True,
            )
        elif size < self.place.workers:
            kind = "shrink"
            text = smaller(self.spec.config, before, group.members, left_out, self.place.workers)
            print(f"shrink   {self._budget} {text}\n", flush=True)
        self.faults.set_recovery(kind)

    def _can_grow(self) -> bool:
        """Whether more actors are ready than train, and the global batch can be divided among them."""
        assert self.group
        return len(self.group.divisible(self.group.pool.ready)) > len(self.group.members)

    def _grow(self) -> None:
        """Take in the actors that have become ready since the group shrank, if they are still
        there.
        """
        assert self.group
        group = self.group
        before, slots = len(group.members), group.divisible(group.pool.ready)
        try:
            store = group.open_store(slots)
        except RayError as error:  # a rank was lost just now
            print(f"grow     failed: {_one_line(error)}", flush=True)
            return  # what watches the group next hears of it
        self._begin_attempt()
        group.regroup(self.spec, slots, store)
        if len(slots) > before:
            print(f"grow     {before} -> {len(slots)} ranks; no step is repeated\n", flush=True)

    def _restart(self) -> None:
        """End all ranks; the next attempt starts from the newest checkpoint."""
        if self.group:
            self.group.end()
        self.group, self._saving = None, None
        reached("restarting")
        self.faults.set_recovery("restart")
        seconds = back_off_s(self.faults.causes)
        pause = (
            f", in {seconds:.0f} s: no step was completed since the last failure" if seconds else ""
        )
        print(f"restart  {self._budget} from the newest checkpoint{pause}\n", flush=True)
        self.stop.wait(seconds, self._clock)

    # The end.

    def _finished(self, outcome: dict[str, Any]) -> dict[str, Any]:
        reached("finished")
        if self.faults.recovery:  # the run ended before it completed another step
            self.faults.close_as_recovered()
        stopped = outcome["exit_reason"] == "stopped"
        return outcome | {
            "exit_code": (self.stop.exit_code or 128 + signal.SIGTERM) if stopped else 0,
            "why": self.stop.reason if stopped else "",
        }

    def _stopped_without_ranks(self) -> dict[str, Any]:
        """A stop while the ranks were starting: nothing was trained that is not in the newest
        checkpoint.
        """
        print("stop     while the ranks were starting: nothing to save", flush=True)
        return {
            "ok": True,
            "exit_reason": "stopped",
            "exit_code": self.stop.exit_code,
            "why": self.stop.reason,
        }

    def _gave_up(self, reason: str) -> dict[str, Any]:
        saved = (
            f" Saved at step {self.outcome['step']}."
            if self.outcome and "step" in self.outcome
            else ""
        )
        if self.faults.recovery:
            self.faults.close("none")
        cause = self.faults.causes[-1]
        message = (
            f"{cause.title}. Gave up: {reason}.{saved} Checkpoints and logs: {self.spec.folder}"
        )
        code = (self.stop.exit_code if saved or not self.stop.reason else 0) or (
            1 if cause.retry else cause.exit_code
        )
        return {
            "ok": False,
            "exit_reason": f"failed: {cause.title}",
            "exit_code": code,
            "message": message,
        }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
