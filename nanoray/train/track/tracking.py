"""Report a run to a tracker beside the training: a slow, failing or hanging one changes nothing.

The training thread only puts records into a bounded queue. A thread of its own begins the tracker's
run and hands the records over. What it has to say waits until the training thread reports next: so
observers are called by one thread alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nanoray.base.atomic import read_json, write_json
from nanoray.base.metrics import METRICS, values_of
from nanoray.checkpoint.run import RunSpec
from nanoray.errors import ConfigError
from nanoray.train.track.mlflow_tracker import MlflowTracker
from nanoray.train.track.observer import Observer
from nanoray.train.track.tracker import Results, TrackedRun, Tracker, tracked_run, without_passwords
from nanoray.train.track.wandb_tracker import WandbTracker

IDS = "trackers"  # the folder of the run in which each tracker has its id of the run
MOST_WAITING = 1000  # records that wait for the tracker; later ones are left out
PATIENCE_S = 30.0  # how long the end of a run waits for the tracker
PATIENCE_STOPPED_S = 10.0  # and that of a stopped one, whose process may soon be killed
# Of the outcome: what is known at the end and in no record
RESULTS = (
    "exit_reason",
    "step",
    "train_loss",
    "loss_ema",
    "val_loss",
    "train_s",
    "tok_per_sec",
    "samples_per_sec",
    "step_ms",
    "first_step_s",
    "world_size",
    "backend",
    "precision",
    "device",
    "resumed_from",
    "torch",
)
TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def require_tracker(kind: str) -> None:
    """Raise ConfigError unless the package of the key `track` can be imported here."""
    if kind == "none":
        return
    missing = TRACKERS[kind]().missing()
    if missing:
        raise ConfigError(missing)


class Tracking(Observer):
    """An observer that reports to a tracker. (rank 0 only)"""

    def __init__(
        self,
        tracker: Tracker,
        spec: RunSpec,
        note: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._tracker = tracker
        self._spec = spec
        self._note = note
        self._patience_s = patience_s
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()  # lines for the user
        self._thread: threading.Thread | None = None
        self._described: set[str] = set()  # metrics whose units the tracker has
        self._last_step = 0
        self._left_out = 0  # records for which there was no room
        self._handed_over = 0
        self._received = 0
        self._results: Results | None = None

    def problem(self) -> str | None:
        """Return why the tracker cannot be used in this process, and the remedy; None if it can."""
        return self._tracker.problem(self._run())

    def begin(self) -> None:
        """Start the thread, which begins the tracker's run or continues it."""
        if self._thread is None and self._results is None:
            name = f"nanoray-{self._tracker.kind}"
            # A daemon: a tracker that hangs must not keep the process from its end.
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def on_note(self, text: str) -> None:
        """Begin with the first line of the run; a tracker has no place for lines."""
        self.begin()

    def on_record(self, record: dict[str, Any]) -> None:
        """Queue the metrics of a step. Never waits."""
        self.begin()
        self._say_news()
        values = values_of(record)
        self._last_step = record["step"]
        self._received += 1
        try:
            self._tasks.put_nowait(lambda: self._log(record["step"], record["time"], values))
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._note(
                    f"warning  {self._tracker.kind} is slow: {MOST_WAITING} records wait for it, "
                    "and further ones are left out; metrics.jsonl has all of them"
                )

    on_late = on_record

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        """Keep the results, which `close` hands over."""
        values = {key: outcome[key] for key in RESULTS if outcome.get(key) is not None}
        status = "finished"
        if outcome.get("exit_reason") == "stopped":
            status = "stopped"
        self._results = Results(values, outcome.get("sample") or "", status)

    def on_failure(self, error: BaseException) -> None:
        """Keep that the run has failed."""
        # Only the class: a message may quote the script's data.
        self._results = Results({"exit_reason": f"failed: {type(error).__name__}"}, "", "failed")

    def close(self) -> None:
        """Hand over the results, and wait for the tracker, but not for ever."""
        if self._thread is None:
            return
        # Another process goes on with the run where this one neither finished it nor failed.
        results = self._results or Results({}, "", "")
        step = self._last_step
        patience_s = self._patience_s
        if results.status == "stopped":
            patience_s = min(patience_s, PATIENCE_STOPPED_S)
        deadline = time.monotonic() + patience_s
        with suppress(queue.Full):
            self._tasks.put(lambda: self._tracker.finish(step, results), timeout=patience_s / 2)
            self._tasks.put(None, timeout=patience_s / 4)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._say_news()
        if self._thread.is_alive():
            waiting = self._received - self._handed_over - self._left_out
            self._note(
                f"warning  {self._tracker.kind} did not finish within {patience_s:.0f} s: "
                f"{waiting} records may be missing there; metrics.jsonl has all of them"
            )
        self._thread = None

    def _say_news(self) -> None:
        """Show the lines of the thread. (the training thread only)"""
        with suppress(queue.Empty):
            while True:
                self._note(self._news.get_nowait())

    # In the tracker's thread.

    def _work(self) -> None:
        """Call the tracker, until the end or its first error."""
        kind = self._tracker.kind
        try:
            where = self._tracker.start(self._run(), self._keep_id)
            self._news.put(f"track  {kind}: {where}")
            while True:
                task = self._tasks.get()
                if task is None:
                    return
                task()
        except (Exception, SystemExit) as error:  # of any class: it is another package's code
            lines = without_passwords(str(error)).strip().splitlines() or [""]
            self._news.put(
                f"warning  {kind} failed ({type(error).__name__}: {lines[0][:200]}); the run goes "
                "on without it, and metrics.jsonl has all records"
            )
        # Take what still comes: `close` must find room in the queue of a tracker that has failed.
        while self._tasks.get() is not None:
            pass

    def _log(self, step: int, time_s: float, values: dict[str, Any]) -> None:
        new = (values.keys() & METRICS.keys()) - self._described
        if new:
            self._tracker.describe({name: METRICS[name].unit for name in sorted(new)})
            self._described |= new
        self._tracker.log(step, time_s, values)
        self._handed_over += 1

    def _run(self) -> TrackedRun:
        return tracked_run(self._spec, self._known_id())

    @property
    def _id_file(self) -> Path:
        return self._spec.folder / IDS / f"{quote(self._tracker.key, safe='')}.json"

    def _known_id(self) -> str:
        """Return the tracker's id of this run; "" for none yet."""
        return str(read_json(self._id_file).get("id", ""))

    def _keep_id(self, run_id: str) -> None:
        """Write the tracker's id of this run, which a resume or the next rank 0 goes on with."""
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._id_file, {"tracker": self._tracker.key, "id": run_id})
