"""Open a run: from the settings of a command line to its folder and its record.

    Opening ─► forecast()    --dry_run --world_size N: what ranks would do that need not exist
            ─► set(...)      what this machine decides: the number of ranks, where the run goes
            ─► dry_run(...)  --dry_run: the plan, and who has set each key; starts nothing
            ─► read(), fetch(), open(ranks) ─► RunSpec

`nanoray train` and `python -m nanoray.launch` differ in when they know their devices; each
of them takes these steps in its own order. The driver uses this, so torch is imported late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.upload.fetch import fetch_fitting, fetch_named
from nanoray.cli import Loaded, require_script
from nanoray.cli.open_folder import open_run
from nanoray.cli.run_plan import dataset_of_dry_run, forecast_at, last_lines, plan
from nanoray.config import Config, Settings, resolve_batch
from nanoray.config.choose import precision_of
from nanoray.config.layout import Layout
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.machine.device import Device
from nanoray.machine.host import cpu_features

S = TypeVar("S", bound=Settings)


class Opening:
    """A run on its way from the settings of a command to its folder and record."""

    def __init__(self, loaded: Loaded, started: float, script: object = None) -> None:
        """Begin with what a command line gave.

        `script` is what trains a model of its own. Raises ConfigError where the model is a script's
        and there is none.
        """
        if loaded.verbose and not loaded.dry_run:
            raise ConfigError(
                "verbose would be ignored without --dry_run; add it, or drop --verbose"
            )
        require_script(loaded.config, script)
        self.loaded = loaded
        self.started = started
        self._dataset: DatasetInfo | None = None

    @property
    def config(self) -> Config:
        """The configuration, as far as it is decided."""
        return self.loaded.config

    def set(self, values: Mapping[str, Any], by: str) -> None:
        """Take a step that sets keys: see Settings.set."""
        self.loaded = self.loaded.set(values, by)

    def forecast(self) -> bool:
        """Print the dry run at another scale, if one was asked for; return whether it was."""
        if not self.loaded.scale:
            return False
        print("\n".join(forecast_at(self.loaded, self.loaded.scale)))
        return True

    def require_batch(self, ranks: int) -> None:
        """Raise ConfigError for an impossible batch."""
        resolve_batch(self.config, self._layout(ranks).dp)

    def _layout(self, ranks: int) -> Layout:
        """Return how the ranks share the work. Raises ConfigError when they cannot."""
        return Layout.of(self.config, ranks)

    def dry_run(
        self,
        ranks: int,
        where: str,
        own: Callable[[Config, int, str], None] | None,
        kind: str | None,
        devices: Sequence[Device],
    ) -> None:
        """Print mesh, batch and memory, and who has set each key, without training.

        where: the placement, in words. own: what prints the dry run of a script's own model, if it
        is one. kind and devices: the precision of the run depends on them; None where they are
        unknown.
        """
        dataset = dataset_of_dry_run(self.config)
        layout = self._layout(ranks)
        planned = plan(self.loaded, layout, dataset)
        decided = planned if kind is None else with_precision(planned, kind, devices)
        config = decided.config
        if own:
            own(config, ranks, where)
        else:
            from nanoray.cli.forecast.dry_run import dry_run_lines

            print("\n".join(dry_run_lines(config, planned.notes, layout, dataset, where)))
        print("\n".join(last_lines(decided)))

    def read(self) -> None:
        """Prepare the dataset."""
        self._dataset = prepare(self.config)

    def fetch(self) -> None:
        """Fetch the run that `resume` names from object storage."""
        self.loaded = fetch_named(self.loaded)

    def open(self, ranks: int) -> RunSpec:
        """Plan for `ranks` ranks, and make or find the run's folder. (one process, after `read`)

        Raises ConfigError for a plan that cannot work, CheckpointError when nothing can be resumed.
        """
        dataset = self._dataset
        assert dataset is not None
        planned = fetch_fitting(plan(self.loaded, self._layout(ranks), dataset), dataset)
        spec = open_run(planned.config, dataset, self.started, planned.origins)
        return replace(spec, notes=(*planned.notes, *spec.notes))


def with_precision(settings: S, kind: str, devices: Sequence[Device]) -> S:
    """Return the settings with the precision of a run on these devices. Raises ConfigError."""
    precision, why = precision_of(settings.config, kind, devices, cpu_features())
    return settings.set({"precision": precision}, why)
