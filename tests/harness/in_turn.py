"""Many small runs in one spawned group of ranks: a process for each rank, started once for a table."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.parallel.mesh import abandon_groups
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.script.program import Program
from nanoray.script.run import Run
from tests.harness.ranks import run_ranks


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


def run_in_turn(turns: Sequence[Turn], world: int, timeout_s: float = 300) -> list[list[Any]]:
    """Train each run on `world` real ranks; return for each one the outcomes of its ranks."""
    packed = []
    for turn in turns:
        packed.append((turn.spec.to_dict(), turn.main, turn.given, turn.stop, turn.leaves))
    results = run_ranks(turns[0].spec, world, timeout_s, train=partial(_train_all, packed))
    broken = [result for result in results if "outcomes" not in result]
    assert not broken, broken
    return [list(of_ranks) for of_ranks in zip(*(r["outcomes"] for r in results), strict=True)]


def _train_all(packed: list[Any], _: RunSpec, rendezvous: Rendezvous) -> dict[str, Any]:
    # A daemon of multiprocessing may have no children, and a DataLoader's workers are some.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    outcomes = []
    for number, (values, main, given, stop, leaves) in enumerate(packed):
        spec = RunSpec.from_dict(values)
        outcome = _train(spec, main, given, rendezvous, f"turn {number}", stop)
        if stop and not leaves and "error" not in outcome:
            newest, _damaged = newest_valid(spec.checkpoints)
            assert newest
            assert newest.state.meta["step"] == stop
            rest = replace(spec, resume=str(newest.path))
            outcome = _train(rest, main, given, rendezvous, f"turn {number}, resumed", 0)
        outcomes.append(outcome)
    return {"outcomes": outcomes}


def _train(
    spec: RunSpec,
    main: Callable[[Run], None],
    given: frozenset[str],
    rendezvous: Rendezvous,
    secret: str,
    stop: int,
) -> dict[str, Any]:
    """Train one command of a run, in a meeting of its own."""
    config = spec.config.model_copy(update={"stop_at": stop})
    try:
        return Program(main, given)(
            replace(spec, config=config), replace(rendezvous, secret=secret)
        )
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    finally:
        abandon_groups()
