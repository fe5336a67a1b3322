"""A run in object storage: what a URL names, and the settings that it was started with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nanoray.base.atomic import json_mapping
from nanoray.base.storage.store import StorageError, Store
from nanoray.base.storage.url import join

_RUN = re.compile(r"\d{4}-\d{2}-\d{2}_\d{6}_.+")
_STEP = re.compile(r"step_\d{8,}")


class DamagedSettings(StorageError):
    """config.json or run.json of a run is not what nanoray writes."""


def is_run_name(name: str) -> bool:
    """Return whether a folder has the name of a run: when it began, and what it is called."""
    return bool(_RUN.fullmatch(name))


@dataclass(frozen=True)
class RunUrl:
    """The URL of a run, and the name of one of its checkpoints or ""."""

    run: str
    step: str = ""

    @classmethod
    def of(cls, url: str) -> RunUrl:
        """Return what a URL names if it names a run. Needs no network."""
        parent, _, last = url.rstrip("/").rpartition("/")
        step = ""
        if _STEP.fullmatch(last):
            step = last
            parent, _, last = parent.rpartition("/")
        if last == "checkpoints":
            return cls(parent, step)
        return cls(join(parent, last), step)

    @classmethod
    def find(cls, url: str) -> RunUrl | None:
        """Return the run or checkpoint that a URL names; None for a folder of several runs.

        Raises StorageError when there is neither.
        """
        where = cls.of(url)
        store = Store(where.run)
        if where.step or where.settings()[0] or store.sizes("checkpoints"):
            return where
        if not any(is_run_name(name) for name in store.folders()):
            raise StorageError(f"there is no run at {url}", missing=True)
        return None

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.run.rpartition("/")[2]

    @property
    def url(self) -> str:
        """The URL of the run or of its checkpoint."""
        return join(self.run, "checkpoints", self.step) if self.step else self.run

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return config.json and run.json; {} for one that is not there.

        Raises StorageError, and DamagedSettings where one is no mapping.
        """
        store = Store(self.run)
        config = self._read(store, "config.json")
        return config, self._read(store, "run.json") if config else {}

    def _read(self, store: Store, name: str) -> dict[str, Any]:
        try:
            return json_mapping(store.read(name))
        except StorageError as error:
            if error.missing:
                return {}
            raise
        except ValueError as error:
            raise DamagedSettings(
                f"{join(self.run, name)} is damaged ({error})", refused=True
            ) from None
