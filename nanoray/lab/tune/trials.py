"""The blocks of steps that a search has run: on all ranks, each kept as a line of tune.jsonl.

    measure(choice, seconds)   ─► known already?  ─► its Trial of then
                               ─► all ranks: LoopArm ─► block ─► Trial ─► tune.jsonl (rank 0)
    next_turn(choices)         ─► the arms of these choices stay, so that a block makes none anew

All ranks search by the same rules and from the same samples, so they agree on what comes next. After
a lost rank a search asks the same questions again, and gets the answers that the file has.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.errors import NanorayError, OutOfMemory
from nanoray.faults.cause import is_collective_error, is_out_of_memory
from nanoray.lab.tune.knobs import Choice, TunedRun, configured, may_change_result, words
from nanoray.lab.tune.tuned_model import TunedModel
from nanoray.machine.atomic import append_line, read_json_lines
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import Order
from nanoray.train.loop_arm import BlockCost, LoopArm, free_memory, same_loss
from nanoray.train.out_of_memory import describe
from nanoray.train.tasks import Task

log = logging.getLogger("nanoray.rank")
FILE = "tune.jsonl"
STOPPED = "stopped"
FEWEST_STEPS = 3
MOST_STEPS = 10_000


class Trial(NamedTuple):
    """One block of a choice."""

    turn: int  # samples of one turn were measured right after each other
    step_s: float
    peak_bytes: int
    loss: float


class SearchEnded(Exception):
    """The budget is spent, or a rank shall stop. Raised on all ranks at the same place."""


@dataclass
class Trials:
    """Measures choices on the ranks of this run."""

    spec: RunSpec
    mesh: Mesh
    subject: TunedModel
    here: TunedRun
    memory: float  # bytes that a rank may take
    wanted: Callable[[], Order]
    deadline: float = math.inf  # of time.monotonic(): no block begins after it
    samples: dict[Choice, list[Trial]] = field(default_factory=dict)
    refused: dict[Choice, str] = field(default_factory=dict)
    # What an earlier attempt has measured, until this one comes to it
    known: dict[tuple[Choice, int], Trial] = field(default_factory=dict)
    turn: int = 0

    def __post_init__(self) -> None:
        self._staying: Sequence[Choice] = ()
        self._open: dict[Choice, LoopArm] = {}  # arms of those, which stay between their blocks

    def read(self) -> None:
        """Take over what this search had measured before it lost a rank. (all ranks)"""
        lines: list[dict[str, Any]] = []
        if self.mesh.rank == 0:
            files = sorted(self.spec.folder.glob("tune*.jsonl"))
            lines = [line for path in files for line in read_json_lines(path)]
        for line in self.mesh.broadcast(lines):
            choice: Choice = tuple((key, value) for key, value in line.pop("choice"))
            if "refused" in line:
                self.refused[choice] = line["refused"]
            else:
                trial = Trial(**line)
                self.known[choice, trial.turn] = trial

    def next_turn(self, staying: Sequence[Choice] = ()) -> int:
        """Begin a turn: its samples are compared with each other. (all ranks)

        The arms of choices that were measured before may stay open after it: to make an arm, and
        above all to compile it, takes longer than a block of steps. None stays where all of them may
        need too much memory together, or where a script makes the model, because it may close things.
        """
        peaks = [self.samples[choice][-1].peak_bytes for choice in staying]
        # Captured graphs of several models in one process were never tried.
        has_graphs = any(configured(self.here, c).compile == "cuda_graphs" for c in staying)
        if has_graphs or self.subject.main or sum(peaks) > self.memory:
            staying = ()
        for choice in [choice for choice in self._open if choice not in staying]:
            self._open.pop(choice).close()
        self._staying = staying
        self.turn += 1
        return self.turn

    def measure(self, choice: Choice, block_s: float) -> Trial | None:
        """Run a block of about `block_s` seconds of a choice in this turn. (all ranks)

        Returns None for a choice that cannot be trained, which is noted. Raises SearchEnded.
        """
        if choice in self.refused:
            return None
        for trial in self.samples.get(choice, ()):
            if trial.turn == self.turn:
                return trial
        found = self.known.get((choice, self.turn)) or self._measured(choice, block_s)
        if found is None:
            return None
        self.samples.setdefault(choice, []).append(found)

        # A choice that computes something else must not be recommended, however fast it is. What may
        # change the result is not compared.
        present = self.samples[()][0].loss if () in self.samples else found.loss
        tolerance = same_loss(self.here.config.precision)
        is_same = math.isclose(found.loss, present, rel_tol=tolerance)
        if is_same or may_change_result(self.here, choice):
            return found
        self.refuse(
            choice, f"its loss is {found.loss:.6g}, and that of the present setting {present:.6g}"
        )
        return None

    def _measured(self, choice: Choice, block_s: float) -> Trial | None:
        """Train a block of a choice, and keep it; None for one that cannot be trained. (all ranks)"""
        self._require_time()
        try:
            trial = self._run_block(choice, configured(self.here, choice), block_s)
        except NanorayError as error:
            # The same on all ranks: it follows from the configuration alone.
            self.refuse(choice, str(error))
            return None
        except Exception as error:
            if is_collective_error(error):
                raise
            self._fail(choice, error)
            return None
        self._keep({"choice": choice, **trial._asdict()})
        return trial

    def _run_block(self, choice: Choice, config: Config, block_s: float) -> Trial:
        """Train a block of a choice on the ranks of this run. (all ranks)"""
        spec = replace(self.spec, config=config)
        earlier = self.samples.get(choice)

        def on_new_arm(task: Task) -> BlockCost:
            arm = LoopArm(spec, self.mesh, task)
            if choice in self._staying:
                self._open[choice] = arm
            try:
                # The first steps show how long they take.
                first = arm.block(1)
                steps = steps_in(block_s, first.step_s)
                return arm.block(steps, settling=0)._replace(loss=first.loss)
            finally:
                if choice not in self._open:
                    arm.close()

        try:
            if earlier and choice in self._open:
                block = self._open[choice].block(steps_in(block_s, earlier[-1].step_s))
            else:
                block = self.subject.open(spec, on_new_arm)
        finally:
            free_memory(self.mesh.device)
        # Beside other arms its memory contains theirs, and later losses are those of other steps.
        first = earlier[0] if earlier else block
        return Trial(self.turn, block.step_s, first.peak_bytes, first.loss)

    def _require_time(self) -> None:
        """Raise SearchEnded where the budget is spent, or any rank shall stop. (all ranks)"""
        late = self.mesh.rank == 0 and time.monotonic() >= self.deadline
        orders = self.mesh.all_gather((late, int(self.wanted())))
        if any(order >= Order.STOP for _, order in orders):
            raise SearchEnded(STOPPED)
        if orders[0][0]:
            raise SearchEnded("the budget is spent")

    def refuse(self, choice: Choice, why: str) -> None:
        """Note that a choice cannot be trained, or is not worth a try. (all ranks)"""
        self.refused[choice] = why
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
        if self.mesh.world_size == 1:
            self.refuse(choice, why)
            return
        # A file of its own: rank 0 writes the other one.
        path = self.spec.folder / f"tune.rank{self.mesh.rank}.jsonl"
        append_line(path, json.dumps({"choice": choice, "refused": why}))
        if is_short:
            raise OutOfMemory(f"rank {self.mesh.rank}: {words(choice)}: {why}") from error
        raise error

    def _keep(self, line: dict[str, Any]) -> None:
        """Append a line to the file of the search. (rank 0 only)"""
        if self.mesh.rank == 0:
            append_line(self.spec.folder / FILE, json.dumps(line))


def steps_in(block_s: float, step_s: float) -> int:
    """Return the number of steps that make up a block of about this many seconds."""
    return min(MOST_STEPS, max(FEWEST_STEPS, round(block_s / step_s)))
