"""Where a run is: what the driver decides on, and what the recoverer changes.

    NO_RANKS ─ start ─► RUNNING ─ watch ─► WATCHED ─ name the cause ─► CAUSE_NAMED
       ▲                   ▲                                                │
       │                   └───────────── form a group ─────────────────────┤
       └───────────────────────────────── restart ──────────────────────────┘

Each field is written in one place, but for `outcome`, which a new watch empties:

    field         changes when                           written by
    ------------  -------------------------------------  -------------------------------
    spec          an attempt begins                      Recoverer.begin_attempt
    stage         a step is done                         Driver.run
    group         all ranks are created                  Driver._start
    collector     a watch is over, or a start failed     Driver._watched
    outcome       rank 0 returns                         Driver._watch, Recoverer.note_end
    headless      a rank is lost                         Recoverer.start_replacements
    forming       the cause of a fault is named          Recoverer.name_cause
    saving        the ranks must save                    Recoverer.begin_saving

A restart begins with a new RunState, of which only the spec is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.faults.cause import FailureCollector
from nanoray.launch.recovery.actors import START_TRIES
from nanoray.launch.recovery.situation import GroupStage
from nanoray.launch.recovery.worker_group import WorkerGroup


@dataclass(frozen=True)
class Saving:
    """The ranks that are left only save what they hold."""

    reason: str | None  # why the run ends then; None: all ranks start again
    until: float = math.inf  # monotonic seconds; set once a rank has failed


@dataclass
class Forming:
    """The forming of another group after a fault: what has been tried so far."""

    reason: str | None  # why training must not go on, as decided on the fault
    lost: list[int]  # slots of the ranks that were lost; more are added if more are lost
    size_before: int  # of the group that broke
    began_at: float  # monotonic seconds
    # The same as `reason`, after a fault while replacements were awaited
    later_reason: str | None = None
    awaited: bool = False  # replacements were awaited
    tries_left: int = START_TRIES
    no_replica: str | None = None  # why the ranks that are left make no whole replica


@dataclass
class RunState:
    """Where a run is, from a start of all its ranks until the next one."""

    spec: RunSpec  # of the present attempt
    stage: GroupStage = GroupStage.NO_RANKS

    # The present ranks, and how they ended in the newest watch.
    group: WorkerGroup | None = None
    collector: FailureCollector | None = None
    outcome: dict[str, Any] | None = None  # rank 0's, which it returns after the last checkpoint

    # A fault.
    headless: bool = False  # the head did not answer when a rank was lost
    forming: Forming | None = None  # the next group, after the newest fault
    saving: Saving | None = None

    @property
    def ranks(self) -> WorkerGroup:
        """Return the group of the present ranks, after their start."""
        assert self.group
        return self.group

    def too_late(self, now: float) -> bool:
        """Return whether the time in which the ranks that are left may save is over."""
        return self.saving is not None and now > self.saving.until
