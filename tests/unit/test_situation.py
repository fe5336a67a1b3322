"""What the driver does next, as a table: each row is a situation and its step."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoray.launch.recovery.situation import (
    STOPPED_UNSAVED,
    UNFIT,
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

NO_RANKS: dict[str, Any] = {"stage": GroupStage.NO_RANKS}
RUNNING: dict[str, Any] = {"stage": GroupStage.RUNNING}
WATCHED: dict[str, Any] = {"stage": GroupStage.WATCHED}

# Rank 0 has returned.
FINISHED = WATCHED | {"exit_reason": "finished"}
STOPPED = WATCHED | {"exit_reason": "stopped"}
SAVING = {"saving": True}
ENDS = {"saving": True, "saving_reason": "max_failures = 3 is exceeded"}
STOP = {"stop_requested": True}

# A fault of which the cause is known: two of three ranks wait with the run's state.
FAULT = {
    "stage": GroupStage.CAUSE_NAMED,
    "rank_failed": True,
    "all_waiting": True,
    "survivors": 2,
    "tries_left": 3,
    "workers": 3,
}
AWAITED = FAULT | {"awaited": True}
WHY = {"reason": "restarting cannot cure this"}
LATER = {"later_reason": "deterministic"}

TABLE: list[tuple[str, dict[str, Any], Step]] = [
    # Without ranks.
    ("a run starts", NO_RANKS, StartRanks()),
    ("a stop comes while the ranks start", NO_RANKS | STOP, EndUntrained()),
    ("ranks that train are watched", RUNNING, WatchRanks()),
    ("also those that stop", RUNNING | STOP | SAVING, WatchRanks()),
    # Rank 0 has returned after the last checkpoint: failures after that change nothing.
    ("a run is complete", FINISHED, Finish()),
    ("a rank fails after that", FINISHED | {"rank_failed": True}, Finish()),
    ("a run is complete before the order to save arrives", FINISHED | ENDS, Finish()),
    ("a run is stopped", STOPPED | STOP, Finish()),
    ("ranks stopped without a driver", STOPPED, Finish()),
    ("all saved, and start again", STOPPED | SAVING, Restart()),
    ("all saved, and a stop is requested", STOPPED | SAVING | STOP, Finish()),
    ("all saved, and the run must end", STOPPED | ENDS, GiveUp(ENDS["saving_reason"])),
    ("the same with a stop", STOPPED | ENDS | STOP, GiveUp(ENDS["saving_reason"])),
    # The watch is over without an outcome.
    (
        "all left drained nodes, or new actors are ready",
        WATCHED | {"all_waiting": True, "regroup": Why.ORDERED},
        FormGroup(Why.ORDERED),
    ),
    (
        "a rank ran out of memory, and all left",
        WATCHED | {"all_waiting": True, "regroup": Why.MEMORY},
        FormGroup(Why.MEMORY),
    ),
    (
        "a rank ran out of memory, and another one failed",
        WATCHED | {"all_waiting": True, "regroup": Why.MEMORY, "rank_failed": True},
        NameCause(False),
    ),
    ("all left a group that broke", WATCHED | {"all_waiting": True}, NameCause(True)),
    ("some did not", WATCHED | {"some_silent": True}, NameCause(False)),
    (
        "a rank failed while all left their group",
        WATCHED | {"all_waiting": True, "regroup": Why.ORDERED, "rank_failed": True},
        NameCause(False),
    ),
    ("a rank failed", WATCHED | {"rank_failed": True, "some_silent": True}, NameCause(False)),
    # The cause is known, and ranks hold the run's state.
    ("the lost ranks are replaced", FAULT, AwaitReplacements()),
    ("all are replaced", AWAITED | {"trainable": 3}, FormGroup(Why.LOST)),
    ("not all are", AWAITED | {"trainable": 2}, FormGroup(Why.SAVING, no_replacement=True)),
    ("but fewer may train", AWAITED | {"trainable": 2, "may_shrink": True}, FormGroup(Why.LOST)),
    (
        "though not without any whole replica",
        AWAITED | {"trainable": 0, "may_shrink": True},
        FormGroup(Why.SAVING, no_replacement=True),
    ),
    (
        "a replacement could not work",
        AWAITED | {"trainable": 2, "unfit": True},
        FormGroup(Why.SAVING, UNFIT, no_replacement=True),
    ),
    ("training must not go on", FAULT | WHY, FormGroup(Why.SAVING, WHY["reason"])),
    ("nor after a later fault", AWAITED | LATER, FormGroup(Why.SAVING, LATER["later_reason"])),
    ("a stop is requested", FAULT | STOP, FormGroup(Why.SAVING)),
    (
        "a stop is requested after the wait",
        AWAITED | STOP | {"trainable": 3},
        FormGroup(Why.SAVING),
    ),
    ("a rank is lost while all save", FAULT | SAVING, FormGroup(Why.SAVING)),
    ("the same before the run ends", FAULT | ENDS, FormGroup(Why.SAVING)),
    # No other group can be formed.
    ("ranks keep nothing", FAULT | {"all_waiting": False}, Restart()),
    ("all are lost", FAULT | {"survivors": 0}, Restart()),
    ("no store opens", FAULT | {"tries_left": 0}, Restart()),
    ("a share is lost", FAULT | {"lost_share": "rank 1"}, Restart("rank 1")),
    ("no replica is whole", FAULT | {"no_replica": "of 2"}, Restart("of 2")),
    ("time is up", FAULT | SAVING | {"too_late": True}, Restart()),
    (
        "time is up, and the run must end",
        FAULT | ENDS | {"too_late": True},
        GiveUp(ENDS["saving_reason"]),
    ),
    (
        "ranks keep nothing, and it repeats",
        FAULT | WHY | {"all_waiting": False},
        GiveUp(WHY["reason"]),
    ),
    (
        "a share is lost, and it repeats",
        FAULT | WHY | {"lost_share": "rank 1"},
        GiveUp(WHY["reason"], "rank 1"),
    ),
    ("a later reason does not end the run", FAULT | LATER | {"survivors": 0}, Restart()),
    ("a stop, and none could save", FAULT | STOP | {"survivors": 0}, GiveUp(STOPPED_UNSAVED)),
]


@pytest.mark.parametrize(
    ("values", "step"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_each_situation_has_its_step(values: dict[str, Any], step: Step) -> None:
    assert next_step(Situation(**values)) == step


def test_the_table_contains_every_step() -> None:
    assert {type(step) for _, _, step in TABLE} == set(get_args(Step))


REASONS = st.sampled_from([None, "why"])
SITUATIONS = st.builds(
    Situation,
    stage=st.sampled_from(GroupStage),
    stop_requested=st.booleans(),
    saving=st.booleans(),
    saving_reason=REASONS,
    too_late=st.booleans(),
    exit_reason=st.sampled_from(["", "finished", "stopped"]),
    rank_failed=st.booleans(),
    all_waiting=st.booleans(),
    some_silent=st.booleans(),
    regroup=st.sampled_from([None, Why.ORDERED, Why.MEMORY]),
    reason=REASONS,
    later_reason=REASONS,
    lost_share=REASONS,
    no_replica=REASONS,
    survivors=st.integers(0, 4),
    tries_left=st.integers(0, 3),
    awaited=st.booleans(),
    trainable=st.integers(0, 4),
    workers=st.integers(1, 4),
    may_shrink=st.booleans(),
    unfit=st.booleans(),
)


def could_save(situation: Situation) -> bool:
    """Whether ranks hold a state that no checkpoint has, and can still write one."""
    if situation.stage is GroupStage.RUNNING:
        return True
    if situation.stage is GroupStage.WATCHED:
        return not situation.exit_reason
    return (
        situation.stage is GroupStage.CAUSE_NAMED
        and situation.all_waiting
        and situation.survivors > 0
        and situation.tries_left > 0
        and not situation.too_late
        and not situation.lost_share
        and not situation.no_replica
    )


@settings(max_examples=2000, derandomize=True)
@given(SITUATIONS)
def test_what_holds_in_every_situation(situation: Situation) -> None:
    """Three promises on the same situations: to make one costs more than to look at its step."""
    step = next_step(situation)
    assert isinstance(step, Step)

    # No step ends ranks that hold an unsaved state.
    if could_save(situation):
        assert not isinstance(step, GiveUp | Restart | Finish | StartRanks | EndUntrained)

    # A run that must stop trains no further step.
    if situation.stop_requested or situation.saving:
        assert not isinstance(step, AwaitReplacements)
        assert step != FormGroup(Why.LOST)
    if situation.stop_requested:
        assert not isinstance(step, StartRanks | Restart)

    # A run that gives up says why.
    if isinstance(step, GiveUp):
        assert step.reason


@pytest.mark.parametrize(
    ("stop_code", "stop_reason", "saved", "code"),
    [
        (0, "", False, 5),
        (0, "", True, 5),
        (143, "", False, 143),  # by a signal
        (143, "", True, 143),
        (143, "the head is gone", True, 143),  # by the driver itself
        (143, "the head is gone", False, 5),
    ],
)
def test_the_exit_code_of_a_run_that_failed(
    stop_code: int, stop_reason: str, saved: bool, code: int
) -> None:
    assert exit_code_after_giving_up(stop_code, stop_reason, saved, failure_code=5) == code
