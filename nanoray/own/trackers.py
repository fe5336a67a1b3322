"""Callbacks of a script that report its run to a tracker of experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.own.callbacks import Callback, ReportingCallback
from nanoray.own.run import Run
from nanoray.train.track.mlflow_tracker import MlflowTracker
from nanoray.train.track.tracker import Tracker, missing_package
from nanoray.train.track.tracking import TRACKERS, Tracking
from nanoray.train.track.wandb_tracker import Mode, WandbTracker


class TrackerCallback(ReportingCallback):
    """Reports a run to a tracker: configuration, metrics, results, samples.

    Rank 0 alone reports. A tracker that fails or hangs is given up with one warning, and the run
    goes on. A resume, and another process that becomes rank 0, continue the
    same run of the tracker: its id is in the run's folder, in trackers/.
    """

    tracker: Tracker
    """the part that is different for each tracker"""

    def __init__(self, tracker: Tracker) -> None:
        missing = missing_package(tracker.kind)
        if missing:
            raise ConfigError(missing)
        self.tracker = tracker

    def observer(self, run: Run) -> Tracking:
        """Return the observer that reports a run, as that of the key `track` does."""

        def note(text: str) -> None:
            for observer in run.observers:
                observer.on_note(text)

        return Tracking(self.tracker, run.spec, note)


class WandbCallback(TrackerCallback):
    """Reports a run to Weights & Biases. Needs `pip install 'nanoray[wandb]'`."""

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Mode | None = None,
    ) -> None:
        """Take what wandb.init takes under these names; each has W&B's own variable as default.

        `project` is WANDB_PROJECT or `nanoray`, `name` that of the run's folder, `mode` WANDB_MODE
        or online. W&B's files are in the run's folder, below wandb/, unless WANDB_DIR is set.
        Raises ConfigError without the package. Without an API key, which WANDB_API_KEY or
        `wandb login` gives, `fit` raises it before step 1, unless the mode is offline.
        """
        super().__init__(WandbTracker(project, name, entity, group, tags, mode))


class MlflowCallback(TrackerCallback):
    """Reports a run to MLflow. Needs `pip install 'nanoray[mlflow]'`, or the whole of mlflow."""

    def __init__(
        self,
        experiment: str | None = None,
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Take the experiment's name, the run's, and the address of the server.

        `experiment` is MLFLOW_EXPERIMENT_NAME or `nanoray`, `name` that of the run's folder.
        `tracking_uri` is what mlflow.set_tracking_uri or MLFLOW_TRACKING_URI has set, else the file
        mlflow.db beside the runs' folders: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`
        shows it. Raises ConfigError without the package.
        """
        super().__init__(MlflowTracker(experiment, name, tracking_uri, tags))


def require_different_trackers(callbacks: Sequence[Callback], config: Config) -> None:
    """Raise ConfigError for two trackers that would write to the same run."""
    keys = []
    if config.track != "none":
        keys.append(TRACKERS[config.track]().key)
    for callback in callbacks:
        if isinstance(callback, TrackerCallback):
            keys.append(callback.tracker.key)
    for key in keys:
        if keys.count(key) > 1:
            kind, _, name = key.partition("/")
            raise ConfigError(
                f"two trackers report to {kind} under the name {name}; drop a callback or track = "
                f"{kind}, or give the callback another project"
            )
