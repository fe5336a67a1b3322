"""Groups that are aborted by order: a frozen rank keeps its connections open, so the others see no error."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoray.mesh.mesh import abort_groups
from nanoray.run import RunSpec
from tests.harness.elastic import run_elastic
from tests.harness.ranks import make_spec
from tests.ranks.test_mirror import RECIPE, Clean, clean, ended_well, fired

__all__ = ["clean"]  # the fixture

PATIENT = {"timeout_s": 300, "init_timeout_s": 60}  # of the collectives: the run would last longer than that


def obeys(events: Path) -> None:
    """Let a thread of this process abort its groups a moment after the planned fault, as `Worker.abort` does."""

    def wait_and_abort() -> None:
        while not events.exists():
            time.sleep(0.05)
        time.sleep(0.5)  # by now this rank waits for the frozen one
        abort_groups()
        abort_groups()  # twice is as once

    threading.Thread(target=wait_and_abort, daemon=True).start()


def left_after(spec: RunSpec, rank: int) -> float:
    """Seconds from the fault until a rank left its group."""
    (event,) = map(json.loads, (spec.folder / "faults.jsonl").read_text().splitlines())
    (line,) = [line for line in spec.log(rank).read_text().splitlines() if "leaving the group" in line]
    at, _, milliseconds = line[:23].partition(",")
    return time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000 - float(event["time"])


@pytest.mark.parametrize(
    ("world", "phase", "settings"),
    [
        (3, "backward", {}),
        (4, "forward", {"tp": 2}),
        pytest.param(3, "exchange_norm", {"dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param(4, "backward", {"pp": 2, "dp_mode": "ddp_by_hand", "grad_accum_steps": 2}, marks=pytest.mark.full),
        pytest.param(3, "eval", {}, marks=pytest.mark.full),
        pytest.param(3, "checkpoint", {}, marks=pytest.mark.full),
    ],
)
def test_the_others_leave_a_frozen_rank(
    text: Path, tmp_path: Path, clean: Clean, world: int, phase: str, settings: dict[str, Any]
) -> None:
    """SIGSTOP, and it stays so until the run is over: no step is repeated, and no bit differs."""
    step = 4 if phase in ("eval", "checkpoint") else 5
    faults = f"stop@rank=1,step={step},phase={phase}"
    spec = make_spec(text, tmp_path, **RECIPE | PATIENT | settings | {"faults": faults})
    others = [slot for slot in range(world) if slot != 1]
    patches = dict.fromkeys(others, partial(obeys, spec.folder / "faults.jsonl"))
    outcome = run_elastic(spec, world, patches=patches, frozen=1, timeout_s=100)
    assert fired(spec) == [phase]
    ended_well(spec, outcome, clean(world, **settings), 1)
    assert max(left_after(spec, slot) for slot in others) < 30, "a second, on a machine that is not busy"
