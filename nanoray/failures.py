"""Who failed first, why, and what came of it: the driver's judgement, without Ray.

    events of n ranks (ended, waits) ─► Inquest ─► cause and echo ─► FaultReport ─► one line, faults.jsonl, a metric

A rank that dies takes others with it: their collectives fail a moment later, and sometimes their news arrive first. So
the driver waits a little, then ranks what it heard: a dead process before an exception, and that before a collective
that lost its peer. Every event costs O(1), because thousands of ranks fail at once when one does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanoray.faults import append_event

# What can end a rank -> how close that is to the root (lower is closer).
CAUSES = {
    "out_of_memory": 0,  # Ray's memory monitor or the kernel ended it
    "killed": 0,  # a signal, or an exit without an exception
    "node_lost": 0,  # its node does not answer
    "hung": 0,  # alive, but the rank that all others waited for
    "exception": 1,  # the program's own error
    "diverged": 1,  # ranks do not hold the same weights any more, and nobody knows whose are right
    "refused": 1,  # NanorayError: another try would end alike
    "peer_lost": 2,  # a collective that lost its peer: a consequence
}
ECHO = 8  # consequences that are told: when one of thousands of ranks dies, all others fail with the same words
_AFTER_UPDATE = ("log", "eval", "checkpoint", "done")  # phases of a step whose update is done


@dataclass
class Failure:
    """How one rank ended. `rank` is its seat: the number that its log and its stamp carry."""

    rank: int
    cause: str
    title: str  # one line for people
    step: int = 0  # the step being computed, or just completed, and the phase of it
    phase: str = "init"
    detail: str = ""  # traceback, or the end of its log
    retry: bool = True
    exit_code: int = 1  # of the command, where there is no retry
    signature: str = ""  # equal for failures that repeat themselves
    fact: dict[str, Any] = field(default_factory=dict)  # pid, node, ip, devices
    death: dict[str, Any] = field(default_factory=dict)  # the death record, where there is one
    silent_s: float = 0.0  # hung: how long nobody had moved

    @property
    def completed(self) -> int:
        """The steps that were done by then."""
        return self.step if self.phase in _AFTER_UPDATE else max(0, self.step - 1)


@dataclass
class FaultReport:
    """One event and what came of it: a line of faults.jsonl."""

    rank: int
    step: int
    phase: str
    cause: str
    title: str
    attempt: int
    world_size: int
    node: str
    ip: str
    pid: int
    device: str
    signal: str | None
    exit_code: int | None
    log_tail: list[str]
    echo: list[str]  # the other ranks' failures, which followed from this one
    recovery: str = ""  # in_place | spare | shrink | restart | none (gave up)
    detect_s: float | None = None  # from the death to the driver's knowing it; None: the moment is not known
    recover_s: float | None = None  # from its knowing until a step was completed that was not done before
    steps_repeated: int | None = None

    @classmethod
    def of(cls, cause: Failure, others: Sequence[Failure], attempt: int, world_size: int) -> FaultReport:
        """Write down what is known when the failure is."""
        fact, death = cause.fact, cause.death
        return cls(
            rank=cause.rank,
            step=cause.step,
            phase=cause.phase,
            cause=cause.cause,
            title=cause.title,
            attempt=attempt,
            world_size=world_size,
            node=fact.get("node", ""),
            ip=fact.get("ip", ""),
            pid=fact.get("pid", 0),
            device=",".join(fact.get("devices", [])) or "cpu",
            signal=death.get("signal"),
            exit_code=death.get("exit_code"),
            log_tail=cause.detail.splitlines(),
            echo=echo_of(others),
        )

    def write(self, folder: Path) -> None:
        """Append this report to the run's faults.jsonl."""
        append_event(folder / "faults.jsonl", "fault", asdict(self))

    def outcome(self) -> str:
        """Return what recovery came to, in one line."""
        detected = "" if self.detect_s is None else f"detected in {self.detect_s:.2f} s, "
        steps = f"{self.steps_repeated or 'no'} step{'' if self.steps_repeated == 1 else 's'} repeated"
        return f"{detected}training again after {self.recover_s or 0.0:.2f} s, {steps}"


@dataclass
class Recovering:
    """A fault that is known and not yet overcome."""

    report: FaultReport
    known: float  # monotonic seconds at which the driver heard of it
    completed: int  # steps that were done by then
    base: int | None = None  # the step after which the present attempt began, where that is known

    @property
    def target(self) -> int:
        """Once a rank computes a step after this one, work is done that had not been done before the fault."""
        return self.completed + 1

    def over(self, step: int, base: int, waiting: bool) -> bool:
        """Hear where a rank of the present attempt is; whether training is past the fault."""
        self.base = base
        return step > self.target and not waiting

    def closed(self) -> FaultReport:
        """Return the report with what recovery took until now."""
        self.report.recover_s = round(time.monotonic() - self.known, 3)
        self.report.steps_repeated = None if self.base is None else max(0, self.completed - self.base)
        return self.report


