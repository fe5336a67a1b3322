"""Where the time of a run went: every second of every rank stands in one account. `nanoray ledger
RUN`

Each rank's process adds up the seconds of its phases in a mapped file, logs/rank0.*.ledger, which
survives SIGKILL. The reader puts the processes of a slot one behind the other; what lies between
them has an account, too:

    command ─ start ─► data, compute, log, evaluation, ... ─╳  recovery  ─► data, compute, ... ─ closing ─► end
                                             the process dies            its successor's first step

So the accounts of a slot sum to the wall time of the command. Seconds are the host's: with a GPU,
the time in which the host waits for the device stands where it waits, mostly in the log. Clocks of
other hosts are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.cli import exit_code_of
from nanoray.errors import ConfigError
from nanoray.faults.cause import read_reports
from nanoray.trace.__main__ import read_steps

_OF_PHASE = {
    "data": "data", "forward": "compute", "backward": "compute", "optimizer": "compute", "idle": "idle", "log": "log",
    "eval": "evaluation", "checkpoint": "checkpoint", "done": "closing",
}  # fmt: skip
KEPT = (
    "start",
    "recovery",
    "data",
    "compute",
    "idle",
    "log",
    "evaluation",
    "checkpoint",
    "closing",
)
# started, created (Unix s), steps, closed, the seconds of each account; first and newest step, how
# many were done again
_FORMAT = struct.Struct(f"<ddq?{len(KEPT)}d3q")

# What each account means, in the order of the table.
MEANINGS = {
    "start": "from the command to the first step: Ray, placement, imports, rendezvous, the model, a warm-up",
    "data": "fetching batches",
    "compute": "forward, backward and update; without --comm_trace also the communication that they wait for",
    "exposed communication": "of those steps: collectives that compute waited for, by the traced steps' share",
    "idle": "stages of a pipeline that wait for another one",
    "log": "records, and waiting for the device to fetch them",
    "evaluation": "validation loss",
    "checkpoint": "waiting for checkpoints and comparisons of ranks",
    "repeated": "steps that were done again after a restart from a checkpoint",
    "recovery": "a rank was lost: noticing it, replacing it, meeting again, the interrupted step",
    "waiting for capacity": "slots without a process while fewer ranks went on",
    "closing": "after the last step: final checkpoint, sample, summary, teardown",
}
USEFUL = ("data", "compute", "exposed communication", "idle")


class Ledger:
    """One process' seconds per account, in a mapped file. A change of phase takes about 2 µs."""

    def __init__(self, path: Path, started: float, takes_over: bool, clock: Any = time) -> None:
        """Open an account. `started`: Unix seconds of the command; `takes_over`: after the loss of
        a rank.

        Until the first step, time goes to `start`, or to `recovery` where this process takes over.
        """
        self._clock, self._seconds = clock, dict.fromkeys(KEPT, 0.0)
        self._head = started, clock.time()
        self._open, self._since, self._steps = (
            "recovery" if takes_over else "start",
            clock.monotonic(),
            0,
        )
        self._closed, self._updating = False, 0
        self._first = self._newest = self._again = 0  # of the steps whose update is done
        self._map: mmap.mmap | bytearray = bytearray(_FORMAT.size)
        # On a full disk these seconds are kept by nobody, and count as recovery
        with suppress(OSError):
            path.write_bytes(self._map)
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        self._write()

    def phase(self, step: int, phase: str) -> None:
        """Close the account that is open, and open that of a phase; set-up and regrouping last
        until there is data.
        """
        if done := self._updating:
            self._again += done <= self._newest
            self._first, self._newest = self._first or done, max(self._newest, done)
        self._updating = step if phase == "optimizer" else 0
        self._change(_OF_PHASE.get(phase, self._open))
        self._steps += phase == "optimizer"

    def group_lost(self) -> None:
        """Charge what has not been charged yet to recovery: the phase in which the group broke, and
        what follows.
        """
        self._open, self._updating = "recovery", 0
        self._change("recovery")

    def close(self) -> None:
        """Charge the rest."""
        self._closed = True
        self._change("closing")

    def _change(self, account: str) -> None:
        now = self._clock.monotonic()
        self._seconds[self._open] += now - self._since
        self._open, self._since = account, now
        self._write()

    def _write(self) -> None:
        steps = self._first, self._newest, self._again
        _FORMAT.pack_into(
            self._map, 0, *self._head, self._steps, self._closed, *self._seconds.values(), *steps
        )


