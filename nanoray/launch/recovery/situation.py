"""What the driver does next, as one pure function of the situation that it is in.

    NO_RANKS ─ StartRanks ─► RUNNING ─ WatchRanks ─► WATCHED ─┬─ Finish, GiveUp
       ▲                        ▲                             ├─ Grow ─► RUNNING
       │                        │                             └─ NameCause ─► CAUSE_NAMED
       │                        └───────── TrainOn, Save ────────────────────────┤
       └────────────────────────────────── Restart ──────────────────────────────┴─ GiveUp

The ranks that are left after a fault may hold the only copy of the run's newest state. The rule of
this file: nothing ends them before they have formed another group, either with replacements to
train on, or alone and only to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

UNFIT = "its replacement cannot work where it was started, and no other node has room"
STOPPED_UNSAVED = "a stop was requested, and no rank could save"


class GroupStage(Enum):
    """How far the driver has come with the present ranks."""

    NO_RANKS = "none has been started, or all were ended"
    RUNNING = "they train, or have the order to"
    WATCHED = "the watch over them is over, and something must be decided"
    CAUSE_NAMED = "the same, and the cause of the fault that ended the watch is known"


class Why(Enum):
    """Why another group of ranks is formed, and how all come to leave the present one.

    A rank that leaves a drained node, or moves off it, is a lost one: it leaves after a step, is
    ended, and another one takes its place.
    """

    LOST = "ranks were lost: a collective of the others fails, or they are ordered to abort"
    ORDERED = "new ranks are ready, or nodes were drained: all are ordered to leave after a step"
    MEMORY = "a rank ran out of memory: the others abort, and all do the step again"
    SAVING = "the ranks that hold the run's state only save it"

    @property
    def follows_fault(self) -> bool:
        return self in (Why.LOST, Why.SAVING)


@dataclass(frozen=True)
class NextGroup:
    """The next group of ranks: why it is formed, of which slots, who leaves and who joins."""

    why: Why
    members: tuple[int, ...]
    leaves: tuple[int, ...]  # slots that hold the run's state, and have no part in this group
    joins: tuple[int, ...]  # slots with a new process, which receives the state


@dataclass(frozen=True)
class Situation:
    """What the driver's decision depends on. Later fields matter in later stages only."""

    stage: GroupStage
    stop_requested: bool = False

    # The ranks save what they hold, and train no further step.
    saving: bool = False
    saving_reason: str | None = None  # why the run ends after that; None: all ranks start again
    too_late: bool = False  # the time in which they may save is over

    # WATCHED
    exit_reason: str = ""  # of rank 0, which returns after the last checkpoint
    rank_failed: bool = False
    all_waiting: bool = False  # all ranks that did not fail wait, with the run's state in memory
    some_silent: bool = False  # a rank has neither ended nor does it wait
    regroup: Why | None = None  # why all left their group, although none failed, if that is known

    # CAUSE_NAMED
    reason: str | None = None  # why training must not go on after this fault
    later_reason: str | None = None  # the same after a fault while replacements were awaited
    lost_share: str | None = None  # which part of the run's state no rank holds any more
    no_replica: str | None = None  # why the ranks that are left make no whole replica
    survivors: int = 0  # ranks that hold the run's state
    tries_left: int = 0  # to form a group
    awaited: bool = False  # replacements of the lost ranks were awaited
    trainable: int = 0  # ranks, with replacements, that could train; known once awaited
    workers: int = 0  # ranks that the run was started with
    may_shrink: bool = False  # fewer may train
    unfit: bool = False  # a replacement could not work on its node


@dataclass(frozen=True)
class StartRanks:
    """Start all ranks from the newest checkpoint."""


@dataclass(frozen=True)
class WatchRanks:
    """Watch the ranks until there is something to decide."""


@dataclass(frozen=True)
class NameCause:
    """Announce the failure that caused the others, and end ranks that did not notice it."""

    group_broke: bool  # although no rank was lost


@dataclass(frozen=True)
class AwaitReplacements:
    """Wait until the lost ranks have new actors."""


