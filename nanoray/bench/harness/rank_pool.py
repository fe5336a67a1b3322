"""Ranks for benchmarks: one process group that stays alive over several calls.

    with RankPool(where) as pool:
        for event in pool.run("module:function", order):
            ...

The function is called as function(mesh, order, emit) on every rank; what rank 0 emits arrives here,
one by one. With `keep` the ranks keep a function and what belongs to it, such as a model, and
`run_kept` calls it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from nanoray.bench.harness.processes import GRACE_S
from nanoray.bench.harness.ranks import START_S, RankChannel, Where, open_link
from nanoray.bench.harness.report import Record, Report
from nanoray.errors import ConfigError, WorkerFailed
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.slots import local_slots
from nanoray.parallel.rendezvous import RankDevice, Rendezvous, choose_backend, rendezvous_of

POLL_S = 0.1
# A survivor's "connection reset" may arrive before the death that caused it is reported
DRAIN_S = 1.5
CONSEQUENCE = 2  # the distance from the root cause of an error in a collective


class RankFailed(WorkerFailed):
    """A rank died or raised; `rank` is the one that is nearest to the root cause."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def add_where_flags(parser: argparse.ArgumentParser, cpu_workers: int = 2) -> None:
    """Add the flags of `where_from`. `cpu_workers`: the number of ranks on CPU without --workers."""
    every = f"how many ranks (default: one per GPU or slice; {cpu_workers} on CPU)"
    parser.add_argument("--workers", type=int, metavar="N", help=every)
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "mig", "cpu"),
        default="auto",
        help="what a rank runs on",
    )
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "gloo"), default="auto", help="of the process group"
    )
    share = "more ranks than GPUs or slices: they take turns on them (without Ray)"
    parser.add_argument("--share_devices", action="store_true", help=share)
    ray = "start them on this Ray cluster: HOST:PORT, auto (RAY_ADDRESS, else local), or local"
    parser.add_argument("--ray_address", help=ray)
    parser.add_argument(
        "--timeout_s",
        type=float,
        default=600.0,
        help="seconds of silence after which a rank has failed",
    )
    parser.set_defaults(cpu_workers=cpu_workers)


def where_from(args: argparse.Namespace, least: int = 1) -> Where:
    """Return the ranks that the flags ask for. Raises ConfigError for fewer than `least`.

    This machine's devices fill in what the flags leave open.
    """
    # Refuse what contradicts itself, before any device is taken
    if args.share_devices and args.ray_address:
        raise ConfigError(
            "share_devices, but ray starts the ranks; only those of this command can share devices"
        )
    if args.timeout_s <= 0 or (args.workers is not None and args.workers < 1):
        raise ConfigError(
            f"workers = {args.workers}, timeout_s = {args.timeout_s:g}; both must be above 0"
        )
    # The number of ranks: from the flag, or one per device
    workers = args.workers
    if workers is None:
        address = args.ray_address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or "local"
        if address not in (None, "local"):
            raise ConfigError(
                "how many ranks? The size of the cluster is not known before it is used; give "
                "--workers N"
            )
        slots = local_slots(args.device, None, discover_gpus(), available_cpus())
        workers = slots.workers if slots.devices else args.cpu_workers
    if workers < least:
        raise ConfigError(f"workers = {workers}; {least} or more are needed, which communicate")
    return Where(
        workers,
        "ray" if args.ray_address else "processes",
        args.device,
        args.backend,
        args.ray_address or "auto",
        args.timeout_s,
        args.share_devices,
    )