@dataclass(frozen=True)
class Process:
    """What one process has written."""

    slot: int
    started: float  # Unix s of its command
    created: float  # Unix s
    steps: int
    closed: bool  # it came to its end, with an error or without
    seconds: dict[str, float]
    first: int  # step; 0 in a file of an older nanoray, which is shorter
    newest: int
    again: int  # steps that it did more than once

    @property
    def last(self) -> float:
        """Unix s of its newest change of phase."""
        return self.created + sum(self.seconds.values())


@dataclass(frozen=True)
class Accounts:
    """The rank-seconds of a run, over all its commands."""

    slots: int  # of the largest command
    commands: int
    wall_s: float  # of all commands together
    even: bool  # all commands had as many ranks
    seconds: dict[str, float]  # rank-seconds per account, as in MEANINGS
    traced: bool  # whether exposed communication was measured

    @property
    def total(self) -> float:
        """All rank-seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps which count."""
        return sum(self.seconds[name] for name in USEFUL) / self.total if self.total else 0.0

    def span(self) -> str:
        """Say how many ranks ran for how long."""
        commands = "" if self.commands == 1 else f" in {self.commands} commands"
        if not self.even:
            return f"up to {self.slots} rank(s), {self.wall_s:.1f} s{commands}: {self.total:.1f} rank-seconds"
        return (
            f"{self.slots} rank(s) x {self.wall_s:.1f} s{commands} = {self.total:.1f} rank-seconds"
        )

    def verdict(self) -> str:
        """Say in a sentence what the time went into: whether communication dominates is answered by
        numbers only.
        """
        share = {name: 100 * seconds / (self.total or 1) for name, seconds in self.seconds.items()}
        largest = max(share, key=lambda name: share[name])
        told = f"goodput {100 * self.goodput:.1f} %; the largest account is {largest} with {share[largest]:.1f} %"
        if not self.traced:
            return f"{told}; communication was not measured (--comm_trace every=50 does)"
        exposed, compute = share["exposed communication"], share["compute"]
        side = "communication" if exposed > compute else "compute"
        return f"{told}; steps are dominated by {side}: {compute:.1f} % compute, {exposed:.1f} % exposed communication"


def read(folder: Path) -> list[Process]:
    """Return what the processes of a run have written, in the order of slots and time."""
    found = []
    for path in (folder / "logs").glob("rank*.ledger"):
        with suppress(OSError, struct.error, ValueError):
            started, created, steps, closed, *rest = _FORMAT.unpack(
                path.read_bytes().ljust(_FORMAT.size, b"\0")
            )
            slot = int(path.name.removeprefix("rank").split(".")[0])
            if started:  # else the process died while it opened the file
                accounts = dict(zip(KEPT, rest[:-3], strict=True))
                found.append(Process(slot, started, created, steps, closed, accounts, *rest[-3:]))
    return sorted(found, key=lambda process: (process.started, process.slot, process.created))


