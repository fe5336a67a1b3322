"""Real ranks for tests: processes with a real TCPStore and gloo, each calling nanoray.train.train.

They are forked from a server that has imported torch once, so a rank starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run import RunSpec
from nanoray.config import make_config
from nanoray.data.prepare import prepare
from nanoray.mesh.rendezvous import Rendezvous, open_store
from nanoray.start.folder import open_run
from tests.harness.commands import forkserver

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
    a worse one. `train` replaces recipe.train.
    """
    specs = specs if isinstance(specs, list) else [specs] * world
    store = open_store("127.0.0.1", world, 30) if world > 1 else None
    pipes, processes = [], []
    for rank in range(world):
        here, there = forkserver.Pipe(duplex=False)
        rendezvous = Rendezvous(
            rank=rank,
            world_size=world,
            local_rank=rank,
            local_world_size=world,
            master_addr="127.0.0.1",
            master_port=store.port if store else 0,
            backend="gloo",
            backend_reason="test",
            secret="test",
            agent_store=True,
        )
        order = specs[rank].to_dict(), rendezvous, there, first, train
        process = forkserver.Process(target=_rank_main, args=order, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    results = []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            arrived = pipe.poll(max(0.1, deadline - time.monotonic()))
            results.append(
                json.loads(pipe.recv())
                if arrived
                else {"error": "Timeout", "message": "no outcome"}
            )
        except EOFError:
            process.join(5)
            results.append({"error": "Died", "message": f"exit code {process.exitcode}"})
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return results


def _rank_main(
    spec: dict[str, Any],
    rendezvous: Rendezvous,
    pipe: Any,
    first: Callable[[], None] | None,
    train: Callable[..., dict[str, Any]] | None,
) -> None:
    from nanoray.train import recipe

    train = train or recipe.train
    try:
        if first:
            first()
        outcome = train(RunSpec.from_dict(spec), rendezvous)
    except BaseException as error:
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    pipe.send(json.dumps(outcome))
    pipe.close()
    os._exit(0)  # as nanoray.train does: tearing down gloo's threads can hang


def records(spec: RunSpec) -> list[dict[str, Any]]:
    """Return metrics.jsonl of a run."""
    return [json.loads(line) for line in (spec.folder / "metrics.jsonl").read_text().splitlines()]


def series(spec: RunSpec, key: str = "train/loss") -> dict[int, float]:
    """Return step -> value of one metric."""
    return {r["step"]: r[key] for r in records(spec) if key in r}
