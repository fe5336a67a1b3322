"""A training on a Ray cluster (cluster.py), and faults: processes that are killed or frozen.

ObservedRun  one command, started again with --resume auto whenever its driver is ended before the run is
Chaos        kinds, moments and targets of the faults, which follow from a seed
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanoray.bench.harness.processes import Child, send_signal
from nanoray.faults.cause import Failure
from nanoray.faults.progress import LEFT, ProgressFile
from nanoray.machine.proc import stat_of
from tests.stress.cluster import POLL_S, NodeCluster

KILL = "kill rank"
FREEZE = "freeze rank"
KILL_ALL = "kill all ranks"
STOP_DRIVER = "stop driver"
KILL_DRIVER = "kill driver"
KILL_NODE = "kill node"
WEIGHTS = {KILL: 4, FREEZE: 2, KILL_ALL: 1, STOP_DRIVER: 1, KILL_DRIVER: 1, KILL_NODE: 1}
LEAST_GAP_S = 3.0  # between two faults: a new process needs a second or two to live at all
MEET = 3  # faults that may wait for recovery; the next is held back until a new step is done
NODE_BACK_S = (1.0, 6.0)  # seconds until a killed node comes back, at random
DRIVER_BACK_S = (0.0, 2.0)  # old ranks may still be alive when the new driver starts
STOP_S = 60.0  # a driver that is asked to stop does so within a step and a checkpoint
FDS_EVERY_S = 1.0
# The head knows after four seconds that a node was killed, in place of thirteen; a busy machine has
# time to answer.
FAST_HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
# Errors of a driver that frequent faults explain: that run could not go on, and a new command can.
EXCUSED = (
    "Gave up: deterministic",
    "a stop was asked for",
    "but the cluster can never hold it",
    "not free within",
)


def open_files(pid: int) -> Counter[str]:
    """Return how many files a process has open, by kind: sockets, pipes, ..., files by suffix."""
    kinds = Counter[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it has been closed meanwhile
            target = os.readlink(link)
            is_file = target.startswith("/")
            kinds[Path(target).suffix[1:] or "files" if is_file else target.split(":[")[0]] += 1
    return kinds


class SoakFailed(Exception):
    """The run did not survive; the message ends with the last lines of its output."""


@dataclass
class SeenRun:
    """What was seen of a run from outside: its steps over time, and open files."""

    # Seconds of the command, steps done for good
    points: list[tuple[float, int]] = field(default_factory=list)
    repeated: int = 0
    # "driver 123" or "rank 0, 456" -> how many of each kind, once a second
    files: dict[str, list[Counter[str]]] = field(default_factory=dict)
    # By slot: base of its attempt, completed steps
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    def at(self, slot: int, step: int, phase: str, base: int) -> int:
        """Record the position of a rank and return its completed steps.

        Returns 0 while the rank has not yet read the step from which it continues. That is so
        before its group has been built: until then its base is unknown.
        """
        if phase in ("init", *LEFT):
            return 0
        completed = max(base, Failure(0, "", "", step, phase).completed)
        before = self.places.get(slot, (base, 0))
        if slot == 0 and (base != before[0] or completed < before[1]):  # another attempt
            self.repeated += max(0, before[1] - base)
        self.places[slot] = (base, completed)
        return completed


class ObservedRun:
    """A run of nanoray.launch that is observed.

    Its driver is started again until the run is done.
    """

    def __init__(self, command: list[str], cluster: NodeCluster, folder: Path, steps: int) -> None:
        """Train `steps` steps with `command` and the runs in `folder`, which is made."""
        self._command = command
        self._cluster = cluster
        self._folder = folder
        self._steps = steps
        self.out = folder / "runs"
        self.out.mkdir(parents=True)
        self.seen = SeenRun()
        self.drivers = 0
        self.ends = list[str]()
        self.driver: Child
        self._end = ""  # why the last driver ended
        self._began = time.monotonic()
        self._fds_at = 0.0
        self._start()

    def __enter__(self) -> ObservedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.end()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def run(self) -> Path | None:
        """Return the newest run folder.

        There are several when a driver was lost before the first checkpoint.
        """
        return max((p.parent for p in self.out.glob("*/run.json")), default=None)

    def _start(self) -> None:
        self.drivers += 1
        # How the driver was ended from outside, if it was, and when
        self.ended_by = ""
        self.ended_by_at = 0.0
        self.disturbed = False  # whether there was a fault since it started
        again = ["--resume", "auto"] if self.drivers > 1 else []
        command = [*self._command, "--out_dir", str(self.out), *again]
        self.driver = Child(command, self._cluster.env, self._folder / f"driver{self.drivers}.log")

    def ranks(self) -> list[tuple[int, int]]:
        """Return (slot, pid) of every living rank: the command of its exit_record names both."""
        return [(slot, pid) for slot, pid in watched_ranks(self.out) if stat_of(pid)]

    def observe(self) -> None:
        """Note how far the run is, and what its processes hold open."""
        run = self.run
        if run is None:
            return
        done = self.seen.points[-1][1] if self.seen.points else 0
        for file in run.glob("logs/rank*.progress"):
            position = ProgressFile.read_all(file)
            if position:
                rank = int(file.stem.removeprefix("rank"))
                done = max(done, self.seen.at(rank, *position[:3]))
        if done:
            self.seen.points.append((round(self.seconds, 2), done))
        if self.seconds >= self._fds_at:
            self._fds_at = self.seconds + FDS_EVERY_S
            holders = [(f"driver {self.driver.process.pid}", self.driver.process.pid)]
            holders += [(f"rank {slot}, {pid}", pid) for slot, pid in self.ranks()] if done else []
            for name, pid in holders:
                with suppress(OSError):
                    kinds = open_files(pid)
                    # A rank that waits for the others has none of the files and connections of
                    # training yet: what it opens then is no leak.
                    if pid == self.driver.process.pid or kinds["progress"]:
                        self.seen.files.setdefault(name, []).append(kinds)

    def done(self) -> bool:
        """Return whether the command has ended and the run is complete.

        Raises SoakFailed when it ended in another way.
        """
        code = self.driver.process.poll()
        if code is None:
            if self.ended_by and self.seconds > self.ended_by_at + STOP_S:
                raise SoakFailed(
                    f"the driver lives {STOP_S:.0f} s after `{self.ended_by}`\n{self.driver.tail()}"
                )
            return False
        text = self.driver.log.read_text(encoding="utf-8", errors="replace")
        if code == 0 and self._summary().get("steps") == self._steps:
            return True
        expected = (143, -signal.SIGTERM, -signal.SIGKILL) if self.ended_by else ()
        excuse = next((words for words in EXCUSED if words in text.rpartition("error:")[2]), "")
        if "Traceback" in text or (code not in expected and not (excuse and self.disturbed)):
            raise SoakFailed(
                f"driver {self.drivers} ended with exit code {code}\n{self.driver.tail()}"
            )
        self._end = self.ended_by if code in expected else excuse
        return False

    def _summary(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError):
            return dict(json.loads((self.run / "summary.json").read_text()))  # type: ignore[operator]
        return {}

    def start_again(self) -> None:
        """Start the driver that was lost; `--resume auto` finds the run."""
        self.ends.append(self._end)
        self.driver.end()
        self._start()


@dataclass
class FaultEvent:
    """One fault: seconds of the command, kind, what it hit, and the step of the run."""

    at_s: float
    kind: str
    target: str
    step: int
    # Until the next step that had not been done before; None: nothing stood still
    again_s: float | None = None


class Chaos:
    """Cause faults in a training.

    The same seed gives the same kinds, pauses and choices in the same order.
    """

    def __init__(self, seed: int, every_s: float, most: int, nodes: int) -> None:
        """Prepare at most `most` faults with exponential pauses of `every_s` seconds on average.

        Only a cluster of two nodes can lose one.
        """
        self._moments = random.Random(f"{seed}/moments")
        self._choices = random.Random(f"{seed}/choices")
        self._every_s = every_s
        self._left = most
        self._kinds = kinds(seed, nodes)
        self._due = 0.0
        self._next = next(self._kinds)
        self.caused: list[FaultEvent] = []

    def _pause(self) -> float:
        return max(LEAST_GAP_S, self._moments.expovariate(1 / self._every_s))

    def act(self, training: ObservedRun, cluster: NodeCluster) -> None:
        """Cause the next fault if its time has come and its target is there."""
        points = training.seen.points
        if not (points and self._left):
            return
        if not self._due:
            self._due = training.seconds + self._pause()  # pauses count from the first step
        if training.seconds < self._due or training.driver.process.poll() is not None:
            return
        if len(self.caused) >= MEET and self.caused[-MEET].step == points[-1][1]:
            return
        ranks = training.ranks()  # now: looking through all processes takes the run's time
        if self._next in (KILL, FREEZE, KILL_ALL) and not ranks:
            return
        if self._next == KILL_NODE and not cluster.is_complete():
            return
        at = round(training.seconds, 2)
        target = self._cause(training, cluster, sorted(ranks))
        training.disturbed = True
        self.caused.append(FaultEvent(at, self._next, target, points[-1][1]))
        print(
            f"{at:7.1f} s  step {points[-1][1]:>6}  {self._next} {target}",
            file=sys.stderr,
            flush=True,
        )
        self._left -= 1
        self._due = training.seconds + self._pause()
        self._next = next(self._kinds)

    def _cause(
        self, training: ObservedRun, cluster: NodeCluster, ranks: list[tuple[int, int]]
    ) -> str:
        if self._next == KILL_NODE:
            back_s = self._choices.uniform(*NODE_BACK_S)
            (node,) = cluster.nodes
            return f"({cluster.take(node, back_s)} processes, back in {back_s:.1f} s)"
        if self._next in (STOP_DRIVER, KILL_DRIVER):
            pid = training.driver.process.pid
            training.ended_by = self._next
            training.ended_by_at = training.seconds
            os.kill(pid, signal.SIGTERM if self._next == STOP_DRIVER else signal.SIGKILL)
            return f"(pid {pid})"
        if self._next != KILL_ALL:
            ranks = [self._choices.choice(ranks)]
        send_signal(
            [pid for _, pid in ranks], signal.SIGSTOP if self._next == FREEZE else signal.SIGKILL
        )
        return ", ".join(f"{slot} (pid {pid})" for slot, pid in ranks)

    def driver_pause(self) -> float:
        """Return how long to wait before a lost driver is started again."""
        return self._choices.uniform(*DRIVER_BACK_S)


def kinds(seed: int, nodes: int) -> Iterator[str]:
    """Yield kinds without end: as often as their weights say, in an order that the seed chooses."""
    order = random.Random(f"{seed}/kinds")
    bag = [
        kind
        for kind, weight in WEIGHTS.items()
        for _ in range(weight)
        if nodes > 1 or kind != KILL_NODE
    ]
    while True:
        yield from order.sample(bag, len(bag))


def survive(
    training: ObservedRun, cluster: NodeCluster, chaos: Chaos | None, limit_s: float
) -> float:
    """Watch the training to its end and return its seconds.

    `chaos` causes faults meanwhile, if given. Raises SoakFailed when it is not done within
    `limit_s` seconds, or ended in a way that no fault explains.
    """
    back_at = 0.0
    while not training.done():
        training.observe()
        is_complete = cluster.is_complete()
        if training.seconds > limit_s:
            raise SoakFailed(f"no end within {limit_s:.0f} s\n{training.driver.tail()}")
        if chaos and training.driver.process.poll() is None:
            back_at = 0.0
            chaos.act(training, cluster)
        elif chaos and not back_at:
            back_at = training.seconds + chaos.driver_pause()
        elif chaos and is_complete and training.seconds >= back_at:
            training.start_again()
        time.sleep(POLL_S)
    training.observe()
    return training.seconds


def watched_ranks(folder: Path) -> list[tuple[int, int]]:
    """Return (slot, pid) of each rank below `folder` whose exit-record process is alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError, ValueError, IndexError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith("nanoray/faults/exit_record.py") for word in words) and words[
                -2
            ].startswith(f"{folder}/"):
                found.append(
                    (int(Path(words[-2]).name.split(".")[0].removeprefix("rank")), int(words[-3]))
                )
    return found


def fault_records(faults: list[FaultEvent]) -> list[dict[str, Any]]:
    """Return the faults as they stand in the JSON file."""
    return [asdict(fault) for fault in faults]