def accounts_of(folder: Path) -> Accounts:
    """Add up the accounts of a run. Raises ConfigError when none of its processes has written any."""
    processes = read(folder)
    if not processes:
        raise ConfigError(
            f"{folder} has no ledger; give the folder of a run, such as runs/2026-..., that has "
            "started"
        )
    total, wall_s, slots = dict.fromkeys(MEANINGS, 0.0), 0.0, set[int]()
    commands = sorted({process.started for process in processes})
    shrunk = [event for event in read_reports(folder) if event["event"] == "fault"]
    for started in commands:
        own = [process for process in processes if process.started == started]
        end = max(process.last for process in own)
        if started == commands[-1]:
            end = max(end, _end_of_command(folder, started))
        wall_s += end - started
        waits = any(
            event["recovery"] == "shrink" and started < event["time"] <= end + 1 for event in shrunk
        )
        slots.add(len({process.slot for process in own}))
        for slot in {process.slot for process in own}:
            _add_slot(
                total, [process for process in own if process.slot == slot], started, end, waits
            )
    _move_repeated(total, processes, sum(event["steps_repeated"] or 0 for event in shrunk))
    share = _exposed_share(folder)
    # What a traced step's time consists of
    steps = sum(total[name] for name in ("data", "compute", "idle", "log"))
    exposed = min(total["compute"], (share or 0.0) * steps)
    total["exposed communication"], total["compute"] = exposed, total["compute"] - exposed
    return Accounts(max(slots), len(commands), wall_s, len(slots) == 1, total, share is not None)


def _add_slot(
    total: dict[str, float], processes: Iterable[Process], started: float, end: float, waits: bool
) -> None:
    at, gap = started, "start"
    for process in processes:
        total[gap] += max(0.0, process.created - at)
        lived = process.last - process.created
        # One that was cut off goes on for a while beside its successor
        alone = min(lived, max(0.0, process.last - at))
        for name, seconds in process.seconds.items():
            total[name] += seconds * (alone / lived if lived else 0.0)
        at, gap = max(at, process.last), "waiting for capacity" if waits else "recovery"
        gap = "closing" if process.closed else gap
    total[gap] += max(0.0, end - at)


def _repeated(processes: Sequence[Process]) -> int:
    """Return how many steps of the slots had been done before, by an earlier process of the slot or
    the same one.
    """
    count, newest = 0, dict[int, int]()
    for p in processes:
        before, newest[p.slot] = newest.get(p.slot, 0), max(newest.get(p.slot, 0), p.newest)
        count += p.again + max(0, min(p.newest, before) - p.first + 1) * (p.first > 0)
    return count


def _move_repeated(total: dict[str, float], processes: Sequence[Process], steps: int) -> None:
    """Take steps that were done again out of data and compute; each is as long as the mean one of
    all ranks.
    """
    done, slots = (
        sum(process.steps for process in processes),
        len({process.slot for process in processes}),
    )
    share = min(1.0, max(_repeated(processes), steps * slots) / done) if done else 0.0
    for name in ("data", "compute"):
        total["repeated"] += share * total[name]
        total[name] *= 1 - share


def _exposed_share(folder: Path) -> float | None:
    """Return the exposed collectives' share of the traced steps' time; None if no step was traced."""
    try:
        figures = [step["figures"] for step in read_steps(folder)]
    except ConfigError:
        return None
    return sum(each["exposed_ms"] for each in figures) / sum(each["step_ms"] for each in figures)


def _end_of_command(folder: Path, started: float) -> float:
    """Return when the newest command ended, in Unix s; 0 where it has not, or its summary is of an
    older one.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        path = folder / "summary.json"
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if os.stat(path).st_mtime >= started:
            return started + float(summary["total_s"])
    return 0.0


def lines(folder: Path) -> list[str]:
    """Return the ledger of a run as text."""
    found = accounts_of(folder)
    width = max(map(len, MEANINGS))
    return [
        f"run  {folder.resolve().name}: {found.span()}",
        *(
            f"{name:<{width}} {seconds:>10.2f} s {100 * seconds / (found.total or 1):>5.1f} %   {MEANINGS[name]}"
            for name, seconds in found.seconds.items()
            if seconds
        ),
        found.verdict(),
    ]


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray ledger RUN` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="nanoray ledger", description="Show where the time of a run went."
    )
    parser.add_argument("run", type=Path, help="run folder")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: print("\n".join(lines(args.run))))


if __name__ == "__main__":
    raise SystemExit(main())
