"""What rungs of a ladder lose beside their base, in what turn they run, and which steps count."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from nanoray.bench.compute import timed
from nanoray.bench.harness.rank_pool import RankFailed
from nanoray.bench.harness.report import Record, Report
from nanoray.bench.ladder import LOSS, LOSS_STEP, Ladder
from nanoray.config import make_config
from nanoray.parallel.mesh import Mesh

BASE = {"micro_batch_size": 2, "device": "cuda", "dropout": 0.0}


def ladder_in(folder: Path) -> Ladder:
    anything: Any = None
    args = Namespace(quick=False, timeout_s=9.0)
    return Ladder(args, Report("gpu", {}), "tiny", anything, anything, folder, {}, "cuda")


def climbed(folder: Path, rungs: dict[str, tuple[dict[str, Any], float]]) -> Ladder:
    """Return a ladder whose rungs have these losses."""
    ladder = ladder_in(folder)
    for rung, (settings, loss) in rungs.items():
        ladder.configs[rung] = make_config(BASE | settings)
        ladder.losses[rung] = loss
    return ladder


def test_a_loss_that_is_not_the_bases_is_wrong_to_what_the_precision_allows(tmp_path: Path) -> None:
    rungs: dict[str, tuple[dict[str, Any], float]] = {
        "base": ({"precision": "fp32"}, 2.0),
        "far": ({"precision": "fp32"}, 2.01),
        "bf16": ({"precision": "bf16"}, 2.01),
        "fp8": ({"precision": "fp8", "fp8_scaling": "row"}, 2.08),
        "larger": ({"precision": "fp32"}, 9.0),
        "dropped": ({"precision": "fp32", "dropout": 0.1}, 9.0),
    }
    ladder = climbed(tmp_path, rungs)
    ladder.compare_losses("base", not_same=["larger"])
    report = ladder.report
    assert {row.arm: (row.median, row.wrong) for row in report.rows} == {
        "tiny: base": (2.0, 0),
        "tiny: far": (2.01, 1),
        "tiny: bf16": (2.01, 0),
        "tiny: fp8": (2.08, 0),
        "tiny: larger": (9.0, None),
        "tiny: dropped": (9.0, None),
    }
    assert {row.metric for row in report.rows} == {LOSS}
    assert report.failed


def test_without_a_base_nothing_is_compared(tmp_path: Path) -> None:
    ladder = climbed(tmp_path, {"bf16": ({}, 3.0)})
    ladder.compare_losses("base")
    assert not ladder.report.rows


class MadeUpRanks:
    """Ranks whose step takes so many milliseconds; they write down their orders."""

    def __init__(self, ms: float, orders: list[tuple[float, int, int]], end: str = "") -> None:
        self.ms = ms
        self.orders = orders
        self.error = end
        self.ended = False

    def run_kept(self, order: Record) -> list[Record]:
        if self.error:
            raise RankFailed(0, self.error)
        self.orders.append((self.ms, order["settling"], order["steps"]))
        return [{"step_ms": self.ms, "loss": 2.0}]

    def end(self) -> None:
        self.ended = True


def test_rungs_take_turns_in_blocks_of_equal_time(tmp_path: Path) -> None:
    """After a first round, which does not count, and without those that fail or do not fit."""
    ladder = ladder_in(tmp_path)
    orders: list[tuple[float, int, int]] = []
    script: list[int] = []
    bad = MadeUpRanks(1.0, orders, "exit code 3")
    large = MadeUpRanks(1.0, orders, "OutOfMemoryError: CUDA out of memory")
    made_up: dict[str, Any] = {"a": MadeUpRanks(10.0, orders), "b": MadeUpRanks(50.0, orders)}
    ladder.pools |= made_up | {"bad": bad, "large": large}
    ladder.scripts["script"] = lambda steps: script.append(steps) or 20.0  # type: ignore[func-returns-value]
    ladder.run_rounds(2, 100.0)
    first = [(10.0, LOSS_STEP - 1, 1), (50.0, LOSS_STEP - 1, 1)]
    assert orders == [*first, (10.0, 1, 10), (50.0, 1, 2), (50.0, 1, 2), (10.0, 1, 10)]
    assert script == [1, 5, 5]
    assert ladder.step_ms == {"a": [10.0, 10.0], "b": [50.0, 50.0], "script": [20.0, 20.0]}
    assert ladder.losses == {"a": 2.0, "b": 2.0}
    assert ladder.failed == {"bad": "tiny: bad: exit code 3"}
    assert ladder.skipped == {"large": "does not fit into the device's memory"}
    assert ladder.report.failures == ["tiny: bad: exit code 3"]
    assert bad.ended
    assert large.ended


def test_a_block_times_exactly_the_steps_that_count() -> None:
    """A loop of 50 ms steps, of which 3 count after 2."""
    steps = iter(lambda: time.sleep(0.05), 0)
    events: list[Record] = []
    mesh = Mesh(0, 1, 0, torch.device("cpu"), "none", "")
    block = timed(steps)  # which imports
    begin = time.perf_counter()
    block(mesh, {"settling": 2, "steps": 3}, events.append)
    elapsed_ms = 1e3 * (time.perf_counter() - begin)
    (event,) = events
    assert 50 <= event["step_ms"] <= (elapsed_ms - 2 * 50) / 3 + 1
