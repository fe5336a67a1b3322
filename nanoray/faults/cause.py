"""Find the failure that caused the others, and report what recovery cost. Nothing here needs Ray.

    events of n ranks (ended, set_waiting) ─► FailureCollector ─► cause, consequences
                                                                ─► FaultReport ─► faults.jsonl

A rank that dies makes the others fail: their collectives raise a moment later, and sometimes the
driver receives those errors first. So the driver collects failures for a short time and then ranks
them: a dead process before an exception, an exception before a collective that lost its peer. Every
event costs O(1), because one death can make thousands of ranks fail at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanoray.faults.inject import append_event
from nanoray.faults.progress import AFTER_UPDATE, SCRIPT, UNKNOWN
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.output import say

# What can end a rank -> how close that is to the root cause (lower is closer).
CAUSES = {
    "out_of_memory": 0,  # ended by Ray's memory monitor or by the kernel
    "killed": 0,  # a signal, or an exit without an exception
    "node_lost": 0,  # its node does not answer
    "hung": 0,  # alive, but all other ranks waited for it
    "drained": 1,  # its node will be taken away
    "driver_silent": 1,  # it ended because its driver did not call for long
    "exception": 1,  # the program's own error
    "no_memory": 1,  # a forward or backward ran out of memory; a restart takes smaller micro batches
    "diverged": 1,  # the ranks' weights differ, and no majority agrees
    "refused": 1,  # NanorayError: a restart would end in the same way
    "peer_lost": 2,  # a collective that lost its peer: a consequence
}
PEER_LOST = CAUSES["peer_lost"]
# Causes that do not count against --max_failures
NOT_CHARGED = ("drained", "driver_silent", "no_memory")
# How long to wait for the root of a consequence: a busy Ray reports a death later than its peers do
ROOT_S = 10.0
PROGRESS_STEPS = 10  # completed steps after which a failure is counted anew
BY_KERNEL = "killed by the kernel, which was out of memory"
# Lines that a report keeps: thousands of ranks fail with the same message
MAX_CONSEQUENCES = 8


@dataclass
class Failure:
    """How one rank ended. `rank` is its slot: the number in the names of its files."""

    rank: int
    cause: str  # a key of CAUSES
    title: str  # one line for people
    step: int = 0  # the step being computed, or just completed
    phase: str = "init"  # "": of a program whose steps are not known
    detail: str = ""  # traceback, or the end of the log
    retry: bool = True
    exit_code: int = 1  # of the command, if there is no retry
    signature: str = ""  # the same for failures that repeat
    facts: dict[str, Any] = field(default_factory=dict)  # pid, node, ip, devices
    # The result of exit_record.read
    exit_record: dict[str, Any] = field(default_factory=dict)
    silent_s: float = 0.0  # hung: seconds without progress on any rank
    # Monotonic seconds at which the driver noticed it; of any program, Unix seconds at which it ended
    at: float = 0.0

    @property
    def completed(self) -> int:
        """Steps completed before the failure."""
        return self.step if self.phase in AFTER_UPDATE else max(0, self.step - 1)


@dataclass
class FaultReport:
    """A fault of a run: the failure that caused it, what followed, and what recovery has cost."""

    cause: Failure
    consequences: list[str]  # failures of other ranks that followed from this one
    attempt: int
    world_size: int

    # What recovery costs is counted from these.
    known_at: float = 0.0  # monotonic seconds at which the driver noticed it
    completed: int = 0  # steps completed before the fault
    base: int | None = None  # the step from which the present attempt started, if known

    recovery: str = ""  # in_place | spare | shrink | restart | none (gave up)
    replaced: int = 0  # ranks that a new process has taken the place of, while the others waited
    # From the death until the driver noticed it; None: the time of death is not known, as on another
    # host, or the rank reported its end itself
    detect_s: float | None = None
    recover_s: float | None = None  # from then until a new step was completed
    steps_repeated: int | None = None

    @property
    def target(self) -> int:
        """The last step that proves no progress.

        A rank that computes a later one has completed a new step.
        """
        return self.completed + 1

    def update(self, step: int, base: int, waiting: bool) -> bool:
        """Process a heartbeat of the present attempt; return whether training is past the fault."""
        if base != UNKNOWN:
            self.base = base
        return step > self.target and not waiting

    def overcome(self, now: float) -> None:
        """Fill in what recovery has cost: a step was completed for the first time since."""
        self.recover_s = round(now - self.known_at, 3)
        if self.base is not None:
            self.steps_repeated = max(0, self.completed - self.base)

    def record(self) -> dict[str, Any]:
        """Return this fault as a line of faults.jsonl."""
        cause = self.cause
        facts = cause.facts
        return {
            "rank": cause.rank,
            "step": cause.step,
            "phase": cause.phase,
            "cause": cause.cause,
            "title": cause.title,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "node": facts.get("node", ""),
            "ip": facts.get("ip", ""),
            "pid": facts.get("pid", 0),
            "device": ",".join(facts.get("devices", [])) or "cpu",
            "signal": cause.exit_record.get("signal"),
            "exit_code": cause.exit_record.get("exit_code"),
            "log_tail": cause.detail.splitlines(),
            "consequences": self.consequences,
            "recovery": self.recovery,
            "replaced": self.replaced,
            "detect_s": self.detect_s,
            "recover_s": self.recover_s,
            "steps_repeated": self.steps_repeated,
        }

    def write(self, folder: Path) -> None:
        """Append this fault to the run's faults.jsonl. A full disk must not end the run."""
        try:
            append_event(folder / "faults.jsonl", "fault", self.record())
        except OSError as error:
            say(f"warning  cannot write the fault report to faults.jsonl: {error.strerror}")