@dataclass(frozen=True)
class FormGroup:
    """Form another group of the ranks that hold the run's state, and of new ones if need be."""

    why: Why
    end_reason: str | None = None  # SAVING: why the run ends then; None: all ranks start again
    no_replacement: bool = False  # SAVING: no replacement came in time


@dataclass(frozen=True)
class Restart:
    """End all ranks, then start them from the newest checkpoint."""

    note: str | None = None  # a consequence of the fault, for its report


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed."""

    reason: str
    note: str | None = None  # a consequence of the fault, for its report


@dataclass(frozen=True)
class Finish:
    """End the run with rank 0's outcome."""


@dataclass(frozen=True)
class EndUntrained:
    """End a run that was stopped while its ranks were starting."""


Step = (
    StartRanks
    | WatchRanks
    | NameCause
    | AwaitReplacements
    | FormGroup
    | Restart
    | GiveUp
    | Finish
    | EndUntrained
)


def next_step(situation: Situation) -> Step:
    """Return what the driver must do now."""
    if situation.stage is GroupStage.NO_RANKS:
        return EndUntrained() if situation.stop_requested else StartRanks()
    if situation.stage is GroupStage.RUNNING:
        return WatchRanks()
    if situation.stage is GroupStage.CAUSE_NAMED:
        return _after_fault(situation)
    if situation.exit_reason:
        return _after_last_checkpoint(situation)

    # All left their group although no rank failed.
    if situation.all_waiting and not situation.rank_failed and situation.regroup:
        return FormGroup(situation.regroup)
    # Ranks that are silent are the cause themselves.
    group_broke = not situation.rank_failed and not situation.some_silent
    return NameCause(group_broke)


def _after_last_checkpoint(situation: Situation) -> Step:
    """Return what follows when rank 0 has returned: failures after that change nothing."""
    only_saved = situation.saving and situation.exit_reason == "stopped"
    if only_saved and situation.saving_reason:
        return GiveUp(situation.saving_reason)
    if only_saved and not situation.stop_requested:
        return Restart()
    return Finish()


def _after_fault(situation: Situation) -> Step:
    """Return what follows when the cause of a fault is known."""
    obstacle = situation.lost_share or situation.no_replica
    can_form_group = (
        situation.all_waiting
        and situation.survivors > 0
        and situation.tries_left > 0
        and not situation.too_late
        and not obstacle
    )
    if not can_form_group:
        return _without_survivors(situation, obstacle)

    # Nothing must be trained any more: the ranks that are left save at once.
    reason = situation.reason or situation.later_reason
    if reason or situation.saving or situation.stop_requested:
        return FormGroup(Why.SAVING, reason)

    if not situation.awaited:
        return AwaitReplacements()
    complete = situation.trainable >= situation.workers
    if situation.trainable > 0 and (complete or situation.may_shrink):
        return FormGroup(Why.LOST)
    return FormGroup(Why.SAVING, UNFIT if situation.unfit else None, no_replacement=True)


def _without_survivors(situation: Situation, note: str | None) -> Step:
    """Return what follows when no rank holds a state that could still be saved.

    A later reason does not count here: it is about a fault that came after the one that is decided,
    and the restart meets it again if it persists.
    """
    reason = situation.saving_reason or situation.reason
    if not reason and situation.stop_requested:
        reason = STOPPED_UNSAVED
    if reason:
        return GiveUp(reason, note)
    return Restart(note)


def exit_code_after_giving_up(
    stop_code: int, stop_reason: str, saved: bool, failure_code: int
) -> int:
    """Return the exit code of a run that failed.

    ============================  =========  ============
    stop requested                saved      exit code
    ============================  =========  ============
    no (stop_code 0)              either     failure_code
    by a signal (stop_reason "")  either     stop_code
    by the driver itself          yes        stop_code
    by the driver itself          no         failure_code
    ============================  =========  ============
    """
    if not stop_code:
        return failure_code
    by_signal = not stop_reason
    return stop_code if by_signal or saved else failure_code
