"""Real ranks for tests: processes with a real TCPStore and gloo, each calling nanoray.train.train.

A rank's first run takes three times the CPU of the next, so the ranks of a file stay for all its
runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.prepare import prepare
from tests.harness.lasting_ranks import LastingRanks

TINY = {
    "name": "test",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "global_batch_size": 12,
    "max_steps": 8,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 0,
    "eval_samples": 24,
    "checkpoint_every": 0,
    "tensorboard": False,
    "sample_tokens": 0,
    "timeout_s": 20,
    "init_timeout_s": 20,
}


_lasting: dict[int, LastingRanks] = {}  # by their number; see run_ranks


def make_spec(text: Path, out_dir: Path, **overrides: Any) -> RunSpec:
    """Open a run of the tiny recipe on a text file."""
    config = make_config(
        TINY
        | {"dataset": str(text), "data_dir": str(text.parent / "cache"), "out_dir": str(out_dir)}
        | overrides
    )
    return open_run(config, prepare(config), time.time())


def run_ranks(
    specs: RunSpec | list[RunSpec],
    world: int,
    timeout_s: float = 90,
    first: Callable[[], None] | None = None,
    train: Callable[..., dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Train one spec (or one per rank) on `world` real ranks; return outcomes or {"error": ...}.

    Each rank's process calls `first` before it trains: a function of a module, to make its machine
    a worse one. `train` replaces rank.train. With either the ranks are new processes; else they
    are those of the file's run before, if that has succeeded.
    """
    if first or train:
        with LastingRanks(world) as ranks:
            return ranks.train(specs, train, timeout_s, first)
    if world not in _lasting:
        _lasting[world] = LastingRanks(world)
        _lasting[world].__enter__()
    outcomes = _lasting[world].train(specs, timeout_s=timeout_s)
    if any("error" in outcome for outcome in outcomes):
        end_ranks(world)
    return outcomes


def end_ranks(world: int | None = None) -> None:
    """End the processes that wait for the next run of so many ranks, or all of them."""
    for size in [*_lasting] if world is None else [world]:
        _lasting.pop(size).__exit__(None, None, None)


def records(spec: RunSpec) -> list[dict[str, Any]]:
    """Return metrics.jsonl of a run."""
    return [json.loads(line) for line in (spec.folder / "metrics.jsonl").read_text().splitlines()]


def series(spec: RunSpec, key: str = "train/loss") -> dict[int, float]:
    """Return step -> value of one metric."""
    return {r["step"]: r[key] for r in records(spec) if key in r}


def only_run(out: Path) -> Path:
    (run,) = [p for p in out.iterdir() if p.is_dir()]
    return run