def outcome_of(record: Mapping[str, Any]) -> str:
    """Return the outcome of recovery in one line, from a fault's record."""
    parts = []
    if record["detect_s"] is not None:
        parts.append(f"detected in {record['detect_s']:.2f} s")
    parts.append(f"training again after {record['recover_s'] or 0.0:.2f} s")
    repeated = record["steps_repeated"]
    if repeated is not None:
        noun = "step" if repeated == 1 else "steps"
        parts.append(f"{repeated or 'no'} {noun} repeated")
    return ", ".join(parts)


def announce(cause: Failure, others: Sequence[Failure], detail: str) -> list[str]:
    """Print a fault: its cause with `detail`, and what followed. Returns what followed."""
    word = "drain  " if cause.cause == "drained" else "failure"
    consequences = consequences_of(others)
    lines = ["", f"{word}  {cause.title}"]
    lines += [f"  {line}" for line in detail.rstrip().splitlines()]
    lines += [f"  {line}" for line in consequences]
    say("\n".join(lines))
    return consequences


def title_of(rank: int, facts: Mapping[str, Any], what: str, how: str = "") -> str:
    """Return one line on a rank: who it is, what it did, and how that came about."""
    device = ",".join(facts.get("devices", ()))
    on_device = f", device {device}" if device else ""
    who = f"rank {rank} (pid {facts['pid']}, node {facts['ip']}{on_device})"
    return f"{who} {what}: {how}" if how else f"{who} {what}"


