"""The driver of a run on Ray: start the ranks, watch them, decide what a failure means, recover.

connect ─► place (placement group) ─► Driver: start ─► watch ─► next_step ─► finish, or give up
                                                ▲                   │
                                                └─ restart, regroup ┘

Only the driver prints. Where the run is stands in run_state.py; situation.py decides from it what
comes next; watcher.py watches the ranks, and recover.py deals with lost ones.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError, PlacementError
from nanoray.faults.cause import Failure, FailureCollector
from nanoray.launch.placement import Placement
from nanoray.launch.recovery.actors import ActorPool, start_timeout_s
from nanoray.launch.recovery.cluster_watch import ClusterWatch
from nanoray.launch.recovery.fault_log import FaultLog
from nanoray.launch.recovery.pickled_script import PickledScript
from nanoray.launch.recovery.rank_end import read_start
from nanoray.launch.recovery.recover import Recoverer, say_after_training
from nanoray.launch.recovery.run_state import RunState
from nanoray.launch.recovery.situation import (
    AwaitReplacements,
    EndUntrained,
    Finish,
    FormGroup,
    GiveUp,
    GroupStage,
    NameCause,
    Restart,
    Situation,
    StartRanks,
    Step,
    WatchRanks,
    Why,
    exit_code_after_giving_up,
    next_step,
)
from nanoray.launch.recovery.watcher import Watcher
from nanoray.launch.recovery.worker import DRIVER_SILENT_S
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.launch.signals import Stop, StopRequested
from nanoray.machine.fault_points import reached
from nanoray.machine.output import say
from nanoray.observe.watch.observers import Console


class Driver:
    """Runs attempt after attempt of a training run, until it ends or must not be tried again."""

    def __init__(
        self,
        spec: RunSpec,
        place: Placement,
        stop: Stop,
        api: Any = ray,
        clock: Any = time,
        script: PickledScript | None = None,
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

        config = spec.config
        self.cluster = ClusterWatch(place, api, cluster_clock, config.head_timeout_s)
        self.faults = FaultLog(spec.folder, config.max_failures, clock)
        self.recoverer = Recoverer(stop, self.cluster, self.faults, clock)
        self.watcher = Watcher(stop, self.cluster, self.faults, self.recoverer, clock)
        self.console = Console(config.max_steps)
        self.at = RunState(spec)

    def run(self) -> dict[str, Any]:
        """Return rank 0's outcome, or why there is none (`ok` False)."""
        try:
            with self.cluster:
                while True:
                    step = next_step(self._situation())
                    match step:
                        case Finish():
                            return self._finished()
                        case EndUntrained():
                            return self._ended_untrained()
                        case GiveUp(reason, note):
                            return self._gave_up(reason, note)
                    stage = self._take(step)  # which may begin a new RunState
                    self.at.stage = stage
        finally:
            if self.faults.present:
                self.faults.close("none")
            if self.at.group:
                self.at.group.end()

    # Decide.

    def _situation(self) -> Situation:
        """Return the values on which the next step depends."""
        saving = self.at.saving
        situation = Situation(
            stage=self.at.stage,
            stop_requested=self.stop.requested,
            saving=saving is not None,
            saving_reason=saving.reason if saving else None,
            too_late=self.at.too_late(self._clock.monotonic()),
        )
        if self.at.stage is GroupStage.WATCHED:
            return self._after_watch(situation)
        if self.at.stage is GroupStage.CAUSE_NAMED:
            return self._after_fault(situation)
        return situation

    def _after_watch(self, situation: Situation) -> Situation:
        """Add what matters when the watch over the ranks is over."""
        group = self.at.ranks
        collector = self.at.collector
        assert collector
        outcome = self.at.outcome
        all_waiting = collector.all_waiting
        rank_failed = bool(collector.failures)
        # A loop of its own is complete when all ranks have returned from it.
        if rank_failed and outcome and "own_loop" in outcome:
            outcome = None
        return replace(
            situation,
            exit_reason=outcome["exit_reason"] if outcome else "",
            rank_failed=rank_failed,
            all_waiting=all_waiting,
            some_silent=bool(collector.silent),
            # This reads progress files, so it is evaluated only where it matters.
            regroup=group.why_left() if all_waiting and not rank_failed else None,
        )

    def _after_fault(self, situation: Situation) -> Situation:
        """Add what matters for the forming of another group."""
        group = self.at.ranks
        forming = self.at.forming
        assert forming
        assert self.at.collector
        situation = replace(
            situation,
            all_waiting=self.at.collector.all_waiting,
            reason=forming.reason,
            later_reason=forming.later_reason,
            no_replica=forming.no_replica,
            tries_left=forming.tries_left,
            awaited=forming.awaited,
            workers=self.place.workers,
            may_shrink=self.at.spec.config.recovery == "shrink",
            unfit=any(slot in group.pool.unfit for slot in forming.lost),
        )
        # Only ranks that wait can form another group, and only where no part of the state is lost.
        if not situation.all_waiting or not group.in_place:
            return replace(situation, all_waiting=False)
        trainable = len(group.divisible(group.pool.ready)) if forming.awaited else 0
        return replace(
            situation,
            survivors=sum(slot in group.runs for slot in group.members),
            lost_share=group.lost_share(),
            trainable=trainable,
        )

    def _take(self, step: Step) -> GroupStage:
        """Take a step that does not end the run; return how far that has brought it."""
        match step:
            case StartRanks():
                return self._start()
            case WatchRanks():
                return self._watch()
            case NameCause(group_broke):
                assert self.at.collector
                self.recoverer.name_cause(self.at, self.at.collector, group_broke)
            case AwaitReplacements():
                self.recoverer.await_replacements(self.at)
            case FormGroup():
                if self._form_group(step):
                    return GroupStage.RUNNING
            case Restart(note):
                return self._restart(note)
        return GroupStage.CAUSE_NAMED

    # Start.

    def _start(self) -> GroupStage:
        """Start all ranks; a stop that is requested meanwhile interrupts that."""
        try:
            self.stop.check()
            self.recoverer.begin_attempt(self.at)
            pool = ActorPool(
                self.at.spec,
                self.place,
                self.stop.check,
                self.cluster,
                self._script,
                api=self._api,
                clock=self._clock,
                variables=self._variables,
            )
            self.at.group = WorkerGroup(pool)
            self.at.group.create()
            self.at.group.begin()
            self._refuse_useless_spares(self.at.group)
        except StopRequested:
            return GroupStage.NO_RANKS  # the next step ends the run
        except RayError as error:
            return self._watched(self._failed_start(error))
        return GroupStage.RUNNING

    def _failed_start(self, error: RayError) -> FailureCollector:
        """Return an actor's failure while starting. Raises PlacementError if none ever started."""
        message = f"an actor failed while starting: {error}"
        if isinstance(error, GetTimeoutError):
            timeout_s = start_timeout_s(self.at.spec.config)
            message = (
                f"the actors did not start within {timeout_s:g} s; look at `ray logs`, "
                "and whether every node has this nanoray and torch"
            )
            # If none has ever started, another try would end the same way.
            if not self.faults.causes:
                raise PlacementError(message) from None
        failure = read_start(self.at.group, error) if self.at.group else None
        cause = "out_of_memory" if isinstance(error, OutOfMemoryError) else "killed"
        failure = failure or Failure(0, cause, message)
        collector = FailureCollector([failure.rank], False, 0.0, 0.0)
        collector.ended(failure.rank, failure, self._clock.monotonic())
        return collector

    def _refuse_useless_spares(self, group: WorkerGroup) -> None:
        config = self.at.spec.config
        if config.spares not in ("auto", 0) and not group.in_place:
            raise ConfigError(
                f"spares = {config.spares} would be ignored: with backend {group.meeting.backend}, "
                f"allreduce {config.allreduce}, dp_mode {config.dp_mode} and "
                f"{Layout.of(config, self.place.workers)} a fault restarts all ranks; drop spares"
            )

    # Watch.

    def _watch(self) -> GroupStage:
        """Watch the ranks; those on drained nodes end if the others can go on without them."""
        self.at.outcome = None
        try:
            collector = self.watcher.watch(self.at, self.console)
        except RayError as error:
            collector = self._failed_start(error)
        self.watcher.end_drained(self.at, collector)
        return self._watched(collector)

    def _watched(self, collector: FailureCollector) -> GroupStage:
        """Note how the ranks ended."""
        self.at.collector = collector
        return GroupStage.WATCHED

    # Recover.

    def _form_group(self, step: FormGroup) -> bool:
        """Form another group; return whether its ranks are to be watched now."""
        if step.why is Why.SAVING:
            # Of new actors that died, the line on the last of them says so.
            if step.no_replacement and self.at.ranks.pool.starting:
                timeout_s = self.at.spec.config.replace_timeout
                say(f"replace  {self.faults.budget} no new actor within {timeout_s:g} s")
            self.recoverer.begin_saving(self.at, step.end_reason)
        formed = self.recoverer.form_group(self.at, step.why)
        # If a rank was lost just now, the next watch over those that wait reports it.
        return formed or not step.why.follows_fault

    def _restart(self, note: str | None) -> GroupStage:
        """End all ranks; the next attempt starts from the newest checkpoint."""
        if note:
            self.faults.explain(note)
        whence = "from the newest checkpoint"
        if self.at.group:
            if self.at.group.in_script:  # what it has saved is its own business
                whence = "all ranks call the script's function again"
            self.at.group.end()
        self.at = RunState(self.at.spec)
        reached("restarting")

        self.faults.set_recovery("restart")
        say(f"restart  {self.faults.budget} {whence}\n")
        return GroupStage.NO_RANKS

    # The end.

    def _finished(self) -> dict[str, Any]:
        outcome = self.at.outcome
        assert outcome is not None
        reached("finished")
        if self.faults.present:  # the run ended before it completed another step
            self.faults.close_as_recovered()

        assert self.at.collector
        for failure in self.at.collector.failures:
            if failure.cause in ("exception", "refused"):
                say_after_training(failure, self.at.spec.log(failure.rank))
        if outcome["exit_reason"] != "stopped":
            return outcome | {"exit_code": 0, "why": ""}
        if self.stop.requested:
            return outcome | {"exit_code": self.stop.exit_code, "why": self.stop.reason}

        # Ranks also stop by themselves, when their driver is silent for too long.
        why = (
            f"no call of this driver reached the ranks for {DRIVER_SILENT_S:.0f} s. They saved at step "
            f"{outcome['step']} and ended; --resume {self.at.spec.folder} continues"
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

    def _gave_up(self, reason: str, note: str | None) -> dict[str, Any]:
        if note:
            self.faults.explain(note)
        outcome = self.at.outcome
        saved = ""
        if outcome and "step" in outcome:
            saved = f" Saved at step {outcome['step']}."
        if self.faults.present:
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
                f"{cause.title}. Gave up: {reason}.{saved} Checkpoints and logs: {self.at.spec.folder}"
            ),
        }
