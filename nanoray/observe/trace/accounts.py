"""Where the time of a run went: `nanoray report ledger` assigns each second of each rank.

The reader of the ledgers (ledger.py) puts the processes of a slot one after the other; the time
between them has an account, too:

    command ─ start ─► data, compute, log, ... ─╳  recovery  ─► data, compute, ... ─ closing ─► end
                                 the process dies            its successor's first step

So the accounts of a slot sum to the wall time of the command.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanoray.cli import (
    Parser,
    add_run,
    exit_code_of,
    find_run_folder,
    name_program,
    tool_parser,
)
from nanoray.errors import ConfigError
from nanoray.faults.cause import read_reports
from nanoray.machine.atomic import read_json
from nanoray.observe.trace.__main__ import read_steps
from nanoray.observe.trace.ledger import FORMAT, KEPT

# What each account means, in the order of the table.
MEANINGS = {
    "start": (
        "from the command to the first step: Ray, placement, imports, rendezvous, the model, a "
        "warm-up"
    ),
    "data": "fetching batches",
    "compute": (
        "forward, backward and update; without --comm_trace also the communication that they wait "
        "for"
    ),
    "exposed communication": (
        "of those steps: collectives that compute waited for, by the traced steps' share"
    ),
    "idle": "stages of a pipeline that wait for another one",
    "log": "records, and waiting for the device to fetch them",
    "evaluation": "validation loss",
    "checkpoint": "waiting for checkpoints and comparisons of ranks",
    "repeated": "steps that were done again after a restart from a checkpoint",
    "recovery": ("a rank was lost: noticing it, replacing it, meeting again, the interrupted step"),
    "waiting for capacity": "slots without a process while fewer ranks went on",
    "closing": "after the last step: final checkpoint, sample, summary, teardown",
}
USEFUL = ("data", "compute", "exposed communication", "idle")


@dataclass(frozen=True)
class Process:
    """The content of one process' file."""

    slot: int
    started: float  # Unix s of its command
    created: float  # Unix s
    steps: int
    closed: bool  # the process ended by itself, with or without an error
    seconds: dict[str, float]
    first: int  # step; 0: it has done none
    newest: int
    repeated: int  # steps that it did more than once

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
        if not self.total:
            return 0.0
        return sum(self.seconds[name] for name in USEFUL) / self.total

    def span(self) -> str:
        """Return the number of ranks, the wall time and the rank-seconds, as text."""
        wall = f"{self.wall_s:.1f} s"
        if self.commands > 1:
            wall += f" in {self.commands} commands"
        total = f"{self.total:.1f} rank-seconds"
        if not self.even:
            return f"up to {self.slots} rank(s), {wall}: {total}"
        return f"{self.slots} rank(s) x {wall} = {total}"

    def verdict(self) -> str:
        """Return a sentence: the goodput, the largest account, and what dominates the steps."""
        total = self.total or 1
        share = {name: 100 * seconds / total for name, seconds in self.seconds.items()}
        largest = max(share, key=lambda name: share[name])
        sentence = (
            f"goodput {100 * self.goodput:.1f} %; the largest account is {largest} with "
            f"{share[largest]:.1f} %"
        )
        if not self.traced:
            return f"{sentence}; communication was not measured (--comm_trace every=50 does)"
        exposed = share["exposed communication"]
        compute = share["compute"]
        side = "communication" if exposed > compute else "compute"
        return (
            f"{sentence}; steps are dominated by {side}: {compute:.1f} % compute, "
            f"{exposed:.1f} % exposed communication"
        )


def read_processes(folder: Path) -> list[Process]:
    """Return the ledgers of a run's processes, in the order of commands, slots and time.

    Raises OSError for a folder that may not be read.
    """
    processes = []
    paths: list[Path] = []
    # Path.glob of Python 3.13 takes a folder that may not be read for an empty one.
    with suppress(FileNotFoundError, NotADirectoryError):
        paths = [path for path in (folder / "logs").iterdir() if path.match("rank*.ledger")]
    for path in paths:
        with suppress(OSError, struct.error, ValueError):
            started, created, steps, closed, *rest = FORMAT.unpack(path.read_bytes())
            slot = int(path.name.removeprefix("rank").split(".")[0])
            if not started:
                continue  # the process died while it created the file
            # By the clock of another host it may be older than its command.
            created = max(created, started)
            seconds = dict(zip(KEPT, rest[:-3], strict=True))
            first, newest, repeated = rest[-3:]
            processes.append(
                Process(slot, started, created, steps, closed, seconds, first, newest, repeated)
            )
    return sorted(processes, key=lambda process: (process.started, process.slot, process.created))


