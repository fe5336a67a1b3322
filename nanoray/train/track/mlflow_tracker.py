"""MLflow: `--track mlflow`, and nanoray.MlflowCallback.

It uses MLflow's client and not `mlflow.start_run`, so an active run of the program itself stays as
it is.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from nanoray.base.atomic import one_at_a_time
from nanoray.train.track.tracker import Results, TrackedRun, Tracker, flattened, without_passwords

LONGEST_VALUE = 6000  # characters of a parameter; MLflow refuses longer ones
SERVERS = ("http", "https")  # schemes of addresses with a server, which makes its tables itself
PER_REQUEST = 100  # parameters in one request, as many as MLflow takes
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """A run of MLflow. Without a tracking URI it is in a file beside the runs' folders."""

    kind: ClassVar[str] = "mlflow"
    packages: ClassVar[tuple[str, ...]] = ("mlflow",)

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "nanoray"
        self._name = name
        self._uri = tracking_uri
        self._tags = dict(tags or {})
        self._client: Any = None
        self._run_id = ""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self._experiment}"

    def problem(self, run: TrackedRun) -> str | None:
        if self.missing():
            return self.missing()
        uri = self._uri_for(run)  # imports mlflow now, and not beside the first steps
        if urlsplit(uri).scheme in SERVERS:
            return None  # the thread finds out whether the server answers
        try:
            self._new_client(uri, run)
        except Exception as error:  # MLflow's own, SQLAlchemy's, or the file system's
            lines = without_passwords(str(error)).strip().splitlines() or [""]
            return (
                f"track = mlflow cannot use the tracking URI {without_passwords(uri)} "
                f"({type(error).__name__}: {lines[0][:160]}); set MLFLOW_TRACKING_URI to a server "
                "or to sqlite:///FILE, which needs: pip install 'nanoray[mlflow]'"
            )
        return None

    def start(self, run: TrackedRun, keep_id: Callable[[str], None]) -> str:
        uri = self._uri_for(run)
        self._client = self._new_client(uri, run)
        if run.known_id:
            self._run_id = run.known_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {"mlflow.source.name": "nanoray", "nanoray.folder": str(run.folder)}
            created = self._client.create_run(
                self._experiment_id(run, uri), run_name=self._name or run.name, tags=tags
            )
            self._run_id = created.info.run_id
            keep_id(self._run_id)
        for key, value in self._tags.items():
            self._client.set_tag(self._run_id, key, value)
        self._log_parameters(run)
        return f"{without_passwords(uri)}, experiment {self._experiment}"

    def describe(self, units: Mapping[str, str]) -> None:
        for name, unit in units.items():
            self._client.set_tag(self._run_id, f"unit/{name}", unit)

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        from mlflow.entities import Metric

        milliseconds = int(1000 * time_s)
        metrics = []
        for name, value in values.items():
            if isinstance(value, str):
                # MLflow's metrics are numbers. A tag has the newest text.
                self._client.set_tag(self._run_id, allowed_name(name), value)
            else:
                metrics.append(Metric(allowed_name(name), float(value), milliseconds, step))
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, step: int, results: Results) -> None:
        for key, value in results.values.items():
            self._client.set_tag(self._run_id, f"nanoray.{key}", str(value))
        if results.sample:
            self._client.log_text(self._run_id, results.sample, f"samples/step_{step:08d}.txt")
        if results.status:
            self._client.set_terminated(self._run_id, STATUS[results.status])

    def _uri_for(self, run: TrackedRun) -> str:
        """Return the URI that the program or the environment has set, or that of our own file.

        MLflow's default is a file of the working folder, which a Ray job loses.
        """
        from mlflow.tracking import get_tracking_uri, is_tracking_uri_set

        if self._uri:
            return self._uri
        if is_tracking_uri_set():
            return str(get_tracking_uri())
        return f"sqlite:///{run.folder.parent / 'mlflow.db'}"

    def _new_client(self, uri: str, run: TrackedRun) -> Any:
        """Return a client. The first one of a file makes its tables, which is no transaction."""
        from mlflow.tracking import MlflowClient

        if urlsplit(uri).scheme in SERVERS:
            return MlflowClient(tracking_uri=uri)
        with one_at_a_time(_lock_of(uri, run)):
            return MlflowClient(tracking_uri=uri)

    def _experiment_id(self, run: TrackedRun, uri: str) -> str:
        """Return the experiment's id; make the experiment where there is none."""
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        # Our own file has its artifacts beside it, and not in the working folder.
        artifacts = None
        if uri == f"sqlite:///{run.folder.parent / 'mlflow.db'}":
            artifacts = (run.folder.parent / "mlflow-artifacts").as_uri()
        try:
            return str(
                self._client.create_experiment(self._experiment, artifact_location=artifacts)
            )
        except Exception:  # of MLflow, or of a server: another run may have made it meanwhile
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def _log_parameters(self, run: TrackedRun) -> None:
        """Write the configuration. MLflow's parameters never change, so a resume adds new ones."""
        from mlflow.entities import Param

        before = self._client.get_run(self._run_id).data.params
        new = []
        for key, value in flattened(run.config).items():
            text = str(value)[:LONGEST_VALUE]
            if key not in before:
                new.append(Param(key, text))
            elif before[key] != text:
                # Such as max_steps of a longer run.
                self._client.set_tag(self._run_id, f"resumed.{key}", text)
        for start in range(0, len(new), PER_REQUEST):
            self._client.log_batch(self._run_id, params=new[start : start + PER_REQUEST])


def _lock_of(uri: str, run: TrackedRun) -> Path:
    """Return the lock of what all runs with this URI share: beside the file, if it is one."""
    path = urlsplit(uri).path
    if uri.startswith("sqlite") and len(path) > 1:
        return Path(f"{path[1:]}.lock")  # the path follows a third slash
    return run.folder.parent / "mlflow.lock"


def allowed_name(name: str) -> str:
    """Return a name of a metric as MLflow takes it: it refuses others, and the whole request."""
    name = re.sub(r"[^\w.\- /]", "_", name)
    # It also refuses what would be another path: `a//b`, `../a`, `/a`.
    if posixpath.normpath(name) != name or name.startswith((".", "/")):
        name = re.sub(r"^[./]+|/+|/$", "_", name)
    return name
