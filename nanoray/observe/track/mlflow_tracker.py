"""MLflow: `--track mlflow`. MLFLOW_EXPERIMENT_NAME and MLFLOW_TRACKING_URI choose the place.

It uses MLflow's client and not `mlflow.start_run`, so an active run of the program itself stays as
it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoray.observe.track.tracker import Results, without_passwords

LONGEST_VALUE = 6000  # characters of a parameter; MLflow refuses longer ones
PER_REQUEST = 100  # parameters in one request, as many as MLflow takes
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A run of MLflow. Without a tracking URI it is in a file beside the runs' folders."""

    kind = "mlflow"

    def __init__(self) -> None:
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "nanoray"
        self._client: Any = None
        self._run_id = ""

    def problem(self) -> str | None:
        """Return None: whether an address can be used is known when it is used."""
        import mlflow.tracking  # now, and not beside the first steps  # noqa: F401

        return None

    def start(self, folder: Path, config: dict[str, Any], known_id: str) -> tuple[str, str]:
        """Begin MLflow's run, or continue it; return its id and where it is."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient, get_tracking_uri, is_tracking_uri_set

        # MLflow's default is a file of the working folder, which a Ray job loses.
        own_file = f"sqlite:///{folder.parent / 'mlflow.db'}"
        uri = get_tracking_uri() if is_tracking_uri_set() else own_file
        self._client = MlflowClient(tracking_uri=uri)
        where = f"{without_passwords(uri)}, experiment {self._experiment}"
        if known_id:
            self._run_id = known_id
            self._client.update_run(self._run_id, status="RUNNING")
            return known_id, where

        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            experiment_id = found.experiment_id
        else:
            # Our own file has its artifacts beside it, and not in the working folder.
            artifacts = (folder.parent / "mlflow-artifacts").as_uri() if uri == own_file else None
            experiment_id = self._client.create_experiment(self._experiment, artifacts)
        tags = {"mlflow.source.name": "nanoray", "nanoray.folder": str(folder)}
        created = self._client.create_run(experiment_id, run_name=folder.name, tags=tags)
        self._run_id = created.info.run_id

        # The configuration. MLflow's parameters never change, so a resume adds none.
        params = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in config.items()]
        for first in range(0, len(params), PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[first : first + PER_REQUEST])
        return self._run_id, where

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        """Report the metrics of a logged step. MLflow's are numbers: a tag has the newest text."""
        from mlflow.entities import Metric

        metrics = []
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._run_id, allowed_name(name), value)
            else:
                metrics.append(Metric(allowed_name(name), float(value), int(1000 * time_s), step))
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, step: int, results: Results) -> None:
        """Report how the run ended."""
        for key, value in results.values.items():
            self._client.set_tag(self._run_id, f"nanoray.{key}", str(value))
        if results.sample:
            self._client.log_text(self._run_id, results.sample, f"samples/step_{step:08d}.txt")
        if results.status:
            self._client.set_terminated(self._run_id, STATUS[results.status])


def allowed_name(name: str) -> str:
    """Return a name of a metric as MLflow takes it: it refuses others, and the whole request."""
    name = re.sub(r"[^\w.\- /]", "_", name)
    # It also refuses what would be another path: `a//b`, `../a`, `/a`.
    return re.sub(r"^[./]+|//+|/$|/(?=\.)", "_", name)
