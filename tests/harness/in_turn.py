"""Many small runs of scripts on one group of ranks, one after the other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.script.program import Program
from nanoray.script.run import Run
from tests.harness.lasting_ranks import LastingRanks


@dataclass(frozen=True)
class Turn:
    """One run of a table. With `stop` it ends after that step, and a second command resumes it.

    With `leaves` no command follows: other ranks may go on.
    """

    spec: RunSpec
    main: Callable[[Run], None]
    given: frozenset[str] = frozenset()
    stop: int = 0
    leaves: bool = False


def run_in_turn(turns: Sequence[Turn], world: int) -> list[list[Any]]:
    """Train each run on `world` real ranks; return for each one the outcomes of its ranks."""
    with LastingRanks(world) as ranks:
        return [_take(turn, ranks) for turn in turns]


def _take(turn: Turn, ranks: LastingRanks) -> list[Any]:
    """Train one run, to its end."""
    outcomes = _train(turn, ranks, turn.spec, turn.stop)
    if not turn.stop or turn.leaves or any("error" in outcome for outcome in outcomes):
        return outcomes
    newest, _damaged = newest_valid(turn.spec.checkpoints)
    assert newest
    assert newest.state.meta["step"] == turn.stop
    return _train(turn, ranks, replace(turn.spec, resume=str(newest.path)), 0)


def _train(turn: Turn, ranks: LastingRanks, spec: RunSpec, stop: int) -> list[Any]:
    """Train one command of a run."""
    config = spec.config.model_copy(update={"stop_at": stop})
    program = Program(turn.main, turn.given)
    return ranks.train(replace(spec, config=config), program, first=_allow_children)


def _allow_children() -> None:
    """A daemon of multiprocessing may have no children, and a DataLoader's workers are some."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