def how_it_ended(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return cause, verb and reason of a process' end from its exit record.

    Without a record ({}) only that it ended is known.
    """
    if record.get("oom"):
        return "out_of_memory", "died", BY_KERNEL
    if record.get("signal"):
        words = ", a segmentation fault" if record["signal"] == "SIGSEGV" else ""
        return "killed", "died", f"killed by {record['signal']}{words}"
    if "exit_code" in record:
        return "killed", "died", f"exited with code {record['exit_code']}"
    return "killed", "died", "killed, or crashed without a Python exception"


def consequences_of(others: Sequence[Failure]) -> list[str]:
    """Return a line for each of the first consequences, and a line with the number of the rest."""
    titles = [failure.title for failure in others[:MAX_CONSEQUENCES]]
    rest = len(others) - MAX_CONSEQUENCES
    if rest > 0:
        titles.append(f"and {rest:,} more ranks")
    return titles


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the events in a run's faults.jsonl, oldest first.

    They are reports (`fault`) and planned faults (`injected`).
    """
    return read_json_lines(folder / "faults.jsonl")


class FailureCollector:
    """Collects how the ranks of one attempt end, until that is enough to find the cause."""

    def __init__(
        self,
        ranks: Iterable[int],
        in_place: bool,
        patience_s: float,
        settle_s: float,
        live: bool = False,
    ) -> None:
        """Expect `ranks`. `in_place`: survivors keep their state and wait for a replacement.

        patience_s: how long survivors may take to notice a failure. settle_s: how long to wait for
        consequences otherwise. live: some of the ranks held the run's state before this attempt
        began.
        """
        self._running = set(ranks)
        self._ranks = len(self._running)
        self._waiting: set[int] = set()
        self._patience_s = patience_s
        self._settle_s = settle_s
        self._deadline = float("inf")
        self._live = live
        self.in_place = in_place
        self.failures: list[Failure] = []
        self.first_failure_at = 0.0
        self.first_left_at = 0.0  # when a rank left its group although none had failed
        self.no_rank_lost = False  # the group broke, but every rank of it is waiting

    def ended(self, rank: int, failure: Failure | None, now: float) -> None:
        """Note that a rank has finished (`failure` None) or failed."""
        self._running.discard(rank)
        self._waiting.discard(rank)
        if failure is None:
            return
        self.first_failure_at = self.first_failure_at or now
        failure.at = failure.at or now
        self.failures.append(failure)

        # A run that cannot start, or a script's own loop: no rank has a state to keep.
        has_no_state = failure.phase == SCRIPT or (not failure.retry and failure.phase == "init")
        if has_no_state and not self._live:
            self.in_place = False

        # In place, wait until the survivors have noticed. Else wait for consequences; after a
        # consequence, longer, because its root must follow.
        if self.in_place:
            wait_s = self._patience_s
        elif CAUSES[failure.cause] == PEER_LOST:
            wait_s = max(self._settle_s, ROOT_S)
        else:
            wait_s = self._settle_s
        self._deadline = min(self._deadline, now + wait_s)

    def hurry(self, patience_s: float, now: float) -> None:
        """Wait at most `patience_s` for the ranks that have not noticed the failure."""
        self._patience_s = min(self._patience_s, patience_s)
        if self.failures or self._waiting:
            self._deadline = min(self._deadline, now + self._patience_s)

    def rank_0_finished(self, now: float, patience_s: float = 0.0) -> None:
        """Note that the run is complete; wait for the other ranks to finish, too: a moment or more."""
        self._deadline = min(self._deadline, now + max(patience_s, 2 * self._settle_s))

    def set_waiting(self, rank: int, waiting: bool, now: float) -> None:
        """Note whether a rank has left its process groups and waits for the next attempt."""
        if waiting and rank in self._running:
            # The first sign of a failure. A rank that does not follow in time hangs.
            if not self._waiting and not self.failures:
                self.first_left_at = now
                self._deadline = min(self._deadline, now + self._patience_s)
            self._waiting.add(rank)
        else:
            self._waiting.discard(rank)

    @property
    def all_waiting(self) -> bool:
        """Whether some ranks did not fail, and all of these wait: they hold the run's state."""
        running = len(self._running)
        if running == 0 or running != len(self._waiting):
            return False
        # A rank that has finished is missing here: the others then have no group to return to.
        return self.no_rank_lost or running + len(self.failures) == self._ranks

    @property
    def silent(self) -> list[int]:
        """The ranks that have neither ended nor wait."""
        return sorted(self._running - self._waiting)

    def complete(self, now: float) -> bool:
        """Whether to stop waiting for further events."""
        if not self._running or now > self._deadline:
            return True
        return len(self._waiting) == len(self._running)

    @property
    def cause(self) -> Failure:
        """The failure closest to the root; of equal ones the earliest. Needs at least one."""
        return min(self.failures, key=lambda failure: (_distance(failure), failure.at))

    @property
    def others(self) -> list[Failure]:
        """The failures that followed from the cause."""
        cause = self.cause
        return [failure for failure in self.failures if failure is not cause]


def _distance(failure: Failure) -> int:
    """Return how far a failure is from the root cause.

    C++ aborts a process where an error of its own is not caught, as of a collective: that may follow
    from an exception of another rank.
    """
    if failure.exit_record.get("signal") == "SIGABRT":
        return max(1, CAUSES[failure.cause])
    return CAUSES[failure.cause]


def reason_to_give_up(cause: Failure, history: list[Failure], max_failures: int) -> str | None:
    """Return why the run must not continue after `cause`, the newest of `history`; None if it may.

    A deterministic failure repeats at the same place: an exception twice, a death without a stated
    reason, and any failure of a program whose steps are not known, three times.
    """
    if not cause.retry:
        return "restarting cannot cure this"
    if cause.cause in NOT_CHARGED:
        return None
    history = _charged(history)

    # Deterministic: the newest failures are equal.
    place = (cause.signature, cause.step, cause.phase)
    repeats = 0
    for earlier in reversed(history):
        if (earlier.signature, earlier.step, earlier.phase) != place:
            break
        repeats += 1
    allowed = 1 if cause.cause == "exception" and cause.phase else 2
    if cause.signature and repeats > allowed:
        where = "at the same step" if cause.phase else "soon after the start"
        return f"deterministic: it failed {repeats} times in the same way {where}"

    # Too many failures for the steps between them.
    if without_progress(history) <= max_failures:
        return None
    reason = f"max_failures = {max_failures} is exceeded"
    if cause.phase:
        reason += f": no {PROGRESS_STEPS} steps in a row without a failure"
    return reason


def without_progress(history: list[Failure]) -> int:
    """Return the number of newest failures with fewer than PROGRESS_STEPS steps between them."""
    history = _charged(history)
    if not history:
        return 0
    count = 1
    for earlier, later in reversed(list(pairwise(history))):
        if later.completed - earlier.completed >= PROGRESS_STEPS:
            break
        count += 1
    return count


def _charged(history: list[Failure]) -> list[Failure]:
    """Return the failures that count against --max_failures."""
    return [failure for failure in history if failure.cause not in NOT_CHARGED]


_COLLECTIVE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
    "broken pipe",
    "application timeout caused pair closure",
    "nccl",
    "gloo",
)
# Of torch.distributed, and ours for groups that a lost peer kept from forming
_COLLECTIVE_ERRORS = {
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "GroupNotFormed",
}