def accounts_of(folder: Path) -> Accounts:
    """Add up the accounts of a run. Raises ConfigError if none of its processes has a ledger."""
    processes = read_processes(folder)
    if not processes:
        raise ConfigError(
            f"{folder} has no ledger; give the folder of a run, such as runs/2026-..., that has "
            "started"
        )
    total = dict.fromkeys(MEANINGS, 0.0)
    wall_s = 0.0
    slot_counts = set[int]()
    faults = [event for event in read_reports(folder) if event["event"] == "fault"]
    # A run may have been continued by later commands; each has its own wall time.
    commands = sorted({process.started for process in processes})
    for started in commands:
        own = [process for process in processes if process.started == started]

        # Only the newest command has a summary. It ends later than its ranks.
        end = max(process.last for process in own)
        if started == commands[-1]:
            end = max(end, _end_of_command(folder, started))
        wall_s += end - started

        # After a shrink, a slot may wait without a process.
        shrunk = any(
            event["recovery"] == "shrink" and started < event["time"] <= end + 1 for event in faults
        )
        slots = {process.slot for process in own}
        slot_counts.add(len(slots))
        for slot in slots:
            of_slot = [process for process in own if process.slot == slot]
            # Each slot's accounts sum to the command's wall time.
            _add_slot(total, of_slot, started, end, shrunk)

    _move_repeated(total, processes)
    traced = _move_exposed(total, folder)
    return Accounts(
        slots=max(slot_counts),
        commands=len(commands),
        wall_s=wall_s,
        even=len(slot_counts) == 1,
        seconds=total,
        traced=traced,
    )


def _add_slot(
    total: dict[str, float], processes: Sequence[Process], started: float, end: float, shrunk: bool
) -> None:
    """Add the processes of one slot in one command, and the gaps between them, to `total`."""
    reached = started
    gap = "start"  # the account of the time until the next process
    for i, process in enumerate(processes):
        total[gap] += max(0.0, process.created - reached)
        has_successor = i < len(processes) - 1

        # A process that was cut off may go on for a while beside its successor. Count the time in
        # which it was alone, spread over its accounts.
        lived = process.last - process.created
        alone = min(lived, max(0.0, process.last - reached))
        share = alone / lived if lived else 0.0
        for name, seconds in process.seconds.items():
            # In a restart all ranks end, but not the run.
            account = "recovery" if name == "closing" and has_successor else name
            total[account] += seconds * share
        reached = max(reached, process.last)

        if process.closed and not has_successor:
            gap = "closing"
        elif shrunk:
            gap = "waiting for capacity"
        else:
            gap = "recovery"
    total[gap] += max(0.0, end - reached)


def _count_repeated(processes: Sequence[Process]) -> int:
    """Return how many steps of the slots a process of the same slot had done before."""
    count = 0
    # The processes of a slot are in the order of time.
    newest_of_slot: dict[int, int] = {}
    for process in processes:
        before = newest_of_slot.get(process.slot, 0)
        newest_of_slot[process.slot] = max(before, process.newest)
        count += process.repeated
        if process.first > 0:
            count += max(0, min(process.newest, before) - process.first + 1)
    return count


def _move_repeated(total: dict[str, float], processes: Sequence[Process]) -> None:
    """Move the time of repeated steps out of data and compute.

    Each repeated step counts as long as the mean step of all ranks.
    """
    done = sum(process.steps for process in processes)
    if not done:
        return
    share = min(1.0, _count_repeated(processes) / done)
    for name in ("data", "compute"):
        total["repeated"] += share * total[name]
        total[name] *= 1 - share


def _move_exposed(total: dict[str, float], folder: Path) -> bool:
    """Move exposed communication out of compute; return whether any traced step measured it."""
    share = _exposed_fraction(folder)
    # A traced step's time consists of these accounts.
    steps_s = sum(total[name] for name in ("data", "compute", "idle", "log"))
    exposed_s = min(total["compute"], (share or 0.0) * steps_s)
    total["exposed communication"] = exposed_s
    total["compute"] -= exposed_s
    return share is not None


def _exposed_fraction(folder: Path) -> float | None:
    """Return the share of exposed collectives in the traced steps; None without a traced step."""
    try:
        figures = [step["figures"] for step in read_steps(folder)]
    except ConfigError:
        return None
    exposed_ms = sum(of_step["exposed_ms"] for of_step in figures)
    step_ms = sum(of_step["step_ms"] for of_step in figures)
    return float(exposed_ms / step_ms) if step_ms else None  # 0: no optimizer was called


def _end_of_command(folder: Path, started: float) -> float:
    """Return when the newest command ended, in Unix s; 0 without a summary of this command."""
    path = folder / "summary.json"
    total_s = read_json(path).get("total_s")
    if total_s is None or os.stat(path).st_mtime < started:
        return 0.0
    return started + float(total_s)


def format_ledger(folder: Path) -> list[str]:
    """Return the ledger of a run as lines of text."""
    accounts = accounts_of(folder)
    # 0 only in a run whose processes died at once.
    total = accounts.total or 1
    width = max(map(len, MEANINGS))
    rows = [f"run  {folder.resolve().name}: {accounts.span()}"]
    for name, seconds in accounts.seconds.items():
        if seconds:
            share = 100 * seconds / total
            rows.append(f"{name:<{width}} {seconds:>10.2f} s {share:>5.1f} %   {MEANINGS[name]}")
    rows.append(accounts.verdict())
    return rows


def make_parser() -> Parser:
    """Return the parser of `nanoray report ledger`."""
    parser = tool_parser(name_program("report ledger"), "Show where the time of a run went.")
    add_run(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray report ledger [RUN]` and return the exit code."""

    def run() -> None:
        args = make_parser().parse_args(argv)
        print("\n".join(format_ledger(find_run_folder(args.run))))

    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
