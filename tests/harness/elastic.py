"""A driver without Ray: it replaces lost ranks of real processes, as nanoray.launch does."""

from __future__ import annotations

import json
import os
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec, write_attempt
from nanoray.faults.progress import ProgressFile
from nanoray.parallel.backends import reports_lost_peers
from nanoray.parallel.rendezvous import Order, Rendezvous, open_store
from tests.harness.commands import forkserver

Patch = Callable[[], None]  # called in a rank's process before it trains; makes it a worse one


@dataclass
class Outcome:
    """Each slot's outcome or error, and by attempt why survivors left their groups."""

    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    left: list[list[str]] = field(default_factory=list)


def run_elastic(
    spec: RunSpec,
    world: int,
    groups: Sequence[Sequence[int]] = (),
    patches: dict[int, Patch] | None = None,
    on_nodes: Sequence[int] = (),
    grow_at: int = 0,
    frozen: int = -1,
    timeout_s: float = 300,
    train: Callable[..., dict[str, Any]] | None = None,
    backend: str = "gloo",
) -> Outcome:
    """Train with `world` ranks; whenever some are lost and the others wait, form another group.

    groups: the slots of the second group, the third, ...; all slots where nothing is said. Slots
    whose process is lost get a new one. patches: by slot, for the processes of the first group.
    on_nodes: each rank's number on its node. grow_at: the step in which a group that has shrunk is
    told to form another one. frozen: a slot whose first process stops and is taken for lost; it
    lives on, with its connections open, until the run is over. train: replaces rank.train.
    backend: of the groups; with another one than gloo a patch has to abort those of survivors.
    """
    write_attempt(spec)
    outcome, stores, lines, processes = Outcome(), [], {}, {}
    slots, orders, attempt = [*range(world)], iter(groups), 0
    deadline = time.monotonic() + timeout_s
    while slots:
        live = attempt > 0
        stores.append(open_store("127.0.0.1", len(slots), 30) if len(slots) > 1 else None)
        secret = secrets.token_hex(8)
        holder = next(i for i, slot in enumerate(slots) if slot in processes or not live)
        for rank, slot in enumerate(slots):
            rendezvous = Rendezvous(
                rank=rank,
                world_size=len(slots),
                local_rank=on_nodes[rank] if on_nodes else rank,
                local_world_size=len(slots),
                master_addr="127.0.0.1",
                master_port=stores[-1].port if stores[-1] else 0,
                backend=backend,
                backend_reason="test",
                secret=secret,
                agent_store=True,
                live=live,
                reference=holder,
                slot=slot,
                slots=world,
                abortable=not reports_lost_peers(backend),
            )
            if slot in processes:
                lines[slot].send((spec.to_dict(), rendezvous))
                continue
            lines[slot], there = forkserver.Pipe()
            patch = (patches or {}).get(slot) if not live else None
            order = spec.to_dict(), rendezvous, there, patch, grow_at, train
            processes[slot] = forkserver.Process(target=_rank_main, args=order, daemon=True)
            processes[slot].start()
            there.close()
        heard = slots
        if not live and frozen in slots:
            left_behind, heard = processes.pop(frozen), [slot for slot in slots if slot != frozen]
        waiting = _listen(heard, lines, processes, outcome, deadline)
        slots = []
        if waiting:
            attempt += 1
            outcome.left.append([waiting[slot] for slot in sorted(waiting)])
            spec = spec.next_attempt()
            write_attempt(spec)
            slots = sorted(next(orders, range(world)))
            for slot in waiting.keys() - {*slots}:
                processes.pop(slot).kill()
    for process in processes.values():
        process.join(5)
        process.kill()
    if frozen >= 0:
        assert left_behind.is_alive()
        left_behind.kill()
    return outcome


def _listen(
    slots: Sequence[int],
    lines: dict[int, Connection],
    processes: dict[int, Any],
    outcome: Outcome,
    deadline: float,
) -> dict[int, str]:
    """Wait until each rank waits, has ended, or is dead; return why each waiting one left."""
    waiting: dict[int, str] = {}
    open_lines = {lines[slot]: slot for slot in slots}
    while open_lines:
        ready = wait([*open_lines], max(0.0, deadline - time.monotonic()))
        if not ready:
            outcome.ranks |= {slot: {"error": "Timeout"} for slot in open_lines.values()}
            return {}
        for line in ready:
            slot = open_lines.pop(line)  # type: ignore[index]
            try:
                kind, value = line.recv()  # type: ignore[union-attr]
            except EOFError:
                kind, value = "ended", None
            if kind == "waits":
                waiting[slot] = value
                continue
            process = processes.pop(slot)
            process.join(5)
            outcome.ranks[slot] = (
                json.loads(value) if value else {"error": "Died", "exit_code": process.exitcode}
            )
    return waiting


def _rank_main(
    spec: dict[str, Any],
    rendezvous: Rendezvous,
    line: Connection,
    patch: Patch | None,
    grow_at: int,
    train: Callable[..., dict[str, Any]] | None,
) -> None:
    from nanoray.train import rank as one_rank

    now = [rendezvous]

    def rejoin(lost: str) -> tuple[RunSpec, Rendezvous]:
        line.send(("waits", lost))
        values, orders = line.recv()
        now.append(orders)
        return RunSpec.from_dict(values), orders

    def wanted() -> Order:
        run, small = RunSpec.from_dict(spec), now[-1].world_size < now[-1].slots
        at = ProgressFile.read_all(run.progress(rendezvous.slot)) if small and grow_at else None
        return Order.REGROUP if at and at[0] >= grow_at else Order.GO_ON

    try:
        if patch:
            patch()
        outcome = (train or one_rank.train)(
            RunSpec.from_dict(spec), rendezvous, wanted=wanted, rejoin=rejoin
        )
    except BaseException as error:
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    line.send(("ended", json.dumps(outcome)))
    line.close()
    os._exit(0)