_MEMORY_ERRORS = {"OutOfMemoryError", "MemoryError"}
# In the message of an error: of the host's memory, and of any
_HOST_SIGNS = (
    "can't allocate memory",  # torch on a CPU
    "cannot allocate memory",  # the system: a worker process, or pinned memory
    "bad_alloc",  # C++, where torch passes it on as a RuntimeError
)
_MEMORY_SIGNS = (
    *_HOST_SIGNS,
    "not enough memory",
    "out of memory",
    "memoryallocation",  # CUDA: cudaErrorMemoryAllocation
    "_status_alloc_failed",  # cuBLAS and cuDNN
    "_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "cublas_status_not_initialized when calling `cublascreate",
    # cuDNN, where each of its algorithms wants more workspace than there is
    "unable to find a valid cudnn algorithm",
    "unable to find an engine to execute this computation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device, or the host, has no memory left."""
    if {cls.__name__ for cls in type(error).__mro__} & _MEMORY_ERRORS:
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in message for sign in _MEMORY_SIGNS)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether `error`, of memory, is about that of the host, which a GPU does not use."""
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return any(sign in message for sign in _HOST_SIGNS)


def is_collective_error(error: BaseException) -> bool:
    """Return whether `error` reports a lost peer of a group: a consequence, never the cause."""
    # By name, because the driver does not import torch.
    names = {cls.__name__ for cls in type(error).__mro__}
    return reports_lost_peer(names, str(error))


def reports_lost_peer(names: Collection[str], message: str) -> bool:
    """Return the same of an error of which the names of its classes and its message are known."""
    if not _COLLECTIVE_ERRORS.isdisjoint(names):
        return True
    # Gloo raises plain RuntimeErrors.
    message = message.lower()
    return "RuntimeError" in names and any(sign in message for sign in _COLLECTIVE_SIGNS)
