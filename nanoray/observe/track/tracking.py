"""Report a run to a tracker: one that fails or hangs is given up with one line, and training goes on.

The training thread puts calls into a queue and never waits for them, because the other ranks would
wait, too. A thread makes them, one after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RESULTS, RunSpec
from nanoray.errors import ConfigError
from nanoray.machine.atomic import read_json, write_json
from nanoray.machine.metrics import values_of
from nanoray.observe.track.mlflow_tracker import MlflowTracker
from nanoray.observe.track.observer import Observer
from nanoray.observe.track.tracker import (
    Results,
    Tracker,
    missing_package,
    shown_config,
    without_passwords,
)
from nanoray.observe.track.wandb_tracker import WandbTracker

IDS = "trackers"  # the folder of the run in which each tracker has its id of the run
MOST_WAITING = 1000  # records that wait for the tracker
PATIENCE_S = 30.0  # how long the end of a run waits for the tracker
TRACKERS: dict[str, Callable[[], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def require_tracker(kind: str) -> None:
    """Raise ConfigError unless the package of the key `track` can be imported here."""
    missing = missing_package(kind) if kind != "none" else None
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
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # that a call raised
        self._where = ""  # of the tracker's run, until it is printed
        self._given_up = False
        self._last_step = 0
        self._results = Results({}, "", "")  # another process goes on with the run

    def problem(self) -> str | None:
        """Return why the tracker cannot be used in this process, and the remedy; None if it can."""
        return missing_package(self._tracker.kind) or self._tracker.problem()

    def on_note(self, text: str) -> None:
        """Begin with the first line of the run; a tracker has no place for lines."""
        if self._thread is None:
            # A daemon: a tracker that hangs must not keep the process from its end.
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
            self._call(self._start)

    def on_record(self, record: dict[str, Any]) -> None:
        """Report the metrics of a step."""
        self.on_note("")
        self._last_step = record["step"]
        log = self._tracker.log
        self._call(partial(log, record["step"], record["time"], values_of(record)))

    on_late = on_record

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        """Keep the results, which `close` hands over."""
        values = {key: outcome[key] for key in (*RESULTS, "step") if outcome.get(key) is not None}
        status = "stopped" if outcome.get("exit_reason") == "stopped" else "finished"
        self._results = Results(values, outcome.get("sample") or "", status)

    def on_failure(self, error: BaseException) -> None:
        """Keep that the run has failed."""
        # Only the class: a message may quote the script's data.
        self._results = Results({"exit_reason": f"failed: {type(error).__name__}"}, "", "failed")

    def close(self) -> None:
        """Hand over the results, and wait for the tracker, but not for ever."""
        if self._thread is None or self._given_up:
            return
        self._call(partial(self._tracker.finish, self._last_step, self._results))
        self._call(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._give_up(f"no answer within {self._patience_s:g} s")
        self._report()

    def _call(self, call: Callable[[], None] | None) -> None:
        """Let the thread make a call; None ends it. Never waits."""
        self._report()
        if self._given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"{MOST_WAITING} records wait for it")

    def _report(self) -> None:
        """Print where the tracker's run is, and a failure. (the training thread only)"""
        if self._error is not None:
            lines = without_passwords(str(self._error)).strip().splitlines() or [""]
            self._give_up(f"{type(self._error).__name__}: {lines[0][:200]}")
        elif self._where:
            where, self._where = self._where, ""
            self._note(f"track  {self._tracker.kind}: {where}")

    def _give_up(self, reason: str) -> None:
        """Call the tracker no more, and say so once."""
        if self._given_up:
            return
        self._given_up = True
        self._note(
            f"warning  {self._tracker.kind} failed ({reason}); the run goes on without it, and "
            "metrics.jsonl has all records"
        )

    # In the tracker's thread.

    def _work(self) -> None:
        """Make the calls, until the end or the first error."""
        try:
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:  # of any class: it is another package's code
            self._error = error

    def _start(self) -> None:
        """Begin the tracker's run, or continue the one whose id an earlier process has written."""
        known_id = str(read_json(self._id_file).get("id", ""))
        config = shown_config(self._spec.config)
        run_id, self._where = self._tracker.start(self._spec.folder, config, known_id)
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._id_file, {"id": run_id})

    @property
    def _id_file(self) -> Path:
        return self._spec.folder / IDS / f"{self._tracker.kind}.json"