class RankPool:
    """Ranks that joined one process group.

    Leaving the `with` block ends everything that was started.
    """

    def __init__(self, where: Where) -> None:
        """Check the request before any device is taken.

        Raises PlacementError or ConfigError.
        """
        self.where = where
        # Per rank: rank, host, pid, device, name, uuid, threads
        self.facts: list[Record] = []
        self.backend = "none"
        self.backend_reason = ""
        self.nccl: str | None = None
        self._link: RankChannel = open_link(where)
        self._phase = "start"
        self._results = dict[int, Any]()
        self._pending: set[int] = set()

    def __enter__(self) -> RankPool:
        try:
            self._link.start()
            # Each rank reports where it is: the devices decide the backend
            no_arguments = dict.fromkeys(self._link.ranks, ())
            hellos = self._all("hello", no_arguments, START_S, "start")
            version = hellos[0]["nccl"]
            self.nccl = ".".join(map(str, version)) if version else None

            # All ranks join the process group
            records = self._rendezvous(hellos)
            arguments = {rank: (asdict(records[rank]),) for rank in self._link.ranks}
            self.facts = self._all("meet", arguments, START_S, "join")
        except BaseException:
            self._link.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the ranks."""
        self._link.end()

    def keep(self, function: str, order: Record) -> None:
        """Let every rank keep the function that "module:function" returns for (mesh, order).

        Raises RankFailed.
        """
        own = dict.fromkeys(self._link.ranks, (function, order))
        self._all("keep", own, self.where.timeout_s + GRACE_S, function)

    def run_kept(self, order: Record) -> Iterator[Record]:
        """Call the kept function on every rank, and yield the events of rank 0, as `run` does."""
        return self.run("", order)

    def run(self, function: str, order: Record) -> Iterator[Record]:
        """Call "module:function" on every rank and yield the events of rank 0.

        The call begins when the iterator is read. Raises RankFailed when a rank dies or raises; the
        pool cannot be used afterwards.
        """
        own = dict.fromkeys(self._link.ranks, (function, order))
        phase = function or "the function that is kept"
        yield from self._events("run", own, self.where.timeout_s + GRACE_S, phase)

    def _all(
        self, method: str, arguments: dict[int, tuple[Any, ...]], silence_s: float, phase: str
    ) -> list[Record]:
        """Run `method` on all ranks, and return the result of each."""
        for _ in self._events(method, arguments, silence_s, phase):
            pass
        return [self._results[rank] for rank in self._link.ranks]

    def _events(
        self, method: str, arguments: dict[int, tuple[Any, ...]], silence_s: float, phase: str
    ) -> Iterator[Record]:
        """Run `method` on all ranks, yield rank 0's events, keep the results. Raises RankFailed."""
        if self._pending:
            raise RuntimeError(
                f"the ranks are still busy with {self._phase}: read its events to the end first"
            )
        self._phase = phase
        self._results = {}
        self._pending = set(arguments)
        for rank, values in arguments.items():
            self._link.send(rank, method, values)

        # Rank -> distance from the root cause, and the text of the failure. When one rank fails the
        # others fail too, in a collective: such an error is the consequence of another one.
        failures: dict[int, tuple[int, str]] = {}
        last_sign = time.monotonic()
        give_up = float("inf")
        while self._pending and time.monotonic() < give_up:
            messages = self._link.receive(POLL_S)
            for rank, message in messages:
                if "event" in message:
                    yield message["event"]
                    continue
                self._pending.discard(rank)
                if "done" in message:
                    self._results[rank] = message["done"]
                    continue

                # Wait a moment for the cause of a failed collective, and for nothing else
                distance = _distance_from_cause(message)
                failures[rank] = (distance, message.get("died") or message["error"])
                patience_s = DRAIN_S if distance == CONSEQUENCE else 0.0
                give_up = min(give_up, time.monotonic() + patience_s)

            if messages:
                last_sign = time.monotonic()
            if time.monotonic() - last_sign > silence_s:
                silent = ", ".join(map(str, sorted(self._pending)))
                first = min(self._pending)
                raise RankFailed(
                    first,
                    f"no sign of rank {silent} for {silence_s:g} s in {phase}; raise --timeout_s "
                    f"if that is too short\n{self._link.tail(first)}",
                )

        if failures:
            rank = min(failures, key=lambda rank: (failures[rank][0], rank))
            text = f"rank {rank}{self._place(rank)} in {phase}: {failures[rank][1]}"
            raise RankFailed(rank, text.rstrip())

    def _place(self, rank: int) -> str:
        """Return where a rank runs, for a message; "" before it has joined."""
        if not self.facts:
            return ""
        fact = self.facts[rank]
        return f" (pid {fact['pid']}, {fact['device']})"

    def _rendezvous(self, hellos: list[Record]) -> list[Rendezvous]:
        """Choose the backend, and make the record of each rank."""
        cards = [RankDevice(h["kind"], h["node"], h["gpu"]) for h in hellos]
        version = hellos[0]["nccl"]
        choice = choose_backend(cards, self.where.backend, tuple(version) if version else None)
        self.backend = choice.backend
        self.backend_reason = choice.reason
        if len(hellos) == 1:
            self.backend = "none"
            self.backend_reason = "one rank: no process group"
        addr = hellos[0]["addr"]
        port = hellos[0]["port"]
        ranks = rendezvous_of([h["node"] for h in hellos], choice, hellos[0]["secret"])
        return [
            # The store is up already, on rank 0.
            replace(
                r,
                master_addr=addr,
                master_port=port,
                device=h["device"],
                threads=h["threads"],
                agent_store=True,
            )
            for r, h in zip(ranks, hellos, strict=True)
        ]


def _distance_from_cause(message: Record) -> int:
    """Return how far a failure is from the root cause: a death, an exception, a failed collective."""
    if "died" in message:
        return 0
    return CONSEQUENCE if message["collective"] else 1


def describe(report: Report, pool: RankPool) -> None:
    """Put ranks, devices, UUIDs, backend and NCCL at run time into the report's conditions."""
    facts = pool.facts
    per_host = list(Counter(f["host"] for f in facts).values())
    report.conditions["ranks"] = {
        "world size": len(facts),
        "on hosts": f"{len(per_host)} ({' + '.join(map(str, per_host))})",
        "threads per rank": facts[0]["threads"],
        "started by": pool.where.launcher,
    }
    names = Counter(f"{f['name']} ({f['device'].partition(':')[0]})" for f in facts)
    report.conditions["devices"] = [f"{count} × {name}" for name, count in names.items()]
    uuids = [fact["uuid"] for fact in facts if fact["uuid"]]
    if uuids:
        report.conditions["UUIDs"] = uuids
    report.conditions["backend"] = f"{pool.backend} ({pool.backend_reason})"
    report.conditions["NCCL"] = pool.nccl or "none in use"
