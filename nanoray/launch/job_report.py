"""What a run writes onto its own Ray job, started by `ray job submit` or KubeRay, while it trains.

Ray fixes a job's metadata when the job is submitted, and offers no call to change it later
(ray-project/ray#36638). But the jobs API reads a job's record from the head's key-value store, so
the driver writes there: `nanoray_*` keys into the metadata, and one line as the message, which `ray
job status` prints. It does so only while the record says RUNNING: Ray itself writes the record
before the driver starts and after it has ended, and keeps the metadata then.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from nanoray.checkpoint.run import RunSpec, newest_record
from nanoray.launch.connection import bounded
from nanoray.launch.ray_compat import JobRecord
from nanoray.train.watch.observers import progress

INTERVAL_S = 5.0
WRITE_S = 2.0  # for one request; a head that is gone must hold up neither training nor the end
PREFIX = "nanoray_"


def submission_id() -> str:
    """Return the id of the Ray job whose driver this process is; empty if there is no job."""
    with suppress(ValueError, KeyError, TypeError):
        job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        return str(job["metadata"]["job_submission_id"])
    return ""


class JobReport:
    """A context manager that keeps the record of this process's Ray job up to date, in a thread.

    Without a job it does nothing.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.state = ""  # set at the end: finished, stopped, failed: ...
        # How many steps the run has: a script may give `fit` another number
        self.count_steps: Callable[[], int] = lambda: spec.config.max_steps
        self._spec = spec
        self._job = submission_id()
        self._written: dict[str, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._write_until_exit, name="nanoray-job-report", daemon=True
        )

    def __enter__(self) -> JobReport:
        if self._job:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.state = "failed"
        self._over.set()
        if self._job:
            bounded(self._thread.join, 2 * WRITE_S + 1)

    def facts(self) -> dict[str, str]:
        """Return state and folder of the run and, once a step was logged, step, loss and ETA."""
        record = newest_record(self._spec.folder)
        facts = {"state": "starting", "folder": str(self._spec.folder)}
        if record:
            facts["state"] = "training"
            facts |= progress(record, self.count_steps())
        if self.state:
            facts["state"] = self.state
        return facts

    def _write_until_exit(self) -> None:
        over = False
        while not over:
            # A head that does not answer is handled by the driver; this is only a report.
            with suppress(Exception):
                facts = self.facts()
                if facts != self._written:
                    self._write(facts)
                    self._written = facts
            over = self._over.wait(INTERVAL_S)
        with suppress(Exception):
            self._write(self.facts())

    def _write(self, facts: dict[str, str]) -> None:
        record = JobRecord(self._job)
        info = json.loads(record.read(WRITE_S))
        # Ray writes the record itself before the driver starts and after it has ended.
        if info["status"] != "RUNNING":
            return
        # Keep the metadata of others, and replace this run's.
        metadata = {}
        for label, value in (info["metadata"] or {}).items():
            if not label.startswith(PREFIX):
                metadata[label] = value
        for name, value in facts.items():
            metadata[f"{PREFIX}{name}"] = value
        info["metadata"] = metadata

        details = [f"{name} {value}" for name, value in facts.items() if name != "state"]
        info["message"] = " · ".join([facts["state"], *details])
        record.write(json.dumps(info).encode(), WRITE_S)