def echo_of(others: Sequence[Failure]) -> list[str]:
    """Return the first consequences in a line each, and how many more there are."""
    more = [f"and {len(others) - ECHO:,} more ranks"] if len(others) > ECHO else []
    return [failure.title for failure in others[:ECHO]] + more


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return a run's fault events, planned faults that fired (`event` injected) among them, in the order of writing."""
    path = folder / "faults.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


class Inquest:
    """What the driver has heard from the ranks of one attempt, and when it has heard enough."""

    def __init__(self, ranks: Iterable[int], in_place: bool, patience_s: float, drain_s: float) -> None:
        """`patience_s`: how long survivors may take to notice; `drain_s`: how long to wait for news without them."""
        self._running = set(ranks)
        self._ranks = len(self._running)
        self._waiting: set[int] = set()
        self._patience_s, self._drain_s = patience_s, drain_s
        self.in_place = in_place  # the others may wait for a replacement, and keep what they have
        self.failures: list[Failure] = []
        self.first_news = 0.0  # when the first failure was known
        self.whole = False  # nobody is lost, though the group broke
        self._give_up = float("inf")

    def ended(self, rank: int, failure: Failure | None, now: float) -> None:
        """Hear that a rank is over: done, or failed."""
        self._running.discard(rank)
        self._waiting.discard(rank)
        if failure is None:
            return
        self.first_news = self.first_news or now
        self.failures.append(failure)
        if not failure.retry:
            self.in_place = False
        self._give_up = min(self._give_up, now + (self._patience_s if self.in_place else self._drain_s))

    def nobody_is_replaced(self, now: float) -> None:
        """Wait for the echo, and not for survivors: the run stops, or nobody could be started."""
        self.in_place = False
        self._give_up = min(self._give_up, now + self._drain_s)

    def rank_0_is_done(self, now: float) -> None:
        """Hear that the run is over; the others end with it, and need not be waited for."""
        self._give_up = min(self._give_up, now + 2 * self._drain_s)

    def waits(self, rank: int, waiting: bool, now: float) -> None:
        """Hear whether a rank has left its groups and waits for orders."""
        if waiting and rank in self._running:
            if not self._waiting and not self.failures:
                self._give_up = min(self._give_up, now + self._patience_s)  # whoever does not follow hangs
            self._waiting.add(rank)
        else:
            self._waiting.discard(rank)

    @property
    def all_wait(self) -> bool:
        """Every rank that did not fail waits for orders, and there is one: the run's state is in memory."""
        left = len(self._running)
        return 0 < left == len(self._waiting) and (self.whole or left + len(self.failures) == self._ranks)

    @property
    def silent(self) -> list[int]:
        """The ranks that neither ended nor wait."""
        return sorted(self._running - self._waiting)

    def closed(self, now: float) -> bool:
        """Whether there is nothing more to wait for."""
        if not self._running or now > self._give_up:
            return True
        return self.in_place and len(self._waiting) == len(self._running)

    @property
    def cause(self) -> Failure:
        """The failure that is closest to the root; of equals the first. Only when there is one."""
        return min(self.failures, key=lambda failure: CAUSES[failure.cause])


def why_not(cause: Failure, history: list[Failure], most: int, stopping: bool) -> str:
    """Return why there is no further try after `cause`, the newest of `history`; empty when there is one.

    A deterministic failure repeats itself at the same place: an exception twice, a death (whose reason nobody told)
    three times. Trying on would only burn devices.
    """
    if not cause.retry:
        return "a restart cannot cure that"
    again = 0
    for earlier in reversed(history):
        if (earlier.signature, earlier.step, earlier.phase) != (cause.signature, cause.step, cause.phase):
            break
        again += 1
    if cause.signature and again >= (2 if cause.cause == "exception" else 3):
        return f"deterministic: it failed {again} times in the same way at the same step"
    if len(history) > most:
        return f"max_failures = {most} are used up"
    return "a stop was asked for" if stopping else ""


def back_off_s(history: list[Failure]) -> float:
    """Return how long to wait before the next restart: nothing after progress, else 1, 2, 4, ... up to 30 s."""
    stuck = 0
    for earlier, later in zip(reversed(history[:-1]), reversed(history), strict=False):
        if later.completed > earlier.completed:
            break
        stuck += 1
    return min(30.0, 2.0 ** (stuck - 1)) if stuck else 0.0
