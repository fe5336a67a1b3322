"""Observers of a run: they receive notes and metric records, on rank 0, and change nothing."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config.settings import public
from nanoray.machine.metrics import check_record
from nanoray.machine.output import say
from nanoray.machine.text import clock, short
from nanoray.observe.track.observer import Observer
from nanoray.observe.track.tracking import TRACKERS, Tracking
from nanoray.observe.watch.record_files import JsonlWriter, TensorBoardWriter

log = logging.getLogger("nanoray.rank")


class Console(Observer):
    """Prints one line per logged step; console.py contains others, for terminals and --quiet."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._first: tuple[float, int] | None = None

    def on_length(self, steps: int) -> None:
        """Count to that step from now on."""
        self.max_steps = steps

    def on_note(self, text: str) -> None:
        """Print the line at once."""
        say(text)

    def on_record(self, record: dict[str, Any]) -> None:
        """Print one aligned line."""
        say(self.line(record))

    def on_output(self, name: str, line: str) -> None:
        """Print a line that a script on rank 0 has written to its stdout or stderr."""
        stream = sys.stderr if name == "stderr" else sys.stdout
        print(line, file=stream, flush=True)

    def line(self, record: dict[str, Any]) -> str:
        """Return the line of a record. Steps increase from call to call, but for a restart."""
        step = record["step"]
        parts = [
            f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}",
            f"loss {record.get('train/loss', nan):.4f}",
        ]
        if "val/loss" in record:
            parts.append(f"val {record['val/loss']:.4f}")
        if "val/accuracy" in record:
            parts.append(f"accuracy {100 * record['val/accuracy']:.1f} %")
        if "train/lr" in record:
            parts.append(f"lr {record['train/lr']:.1e}")
        parts.append(f"gnorm {record.get('train/grad_norm', nan):.2f}")
        if "time/step_ms" in record:
            parts.append(f"{record['time/step_ms']:.3g} ms")
        for key, unit in (("perf/tok_per_sec", "tok/s"), ("perf/samples_per_sec", "samples/s")):
            if key in record:
                parts.append(f"{short(record[key])} {unit}")
        if "perf/mfu" in record:
            parts.append(f"mfu {record['perf/mfu']:.1f} %")
        if "comm/exposed_share" in record:
            parts.append(f"comm exposed {record['comm/exposed_share']:.0f} %")
        return " | ".join([*parts, *self.eta(record)])

    def eta(self, record: dict[str, Any]) -> list[str]:
        """Return `eta` and the remaining time, by the mean since the first record; [] at that one."""
        step = record["step"]
        if (
            self._first is None or step < self._first[1]
        ):  # a restart may begin before the first line
            self._first = (record["time"], step)
        first_time, first_step = self._first
        if step == first_step:
            return []
        step_s = (record["time"] - first_time) / (step - first_step)
        return [f"eta {clock(step_s * (self.max_steps - step))}"]


