"""The blocks of steps that a search has run: on all ranks, each kept as a line of tune.jsonl.

    measure(choice, turn, seconds) ─► known already?  ─► its Trial of then
                                   ─► all ranks: LoopArm ─► block ─► Trial ─► tune.jsonl (rank 0)
    keep_open(choices, ..., use)   ─► the arms of these choices stay, so that a block makes none anew

All ranks search by the same rules and from the same samples, so they agree on what comes next. A
search that goes on asks the same questions again, and gets the answers that the file has.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from nanoray.base.atomic import append_line, read_json_lines
from nanoray.checkpoint.run import RunSpec
from nanoray.config import Config
from nanoray.config.settings import OF_ONE_COMMAND
from nanoray.errors import ConfigError, NanorayError, OutOfMemory
from nanoray.faults.cause import is_collective_error, is_out_of_memory
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.rendezvous import Order
from nanoray.train.arm import BlockCost, LoopArm, free_memory, same_loss
from nanoray.train.out_of_memory import describe
from nanoray.train.tasks import Task
from nanoray.tune.space import Choice, TunedRun, changes_of, configured, words

log = logging.getLogger("nanoray.rank")
T = TypeVar("T")
FILE = "tune.jsonl"
STOPPED = "stopped"
RESERVED = 0.35  # of the budget, for the turns that confirm what was found
MOST_RESERVED_S = 100.0
FIRST_STEPS = 3  # that count in the first block of a choice: its step is not known yet
MOST_STEPS = 10_000


class Trial(NamedTuple):
    """One block of a choice."""

    turn: int  # samples of one turn were measured right after each other
    step_s: float
    peak_bytes: int
    loss: float
    wall_s: float  # of the block with all that it took
    steps: int


class SearchEnded(Exception):
    """The budget is spent, or a rank shall stop. Raised on all ranks at the same place."""


class TuneSubject(Protocol):
    """What is tuned: it hands the model and the data of a run to those who train."""

    keeps_tasks: bool  # whether a task may still be used when `open` has returned

    def open(self, spec: RunSpec, use: Callable[[Task], T]) -> T:
        """Make the task of `spec`, and return what `use` returns for it. (all ranks)"""


@dataclass
class Trials:
    """Measures choices on the ranks of this run."""

    spec: RunSpec
    mesh: Mesh
    subject: TuneSubject
    here: TunedRun
    budget_s: float  # from now on
    wanted: Callable[[], Order]
    say: Callable[[str], None]
    samples: dict[Choice, list[Trial]] = field(default_factory=dict)
    refused: dict[Choice, str] = field(default_factory=dict)
    # What earlier commands or attempts have found, until this search comes to it
    known: dict[tuple[Choice, int], Trial] = field(default_factory=dict)
    known_refused: dict[Choice, str] = field(default_factory=dict)
    spent_s: float = 0.0  # of all samples, those of earlier commands too
    turn: int = 0

    def __post_init__(self) -> None:
        self._open: dict[Choice, LoopArm] = {}  # arms that stay between their blocks
        self._deadline = time.monotonic() + self.budget_s
        # Until it is set to 0 the budget ends so much earlier
        self.reserve_s = min(MOST_RESERVED_S, RESERVED * self.budget_s)

    def read(self, files: Iterable[Path], place: str) -> None:
        """Take over what earlier commands, or attempts, have measured at this place. (all ranks)

        Raises ConfigError for a search of another place or configuration.
        """
        lines: list[dict[str, Any]] = []
        if self.mesh.rank == 0:
            lines = [line for path in files for line in read_json_lines(path)]
        lines = self.mesh.broadcast(lines)
        # As JSON has it: tuples become lists
        own = json.loads(json.dumps({"place": place, "config": compared(self.here.config)}))
        heads = [line for line in lines if "place" in line]
        for head in heads:
            others = [key for key in own["config"] if head["config"].get(key) != own["config"][key]]
            if head["place"] != place:
                others.insert(0, f"{head['place']}, and this is {place}")
            if others:
                raise ConfigError(
                    f"the search to go on from was for another run: {', '.join(others)}; start a new one"
                )
        found = [line for line in lines if "choice" in line]
        # A new folder has what an earlier one had, so that a third command can go on from it.
        if self.mesh.rank == 0 and not own_file(self.spec.folder, 0).is_file():
            for line in (own, *found):
                self._keep(line)
        for line in found:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        choice: Choice = tuple((key, value) for key, value in line["choice"])
        if line.get("refused"):
            self.known_refused.setdefault(choice, line["refused"])
            return
        values = {name: line[name] for name in Trial._fields}
        sample = Trial(**values)
        self.known.setdefault((choice, sample.turn), sample)

    def next_turn(self) -> int:
        """Begin a turn: its samples are compared with each other."""
        self.turn += 1
        return self.turn

    def measure(self, choice: Choice, block_s: float) -> Trial | None:
        """Run a block of about `block_s` seconds of a choice in this turn. (all ranks)

        Returns None for a choice that cannot be trained, which is noted. Raises SearchEnded.
        """
        for sample in self.samples.get(choice, ()):
            if sample.turn == self.turn:
                return sample
        known = self.known.get((choice, self.turn))
        if known is not None:
            self._add(choice, known)
            return self._right(choice, known)
        if choice in self.known_refused:
            self.refused.setdefault(choice, self.known_refused[choice])
        if choice in self.refused:
            return None
        self._require_time()
        try:
            config = configured(self.here, choice)
        except NanorayError as error:
            self.refuse(choice, str(error))
            return None

        try:
            sample = self._run_block(choice, config, block_s)
        except NanorayError as error:
            # The same on all ranks: it follows from the configuration alone.
            self.refuse(choice, str(error))
            return None
        except Exception as error:
            if is_collective_error(error):
                raise
            self._fail(choice, error)
            return None
        self._add(choice, sample)
        self._keep({"choice": choice, **sample._asdict()})
        return self._right(choice, sample)

    def keep_open(self, choices: Sequence[Choice], memory_bytes: float, use: Callable[[], T]) -> T:
        """Return what `use` returns; meanwhile the arms of these choices stay open. (all ranks)

        To make an arm, and above all to compile it, takes longer than a block of steps. The arms are
        made for each block nevertheless where all of them may need more than `memory_bytes`
        together.
        """
        if not self._can_stay_open(choices, memory_bytes):
            return use()
        with ExitStack() as stack:
            stack.callback(self._open.clear)
            for choice in choices:
                spec = replace(self.spec, config=configured(self.here, choice))
                arm = self.subject.open(spec, partial(LoopArm, spec, self.mesh))
                stack.callback(arm.close)
                self._open[choice] = arm
            return use()

    def _can_stay_open(self, choices: Sequence[Choice], memory_bytes: float) -> bool:
        """Return whether arms of these choices may be open together."""
        if not self.subject.keeps_tasks:
            return False
        for choice in choices:
            # Captured graphs of several models in one process were never tried.
            if configured(self.here, choice).compile == "cuda_graphs":
                return False
        peaks = [self.samples[choice][-1].peak_bytes for choice in choices]
        return sum(peaks) <= memory_bytes

    def _right(self, choice: Choice, trial: Trial) -> Trial | None:
        """Return a trial whose loss is that of the present setting; refuse the choice otherwise.

        A choice that computes something else must not be recommended, however fast it is. What may
        change the result is not compared.
        """
        present = self.samples[()][0].loss if () in self.samples else trial.loss
        tolerance = same_loss(self.here.config.precision)
        is_same = math.isclose(trial.loss, present, rel_tol=tolerance)
        if is_same or changes_of(self.here, choice):
            return trial
        self.refuse(
            choice, f"its loss is {trial.loss:.6g}, and that of the present setting {present:.6g}"
        )
        return None

    def _run_block(self, choice: Choice, config: Config, block_s: float) -> Trial:
        """Train a block of a choice on the ranks of this run. (all ranks)"""
        began = time.monotonic()
        spec = replace(self.spec, config=config)
        arm = self._open.get(choice)
        try:
            if arm:
                block = self._train_on(arm, choice, block_s)
            else:
                block = self.subject.open(
                    spec, lambda task: self._train(spec, task, choice, block_s)
                )
        finally:
            free_memory(self.mesh.device)
        wall_s = self.mesh.broadcast(time.monotonic() - began)
        return Trial(self.turn, block.step_s, block.peak_bytes, block.loss, wall_s, block.steps)

    def _add(self, choice: Choice, sample: Trial) -> None:
        self.samples.setdefault(choice, []).append(sample)
        self.spent_s += sample.wall_s

    def _train(self, spec: RunSpec, task: Task, choice: Choice, block_s: float) -> BlockCost:
        """Train a block on an arm that is made for it. (all ranks)"""
        arm = LoopArm(spec, self.mesh, task)
        try:
            if choice in self.samples:
                return arm.block(self._steps(choice, block_s))
            # The first steps of a choice also show how long they take.
            first = arm.block(1)
            steps = self.mesh.broadcast(max(FIRST_STEPS, round(block_s / first.step_s)))
            return arm.block(min(MOST_STEPS, steps), settling=0)._replace(loss=first.loss)
        finally:
            arm.close()

    def _train_on(self, arm: LoopArm, choice: Choice, block_s: float) -> BlockCost:
        """Train a block on an arm that stays open. (all ranks)

        Its memory contains that of the other arms, and its losses are those of later steps.
        """
        block = arm.block(self._steps(choice, block_s))
        known = self.samples[choice][-1]
        return block._replace(peak_bytes=known.peak_bytes, loss=known.loss)

    def _steps(self, choice: Choice, block_s: float) -> int:
        """Return how many steps of a choice that was measured take so long."""
        steps = round(block_s / self.samples[choice][-1].step_s)
        return min(MOST_STEPS, max(FIRST_STEPS, steps))

    def _require_time(self) -> None:
        """Raise SearchEnded where the budget is spent, or any rank shall stop. (all ranks)"""
        late = self.mesh.rank == 0 and time.monotonic() >= self._deadline - self.reserve_s
        orders = self.mesh.all_gather((late, int(self.wanted())))
        if any(order >= Order.STOP for _, order in orders):
            raise SearchEnded(STOPPED)
        if orders[0][0]:
            raise SearchEnded("the budget is spent")

    def refuse(self, choice: Choice, why: str) -> None:
        """Note that a choice cannot be trained, or is not worth a try."""
        self.refused[choice] = why
        if choice not in self.known_refused:
            self._keep({"choice": choice, "refused": why})
        log.info("%s: %s", words(choice), why)

    def _fail(self, choice: Choice, error: Exception) -> None:
        """Note that a choice has failed on this rank.

        Alone it goes on. Other ranks may wait in a collective of that step, so several begin anew,
        and leave this choice out. Raises OutOfMemory, or the error.
        """
        why = f"{type(error).__name__}: {error}"
        is_short = is_out_of_memory(error)
        if is_short:
            why = f"out of memory: {describe(error, self.mesh.device)}"
        self.refused[choice] = why
        line = {"choice": choice, "refused": why}
        if self.mesh.world_size == 1:
            self._keep(line)
            return
        append_line(own_file(self.spec.folder, self.mesh.rank), json.dumps(line))
        if is_short:
            raise OutOfMemory(f"rank {self.mesh.rank}: {words(choice)}: {why}") from error
        raise error

    def _keep(self, line: dict[str, Any]) -> None:
        """Append a line to the file of the search. (rank 0 only)"""
        if self.mesh.rank == 0:
            append_line(own_file(self.spec.folder, 0), json.dumps(line))


def compared(config: Config) -> dict[str, Any]:
    """Return the keys that decide what a search measures."""
    values = config.model_dump()
    for key in (*OF_ONE_COMMAND, "name", "tuned_for", "env", "ray_address"):
        del values[key]
    return values


def own_file(folder: Path, rank: int) -> Path:
    """Return the file of one rank; all but the first have only what failed there alone."""
    return folder / (FILE if rank == 0 else f"tune.rank{rank}.jsonl")


def files_of(folder: Path) -> list[Path]:
    """Return the files of a search, that of rank 0 first."""
    return [
        path for path in (folder / FILE, *sorted(folder.glob("tune.rank*.jsonl"))) if path.is_file()
    ]
