"""A training whose ranks are killed, and what its records say afterwards.

All moments are Unix seconds of this host's wall clock: the records', the logs' and the killer's.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from nanoray.bench.harness.launchers import RANK_PID
from nanoray.bench.harness.processes import GRACE_S, Child, ChildFailed, send_signal
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.proc import stat_of

POLL_S = 0.02  # between two looks at the records
FOLLOW_S = 0.1  # the same where a look does not decide when something happens
TORCHRUN_SAW = re.compile(
    r"^[WE](\d{4} \d\d:\d\d:\d\d\.\d+) .*(?:closing signal|failed \(exitcode)"
)

Done = dict[tuple[int, int], float]  # (attempt, step) -> when that step was done


class Standstill(NamedTuple):
    """A time without a new step."""

    seconds: float
    step: int  # the last one before
    repeated: int  # steps done before and again
    end: float  # the moment of the next new step


class MeasuredFault(NamedTuple):
    """A kill and its consequences."""

    round: int
    rank: int
    step: int  # the last one that was done before training stood still
    # From the kill, or from the notice on, to the end of the next step that was not done before
    standstill_s: float
    repeated: int  # steps done before the fault and again after it
    wrong: int  # steps whose loss is not that of a run without a fault
    noticed_s: float | None = None  # of a kill


class Goodput(NamedTuple):
    """What a time with kills came to."""

    percent: float  # useful steps of those that as much time without kills would have given
    useful: int  # steps done for the first time
    repeated: int
    clean_per_s: float  # steps per second without kills


def outage(done: Mapping[tuple[int, int], float], killed: float) -> Standstill | None:
    """Return how training went on after the kill; None while it has not.

    What the ranks of the killed one's attempt still complete belongs to before the kill: a survivor
    that has the lost rank's gradients already finishes its step.
    """

    # A restart counts as a new attempt; whatever an older attempt completes is no recovery.
    attempt = max((attempt for (attempt, _), at in done.items() if at <= killed), default=0)

    # The last step before the kill, then the steps that no attempt had completed before.
    last = max((step for each, step in done if each <= attempt), default=0)
    later = [(each, step) for each, step in done if each > attempt]
    new = [done[key] for key in later if key[1] > last]
    if not new:
        return None

    # Steps between the first of the new attempt and the last before the kill are repeated.
    _, first = min(later)
    return Standstill(min(new) - killed, last, last + 1 - first, min(new))


def first_times(done: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Return when each step was done for the first time; all other times are repetitions."""
    first: dict[int, float] = {}
    for (_, step), at in done.items():
        first[step] = min(at, first.get(step, at))
    return first


def goodput(
    done: Mapping[tuple[int, int], float], start: float, begin: float, end: float
) -> Goodput | None:
    """Return the goodput from `begin` to `end`.

    It is measured by the speed from `start` to `begin`, without kills. Only the first time that a
    step is done counts. None when no step was done without kills.
    """

    # Steps per second without kills are the measure: what the same seconds would have given.
    first = first_times(done)
    clean = sum(start < at <= begin for at in first.values()) / (begin - start)
    useful = sum(begin < at <= end for at in first.values())
    repeated = sum(begin < at <= end for at in done.values()) - useful
    if clean:
        return Goodput(100 * useful / (clean * (end - begin)), useful, repeated, clean)
    return None


def arrivals(seed: int, mean_s: float, window_s: float, ranks: int) -> list[tuple[float, int]]:
    """Return (second, rank) of each kill: a Poisson process over `window_s` seconds.

    The same seed gives the same kills.
    """

    # Exponential pauses make a Poisson process; moments and ranks come from one generator, in
    # turn.
    source = random.Random(seed)
    moments = itertools.accumulate(source.expovariate(1 / mean_s) for _ in itertools.count())
    return [
        (at, source.randrange(ranks))
        for at in itertools.takewhile(lambda at: at < window_s, moments)
    ]


def wrong_losses(
    losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float
) -> int:
    """Return the number of steps that are missing or have another loss.

    `tolerance` is relative; 0 requires the same bits.
    """
    return sum(
        step not in losses or abs(losses[step] - loss) > tolerance * abs(loss)
        for step, loss in reference.items()
    ) + len(losses.keys() - reference.keys())


