"""The protocol of driver and survivors under random faults: thousands of interleavings, shrunk to a
minimal one.

No process runs: the driver is the real one, on a scripted Ray and in scripted time
(tests/harness/scripted_ray.py).
"""

from __future__ import annotations

import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoray.launch.recovery import driver
from nanoray.launch.recovery.recover import SAVE_S
from nanoray.launch.recovery.situation import (
    AwaitReplacements,
    FormGroup,
    Restart,
    Situation,
    Step,
    next_step,
)
from tests.harness.scripted_ray import Run

KINDS = (
    "die",
    "node",
    "memory",
    "exception",
    "refused",
    "peer_lost",
    "hang",
    "freeze",
    "sigterm",
    "head",
    "break",
)
KINDS += ("drain", "drain", "drain_driver")
ORDERS = (None, None, None, "start", "run", "go_on", "spare", "kill", "pause", "stop")
BOUND_S = 3 * SAVE_S  # from a stop until the run is over, whatever else happens


class Event(NamedTuple):
    """One fault of a plan."""

    at: float  # seconds after the start
    kind: str
    slot: int
    notice_s: float  # until the peers know
    report_s: float  # until Ray knows
    drain_s: float | None = None  # until a drained node is gone, if anybody says
    # First word of an order: the fault comes with the next such order after `at`, so that it meets
    # the driver while it recovers.
    order: str | None = None
    delay_s: float = 0.0  # and so long after it


EVENTS = st.builds(
    Event,
    at=st.one_of(st.floats(0.0, 45.0), st.sampled_from([10.3, 10.301, 10.32, 12.31, 12.4])),
    kind=st.sampled_from(KINDS),
    slot=st.integers(0, 3),
    notice_s=st.sampled_from([0.0, 0.02, 1.0, 20.0]),
    report_s=st.sampled_from([0.001, 0.01, 0.5]),
    drain_s=st.sampled_from([None, 3.0, 30.0]),
    order=st.sampled_from(ORDERS),
    delay_s=st.sampled_from([0.02, 0.3, 1.0, 5.0]),
)
CONFIGS = st.fixed_dictionaries(
    {
        "workers": st.integers(2, 4),
        "recovery": st.sampled_from(["in_place", "in_place", "shrink"]),
        "spares": st.sampled_from([0, 0, 1]),
        "replace_timeout": st.sampled_from([0.0, 5.0, 60.0]),
        "max_failures": st.sampled_from([0, 3, 99]),
        "tp": st.sampled_from([1, 1, 2]),
    }
).filter(lambda config: config["tp"] == 1 or config["workers"] == 4)  # 2 x 2 recovers in place
STARTS = st.fixed_dictionaries(
    {
        "start_s": st.sampled_from([0.5, 2.0, 1000.0]),
        "failing": st.dictionaries(st.integers(0, 3), st.integers(1, 4), max_size=1),
        "refusing": st.dictionaries(st.integers(0, 3), st.integers(1, 4), max_size=1),
        "room": st.sampled_from([0, 1, 3]),
        "lost_requests": st.dictionaries(st.integers(0, 3), st.integers(1, 2), max_size=1),
    }
)


def fire(run: Run, event: Event, stops: list[float]) -> None:
    """Let an event of a plan happen, if it still can."""
    actor = run.ray.actors.get(event.slot)
    trains = actor is not None and actor.alive and actor.trains_since is not None
    if event.kind == "sigterm":
        stops.append(run.ray.time.now)
        run.stop(signal.SIGTERM, None)
    elif event.kind == "head":
        run.ray.head.close()
    elif event.kind == "drain_driver":
        stops.append(run.ray.time.now)
        run.ray.drain(run.driver, None)
    elif (
        event.kind == "drain" and actor is not None and actor.facts["node"] not in run.ray.draining
    ):
        run.ray.drain(run.driver, event.slot, event.drain_s)
    elif event.kind in ("die", "node", "memory") and actor is not None and actor.alive:
        run.ray.die(event.slot, event.notice_s, event.report_s, event.kind)
    elif event.kind in ("exception", "refused", "peer_lost") and trains:
        run.ray.fail(event.slot, event.kind, "ValueError: x", event.notice_s)
    elif event.kind in ("hang", "freeze") and trains and actor in run.ray.members:
        run.ray.hang(event.slot, event.kind == "freeze")
    elif event.kind == "freeze" and actor is not None and actor.alive and actor.waiting:
        run.ray.freeze(event.slot)
    elif event.kind == "break":
        run.ray.break_group()


def schedule(run: Run, event: Event, stops: list[float]) -> None:
    """Let an event happen now, or with the driver's next order of that kind."""
    if event.order is None:
        fire(run, event, stops)
        return
    late = partial(run.ray.at, event.delay_s, fire, run, event, stops)
    run.ray.armed.append((event.order, late))


def play(folder: Path, config: dict[str, Any], starts: dict[str, Any], plan: list[Event]) -> None:
    """Run the driver through a plan and check what must hold in every case."""
    run = Run(folder / "run", **config)
    run.ray.failing_starts, run.ray.refusing_starts = (
        dict(starts["failing"]),
        dict(starts["refusing"]),
    )
    run.ray.room = starts.get("room", 0)
    stops: list[float] = []
    # Of the actors after the first ones
    run.ray.at(0.0, lambda: setattr(run.ray, "start_s", starts["start_s"]))
    run.ray.at(0.0, run.ray.lost_requests.update, starts.get("lost_requests", {}))
    for event in plan:
        run.ray.at(event.at, schedule, run, event, stops)
    outcome = run()
    assert run.ray.thrown_away == [], "a state in memory that no checkpoint and no other rank has"
    assert run.ray.without_head == [], "Ray would wait for ever"
    assert outcome["exit_reason"] in ("finished", "stopped") or outcome["message"]
    assert not [actor.name for actor in run.ray.created if actor.alive], "an actor is left"
    if stops:
        assert run.ray.time.now - min(stops) < BOUND_S, "a stop is obeyed in time"


@pytest.mark.slow
@pytest.mark.parametrize("examples", [60, pytest.param(600, marks=pytest.mark.full)])
def test_no_interleaving_loses_a_state(examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(config=CONFIGS, starts=STARTS, plan=st.lists(EVENTS, min_size=1, max_size=4))
    def play_any(config: dict[str, Any], starts: dict[str, Any], plan: list[Event]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            play(Path(folder), config, starts, plan)

    play_any()


def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of before: whoever is left is ended without saving when no replacement comes."""

    def forget_survivors(situation: Situation) -> Step:
        step = next_step(situation)
        forgets = isinstance(step, AwaitReplacements) or (
            isinstance(step, FormGroup) and step.why.follows_fault
        )
        return Restart() if forgets else step

    monkeypatch.setattr(driver, "next_step", forget_survivors)
    plan = [Event(10.3, "die", 1, 0.02, 0.01)]
    config = {
        "workers": 2,
        "recovery": "in_place",
        "spares": 0,
        "replace_timeout": 5.0,
        "max_failures": 3,
    }
    with pytest.raises(
        AssertionError, match="a state in memory that no checkpoint and no other rank has"
    ):
        play(tmp_path, config, {"start_s": 1000.0, "failing": {}, "refusing": {}}, plan)
