"""The driver of a run on Ray: start the ranks, watch them, decide what a failure means, recover.

connect ─► place (placement group) ─► Driver: start ─► watch ─► next_step ─► finish, or give up
                                                ▲                   │
                                                └─ restart, regroup ┘

Only the driver prints. situation.py decides what comes next, recover.py deals with lost ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from nanoray.config.mesh import AXES
from nanoray.errors import ConfigError, PlacementError
from nanoray.faults.cause import Failure, FailureCollector, back_off_s
from nanoray.faults.hang import Position, Watchdog
from nanoray.launch.actors import POLL_S, ActorPool, start_timeout_s
from nanoray.launch.cluster_watch import ClusterWatch
from nanoray.launch.drain import AbortOrders, Drains, Leave
from nanoray.launch.fault_log import FaultLog
from nanoray.launch.moves import Moves
from nanoray.launch.placement import Placement
from nanoray.launch.rank_end import end_hung
from nanoray.launch.recover import Recoverer, Saving
from nanoray.launch.script import Script
from nanoray.launch.signals import Stop, StopRequested
from nanoray.launch.situation import (
    AwaitReplacements,
    EndUntrained,
    Finish,
    GiveUp,
    Grow,
    NameCause,
    Restart,
    Save,
    Situation,
    Stage,
    StartRanks,
    Step,
    TrainOn,
    Watch,
    exit_code_after_giving_up,
    next_step,
)
from nanoray.launch.worker import DRIVER_SILENT_S, Heartbeat
from nanoray.launch.worker_group import SETTLE_S, WorkerGroup
from nanoray.output import say
from nanoray.points import reached
from nanoray.run import RunSpec
from nanoray.train.watch.observers import Console

# While ranks save, one that does not notice a lost peer for this long is ended.
STOP_PATIENCE_S = 30.0
MUTE_S = 5.0  # a living rank answers a heartbeat within a second or two


class Driver:
    """Runs attempt after attempt of a training run, until it ends or must not be tried again."""

    def __init__(
        self,
        spec: RunSpec,
        place: Placement,
        stop: Stop,
        api: Any = ray,
        clock: Any = time,
        script: Script | None = None,
        cluster_clock: Any = time,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`api` and `clock` are the modules ray and time, or what takes their place.

        cluster_clock: for the questions to the head, which is a real one also in tests. variables:
        of each rank's environment.
        """
        self.place = place
        self.stop = stop
        self._script = script
        self._variables = variables
        self._api = api
        self._clock = clock

        self.console = Console(spec.config.max_steps)
        head_timeout_s = spec.config.head_timeout_s
        self.cluster = ClusterWatch(place, api, cluster_clock, head_timeout_s)
        self.faults = FaultLog(spec.folder, clock)
        self.recoverer = Recoverer(spec, place, stop, self.cluster, self.faults, clock)
        self._drains = Drains(self.cluster)
        self._moves = Moves(clock)
        self._aborts = AbortOrders(clock)
        self._steps: dict[int, int] = {}  # by slot, as its last heartbeat said

        # The present ranks, and how far the driver has come with them.
        self.group: WorkerGroup | None = None
        self._stage = Stage.NO_RANKS
        self._collector: FailureCollector | None = None  # of the last watch
        self._heartbeat_at: dict[int, float] = {}  # slot -> monotonic seconds of its last heartbeat

    @property
    def spec(self) -> RunSpec:
        """Return the spec of the present attempt."""
        return self.recoverer.spec

    def run(self) -> dict[str, Any]:
        """Return rank 0's outcome, or why there is none (`ok` False)."""
        try:
            with self.cluster:
                while True:
                    step = next_step(self._situation())
                    outcome = self._do(step)
                    if outcome is not None:
                        return outcome
        finally:
            if self.faults.recovery:
                self.faults.close("none")
            if self.group:
                self.group.end()

    def _situation(self) -> Situation:
        """Return the values on which the next step depends."""
        saving = self.recoverer.saving
        situation = Situation(
            stage=self._stage,
            stop_requested=self.stop.requested,
            saving=saving is not None,
            saving_reason=saving.reason if saving else "",
            too_late=self.recoverer.too_late,
        )
        if self._stage is Stage.WATCHED:
            return self._after_watch(situation)
        if self._stage is Stage.CAUSE_NAMED:
            return self._after_fault(situation)
        return situation

    def _after_watch(self, situation: Situation) -> Situation:
        """Add what matters when the watch over the ranks is over."""
        assert self.group
        assert self._collector
        outcome = self.recoverer.outcome
        all_waiting = self._collector.all_waiting
        rank_failed = bool(self._collector.failures)
        # This reads progress files, so it is evaluated only where it matters.
        can_grow = all_waiting and not rank_failed and self.recoverer.can_grow(self.group)
        return replace(
            situation,
            exit_reason=outcome["exit_reason"] if outcome else "",
            rank_failed=rank_failed,
            all_waiting=all_waiting,
            some_silent=bool(self._collector.silent),
            pausing=self.group.pausing,
            can_grow=can_grow,
        )

    def _after_fault(self, situation: Situation) -> Situation:
        """Add what matters for the forming of another group."""
        group = self.group
        forming = self.recoverer.forming
        assert group
        assert forming
        assert self._collector
        situation = replace(
            situation,
            all_waiting=self._collector.all_waiting,
            reason=forming.reason,
            later_reason=forming.later_reason,
            no_replica=forming.no_replica,
            tries_left=forming.tries_left,
            awaited=forming.awaited,
            workers=self.place.workers,
            may_shrink=self.spec.config.recovery == "shrink",
            unfit=any(slot in group.pool.unfit for slot in forming.lost),
        )
        if not situation.all_waiting:  # only ranks that wait can form another group
            return situation
        trainable = len(group.divisible(group.pool.ready)) if forming.awaited else 0
        return replace(
            situation,
            survivors=sum(slot in group.runs for slot in group.members),
            lost_share=group.lost_share(),
            trainable=trainable,
        )

    def _do(self, step: Step) -> dict[str, Any] | None:
        """Take a step; return the outcome of the run if it was the last one."""
        match step:
            case StartRanks():
                self._start()
            case Watch():
                self._watch_until_decision()
            case Grow():
                assert self.group
                moving = self._moves.ready(self.group)
                if self.recoverer.grow(self.group, moving):
                    self._moves.announce_moved(self.group, moving)
                self._stage = Stage.RUNNING
            case NameCause(group_broke):
                assert self.group
                assert self._collector
                self.recoverer.name_cause(self.group, self._collector, group_broke)
                self._stage = Stage.CAUSE_NAMED
            case AwaitReplacements():
                assert self.group
                self.recoverer.await_replacements(self.group)
            case TrainOn():
                self._form_group(saves=False)
            case Save():
                self._save(step)
            case Restart(note):
                self._restart(note)
            case GiveUp(reason, note):
                return self._gave_up(reason, note)
            case Finish():
                return self._finished()
            case EndUntrained():
                return self._ended_untrained()
        return None

    # Start.

    def _start(self) -> None:
        """Start all ranks; a stop that is requested meanwhile interrupts that."""
        self.recoverer.outcome = None
        try:
            self.stop.check()
            self.recoverer.begin_attempt()
            pool = ActorPool(
                self.spec,
                self.place,
                self.stop.check,
                self.cluster,
                self._script,
                api=self._api,
                clock=self._clock,
                variables=self._variables,
            )
            self.group = WorkerGroup(pool)
            self.group.create()
            self.group.begin()
            self._refuse_useless_spares(self.group)
            self._stage = Stage.RUNNING
        except StopRequested:
            pass  # the next step ends the run
        except RayError as error:
            self._collector = self._failed_start(error)
            self._stage = Stage.WATCHED

    def _failed_start(self, error: RayError) -> FailureCollector:
        """Return an actor's failure while starting. Raises PlacementError if none ever started."""
        message = f"an actor failed while starting: {error}"
        if isinstance(error, GetTimeoutError):
            timeout_s = start_timeout_s(self.spec.config)
            message = (
                f"the actors did not start within {timeout_s:g} s; look at `ray logs`, "
                "and whether every node has this nanoray and torch"
            )
            # If none has ever started, another try would end the same way.
            if not self.faults.causes:
                raise PlacementError(message) from None
        collector = FailureCollector([0], False, 0.0, 0.0)
        collector.ended(0, Failure(0, "killed", message), self._clock.monotonic())
        return collector

    def _refuse_useless_spares(self, group: WorkerGroup) -> None:
        config = self.spec.config
        if config.spares not in ("auto", 0) and not group.in_place:
            *axes, last = [f"{axis.key} {getattr(config, axis.key)}" for axis in AXES]
            raise ConfigError(
                f"spares = {config.spares} would be ignored: with backend {group.backend}, "
                f"{self.place.workers} rank(s), allreduce {config.allreduce}, "
                f"dp_mode {config.dp_mode}, {', '.join(axes)} and {last} a fault restarts all "
                "ranks; drop spares"
            )

    # Watch.

    def _watch_until_decision(self) -> None:
        """Watch the ranks; those on drained nodes end if the others can go on without them."""
        assert self.group
        self.recoverer.outcome = None
        try:
            collector = self.watch(self.group)
        except RayError as error:
            collector = self._failed_start(error)
        still_trains = self.recoverer.outcome is None and not self.recoverer.ending
        if still_trains and self._drains.end(self.group, collector):
            self.recoverer.start_replacements(self.group, collector, collector.failures)
        self._collector = collector
        self._stage = Stage.WATCHED

    def watch(self, group: WorkerGroup) -> FailureCollector:
        """Print what the ranks report until they have finished, have failed, or all wait."""
        config = self.spec.config
        # A survivor may be computing, and notices a lost peer in its next collective only.
        patience_s = max(config.timeout_s, config.init_timeout_s) + SETTLE_S
        collector = FailureCollector(
            group.members, group.in_place, patience_s, SETTLE_S, group.live
        )
        watchdog = Watchdog(group.members, config.hang_timeout, self._clock.monotonic)
        members = set(group.members)
        self._heartbeat_at = dict.fromkeys(members, self._clock.monotonic())
        self._steps = {}
        # Each rank has one heartbeat pending all the time; its answer requests the next one.
        for slot in group.members:
            group.request_heartbeat(slot, after=self.faults.target)

        while not collector.complete(self._clock.monotonic()) and not self.recoverer.too_late:
            self.recoverer.keep_folder()
            self.recoverer.request_again(group)
            self._send_orders(group, collector)
            for kind, slot, value in group.events(POLL_S):
                if kind == "ended":
                    watchdog.ended(slot)
                    # What a script printed before an error comes before the error.
                    if slot == group.members[0]:
                        group.print_messages(self.console, wait_s=1.0)
                    self.recoverer.note_end(group, collector, slot, value)
                elif kind == "heartbeat" and slot in group.runs and slot in members:
                    self._on_heartbeat(group, collector, watchdog, slot, value)
                elif kind == "started":
                    self._on_start(group, collector, slot, value)
            # After a failure rank 0 may be lost, and all ranks stand still.
            if not collector.failures:
                group.print_messages(self.console)
                self._check_for_hang(group, collector, watchdog)

        # All that rank 0 reported until its end, or until it left its group.
        if not collector.failures:
            group.print_messages(self.console, wait_s=5.0)
        return collector

    def _send_orders(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Order the ranks to stop, to leave drained nodes, or to leave a group that broke."""
        # A stop is requested from outside, or because of trouble with the cluster.
        if not self.recoverer.ending:
            trouble = self.cluster.trouble()
            if trouble:
                self.stop.request(trouble)
        if not (self.recoverer.ending or group.pausing or collector.failures):
            self._leave_drained_nodes(group)
            # A rank goes back to its slot in undisturbed training.
            undisturbed = not self.faults.recovery and not group.pausing
            if undisturbed and self._moves.due(group):
                group.pause()
        if self.recoverer.ending:
            group.stop()
            if collector.failures:
                collector.hurry(STOP_PATIENCE_S, self._clock.monotonic())
        if self.recoverer.headless or self.cluster.head_lost:
            self._give_up_mute_ranks(group, collector)
        self._aborts.send_due(group, collector)

    def _give_up_mute_ranks(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Wait no longer for ranks that do not answer, where Ray reports no death without a head.

        A rank that answers is alive and will notice the fault; one that does not is dead.
        """
        now = self._clock.monotonic()
        patience_s = max(MUTE_S, 3 * group.heartbeat_s)
        mute_s = [now - self._heartbeat_at.get(slot, now) for slot in collector.silent]
        if all(seconds > patience_s for seconds in mute_s):
            collector.hurry(0.0, now)

    def _leave_drained_nodes(self, group: WorkerGroup) -> None:
        """Order all ranks to leave their group, or to save, if ranks should leave drained nodes."""
        self._drains.announce(group)
        leave = self._drains.decide(group)
        if leave is Leave.IN_PLACE:
            group.pause()
        elif leave is Leave.SAVE:
            positions = [position for position, _ in group.positions().values()]
            failures = self._drains.failures(group)
            self.faults.add(failures, positions, self.spec.attempt, len(group.members))
            self.faults.set_recovery("restart")
            self.recoverer.saving = Saving("")

    def _on_heartbeat(
        self,
        group: WorkerGroup,
        collector: FailureCollector,
        watchdog: Watchdog,
        slot: int,
        heartbeat: Heartbeat,
    ) -> None:
        """Note a rank's position, and request the next one."""
        now = self._clock.monotonic()
        self._heartbeat_at[slot] = now
        waiting = heartbeat.waiting and heartbeat.attempt == self.spec.attempt
        collector.set_waiting(slot, waiting, now)
        trains_alone = self.spec.config.sync_every > 0
        if trains_alone and heartbeat.step != self._steps.get(slot):
            collector.moved(slot, now)
        self._steps[slot] = heartbeat.step
        watchdog.update(slot, Position(heartbeat.step, heartbeat.phase), heartbeat.written_at)

        # A base of -1 belongs to a group that has not been built yet.
        completed_a_step = -1 < heartbeat.base < heartbeat.step - 1
        if completed_a_step:
            group.newcomers.discard(slot)

        # A fault is overcome once a rank has completed a step that was not completed before it.
        # Spares start only in undisturbed training, which they would slow down otherwise.
        recovery = self.faults.recovery
        if recovery:
            overcome = recovery.update(heartbeat.step, heartbeat.base, heartbeat.waiting)
            if overcome and not self.recoverer.saving:
                self.faults.close_as_recovered()
        elif heartbeat.step > 1 and not collector.failures:
            group.add_spares()
        group.request_heartbeat(slot, heartbeat.waiting, self.faults.target)

    def _on_start(
        self, group: WorkerGroup, collector: FailureCollector, slot: int, ready: bool
    ) -> None:
        """Note that a new actor is ready, or died before; a ready one may let the group grow."""
        self.recoverer.note_start(group, slot, ready)
        undisturbed = not collector.failures and not self.recoverer.ending
        if ready and undisturbed and self.recoverer.can_grow(group):
            group.pause()

    def _check_for_hang(
        self, group: WorkerGroup, collector: FailureCollector, watchdog: Watchdog
    ) -> None:
        """End the rank that all others wait for, once none has made progress for too long."""
        if watchdog.quiet:
            # Progress files are newer than heartbeats.
            for slot, (position, written_at) in group.positions().items():
                watchdog.update_from_file(slot, position, written_at)
        if watchdog.hangs():
            end_hung(group, watchdog, collector)
            self.recoverer.start_replacements(group, collector, collector.failures)

    # Recover.

    def _save(self, step: Save) -> None:
        """Let the ranks that are left save what they hold."""
        if step.no_replacement:
            timeout_s = self.spec.config.replace_timeout
            budget = self.recoverer.budget
            say(f"replace  {budget} no new actor within {timeout_s:g} s")
        self.recoverer.begin_saving(step.reason)
        self._form_group(saves=True)

    def _form_group(self, saves: bool) -> None:
        assert self.group
        if self.recoverer.form_group(self.group, saves):
            self._stage = Stage.RUNNING

    def _restart(self, note: str) -> None:
        """End all ranks; the next attempt starts from the newest checkpoint."""
        if note:
            self.faults.explain(note)
        if self.group:
            self.group.end()
        self.group = None
        self.recoverer.saving = None
        self.recoverer.forming = None
        self._stage = Stage.NO_RANKS
        reached("restarting")

        self.faults.set_recovery("restart")
        seconds = back_off_s(self.faults.causes)
        pause = ""
        if seconds:
            pause = f", in {seconds:.0f} s: no step was completed since the last failure"
        budget = self.recoverer.budget
        say(f"restart  {budget} from the newest checkpoint{pause}\n")
        self.stop.wait(seconds, self._clock)

    # The end.

    def _finished(self) -> dict[str, Any]:
        outcome = self.recoverer.outcome
        assert outcome is not None
        reached("finished")
        if self.faults.recovery:  # the run ended before it completed another step
            self.faults.close_as_recovered()
        if outcome["exit_reason"] != "stopped":
            return outcome | {"exit_code": 0, "why": ""}
        if self.stop.requested:
            return outcome | {"exit_code": self.stop.exit_code, "why": self.stop.reason}

        # Ranks also stop by themselves, when their driver is silent for too long.
        silent_s = outcome.get("silent_s", DRIVER_SILENT_S)
        why = (
            f"no call of this driver reached the ranks for {silent_s:.0f} s: it was frozen (Ctrl-Z, "
            f"a sleeping or paused machine) or cut off. They saved at step {outcome['step']} and ended; "
            f"no failure is counted. --resume {self.spec.folder} continues"
        )
        say(f"\nstop     {why}")
        return outcome | {"exit_code": 128 + signal.SIGTERM, "why": why}

    def _ended_untrained(self) -> dict[str, Any]:
        """Return the outcome of a stop while the ranks were starting.

        Nothing was trained that is not in the newest checkpoint.
        """
        say("stop     while the ranks were starting: nothing to save")
        return {
            "ok": True,
            "exit_reason": "stopped",
            "exit_code": self.stop.exit_code,
            "why": self.stop.reason,
        }

    def _gave_up(self, reason: str, note: str) -> dict[str, Any]:
        if note:
            self.faults.explain(note)
        outcome = self.recoverer.outcome
        saved = ""
        if outcome and "step" in outcome:
            saved = f" Saved at step {outcome['step']}."
        if self.faults.recovery:
            self.faults.close("none")
        cause = self.faults.causes[-1]
        failure_code = 1 if cause.retry else cause.exit_code
        return {
            "ok": False,
            "exit_reason": f"failed: {cause.title}",
            "exit_code": exit_code_after_giving_up(
                self.stop.exit_code, self.stop.reason, bool(saved), failure_code
            ),
            "message": (
                f"{cause.title}. Gave up: {reason}.{saved} Checkpoints and logs: {self.spec.folder}"
            ),
        }