class TrainingProcess:
    """One training as a child process.

    Leaving the `with` block ends it and its ranks, also those of a Ray head.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        head: Child | None,
    ) -> None:
        """Start `command` with an --out_dir in `folder`; the Ray head may start its ranks."""
        self.folder = folder
        self.head = head
        self.done = Done()
        folder.mkdir(parents=True)
        self.child = Child([*command, "--out_dir", str(folder)], env, folder / "output.log")
        # Pid of a rank -> when it was started, by the kernel's clock
        self._seen: dict[int, str] = {}
        self._file: TextIO | None = None
        self._rest = ""

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Remember the ranks' pids before the launcher ends: afterwards their parent is gone
            # and nothing shows that they are ours.
            for rank in range(len(list(self.folder.glob("*/logs/rank*.log")))):
                self.process_of(rank)
            self.child.end()
        finally:
            self._end_ranks()
            if self._file:
                self._file.close()

    @property
    def step(self) -> int:
        """The newest step that is done, in any attempt."""
        return max((step for _, step in self.done), default=0)

    @property
    def step_s(self) -> float:
        """Seconds from step to step, the median."""
        moments = sorted(self.done.values())
        if len(moments) > 1:
            return statistics.median(b - a for a, b in itertools.pairwise(moments))
        return 0.0

    def read(self) -> None:
        """Read the new records.

        A restart replaces the file; the records of the old file are kept.
        """
        path = next(self.folder.glob("*/metrics.jsonl"), None)
        if path is None:
            return
        if self._file is None:
            self._file = path.open(encoding="utf-8")

        # A restart writes a new file in place of the old one. Read the old one to its end first.
        replaced = not os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        self._add_records(self._file)
        if replaced:
            self._file.close()
            self._file = path.open(encoding="utf-8")
            self._rest = ""
            self._add_records(self._file)

    def _add_records(self, file: TextIO) -> None:
        # The last line may be half written; it stays for the next reading.
        *lines, self._rest = (self._rest + file.read()).split("\n")
        for record in map(json.loads, lines):
            self.done.setdefault((record["attempt"], record["step"]), record["time"])

    def wait_until(self, reached: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Read records until `reached()`.

        Raises ChildFailed when the run ends before, or takes too long.
        """

        deadline = time.monotonic() + timeout_s
        while True:
            # Check for the end before reading: what the run wrote last is then in the file.
            ended = self.child.process.poll() is not None
            self.read()
            if reached():
                return
            if ended:
                raise ChildFailed(
                    f"exit code {self.child.process.returncode} before {what}\n{self.child.tail()}"
                )
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"no {what} within {timeout_s:g} s, but step {self.step}\n{self.child.tail()}"
                )
            time.sleep(POLL_S)

    def follow(self, end: float) -> None:
        """Read records until that moment. Raises ChildFailed when the run ends before it."""
        while True:
            left = end - time.time()
            if left <= 0:
                return
            if self.child.process.poll() is not None:
                raise ChildFailed(
                    f"exit code {self.child.process.returncode} in mid-run\n{self.child.tail()}"
                )
            time.sleep(min(left, FOLLOW_S))
            self.read()

    def finish(self, timeout_s: float) -> None:
        """Wait for the run's good end. Raises ChildFailed."""
        self.child.wait(timeout_s)
        self.read()

    def kill(self, rank: int) -> float | None:
        """Send SIGKILL to a rank and return the moment; None when it has no process now."""

        pid = self.process_of(rank)
        if pid is None:
            return None

        # Take the moment before the signal, so that the standstill includes the kill itself.
        killed = time.time()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return killed

    def losses(self) -> dict[int, float]:
        """Return step -> loss as the run's file holds them at its end."""
        (path,) = self.folder.glob("*/metrics.jsonl")
        return {record["step"]: record["train/loss"] for record in read_json_lines(path)}

    def noticed_s(self, arm: str, killed: float) -> float | None:
        """Return the seconds until the launcher logged the kill; None without such a line."""

        # Each launcher logs the loss of a rank in its own format, with the wall clock of this
        # host.
        if arm in ("torchrun", "torchrun-script"):
            year = datetime.fromtimestamp(killed).year
            lines = self.child.log.read_text(encoding="utf-8", errors="replace").splitlines()
            matches = [TORCHRUN_SAW.match(line) for line in lines]
            times = [f"{year}{match[1]}" for match in matches if match]
            moments = [datetime.strptime(text, "%Y%m%d %H:%M:%S.%f").timestamp() for text in times]
        elif arm in ("torchtrainer", "torchft", "torchft_defaults"):
            # Ray Train's controller writes its decisions to a log in the session's folder.
            session = self.head.log.with_suffix("") if self.head else self.folder
            logs = session.glob("session_2*/logs/train/ray-train-app-controller-*.log")
            lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
            times = [json.loads(line)["asctime"] for line in lines if '"[FailurePolicy]' in line]
            moments = [
                datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp() for text in times
            ]
        elif arm == "run":
            paths = self.folder.glob("launcher/*/faults.jsonl")
            moments = [event["time"] for path in paths for event in read_json_lines(path)]
        else:
            # nanoray's driver measures it itself
            for path in self.folder.glob("*/faults.jsonl"):
                for event in read_json_lines(path):
                    if event.get("event") == "fault" and event.get("detect_s") is not None:
                        return float(event["detect_s"])
            return None
        return next((at - killed for at in sorted(moments) if at >= killed - 0.001), None)

    # The processes of ranks. Their logs name the pids, /proc names their parents and sessions.

    def process_of(self, rank: int) -> int | None:
        """Return the pid of a rank, if that is a living process of this run."""

        # Each attempt of a rank writes its pid to the log; only the newest one counts.
        log = next(self.folder.glob(f"*/logs/rank{rank}.log"), None)
        if log is None:
            return None
        pids = RANK_PID.findall(log.read_text(encoding="utf-8", errors="replace"))
        if not pids:
            return None
        pid = int(pids[-1])  # of the newest attempt
        stat = stat_of(pid)
        if not stat:
            return None

        # A pid may be in use again, by a process of another program
        sessions = {str(self.child.process.pid)}
        if self.head:
            sessions.add(str(self.head.process.pid))
        # Torchrun gives each rank a session, and so do the fork servers of `nanoray run`.
        above = stat
        while above and above[3] not in sessions:
            above = stat_of(int(above[1]))  # its parent
        if not above:
            return None
        self._seen[pid] = stat[19]
        return pid

    def _end_ranks(self) -> None:
        """Wait for the ranks to be gone, and kill those that stay: the next arm needs the machine."""
        deadline = time.monotonic() + GRACE_S

        # A pid with another start time is another process, which must not be killed.
        while left := [
            pid for pid, begun in self._seen.items() if (stat := stat_of(pid)) and stat[19] == begun
        ]:
            if time.monotonic() > deadline:
                send_signal(left, signal.SIGKILL)
                return
            time.sleep(POLL_S)