class Observers:
    """The observers of this process, which are open on rank 0 alone.

    After the loss of a rank another process may become rank 0.
    """

    def __init__(self, spec: RunSpec, observers: Sequence[Observer]) -> None:
        """`observers` receive the same notes and records on rank 0 as its files."""
        self._spec = spec
        self._given = observers
        self.opened: list[Observer] = []
        self._metrics: JsonlWriter | None = None
        self._failing: set[str] = set()  # files that could not be written at the last record

    def open(self, rank: int, resume_step: int) -> None:
        """Open the observers on rank 0, and close them elsewhere.

        Records after `resume_step` are dropped, because those steps run again.
        """
        if rank == 0 and not self.opened:
            config = self._spec.config
            folder = self._spec.folder
            self._metrics = JsonlWriter(folder / "metrics.jsonl", resume_step)
            self.opened = [*self._given, self._metrics]
            if config.tensorboard:
                shown = {key: public(key, value) for key, value in config.model_dump().items()}
                text = json.dumps(shown, indent=2) + "\n"
                self.opened.append(TensorBoardWriter(folder / "tb", text, resume_step))
            if config.track != "none":
                tracker = TRACKERS[config.track]()
                self.opened.append(Tracking(tracker, self._spec, self.note))
            for observer in self.opened:
                observer.on_length(config.max_steps)
        while rank and self.opened:
            self.opened.pop().close()

    def problem(self) -> str | None:
        """Return why an observer cannot do its work, and the remedy; None if all can."""
        problems = (observer.problem() for observer in self.opened)
        return next(filter(None, problems), None)

    def catch_up(self, newest: dict[str, Any], reported_step: int) -> None:
        """Report the newest record if an interruption or a lost rank kept it from being reported."""
        if not self.opened or self._metrics is None:
            return
        if self._metrics.last_step < newest.get("step", -1) <= reported_step:
            self.record(newest)

    def note(self, text: str) -> None:
        """Show one line to the user on rank 0; the other ranks only log it."""
        log.info(text)
        for observer in self.opened:
            observer.on_note(text)

    def record(self, record: dict[str, Any]) -> None:
        """Report the record of a step. On a full disk it waits in memory, and the run continues."""
        check_record(record)
        for observer in self.opened:
            self._pass_on(observer, observer.on_record, record)
            # Another dict: all ranks keep the engine's own. Its names take precedence.
            record = record | observer.added() | record

    def _pass_on(
        self,
        observer: Observer,
        on_record: Callable[[dict[str, Any]], None],
        record: dict[str, Any],
    ) -> None:
        """Call an observer; warn at the first failure of a file, and when it works again."""
        name = _target(observer)
        try:
            on_record(record)
        except (OSError, ValueError) as error:
            if name not in self._failing:
                self._failing.add(name)
                self.note(f"warning  {name} cannot be written ({_reason(error)})")
        else:
            if name in self._failing:
                self._failing.discard(name)
                self.note(f"warning  {name} is written again")

    def complete_newest(self) -> None:
        """Add to the newest record what was added after it."""
        late: dict[str, Any] = {}
        for observer in self.opened:
            late |= observer.added()
        if not late:
            return
        newest = self._metrics.newest if self._metrics else {}
        if not newest:
            self.note(f"warning  there is no record yet: {', '.join(late)} is in no file")
            return
        late = {"step": newest["step"], "time": newest["time"], **late}
        for observer in self.opened:
            self._pass_on(observer, observer.on_late, late)

    def saved(self, step: int) -> None:
        """Call the observers for which the checkpoint of a step matters: it is on disk."""
        for observer in self.opened:
            observer.on_saved(step)

    def rewind(self, step: int) -> None:
        """Drop the records after `step` where an observer keeps records."""
        for observer in self.opened:
            try:
                observer.rewind(step)
            except OSError as error:
                where = _target(observer)
                self.note(
                    f"warning  records after step {step} could not be dropped from {where}: "
                    f"{_reason(error)}"
                )

    def ended(self, outcome: Mapping[str, Any]) -> None:
        """Pass the outcome to the observers that report it."""
        for observer in self.opened:
            observer.on_end(outcome)
        self.complete_newest()

    def failed(self, error: BaseException) -> None:
        """Pass the error that ends the run to the observers that report it."""
        for observer in self.opened:
            observer.on_failure(error)
        self.complete_newest()

    def close(self) -> None:
        """Close all observers; a failed write gives a warning."""
        for observer in self.opened:
            try:
                observer.close()
            except (OSError, ValueError) as error:
                self.note(f"warning  some records are not in {_target(observer)}: {_reason(error)}")


FILES: dict[type, str] = {JsonlWriter: "metrics.jsonl", TensorBoardWriter: "tb/"}


def _target(observer: Observer) -> str:
    """Return what an observer writes, for messages."""
    return FILES.get(type(observer), type(observer).__name__)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def progress(record: dict[str, Any], max_steps: int) -> dict[str, str]:
    """Return step, loss, val_loss and ETA of a run's newest record, as text, where it has them."""
    texts = {
        "step": f"{record['step']}/{max_steps}",
        "loss": f"{record.get('train/loss', nan):.4f}",
    }
    if "val/loss" in record:
        texts["val_loss"] = f"{record['val/loss']:.4f}"
    if "time/step_ms" in record:
        remaining_s = record["time/step_ms"] / 1e3 * (max_steps - record["step"])
        texts["eta"] = clock(remaining_s)
    return texts


def now() -> float:
    """Return Unix seconds, for display only: nothing is ordered by it."""
    return round(time.time(), 3)
