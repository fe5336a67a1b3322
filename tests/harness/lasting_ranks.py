"""Ranks that stay: one group of processes trains many runs, one after the other.

A process per rank is forked once. Each run meets in a store of its own and leaves its process groups
at the end, so a run that is refused or fails does not touch the next one.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.parallel.rendezvous import Rendezvous, open_store
from tests.harness.commands import forkserver

Train = Callable[..., dict[str, Any]]  # nanoray.train.rank.train, or a Program


class LastingRanks:
    """`world` rank processes; `train` runs one program on all of them."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._lines: list[Any] = []
        self._processes: list[Any] = []

    def __enter__(self) -> LastingRanks:
        for _ in range(self._world):
            line, there = forkserver.Pipe()
            process = forkserver.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._lines.append(line)
            self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for line, process in zip(self._lines, self._processes, strict=True):
            line.close()  # the process ends at the end of its line
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def train(
        self,
        specs: RunSpec | list[RunSpec],
        train: Train | None = None,
        timeout_s: float = 200,
        first: Callable[[], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Call `train(spec, rendezvous)` on every rank; return outcomes, or {"error": ...}.

        specs: one, or one per rank. Without `train` it is nanoray.train.rank's. Each rank calls
        `first` before it trains.
        """
        specs = specs if isinstance(specs, list) else [specs] * self._world
        store = open_store("127.0.0.1", self._world, 30) if self._world > 1 else None
        secret = secrets.token_hex(8)
        for rank, line in enumerate(self._lines):
            rendezvous = Rendezvous(
                rank=rank,
                world_size=self._world,
                local_rank=rank,
                local_world_size=self._world,
                master_addr="127.0.0.1",
                master_port=store.port if store else 0,
                backend="gloo",
                backend_reason="test",
                secret=secret,
                agent_store=True,
            )
            line.send((specs[rank].to_dict(), rendezvous, train, first))

        deadline = time.monotonic() + timeout_s
        outcomes = []
        for line, process in zip(self._lines, self._processes, strict=True):
            try:
                arrived = line.poll(max(0.1, deadline - time.monotonic()))
                outcomes.append(
                    json.loads(line.recv())
                    if arrived
                    else {"error": "Timeout", "message": "no outcome"}
                )
            except (EOFError, OSError):
                process.join(5)
                outcomes.append({"error": "Died", "message": f"exit code {process.exitcode}"})
        return outcomes


def _serve(line: Any) -> None:
    """Train one run after the other, until the line is closed."""
    import torch

    from nanoray.parallel.mesh import abandon_groups
    from nanoray.train import rank as one_rank

    while True:
        try:
            spec, rendezvous, train, first = line.recv()
        except EOFError:
            os._exit(0)  # tearing down gloo's threads can hang
        torch.set_num_threads(1)
        try:
            if first:
                first()
            outcome = (train or one_rank.train)(RunSpec.from_dict(spec), rendezvous)
        except BaseException as error:
            outcome = {
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
        # A failed run leaves its groups open, and the next one would use them.
        abandon_groups()
        sys.stdout.flush()
        line.send(json.dumps(outcome))
